"""The layers that the networks are made of, natively batched over NHWC.

Dtype policy: parameters are float32; convolutions and matmuls run in the module's `dtype` (float32 for attacks,
bfloat16 optional for training); GroupNorm statistics and the attention softmax are always float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dime_jax.models import cpu_convolution, winograd

Dtype = DTypeLike
Padding = int | Sequence[tuple[int, int]]

# Ho et al. 2020: uniform with variance 2 / (fan in + fan out).
KERNEL_INIT = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


def dense(
    features: int,
    name: str | None = None,
    dtype: Dtype | None = None,
    kernel_init: nn.initializers.Initializer = KERNEL_INIT,
    use_bias: bool = True,
) -> nn.Dense:
    """A linear map of the channels; as a 1×1 convolution it is the same. The arguments are `nn.Dense`'s."""
    return nn.Dense(features, use_bias, dtype, kernel_init=kernel_init, name=name)


def add_residual(x: jax.Array, h: jax.Array, dtype: Dtype | None = None) -> jax.Array:
    """x + h, with a map of x (the module's "shortcut", computed in `dtype`) where the widths differ."""
    if x.shape[-1] != h.shape[-1]:
        x = dense(h.shape[-1], dtype=dtype, name="shortcut")(x)
    return x + h


def conv3x3(
    features: int,
    name: str,
    dtype: Dtype,
    strides: int = 1,
    padding: Padding = 1,
    kernel_init: nn.initializers.Initializer = KERNEL_INIT,
    convolve: Callable[..., jax.Array] | None = None,
) -> nn.Conv:
    """A 3×3 convolution, padded by one on each side unless `padding` says otherwise. The arguments are `nn.Conv`'s.

    `convolve` computes it; None: on a CPU in the way that is fastest there.
    """
    return nn.Conv(
        features,
        (3, 3),
        strides,
        padding,
        dtype=dtype,
        kernel_init=kernel_init,
        conv_general_dilated=convolve or (_convolve if strides == padding == 1 else None),
        name=name,
    )


def _convolve(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Sequence[tuple[int, int]], **options: Any
) -> jax.Array:
    """The convolution of stride 1 and padding 1, on a CPU in the way that is fastest there."""

    def direct(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **options)

    if cpu_convolution.is_faster(x, kernel):
        return jax.lax.platform_dependent(x, kernel, cpu=cpu_convolution.convolve, default=direct)
    return direct(x, kernel)


def upsample_conv3x3(features: int, name: str, dtype: Dtype) -> nn.Conv:
    """A 3×3 convolution of the image with every pixel repeated 2×2, without making that image.

    Two of the three rows (and columns) that an output sees are copies of one pixel, so each of the four positions in a
    2×2 block of outputs is a 2×2 convolution of the small image, with sums of the kernel's entries: 16 multiplications
    instead of 36, and 9 in `winograd`.
    """
    return conv3x3(features, name, dtype, convolve=_convolve_upsampled)


def _convolve_upsampled(x: jax.Array, kernel: jax.Array, *strides_and_padding: object, **options: Any) -> jax.Array:
    """The convolution of `upsample_conv3x3`, on a CPU in the way that is fastest there; stride and padding are 1."""
    del strides_and_padding
    options.update(lhs_dilation=None, rhs_dilation=None)

    def direct(x: jax.Array, kernel: jax.Array) -> jax.Array:
        batch, height, width, _ = x.shape
        outputs = [
            jax.lax.conv_general_dilated(
                x, _fold(_fold(kernel, i, axis=0), j, axis=1), (1, 1), [(1 - i, i), (1 - j, j)], **options
            )
            for i in range(2)
            for j in range(2)
        ]
        blocks = jnp.stack(outputs, axis=3).reshape(batch, height, width, 2, 2, -1)
        return blocks.swapaxes(2, 3).reshape(batch, 2 * height, 2 * width, -1)

    if winograd.is_faster_upsampled(x, kernel):
        return jax.lax.platform_dependent(x, kernel, cpu=winograd.convolve_upsampled, default=direct)
    return direct(x, kernel)


def _fold(kernel: jax.Array, position: int, axis: int) -> jax.Array:
    """Fold three taps on repeated pixels into two on distinct ones; which coincide depends on the place in a block."""
    first, middle, last = jnp.split(kernel, 3, axis)
    taps = [first, middle + last] if position == 0 else [first + middle, last]
    return jnp.concatenate(taps, axis)


