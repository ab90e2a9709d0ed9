"""The skeleton of a U-Net: stem, levels down, middle, levels up with skips, output.

The DDPM and the Guided Diffusion networks share it, and the names of its modules; they differ in how they build a
residual block, an attention block, a resampling step and the embedding of t.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models.layers import Dtype, GroupNorm, attend, conv3x3, dense
from dime_jax.models.spec import UnetSpec

ZEROS = nn.initializers.zeros  # every residual branch starts as nothing, the network as its shortcuts


class UnetAttention(nn.Module):
    """x + out(softmax(q kᵀ / √d) v), with q, k, v linear in GN(x); subclasses say how."""

    spec: UnetSpec
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Attend over the H·W positions of x [B, H, W, C]."""
        batch, height, width, channels = x.shape
        h = GroupNorm(self.spec.norm_groups, self.spec.norm_eps, self.dtype, name="norm")(x)
        h = h.reshape(batch, height * width, channels)
        h = attend(*self.query_key_value(h, self.spec.heads(channels))).reshape(x.shape)
        return x + dense(channels, dtype=self.dtype, kernel_init=ZEROS, name="out")(h)

    def query_key_value(self, h: jax.Array, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Three arrays [B, positions, heads, C / heads] for h [B, positions, C]."""
        raise NotImplementedError


class Unet(nn.Module):
    """A U-Net over NHWC batches; see the subclasses.

    Attributes:
      spec: the architecture.
      dtype: of convolutions and matmuls; parameters, statistics and the output are float32.
      remat: recompute the residual and attention blocks in the backward pass instead of storing their activations.
    """

    spec: UnetSpec
    dtype: Dtype = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array, label: jax.Array | None = None, train: bool = False) -> jax.Array:
        """The network's output, float32 [B, H, W, spec.out_channels].

        Args:
          x: images [B, H, W, C].
          t: int timesteps, a scalar or [B].
          label: int classes [B], for class-conditional networks.
          train: apply dropout (needs the random stream "dropout").
        """
        spec = self.spec
        levels = range(len(spec.level_channels))
        embedding = self._embed(jnp.broadcast_to(t, x.shape[:1]), label)
        h = conv3x3(spec.stem_channels, "conv_in", self.dtype)(x.astype(self.dtype))
        skips = [h]
        for level in levels:
            for block in range(spec.num_res_blocks):
                h = self.res_block(h, embedding, spec.level_channels[level], f"down_{level}_block_{block}", train)
                if level in spec.attention_levels:
                    h = self.attention(h, f"down_{level}_attention_{block}")
                skips.append(h)
            if level != levels[-1]:
                h = self.downsample(h, embedding, f"down_{level}_downsample", train)
                skips.append(h)
        h = self.res_block(h, embedding, h.shape[-1], "middle_block_0", train)
        if getattr(spec, "middle_attention", True):
            h = self.attention(h, "middle_attention")
        h = self.res_block(h, embedding, h.shape[-1], "middle_block_1", train)
        for level in reversed(levels):
            for block in range(spec.num_res_blocks + 1):
                h = jnp.concatenate([h, skips.pop()], axis=-1)
                h = self.res_block(h, embedding, spec.level_channels[level], f"up_{level}_block_{block}", train)
                if level in spec.up_attention:
                    h = self.attention(h, f"up_{level}_attention_{block}")
            if level:
                h = self.upsample(h, embedding, f"up_{level}_upsample", train)
        h = nn.silu(GroupNorm(spec.norm_groups, spec.norm_eps, self.dtype, name="norm_out")(h))
        return conv3x3(spec.out_channels, "conv_out", self.dtype, kernel_init=ZEROS)(h).astype(jnp.float32)

    def _embed(self, t: jax.Array, label: jax.Array | None) -> jax.Array:
        """Two-layer MLP of the features of t, plus the label's embedding; [B, time_channels]."""
        width = self.spec.time_channels
        hidden = dense(width, dtype=self.dtype, name="time_dense_0")(self.time_features(t))
        embedding = dense(width, dtype=self.dtype, name="time_dense_1")(nn.silu(hidden))
        if self.spec.num_classes is not None:
            embed_label = nn.Embed(self.spec.num_classes, width, dtype=self.dtype, name="label_embedding")
            embedding = embedding + embed_label(label)
        return embedding

    def _block(self, block: type[nn.Module], name: str, **arguments: int | str) -> nn.Module:
        """A block with this network's spec and dtype, rematerialised if asked."""
        wrapped = nn.remat(block, static_argnums=(3,) if "channels" in arguments else ()) if self.remat else block
        return wrapped(self.spec, dtype=self.dtype, name=name, **arguments)

    def time_features(self, t: jax.Array) -> jax.Array:
        """Features of t [B], [B, spec.time_features]."""
        raise NotImplementedError

    def res_block(self, h: jax.Array, embedding: jax.Array, channels: int, name: str, train: bool) -> jax.Array:
        """A residual block with `channels` output channels."""
        raise NotImplementedError

    def attention(self, h: jax.Array, name: str) -> jax.Array:
        """Self-attention over positions, added to h."""
        raise NotImplementedError

    def downsample(self, h: jax.Array, embedding: jax.Array, name: str, train: bool) -> jax.Array:
        """Halve height and width."""
        raise NotImplementedError

    def upsample(self, h: jax.Array, embedding: jax.Array, name: str, train: bool) -> jax.Array:
        """Double height and width."""
        raise NotImplementedError
