"""The U-Net of Stable Diffusion in flax: residual blocks and transformers that look at the caption.

See `ConditionalUnetSpec`. Modules are named as in `unet.Unet`.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models import layers
from dime_jax.models.checks import (
    MAX_CHANNELS,
    MAX_RES_BLOCKS,
    check_flags,
    check_integer,
    check_integers,
    check_number,
    check_tuple,
    check_widths,
)
from dime_jax.models.ddpm_unet import ResBlock
from dime_jax.models.layers import GroupNorm, conv3x3, dense, layer_norm
from dime_jax.models.network_spec import DenoiserSpec, floats, integers

MAX_TRANSFORMER_LAYERS = 512  # in a U-Net; each takes a while to trace

_NORM_EPS = 1e-6  # of the GroupNorm before a transformer, whatever the spec's norm_eps is
_LAYER_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionalUnetSpec(DenoiserSpec):
    """The U-Net of Stable Diffusion (diffusers' UNet2DConditionModel); the defaults are those of version 1.

    Level l works at 1/2^l of the latents' resolution. A level has `num_res_blocks` residual blocks on the way down and
    one more on the way up, each followed by a transformer if the level is listed in `attention_levels` (down) or
    `up_attention_levels` (up). The middle always has one.

    Attributes:
      channels: of a latent.
      level_channels: widths; the first is also that of the first convolution and of the embedding of t.
      level_heads: attention heads of each level; the middle has the last level's.
      context_channels: width of the text embedding.
      transformer_layers: in each transformer.
      linear_projection: whether a transformer's input and output maps are stored as matrices (version 2) or as 1×1
        convolutions (version 1), which compute the same.
      time_channels: width of the time MLP.
      time_cos_first: order of the embedding of t: [cos, sin] instead of [sin, cos].
      time_frequency_shift: s in the frequencies 10000^(-i / (half - s)), i = 0 … half - 1.
      symmetric_downsample: padding of the stride-2 convolutions: one on each side, instead of one after the end.
      norm_groups: groups of every GroupNorm.
      norm_eps: added to the variance in residual blocks and the output; transformers have 1e-6.
      dropout: in training; kept for the record.
    """

    kind: ClassVar[str] = "conditional_unet"

    channels: int = 4
    level_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    num_res_blocks: int = 2
    attention_levels: tuple[int, ...] = (0, 1, 2)
    up_attention_levels: tuple[int, ...] = (0, 1, 2)
    level_heads: tuple[int, ...] = (8, 8, 8, 8)
    context_channels: int = 768
    transformer_layers: int = 1
    linear_projection: bool = False
    time_channels: int = 1280
    time_cos_first: bool = True
    time_frequency_shift: float = 0
    symmetric_downsample: bool = True
    norm_groups: int = 32
    norm_eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_widths(self)
        levels = len(self.level_channels)
        for name in ("attention_levels", "up_attention_levels"):
            check_tuple(self, name, 0, levels - 1)
        check_tuple(self, "level_heads", 1, MAX_CHANNELS)
        if len(self.level_heads) != levels:
            raise ValueError(f"expected one of level_heads for each of {levels} levels, got {len(self.level_heads)}")
        for level in {*self.attention_levels, *self.up_attention_levels, levels - 1}:
            channels, heads = self.level_channels[level], self.level_heads[level]
            if channels % heads:
                raise ValueError(f"expected level_channels divisible by level_heads, got {channels} and {heads}")
        if self.level_channels[0] % 2:
            raise ValueError(f"expected an even first width (that of the time embedding), got {self.level_channels[0]}")
        check_integer(self.channels, 1, 64, "channels")
        check_integers(self, 1, MAX_RES_BLOCKS, "num_res_blocks", "transformer_layers")
        layers = levels * (2 * self.num_res_blocks + 1) * self.transformer_layers
        check_integer(layers, 1, MAX_TRANSFORMER_LAYERS, "number of transformer layers")
        check_integers(self, 1, MAX_CHANNELS, "context_channels", "time_channels")
        check_number(self.time_frequency_shift, 0, self.level_channels[0] // 2 - 0.5, "time_frequency_shift")
        check_number(self.norm_eps, 1e-12, 1.0, "norm_eps")
        check_number(self.dropout, 0.0, 0.99, "dropout")
        check_flags(self)

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Latents that the levels halve to one pixel, t, and the embedding of one token."""
        size = 2 ** (len(self.level_channels) - 1)
        return floats(size, size, self.channels), integers(), floats(1, self.context_channels)


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
