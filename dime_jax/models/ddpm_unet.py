"""The U-Net of Ho et al. 2020 in flax, one module for its three public dialects (see `DdpmUnetSpec`)."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models import layers
from dime_jax.models.checks import MAX_STEPS, check_integer, check_number
from dime_jax.models.layers import Dtype, GroupNorm, conv3x3, dense
from dime_jax.models.unet import ZEROS, Unet, UnetAttention, UnetSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DdpmUnetSpec(UnetSpec):
    """The DDPM U-Net in its three public dialects (pytorch-ddpm/SecMI, ddim/pesser, diffusers' UNet2DModel).

    Attributes:
      time_table_steps: length of the time-embedding table stored with the weights (pytorch-ddpm), or None to compute
        the embedding. The stored table is a constant, not a parameter, and is used as it is in the file.
      time_cos_first: order of the computed embedding: [cos, sin] instead of [sin, cos].
      time_frequency_shift: s in the frequencies 10000^(-i / (half - s)), i = 0 … half - 1.
      symmetric_downsample: padding of the stride-2 convolutions: one on each side, instead of one after the end.
      middle_attention: whether the middle has attention.
    """

    kind: ClassVar[str] = "ddpm_unet"

    time_table_steps: int | None = None
    time_cos_first: bool = False
    time_frequency_shift: float = 1
    symmetric_downsample: bool = False
    middle_attention: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time_table_steps is not None:
            check_integer(self.time_table_steps, 1, MAX_STEPS, "time_table_steps")
        check_number(self.time_frequency_shift, 0, self.time_features // 2 - 0.5, "time_frequency_shift")


class ResBlock(nn.Module):
    """x + conv(silu(GN(conv(silu(GN(x))) + dense(silu(embedding))))), with a 1×1 shortcut where the width changes."""

    spec: DdpmUnetSpec
    channels: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, embedding: jax.Array, train: bool) -> jax.Array:
        """Block over x [B, H, W, C] and embedding [B, time_channels]."""
        spec = self.spec
        h = nn.silu(GroupNorm(spec.norm_groups, spec.norm_eps, self.dtype, name="norm_1")(x))
        h = conv3x3(self.channels, "conv_1", self.dtype)(h)
        h = h + dense(self.channels, dtype=self.dtype, name="time_dense")(nn.silu(embedding))[:, None, None]
        h = nn.silu(GroupNorm(spec.norm_groups, spec.norm_eps, self.dtype, name="norm_2")(h))
        h = nn.Dropout(spec.dropout, deterministic=not train)(h)
        h = conv3x3(self.channels, "conv_2", self.dtype, kernel_init=ZEROS)(h)
        return layers.add_residual(x, h, self.dtype)


class Attention(UnetAttention):
    """Self-attention with three maps of GN(x)."""

    def query_key_value(self, h: jax.Array, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A map each."""
        query = dense(h.shape[-1], dtype=self.dtype, name="query")(h)
        key = dense(h.shape[-1], dtype=self.dtype, name="key")(h)
        value = dense(h.shape[-1], dtype=self.dtype, name="value")(h)
        return layers.split_heads(query, heads), layers.split_heads(key, heads), layers.split_heads(value, heads)


class DdpmUnet(Unet):
    """The DDPM U-Net. A stored time table is in the collection "constants"; everything trainable is in "params"."""

    spec: DdpmUnetSpec

    def time_features(self, t: jax.Array) -> jax.Array:
        """The row of the stored table, or the sinusoid."""
        spec = self.spec
        if spec.time_table_steps is not None:
            steps, features = spec.time_table_steps, spec.time_features
            table = self.variable("constants", "time_table", layers.interleaved_time_table, steps, features)
            return table.value[t]
        return layers.timestep_embedding(
            t, spec.time_features, cos_first=spec.time_cos_first, frequency_shift=spec.time_frequency_shift
        )

    def res_block(self, h: jax.Array, embedding: jax.Array, channels: int, name: str, train: bool) -> jax.Array:
        """See `ResBlock`."""
        return self._block(ResBlock, name, channels=channels)(h, embedding, train)

    def attention(self, h: jax.Array, name: str) -> jax.Array:
        """See `Attention`."""
        return self._block(Attention, name)(h)

    def downsample(self, h: jax.Array, embedding: jax.Array, name: str, train: bool) -> jax.Array:
        """A stride-2 convolution; its padding is the dialect's."""
        padding = 1 if self.spec.symmetric_downsample else ((0, 1), (0, 1))
        return conv3x3(h.shape[-1], name, self.dtype, strides=2, padding=padding)(h)

    def upsample(self, h: jax.Array, embedding: jax.Array, name: str, train: bool) -> jax.Array:
        """Nearest neighbour, then a convolution."""
        return layers.upsample_conv3x3(h.shape[-1], name, self.dtype)(h)
