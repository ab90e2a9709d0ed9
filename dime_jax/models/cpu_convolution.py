"""A 3×3 convolution of many channels, and its derivatives, each in the way that is fastest on a CPU.

    y = Σ_ij shift_ij(x) k_ij,   ∂/∂k_ij = shift_ij(x)ᵀ ∂y,   with shift_ij(x) the pixels that tap (i, j) sees.

XLA writes the gradient of the kernel as one convolution whose window is a whole image, which takes two to four times as
long on CPUs. Here it is nine matrix products for small images, and Winograd's sixteen of a quarter of the length for
larger ones. An image that is smaller than the kernel XLA takes for the kernel itself, and falls back to a plain loop:
25 times as long as the nine products at 2×2 pixels and 1024 channels. On accelerators the vendor's library does better
than both.
"""

import jax
import jax.numpy as jnp

from dime_jax._util.typing import PyTree
from dime_jax.models import winograd

_MIN_WINOGRAD_PIXELS = 256  # in an image; below, transforming the gradient costs more than it saves


def is_faster(x: jax.Array, kernel: jax.Array) -> bool:
    """Whether `convolve` beats XLA's convolution or its gradient for x [B, H, W, C], kernel [3, 3, C, K] on a CPU."""
    small = x.shape[1] * x.shape[2] < _MIN_WINOGRAD_PIXELS and not _is_tiny(x)
    return min(kernel.shape[2:]) >= (128 if small else 32)


@jax.custom_jvp
def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution of x [B, H, W, C], padded by one on each side, with a kernel [3, 3, C, K]."""
    if _is_tiny(x):
        return _by_products(x, kernel)
    if winograd.is_faster(x, kernel):
        return winograd.convolve(x, kernel)
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))


@convolve.defjvp
def _(primals: PyTree, tangents: PyTree) -> tuple[jax.Array, jax.Array]:
    """The product rule. Reverse mode transposes the second term and never computes it."""
    (x, kernel), (x_dot, kernel_dot) = primals, tangents
    height, width = x.shape[1:3]
    large = height * width >= _MIN_WINOGRAD_PIXELS and height % 2 == 0 and width % 2 == 0
    by_kernel = winograd.convolve if large else _by_products
    return convolve(x, kernel), convolve(x_dot, kernel) + by_kernel(x, kernel_dot)


def _is_tiny(x: jax.Array) -> bool:
    """Whether images are smaller than the kernel in both directions."""
    return max(x.shape[1:3]) < 3


def _by_products(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution as a sum of nine matrix products."""
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    taps = [padded[:, i : i + height, j : j + width] @ kernel[i, j] for i in range(3) for j in range(3)]
    return sum(taps[1:], taps[0])
