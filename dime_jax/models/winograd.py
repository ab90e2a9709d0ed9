"""3×3 convolutions with fewer multiplications, as matrix products, for the CPU.

The minimal filtering algorithm F(2×2, 3×3) of Winograd (Lavin & Gray 2015): a 2×2 block of outputs sees a 4×4 block of
inputs. With d and g one such block and the kernel,

    block = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A,

which is 16 multiplications instead of 36, and, summed over input channels, 16 matrix products. The transforms B and A
are sums and differences, so errors stay those of float32.

Where the image is one with every pixel repeated 2×2, a block of outputs sees 3×3 distinct pixels, and there are
transforms with 9 multiplications: along one axis, for pixels a, b, c and taps g,

    g₀ a + (g₁ + g₂) b = g₀ (a - b) + s b,   (g₀ + g₁) b + g₂ c = s b + g₂ (c - b),   s = g₀ + g₁ + g₂.

XLA's CPU convolution runs at about the speed of its matrix product, so these take half to nine tenths of its time,
the less the more channels there are. On accelerators the vendor's library makes such choices itself.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

# Below this many 2×2 blocks in a batch the kernel's transform costs more than it saves; with fewer channels (in small
# images) the products save less than it takes to compile them; and with more numbers than this (512 MiB) the
# transformed images, which are four times as large as the images, might not fit into memory.
_MIN_BLOCKS = 128
_MIN_CHANNELS, _MIN_CHANNELS_IF_SMALL, _SMALL_PIXELS = 64, 128, 256
_MAX_TRANSFORMED = 2**27


def is_faster(x: jax.Array, kernel: jax.Array) -> bool:
    """Whether `convolve` beats the direct convolution of x [B, H, W, C] with a kernel [3, 3, C, K] on a CPU."""
    height, width = x.shape[1:3]
    even = height % 2 == 0 and width % 2 == 0
    return even and _is_worthwhile(x.size // (4 * x.shape[-1]), 16, kernel, height * width)


def is_faster_upsampled(x: jax.Array, kernel: jax.Array) -> bool:
    """Whether `convolve_upsampled` beats direct convolutions on a CPU."""
    return _is_worthwhile(x.size // x.shape[-1], 9, kernel, 4 * x.shape[1] * x.shape[2])


def _is_worthwhile(blocks: int, products: int, kernel: jax.Array, pixels: int) -> bool:
    channels = kernel.shape[2:]
    least = _MIN_CHANNELS if pixels >= _SMALL_PIXELS else _MIN_CHANNELS_IF_SMALL
    transformed = blocks * products * sum(channels)
    return blocks >= _MIN_BLOCKS and min(channels) >= least and transformed <= _MAX_TRANSFORMED


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution of x [B, H, W, C], padded by one on each side, with a kernel [3, 3, C, K]; H and W even."""
    batch, height, width, channels = x.shape
    # Pixel (2i + a, 2j + b) of the padded image is blocks[:, i, a, j, b].
    blocks = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    blocks = blocks.reshape(batch, height // 2 + 1, 2, width // 2 + 1, 2, channels)
    inputs = [_transform_blocks(band, axis=2) for band in _transform_blocks(blocks, axis=1)]
    return _filter(inputs, _along_both_axes(_transform_taps, kernel), _transform_products)


def convolve_upsampled(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`convolve` of x [B, H, W, C] with every pixel repeated 2×2: [B, 2H, 2W, K]."""
    inputs = [_neighbour_differences(band, axis=2) for band in _neighbour_differences(x, axis=1)]
    return _filter(inputs, _along_both_axes(_outer_taps_and_sum, kernel), _add_middle)


def _filter(
    inputs: Sequence[Sequence[jax.Array]],
    kernels: Iterable[Iterable[jax.Array]],
    transform: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """2×2 blocks of outputs from transformed inputs [n][n][B, H, W, C] and kernels [n][n][C, K]: [B, 2H, 2W, K].

    `transform` makes two outputs of n products. Everything is a list of arrays: stacked into one, XLA would copy them
    apart again.
    """
    batch, rows, columns, channels = inputs[0][0].shape
    products = [
        [block.reshape(-1, channels) @ taps for block, taps in zip(*pair, strict=True)]
        for pair in zip(inputs, kernels, strict=True)
    ]
    bands = zip(*(transform(column) for column in zip(*products)))  # [2][n]: output row, input column
    outputs = [
        jnp.stack([pixel.reshape(batch, rows, columns, -1) for pixel in transform(band)], axis=3) for band in bands
    ]
    return jnp.stack(outputs, axis=2).reshape(batch, 2 * rows, 2 * columns, -1)


def _along_both_axes(
    transform: Callable[[Iterable[jax.Array]], tuple[jax.Array, ...]], kernel: jax.Array
) -> list[tuple[jax.Array, ...]]:
    """A transform of three taps applied to the columns and then to the rows of a kernel [3, 3, C, K]: [n][n][C, K]."""
    rows = [transform(kernel[i, j] for j in range(3)) for i in range(3)]
    return list(zip(*(transform(column) for column in zip(*rows))))


def _transform_taps(taps: Iterable[jax.Array]) -> tuple[jax.Array, ...]:
    """G g: three taps become four."""
    first, middle, last = taps
    return first, (first + middle + last) / 2, (first - middle + last) / 2, last


def _transform_blocks(blocks: jax.Array, axis: int) -> list[jax.Array]:
    """Bᵀ d along an axis whose successor tells even from odd pixels: four arrays, one block shorter."""
    even = jax.lax.index_in_dim(blocks, 0, axis + 1, keepdims=False)
    odd = jax.lax.index_in_dim(blocks, 1, axis + 1, keepdims=False)
    d0, d2 = _but_last(even, axis), _but_first(even, axis)
    d1, d3 = _but_last(odd, axis), _but_first(odd, axis)
    return [d0 - d2, d1 + d2, d2 - d1, d1 - d3]


def _but_first(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, 1, None, axis=axis)


def _but_last(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, 0, -1, axis=axis)


def _transform_products(products: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Aᵀ m: four products become two outputs."""
    m0, m1, m2, m3 = products
    return m0 + m1 + m2, m1 - m2 - m3


def _outer_taps_and_sum(taps: Iterable[jax.Array]) -> tuple[jax.Array, ...]:
    """g₀, s, g₂."""
    first, middle, last = taps
    return first, first + middle + last, last


def _neighbour_differences(x: jax.Array, axis: int) -> list[jax.Array]:
    """a - b, b, c - b for each pixel b, with zeros around the image."""
    padded = jnp.pad(x, [(1, 1) if i == axis else (0, 0) for i in range(x.ndim)])
    before = jax.lax.slice_in_dim(padded, 0, -2, axis=axis)
    after = jax.lax.slice_in_dim(padded, 2, None, axis=axis)
    return [before - x, x, after - x]


def _add_middle(products: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """The two outputs of three products."""
    first, middle, last = products
    return first + middle, middle + last
