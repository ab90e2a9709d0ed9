"""The skeleton of a U-Net: stem, levels down, middle, levels up with skips, output.

All U-Nets share it, and the names of its modules; they differ in how they build a residual block, an attention block,
a resampling step and the embedding of t.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models import checks, layers
from dime_jax.models.checks import Blocks, Channels, Classes, Dropout, Eps, FewChannels, Level
from dime_jax.models.layers import Dtype, GroupNorm, attend, conv3x3, dense
from dime_jax.models.network_spec import DenoiserSpec, floats, integers

ZEROS = nn.initializers.zeros  # every residual branch starts as nothing, the network as its shortcuts


class UnetSpec(DenoiserSpec):
    """The topology that every U-Net shares, whose fields its dataclass declares.

    Level l works at 1/2^l of the resolution; `level_channels` has one entry per level. A level has `num_res_blocks`
    residual blocks on the way down and one more on the way up, each followed by attention if the level is listed in
    `attention_levels` (down) or `up_attention_levels` (up; None means the same levels).

    Attributes:
      time_channels: width of the time MLP.
      norm_groups: groups of every GroupNorm.
      norm_eps: added to the variance in residual blocks and the output.
      dropout: rate before the second convolution of a residual block; applies in training only.
      middle_attention: whether the middle has attention.
      time_cos_first: order of the embedding of t: [cos, sin] instead of [sin, cos].
      time_frequency_shift: s in the frequencies 10000^(-i / (half - s)), i = 0 … half - 1.
      symmetric_downsample: padding of the stride-2 convolutions: one on each side, instead of one after the end.
    """

    level_channels: tuple[int, ...]
    num_res_blocks: int
    attention_levels: tuple[int, ...]
    up_attention_levels: tuple[int, ...] | None
    time_channels: int
    norm_groups: int
    norm_eps: float
    dropout: float
    middle_attention: bool = True
    time_cos_first: bool = True
    time_frequency_shift: float = 0
    symmetric_downsample: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_levels(self.level_channels, self.num_res_blocks)
        checks.check_norm_groups(self.norm_groups, self.stem_channels, *self.level_channels)
        for level in self.attention_everywhere:
            checks.check_integer(level, 0, len(self.level_channels) - 1, "attention_levels")
        if self.time_features % 2:
            raise ValueError(f"time_features must be even, got {self.time_features}")
        checks.check_number(self.time_frequency_shift, 0, self.time_features // 2 - 0.5, "time_frequency_shift")

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """An x that the levels halve to one pixel, t, and the class or the embedding of one token, if it takes any."""
        size = 2 ** (len(self.level_channels) - 1)
        classes = () if self.num_classes is None else (integers(),)
        text = () if self.context_channels is None else (floats(1, self.context_channels),)
        return floats(size, size, self.in_channels), integers(), *classes, *text

    @property
    def up_attention(self) -> tuple[int, ...]:
        """Levels with attention on the way up."""
        return self.attention_levels if self.up_attention_levels is None else self.up_attention_levels

    @property
    def attention_everywhere(self) -> set[int]:
        """Levels with attention on either way, and that of the middle."""
        return {*self.attention_levels, *self.up_attention, len(self.level_channels) - 1}

    @property
    def in_channels(self) -> int:
        """Channels of x."""
        raise NotImplementedError

    @property
    def out_channels(self) -> int:
        """Output channels: the prediction, then the learned variance if there is one."""
        return self.in_channels

    @property
    def stem_channels(self) -> int:
        """Width after the first convolution."""
        return self.level_channels[0]

    @property
    def time_features(self) -> int:
        """Size of the sinusoidal embedding of t."""
        return self.level_channels[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageUnetSpec(UnetSpec):
    """A U-Net on images; the defaults are the 35.7M-parameter CIFAR-10 network of Ho et al. 2020.

    Attributes:
      image_channels: channels of an image.
      learned_sigma: whether the network has as many output channels again for the variance (not used by attacks).
      stem_channels: width after the first convolution.
      time_features: size of the sinusoidal embedding of t.
      head_channels: width of one attention head; None means `num_heads` heads at every width.
      num_heads: number of attention heads where `head_channels` is None.
      num_classes: size of the label embedding of a class-conditional network, else None.
      (others): see `UnetSpec`.
    """

    image_channels: FewChannels = 3
    learned_sigma: bool = False
    stem_channels: Channels = 128
    time_features: Channels = 128
    time_channels: Channels = 512
    level_channels: tuple[Channels, ...] = (128, 256, 256, 256)
    num_res_blocks: Blocks = 2
    attention_levels: tuple[Level, ...] = (1,)
    up_attention_levels: tuple[Level, ...] | None = None
    head_channels: Channels | None = None
    num_heads: Channels = 1
    norm_groups: Channels = 32
    norm_eps: Eps = 1e-6
    num_classes: Classes | None = None
    dropout: Dropout = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for level in self.attention_everywhere:
            self.heads(self.level_channels[level])

    @property
    def in_channels(self) -> int:
        """Channels of an image."""
        return self.image_channels

    @property
    def out_channels(self) -> int:
        """Twice as many if the variance is learned."""
        return self.image_channels * (2 if self.learned_sigma else 1)

    def heads(self, channels: int) -> int:
        """Number of attention heads at the given width."""
        name = "num_heads" if self.head_channels is None else "head_channels"
        size = getattr(self, name)
        if channels % size:
            raise ValueError(f"attention widths must be divisible by {name}={size}, got {channels}")
        return size if self.head_channels is None else channels // size


class UnetAttention(nn.Module):
    """x + out(softmax(q kᵀ / √d) v), with q, k, v linear in GN(x); subclasses say how."""

    spec: ImageUnetSpec
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
      residual: its residual blocks.
      self_attention: its attention blocks.
      spec: the architecture.
      dtype: of convolutions and matmuls; parameters, statistics and the output are float32.
      remat: recompute the residual and attention blocks in the backward pass instead of storing their activations.
    """

    residual: ClassVar[type[nn.Module]]
    self_attention: ClassVar[type[nn.Module]]

    spec: UnetSpec
    dtype: Dtype = jnp.float32
    remat: bool = False
    out_init: nn.initializers.Initializer = ZEROS

    @nn.compact
    def __call__(
        self, x: jax.Array, t: jax.Array, condition: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        """The network's output, float32 [B, H, W, spec.out_channels].

        Args:
          x: images or latents [B, H, W, C].
          t: int timesteps, a scalar or [B].
          condition: int classes [B], or text embeddings [B, tokens, context_channels], if the network takes them.
          train: apply dropout (needs the random stream "dropout").
        """
        spec = self.spec
        levels = range(len(spec.level_channels))
        embedding = self._embed(jnp.broadcast_to(t, x.shape[:1]), condition)
        h = conv3x3(spec.stem_channels, "conv_in", self.dtype)(x.astype(self.dtype))
        skips = [h]
        for level in levels:
            for block in range(spec.num_res_blocks):
                h = self.res_block(h, embedding, spec.level_channels[level], f"down_{level}_block_{block}", train)
                if level in spec.attention_levels:
                    h = self.attention(h, condition, level, f"down_{level}_attention_{block}")
                skips.append(h)
            if level != levels[-1]:
                h = self.downsample(h, embedding, f"down_{level}_downsample", train)
                skips.append(h)
        h = self.res_block(h, embedding, h.shape[-1], "middle_block_0", train)
        if spec.middle_attention:
            h = self.attention(h, condition, levels[-1], "middle_attention")
        h = self.res_block(h, embedding, h.shape[-1], "middle_block_1", train)
        for level in reversed(levels):
            for block in range(spec.num_res_blocks + 1):
                h = jnp.concatenate([h, skips.pop()], axis=-1)
                h = self.res_block(h, embedding, spec.level_channels[level], f"up_{level}_block_{block}", train)
                if level in spec.up_attention:
                    h = self.attention(h, condition, level, f"up_{level}_attention_{block}")
            if level:
                h = self.upsample(h, embedding, f"up_{level}_upsample", train)
        h = nn.silu(GroupNorm(spec.norm_groups, spec.norm_eps, self.dtype, name="norm_out")(h))
        return conv3x3(spec.out_channels, "conv_out", self.dtype, kernel_init=self.out_init)(h).astype(jnp.float32)

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
        """Features of t [B], [B, spec.time_features]: the row of a stored table, or the sinusoid."""
        spec = self.spec
        if spec.time_table_steps is not None:
            steps, features = spec.time_table_steps, spec.time_features
            table = self.variable("constants", "time_table", layers.interleaved_time_table, steps, features)
            return table.value[t]
        return layers.timestep_embedding(
            t, spec.time_features, cos_first=spec.time_cos_first, frequency_shift=spec.time_frequency_shift
        )

    def res_block(self, h: jax.Array, embedding: jax.Array, channels: int, name: str, train: bool) -> jax.Array:
        """A residual block with `channels` output channels."""
        return self._block(self.residual, name, channels=channels)(h, embedding, train)

    def attention(self, h: jax.Array, condition: jax.Array | None, level: int, name: str) -> jax.Array:
        """Attention over positions, added to h."""
        return self._block(self.self_attention, name)(h)

    def downsample(self, h: jax.Array, embedding: jax.Array, name: str, train: bool) -> jax.Array:
        """Halve height and width by a stride-2 convolution."""
        padding = 1 if self.spec.symmetric_downsample else ((0, 1), (0, 1))
        return conv3x3(h.shape[-1], name, self.dtype, strides=2, padding=padding)(h)

    def upsample(self, h: jax.Array, embedding: jax.Array, name: str, train: bool) -> jax.Array:
        """Double height and width: nearest neighbour, then a convolution."""
        return layers.upsample_conv3x3(h.shape[-1], name, self.dtype)(h)