class GroupNorm(nn.Module):
    """y = (x - mean) / √(var + eps) * scale + bias, with mean and var over one image and one group of channels.

    Both moments come from one pass over x. E[x²] - E[x]² would lose digits where the mean is large, so they are taken
    of the differences d to the image's first pixel, which are about as large as the channel's deviations:
    var = mean over the group's channels of E[d²] - E[d]² + (channel mean - mean)².
    """

    groups: int
    eps: float
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [B, H, W, C]."""
        channels = x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))

        def group_mean(y: jax.Array) -> jax.Array:
            means = y.reshape(-1, self.groups, channels // self.groups).mean(-1)
            return jnp.repeat(means, channels // self.groups, axis=-1)[:, None, None, :]

        x = x.astype(jnp.float32)
        first = x[:, :1, :1]
        difference = x - first
        shift, square = difference.mean((1, 2), keepdims=True), (difference * difference).mean((1, 2), keepdims=True)
        mean = group_mean(first + shift)
        variance = group_mean(square - shift * shift + (first + shift - mean) ** 2)
        gain = jax.lax.rsqrt(variance + self.eps) * scale[None, None, None]
        return ((x - mean) * gain + bias[None, None, None]).astype(self.dtype)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool = False) -> jax.Array:
    """softmax(q kᵀ / √d) v, all [B, positions, heads, d]; if `causal`, no position sees a later one."""
    size = query.shape[-1]
    logits = jnp.einsum("bqhd,bkhd->bhqk", query * jnp.asarray(size**-0.5, query.dtype), key)
    if causal:
        logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool))[None, None], logits, -jnp.inf)
    weights = jax.nn.softmax(logits.astype(jnp.float32)).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def query_key_value(
    x: jax.Array, context: jax.Array, features: int, heads: int, *, use_bias: bool = True, dtype: Dtype | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The module's maps "query" of x [B, N, C], "key" and "value" of context [B, M, D]: [B, N or M, heads, d] each."""
    query = dense(features, "query", dtype, use_bias=use_bias)(x)
    key = dense(features, "key", dtype, use_bias=use_bias)(context)
    value = dense(features, "value", dtype, use_bias=use_bias)(context)
    return split_heads(query, heads), split_heads(key, heads), split_heads(value, heads)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[B, positions, C] as [B, positions, heads, C / heads]."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


MAX_LOGITS = 2**25  # that `attend_bounded` holds at once: 128 MiB


def attend_bounded(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """`attend`, a part of the queries at a time where q kᵀ of the whole batch would have more than MAX_LOGITS entries.

    Derivatives compute the logits again instead of keeping them, so that they are bounded too.
    """
    batch, positions, heads, size = query.shape
    parts = -(-batch * positions * heads * key.shape[1] // MAX_LOGITS)
    if parts <= 1:
        return attend(query, key, value)
    length = -(-positions // min(parts, positions))
    parts = -(-positions // length)
    padded = jnp.pad(query, ((0, 0), (0, parts * length - positions), (0, 0), (0, 0)))
    slices = padded.reshape(batch, parts, length, heads, size).swapaxes(0, 1)
    outputs = jax.lax.map(jax.checkpoint(lambda part: attend(part, key, value)), slices)
    return outputs.swapaxes(0, 1).reshape(batch, parts * length, heads, -1)[:, :positions]


def layer_norm(eps: float, name: str, affine: bool = True) -> nn.LayerNorm:
    """(x - mean) / √(var + eps) over the channels, times scale plus bias if `affine`; the variance in two passes."""
    return nn.LayerNorm(eps, use_bias=affine, use_scale=affine, use_fast_variance=False, name=name)


def upsample_nearest(x: jax.Array) -> jax.Array:
    """Repeat every pixel 2×2."""
    return x.repeat(2, axis=1).repeat(2, axis=2)


def average_pool(x: jax.Array) -> jax.Array:
    """Mean of every 2×2 block."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4))


def timestep_embedding(t: jax.Array, features: int, *, cos_first: bool, frequency_shift: float) -> jax.Array:
    """[sin(t ω), cos(t ω)] (or cos first), ω_i = 10000^(-i / (half - shift)), half = features / 2; [B, features].

    The frequencies are rounded to float32 on the host in the steps the original code takes: at t = 1000 one unit in
    the last place of ω is already 6e-5 in the angle.
    """
    half = features // 2
    exponent = np.float32(-np.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half - frequency_shift)
    angle = t.astype(jnp.float32)[:, None] * np.exp(exponent)[None]
    waves = [jnp.cos(angle), jnp.sin(angle)] if cos_first else [jnp.sin(angle), jnp.cos(angle)]
    return jnp.concatenate(waves, axis=-1)


def interleaved_time_table(num_steps: int, features: int) -> jax.Array:
    """pytorch-ddpm's table before training: row t is sin(t ω_0), cos(t ω_0), sin(t ω_1), …, ω_i = 10000^(-i / half)."""
    embedding = timestep_embedding(jnp.arange(num_steps), features, cos_first=False, frequency_shift=0)
    return embedding.reshape(num_steps, 2, features // 2).swapaxes(1, 2).reshape(num_steps, features)
