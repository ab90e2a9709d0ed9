"""The U-Net of Dhariwal & Nichol 2021 (openai/guided-diffusion) in flax; see `GuidedUnetSpec`."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models import layers
from dime_jax.models.layers import Dtype, GroupNorm, conv3x3, dense
from dime_jax.models.unet import ZEROS, ImageUnetSpec, Unet, UnetAttention

_RESAMPLE = {"": lambda x: x, "down": layers.average_pool, "up": layers.upsample_nearest}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuidedUnetSpec(ImageUnetSpec):
    """The U-Net of Dhariwal & Nichol 2021 (openai/guided-diffusion). The time embedding is [cos, sin] with shift 0.

    Attributes:
      resblock_updown: resample inside residual blocks, instead of by a convolution.
      scale_shift_norm: condition by GroupNorm(h) * (1 + scale) + shift, instead of adding to h.
      new_attention_order: the qkv channels are ordered (q|k|v, head, channel), instead of (head, q|k|v, channel).
    """

    kind: ClassVar[str] = "guided_unet"

    norm_eps: float = 1e-5
    resblock_updown: bool = True
    scale_shift_norm: bool = True
    new_attention_order: bool = False


class GuidedBlock(nn.Module):
    """A residual block that may resample: both branches are halved or doubled after the first GN and SiLU.

    With scale-shift norm the embedding gives (scale, shift) and the second norm is GN(h) * (1 + scale) + shift.
    """

    spec: GuidedUnetSpec
    channels: int
    resample: str = ""
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, embedding: jax.Array, train: bool) -> jax.Array:
        """Block over x [B, H, W, C] and embedding [B, time_channels]."""
        spec = self.spec
        h = nn.silu(GroupNorm(spec.norm_groups, spec.norm_eps, self.dtype, name="norm_1")(x))
        h, x = _RESAMPLE[self.resample](h), _RESAMPLE[self.resample](x)
        h = conv3x3(self.channels, "conv_1", self.dtype)(h)
        features = self.channels * (2 if spec.scale_shift_norm else 1)
        condition = dense(features, dtype=self.dtype, name="time_dense")(nn.silu(embedding))[:, None, None]
        norm = GroupNorm(spec.norm_groups, spec.norm_eps, self.dtype, name="norm_2")
        if spec.scale_shift_norm:
            scale, shift = jnp.split(condition, 2, axis=-1)
            h = norm(h) * (1 + scale) + shift
        else:
            h = norm(h + condition)
        h = nn.Dropout(spec.dropout, deterministic=not train)(nn.silu(h))
        h = conv3x3(self.channels, "conv_2", self.dtype, kernel_init=ZEROS)(h)
        return layers.add_residual(x, h, self.dtype)


class GuidedAttention(UnetAttention):
    """Self-attention with one map of GN(x) in the legacy or the new channel order."""

    spec: GuidedUnetSpec

    def query_key_value(self, h: jax.Array, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the three parts of one linear map of h."""
        batch, positions, channels = h.shape
        qkv = dense(3 * channels, dtype=self.dtype, name="qkv")(h)
        if self.spec.new_attention_order:
            query, key, value = jnp.moveaxis(qkv.reshape(batch, positions, 3, heads, channels // heads), 2, 0)
        else:
            query, key, value = jnp.moveaxis(qkv.reshape(batch, positions, heads, 3, channels // heads), 3, 0)
        return query, key, value


class GuidedUnet(Unet):
    """The Guided Diffusion U-Net."""

    residual = GuidedBlock
    self_attention = GuidedAttention

    spec: GuidedUnetSpec

    def downsample(self, h: jax.Array, embedding: jax.Array, name: str, train: bool) -> jax.Array:
        """A residual block that halves, or a stride-2 convolution."""
        if self.spec.resblock_updown:
            return self._block(GuidedBlock, name, channels=h.shape[-1], resample="down")(h, embedding, train)
        return super().downsample(h, embedding, name, train)

    def upsample(self, h: jax.Array, embedding: jax.Array, name: str, train: bool) -> jax.Array:
        """A residual block that doubles, or nearest neighbour and a convolution."""
        if self.spec.resblock_updown:
            return self._block(GuidedBlock, name, channels=h.shape[-1], resample="up")(h, embedding, train)
        return super().upsample(h, embedding, name, train)
