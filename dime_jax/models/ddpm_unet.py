"""The U-Net of Ho et al. 2020 in flax, one module for its three public dialects (see `DdpmUnetSpec`)."""

import dataclasses
from typing import Annotated, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models import layers
from dime_jax.models.checks import MAX_STEPS, Range
from dime_jax.models.layers import Dtype, GroupNorm, conv3x3, dense
from dime_jax.models.unet import ZEROS, ImageUnetSpec, Unet, UnetAttention, UnetSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DdpmUnetSpec(ImageUnetSpec):
    """The DDPM U-Net in its three public dialects (pytorch-ddpm/SecMI, ddim/pesser, diffusers' UNet2DModel).

    Attributes:
      time_table_steps: length of the time-embedding table stored with the weights (pytorch-ddpm), or None to compute
        the embedding. The stored table is a constant, not a parameter, and is used as it is in the file.
      (others): see `UnetSpec`.
    """

    kind: ClassVar[str] = "ddpm_unet"

    time_table_steps: Annotated[int, Range(1, MAX_STEPS)] | None = None
    time_cos_first: bool = False
    time_frequency_shift: float = 1
    symmetric_downsample: bool = False
    middle_attention: bool = True


class ResBlock(nn.Module):
    """x + conv(silu(GN(conv(silu(GN(x))) + dense(silu(embedding))))), with a 1×1 shortcut where the width changes."""

    spec: UnetSpec
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
        """Return one linear map of h each for query, key and value."""
        return layers.query_key_value(h, h, h.shape[-1], heads, dtype=self.dtype)


class DdpmUnet(Unet):
    """The DDPM U-Net. A stored time table is in the collection "constants"; everything trainable is in "params"."""

    residual = ResBlock
    self_attention = Attention
