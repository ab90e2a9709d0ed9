"""What Winograd's form of a convolution costs to compile: kernels and seconds, against the direct one.

    python -m benchmarks compilation

A chain of equal layers in one program, compiled afresh; seconds are of the process's own CPU time.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dime_jax.models import winograd

LAYERS = 6
IMAGES, CHANNELS = (8, 16, 16), 64


def direct(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution as XLA has it."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def compile_chain(name: str, convolve: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    """Compile the chain, count what is in it, and print both for one layer."""

    def network(x: jax.Array, kernels: list[jax.Array]) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.silu(convolve(x, kernel))
        return x

    lowered = jax.jit(network).lower(
        jnp.zeros((*IMAGES, CHANNELS)), [jnp.zeros((3, 3, CHANNELS, CHANNELS)) for _ in range(LAYERS)]
    )
    start = time.process_time()
    text = lowered.compile().as_text() or ""
    seconds = (time.process_time() - start) / LAYERS
    fusions, products = text.count(" fusion(") / LAYERS, text.count(" dot(") / LAYERS
    counts = f"{fusions:.0f} fusions, {products:.0f} matrix products"
    print(f"compiling a 3x3 layer, {name}: {seconds:.3f} s of CPU, {counts}")


def run() -> None:
    """Compile both."""
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        compile_chain("direct", direct)
        compile_chain("Winograd", winograd.convolve)
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
