"""3×3 convolution by the minimal filtering algorithm F(2×2, 3×3) of Winograd (Lavin & Gray 2015), for the CPU.

A 2×2 block of outputs sees a 4×4 block of inputs. With d and g one such block and the kernel,

    block = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A,

which is 16 multiplications instead of 36, and, summed over input channels, 16 matrix products. The transforms B and A
are sums and differences, so errors stay those of float32.

XLA's CPU convolution runs at about 0.7 of the speed of its matrix product, so this takes half its time where the
transformed blocks fit the cache. On accelerators the vendor's library makes this choice itself.
"""

import jax
import jax.numpy as jnp

# Below this many 2×2 blocks in a batch the kernel's transform costs more than it saves; above this many pixels in an
# image the transformed blocks leave the cache; with fewer channels the matrix products are too thin.
_MIN_BLOCKS = 512
_MAX_PIXELS = 256
_MIN_CHANNELS = 128


def is_faster(x: jax.Array, kernel: jax.Array) -> bool:
    """Whether `convolve` beats the direct convolution of x [B, H, W, C] with a kernel [3, 3, C, K] on a CPU."""
    batch, height, width, _ = x.shape
    even = height % 2 == 0 and width % 2 == 0
    blocks = batch * height * width // 4
    return even and blocks >= _MIN_BLOCKS and height * width <= _MAX_PIXELS and min(kernel.shape[2:]) >= _MIN_CHANNELS


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution of x [B, H, W, C], padded by one on each side, with a kernel [3, 3, C, K]; H and W even."""
    batch, height, width, channels = x.shape
    rows, columns = height // 2, width // 2
    # Pixel (2i + a, 2j + b) of the padded image is blocks[:, i, a, j, b].
    blocks = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))).reshape(batch, rows + 1, 2, columns + 1, 2, channels)
    kernels = _transform_kernel(_transform_kernel(kernel, axis=0), axis=1)
    # Sixteen separate products: one batched product would first copy its operands into one array.
    products = [
        [block.reshape(-1, channels) @ kernels[i, j] for j, block in enumerate(_transform_input(band, axis=2))]
        for i, band in enumerate(_transform_input(blocks, axis=1))
    ]
    bands = zip(*(_transform_output(column) for column in zip(*products)))  # [2][4]: output row, input column
    outputs = [
        jnp.stack([pixel.reshape(batch, rows, columns, -1) for pixel in _transform_output(band)], axis=3)
        for band in bands
    ]
    return jnp.stack(outputs, axis=2).reshape(batch, height, width, -1)


def _transform_kernel(kernel: jax.Array, axis: int) -> jax.Array:
    """G g along an axis: three taps become four."""
    first, middle, last = jnp.split(kernel, 3, axis)
    return jnp.concatenate([first, (first + middle + last) / 2, (first - middle + last) / 2, last], axis)


def _transform_input(blocks: jax.Array, axis: int) -> list[jax.Array]:
    """Bᵀ d along an axis whose successor tells even from odd pixels: four arrays, one block shorter."""
    even, odd = (jax.lax.index_in_dim(blocks, parity, axis + 1, keepdims=False) for parity in range(2))
    count = blocks.shape[axis] - 1
    d0, d2 = (jax.lax.slice_in_dim(even, start, start + count, axis=axis) for start in range(2))
    d1, d3 = (jax.lax.slice_in_dim(odd, start, start + count, axis=axis) for start in range(2))
    return [d0 - d2, d1 + d2, d2 - d1, d1 - d3]


def _transform_output(products: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Aᵀ m: four products become two outputs."""
    m0, m1, m2, m3 = products
    return m0 + m1 + m2, m1 - m2 - m3
