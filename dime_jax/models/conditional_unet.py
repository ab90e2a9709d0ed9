"""The U-Net of Stable Diffusion in flax: residual blocks and transformers that look at the caption.

See `ConditionalUnetSpec`. Modules are named as in `unet.Unet`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models import layers
from dime_jax.models.ddpm_unet import ResBlock
from dime_jax.models.latent_spec import ConditionalUnetSpec
from dime_jax.models.layers import GroupNorm, conv3x3, dense, layer_norm

_NORM_EPS = 1e-6  # of the GroupNorm before a transformer, whatever the spec's norm_eps is
_LAYER_NORM_EPS = 1e-5


class ContextAttention(nn.Module):
    """out(softmax(q kᵀ / √d) v) with q from x, and k, v from the context."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        """Attend from x [B, N, C] to context [B, M, D]."""
        channels = x.shape[-1]
        query = layers.split_heads(dense(channels, use_bias=False, name="query")(x), self.heads)
        key = layers.split_heads(dense(channels, use_bias=False, name="key")(context), self.heads)
        value = layers.split_heads(dense(channels, use_bias=False, name="value")(context), self.heads)
        h = layers.attend_bounded(query, key, value).reshape(x.shape)
        return dense(channels, name="out")(h)


class TransformerLayer(nn.Module):
    """Self-attention, attention to the context, and an MLP with a gate, each added to x after a layer norm."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        """Layer over tokens x [B, N, C] and context [B, M, D]."""
        h = layer_norm(_LAYER_NORM_EPS, "norm_1")(x)
        x = x + ContextAttention(self.heads, name="self_attention")(h, h)
        h = layer_norm(_LAYER_NORM_EPS, "norm_2")(x)
        x = x + ContextAttention(self.heads, name="cross_attention")(h, context)
        h = layer_norm(_LAYER_NORM_EPS, "norm_3")(x)
        h, gate = jnp.split(dense(8 * x.shape[-1], name="mlp_0")(h), 2, axis=-1)
        return x + dense(x.shape[-1], name="mlp_1")(h * jax.nn.gelu(gate, approximate=False))


class Transformer(nn.Module):
    """x + out(layers(in(GN(x)))) over the positions of an image."""

    spec: ConditionalUnetSpec
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        """Transformer over x [B, H, W, C] and context [B, M, D]."""
        batch, height, width, channels = x.shape
        h = GroupNorm(self.spec.norm_groups, _NORM_EPS, name="norm")(x).reshape(batch, height * width, channels)
        h = dense(channels, name="project_in")(h)
        for layer in range(self.spec.transformer_layers):
            h = TransformerLayer(self.heads, name=f"layer_{layer}")(h, context)
        return x + dense(channels, name="project_out")(h).reshape(x.shape)


class ConditionalUnet(nn.Module):
    """The U-Net."""

    spec: ConditionalUnetSpec

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array, context: jax.Array) -> jax.Array:
        """The prediction [B, H, W, channels].

        Args:
          x: latents [B, H, W, channels].
          t: int timesteps, a scalar or [B].
          context: text embeddings [B, tokens, context_channels].
        """
        spec = self.spec
        levels = range(len(spec.level_channels))
        embedding = self._embed(jnp.broadcast_to(t, x.shape[:1]))

        def res_block(h: jax.Array, channels: int, name: str) -> jax.Array:
            return ResBlock(spec, channels, name=name)(h, embedding, False)  # type: ignore[arg-type]

        def transformer(h: jax.Array, level: int, name: str) -> jax.Array:
            return Transformer(spec, spec.level_heads[level], name=name)(h, context)

        h = conv3x3(spec.level_channels[0], "conv_in", jnp.float32)(x)
        skips = [h]
        for level in levels:
            for block in range(spec.num_res_blocks):
                h = res_block(h, spec.level_channels[level], f"down_{level}_block_{block}")
                if level in spec.attention_levels:
                    h = transformer(h, level, f"down_{level}_attention_{block}")
                skips.append(h)
            if level != levels[-1]:
                h = self._downsample(h, f"down_{level}_downsample")
                skips.append(h)
        h = res_block(h, h.shape[-1], "middle_block_0")
        h = transformer(h, levels[-1], "middle_attention")
        h = res_block(h, h.shape[-1], "middle_block_1")
        for level in reversed(levels):
            for block in range(spec.num_res_blocks + 1):
                h = jnp.concatenate([h, skips.pop()], axis=-1)
                h = res_block(h, spec.level_channels[level], f"up_{level}_block_{block}")
                if level in spec.up_attention_levels:
                    h = transformer(h, level, f"up_{level}_attention_{block}")
            if level:
                h = layers.upsample_conv3x3(h.shape[-1], f"up_{level}_upsample", jnp.float32)(h)
        h = nn.silu(GroupNorm(spec.norm_groups, spec.norm_eps, name="norm_out")(h))
        return conv3x3(spec.channels, "conv_out", jnp.float32)(h)

    def _embed(self, t: jax.Array) -> jax.Array:
        """Two-layer MLP of the sinusoid of t; [B, time_channels]."""
        spec = self.spec
        features = layers.timestep_embedding(
            t, spec.level_channels[0], cos_first=spec.time_cos_first, frequency_shift=spec.time_frequency_shift
        )
        hidden = dense(spec.time_channels, name="time_dense_0")(features)
        return dense(spec.time_channels, name="time_dense_1")(nn.silu(hidden))

    def _downsample(self, h: jax.Array, name: str) -> jax.Array:
        padding = 1 if self.spec.symmetric_downsample else ((0, 1), (0, 1))
        return conv3x3(h.shape[-1], name, jnp.float32, strides=2, padding=padding)(h)
