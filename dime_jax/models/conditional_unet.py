"""The U-Net of Stable Diffusion in flax: residual blocks and transformers that look at the caption.

See `ConditionalUnetSpec`. Modules are named as in `unet.Unet`.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models import layers
from dime_jax.models.checks import Blocks, Channels, Dropout, Eps, FewChannels, Layers, Level, check_integer
from dime_jax.models.ddpm_unet import DdpmUnet
from dime_jax.models.layers import GroupNorm, dense, layer_norm
from dime_jax.models.unet import UnetSpec

MAX_TRANSFORMER_LAYERS = 512  # in a U-Net; each takes a while to trace

_NORM_EPS = 1e-6  # of the GroupNorm before a transformer, whatever the spec's norm_eps is
_LAYER_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionalUnetSpec(UnetSpec):
    """The U-Net of Stable Diffusion (diffusers' UNet2DConditionModel); the defaults are those of version 1.

    Attention is a transformer; the middle always has one.

    Attributes:
      channels: of a latent.
      level_channels: widths; the first is also that of the first convolution and of the embedding of t.
      level_heads: attention heads of each level; the middle has the last level's.
      context_channels: width of the text embedding.
      transformer_layers: in each transformer.
      linear_projection: whether a transformer's input and output maps are stored as matrices (version 2) or as 1×1
        convolutions (version 1), which compute the same.
      (others): see `UnetSpec`; the GroupNorm of a transformer adds 1e-6 to the variance, whatever `norm_eps` is.
    """

    kind: ClassVar[str] = "conditional_unet"

    channels: FewChannels = 4
    level_channels: tuple[Channels, ...] = (320, 640, 1280, 1280)
    num_res_blocks: Blocks = 2
    attention_levels: tuple[Level, ...] = (0, 1, 2)
    up_attention_levels: tuple[Level, ...] = (0, 1, 2)
    level_heads: tuple[Channels, ...] = (8, 8, 8, 8)
    context_channels: Channels = 768
    transformer_layers: Layers = 1
    linear_projection: bool = False
    time_channels: Channels = 1280
    time_cos_first: bool = True
    time_frequency_shift: float = 0
    symmetric_downsample: bool = True
    norm_groups: Channels = 32
    norm_eps: Eps = 1e-5
    dropout: Dropout = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = len(self.level_channels)
        if len(self.level_heads) != levels:
            raise ValueError(f"level_heads must have {levels} entries, one for each level, got {len(self.level_heads)}")
        for level in self.attention_everywhere:
            channels, heads = self.level_channels[level], self.level_heads[level]
            if channels % heads:
                raise ValueError(f"level_channels must be divisible by level_heads, got {channels} and {heads}")
        layers = levels * (2 * self.num_res_blocks + 1) * self.transformer_layers
        check_integer(layers, 1, MAX_TRANSFORMER_LAYERS, "number of transformer layers")

    @property
    def in_channels(self) -> int:
        """Channels of a latent."""
        return self.channels


class ContextAttention(nn.Module):
    """out(softmax(q kᵀ / √d) v) with q from x, and k, v from the context."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        """Attend from x [B, N, C] to context [B, M, D]."""
        channels = x.shape[-1]
        maps = layers.query_key_value(x, context, channels, self.heads, use_bias=False)
        return dense(channels, name="out")(layers.attend_bounded(*maps).reshape(x.shape))


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


class ConditionalUnet(DdpmUnet):
    """The U-Net of Stable Diffusion: the DDPM U-Net with transformers for attention."""

    spec: ConditionalUnetSpec
    out_init: nn.initializers.Initializer = layers.KERNEL_INIT

    def attention(self, h: jax.Array, condition: jax.Array | None, level: int, name: str) -> jax.Array:
        """Attend as `Transformer` does."""
        assert condition is not None
        block = nn.remat(Transformer) if self.remat else Transformer
        return block(self.spec, self.spec.level_heads[level], name=name)(h, condition)
