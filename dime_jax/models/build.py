"""From a spec to a network, its variables, and the eps function that a Denoiser needs."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import ApplyFn
from dime_jax.models.ddpm_unet import DdpmUnet
from dime_jax.models.guided_unet import GuidedUnet
from dime_jax.models.layers import Dtype
from dime_jax.models.spec import DdpmUnetSpec, GuidedUnetSpec, ModelSpec
from dime_jax.models.unet import Unet


def build(spec: DdpmUnetSpec | GuidedUnetSpec, *, dtype: Dtype = jnp.float32, remat: bool = False) -> Unet:
    """The network of the spec; its variables are `{"params": ..., "constants": ...}` (constants only if it has any).

    Args:
      spec: the architecture.
      dtype: of convolutions and matmuls.
      remat: compute activations again in the backward pass instead of keeping them.
    """
    if isinstance(spec, DdpmUnetSpec):
        return DdpmUnet(spec, dtype=dtype, remat=remat)
    return GuidedUnet(spec, dtype=dtype, remat=remat)


def init(spec: DdpmUnetSpec | GuidedUnetSpec, key: jax.Array) -> PyTree:
    """Fresh variables for training; the same for the same key on one backend.

    The draws use JAX's "rbg" generator: with the default one, XLA takes a second per weight shape to compile on CPUs.
    """
    size = 2 ** (len(spec.level_channels) - 1)
    x = jnp.zeros((1, size, size, spec.image_channels))
    label = None if spec.num_classes is None else jnp.zeros(1, jnp.int32)
    rbg_key = jax.random.wrap_key_data(jax.random.bits(key, (4,), jnp.uint32), impl="rbg")
    return _initializer(spec)(rbg_key, x, jnp.zeros((), jnp.int32), label)


@functools.lru_cache(maxsize=32)
def _initializer(spec: DdpmUnetSpec | GuidedUnetSpec) -> Callable[..., PyTree]:
    return jax.jit(build(spec).init)


@functools.lru_cache(maxsize=32)
def param_shapes(spec: DdpmUnetSpec | GuidedUnetSpec) -> PyTree:
    """The variables' shapes and dtypes, without computing anything. (Do not change the tree: it is shared.)"""
    return jax.eval_shape(lambda: init(spec, jax.random.key(0)))


@functools.lru_cache(maxsize=32)
def denoise(spec: ModelSpec) -> ApplyFn:
    """The function `apply(variables, x, t, condition) -> eps` of a network, for a Denoiser.

    Learned variances are cut off, and other predictions turned into noise (`NoiseSchedule.noise_of`).
    Equal specs get the same function, so that models of one architecture share one compilation.
    """
    network = build(spec.architecture)
    schedule = spec.schedule.build()
    channels = spec.architecture.image_channels

    def apply(variables: PyTree, x: jax.Array, t: jax.Array, condition: jax.Array | None) -> jax.Array:
        output = network.apply(variables, x, t, condition)
        return schedule.noise_of(jnp.asarray(output)[..., :channels], spec.prediction, x, t)

    return apply
