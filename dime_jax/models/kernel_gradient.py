"""A 3×3 convolution whose gradient with respect to the kernel is nine matrix products, for training on CPUs.

    y = Σ_ij shift_ij(x) k_ij,   ∂/∂k_ij = shift_ij(x)ᵀ ∂y,   with shift_ij(x) the pixels that tap (i, j) sees.

XLA writes this gradient as one convolution whose window is a whole image, which on CPUs takes two to four times as long
where there are many channels. On accelerators the vendor's library does better.
"""

from typing import Any

import jax
import jax.numpy as jnp

_MIN_CHANNELS = 128  # below, the matrix products are too thin to win


def is_faster(kernel: jax.Array) -> bool:
    """Whether `convolve` has the faster gradient for a kernel [3, 3, C, K] on a CPU."""
    return min(kernel.shape[2:]) >= _MIN_CHANNELS


@jax.custom_jvp
def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution of x [B, H, W, C], padded by one on each side, with a kernel [3, 3, C, K]."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))


@convolve.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The product rule. Reverse mode transposes the second term and never computes it."""
    (x, kernel), (x_dot, kernel_dot) = primals, tangents
    return convolve(x, kernel), convolve(x_dot, kernel) + _by_products(x, kernel_dot)


def _by_products(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The same convolution as a sum of nine matrix products."""
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    taps = [padded[:, i : i + height, j : j + width] @ kernel[i, j] for i in range(3) for j in range(3)]
    return sum(taps[1:], taps[0])
