"""The skeleton of a U-Net: stem, levels down, middle, levels up with skips, output.

The DDPM and the Guided Diffusion networks share it, and the names of its modules; they differ in how they build a
residual block, an attention block, a resampling step and the embedding of t.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models.checks import (
    MAX_CHANNELS,
    MAX_CLASSES,
    MAX_RES_BLOCKS,
    check_flags,
    check_integer,
    check_integers,
    check_number,
    check_tuple,
    check_widths,
)
from dime_jax.models.layers import Dtype, GroupNorm, attend, conv3x3, dense
from dime_jax.models.network_spec import DenoiserSpec, floats, integers

ZEROS = nn.initializers.zeros  # every residual branch starts as nothing, the network as its shortcuts


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnetSpec(DenoiserSpec):
    """The topology every U-Net here shares; the defaults are the 35.7M-parameter CIFAR-10 network of Ho et al. 2020.

    Level l works at 1/2^l of the resolution; `level_channels` has one entry per level. A level has `num_res_blocks`
    residual blocks on the way down and one more on the way up, each followed by self-attention if the level is listed
    in `attention_levels` (down) or `up_attention_levels` (up; None means the same levels).

    Attributes:
      image_channels: channels of an image.
      learned_sigma: whether the network has as many output channels again for the variance (not used by attacks).
      stem_channels: width after the first convolution.
      time_features: size of the sinusoidal embedding of t.
      time_channels: width of the time MLP.
      head_channels: width of one attention head; None means `num_heads` heads at every width.
      num_heads: number of attention heads where `head_channels` is None.
      norm_groups: groups of every GroupNorm.
      norm_eps: added to every GroupNorm's variance.
      num_classes: size of the label embedding of a class-conditional network, else None.
      dropout: rate before the second convolution of a residual block; applies in training only.
    """

    image_channels: int = 3
    learned_sigma: bool = False
    stem_channels: int = 128
    time_features: int = 128
    time_channels: int = 512
    level_channels: tuple[int, ...] = (128, 256, 256, 256)
    num_res_blocks: int = 2
    attention_levels: tuple[int, ...] = (1,)
    up_attention_levels: tuple[int, ...] | None = None
    head_channels: int | None = None
    num_heads: int = 1
    norm_groups: int = 32
    norm_eps: float = 1e-6
    num_classes: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_integers(self, 1, MAX_CHANNELS, "stem_channels", "time_features", "time_channels", "num_heads")
        check_widths(self, self.stem_channels)
        last = len(self.level_channels) - 1
        check_tuple(self, "attention_levels", 0, last)
        if self.up_attention_levels is not None:
            check_tuple(self, "up_attention_levels", 0, last)
        check_integer(self.image_channels, 1, 64, "image_channels")
        if self.time_features % 2:
            raise ValueError(f"expected an even number of time_features, got time_features={self.time_features}")
        check_integer(self.num_res_blocks, 1, MAX_RES_BLOCKS, "num_res_blocks")
        if self.head_channels is not None:
            check_integer(self.head_channels, 1, MAX_CHANNELS, "head_channels")
        for level in (*self.attention_levels, *self.up_attention, last):
            self.heads(self.level_channels[level])
        check_number(self.norm_eps, 1e-12, 1.0, "norm_eps")
        check_number(self.dropout, 0.0, 0.99, "dropout")
        check_flags(self)
        if self.num_classes is not None:
            check_integer(self.num_classes, 1, MAX_CLASSES, "num_classes")

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Images that the levels halve to one pixel, t, and a label if there are classes."""
        size = 2 ** (len(self.level_channels) - 1)
        label = () if self.num_classes is None else (integers(),)
        return floats(size, size, self.image_channels), integers(), *label

    @property
    def up_attention(self) -> tuple[int, ...]:
        """Levels with attention on the way up."""
        return self.attention_levels if self.up_attention_levels is None else self.up_attention_levels

    @property
    def out_channels(self) -> int:
        """Output channels: the prediction, then the learned variance if there is one."""
        return self.image_channels * (2 if self.learned_sigma else 1)

    def heads(self, channels: int) -> int:
        """Number of attention heads at the given width."""
        size, name = (
            (self.num_heads, "num_heads") if self.head_channels is None else (self.head_channels, "head_channels")
        )
        if channels % size:
            raise ValueError(f"expected attention widths divisible by {name}={size}, got {channels}")
        return size if self.head_channels is None else channels // size


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
