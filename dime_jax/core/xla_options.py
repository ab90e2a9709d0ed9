"""Tell XLA how to compile networks, where its own choice is slow."""

import functools

import jax

# XLA hands a convolution on a CPU to the library YNNPACK, whose answer takes up to 1.7 times as long for networks of
# few channels as that of XLA's own code; nothing is handed to it if this list is empty.
_ON_CPUS = {"xla_cpu_experimental_ynn_fusion_type": ""}


@functools.cache
def network_options() -> dict[str, str] | None:
    """`compiler_options` of `jax.jit` for a program with a network in it; None if there are none.

    A jaxlib that does not know an option would refuse every program, so a small one is tried first.
    """
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda x: x + 1, compiler_options=_ON_CPUS).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return None
    return _ON_CPUS
