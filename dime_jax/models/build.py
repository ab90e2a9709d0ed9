"""From a spec to a network, the shapes of its variables, and the pure functions that a Denoiser needs.

    eps = denoise(spec)(variables, x, t, condition)
    x = encode(spec.autoencoder)(variables, images)
    condition = embed_tokens(spec.text_encoder)(variables, tokens)

Equal specs get the same function, so that models of one architecture share one compilation. They compute in float32 at
the caller's precision.
"""

import functools
from collections.abc import Callable
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import ApplyFn
from dime_jax.models.architectures import NETWORKS
from dime_jax.models.autoencoder import AutoencoderSpec, Posterior
from dime_jax.models.clip_text import ClipTextSpec
from dime_jax.models.layers import Dtype
from dime_jax.models.network_spec import NetworkSpec
from dime_jax.models.spec import ModelSpec


def build(spec: NetworkSpec, **options: Dtype | bool) -> nn.Module:
    """Return the network of the spec; its variables are `{"params": ..., "constants": ...}` (constants if it has any).

    Args:
      spec: the architecture.
      **options: of some networks: the U-Nets on images take `dtype`, that of convolutions and matmuls, and `remat`, to
        compute activations again in the backward pass instead of keeping them.
    """
    return NETWORKS[type(spec)](spec, **options)


def init(spec: NetworkSpec, key: jax.Array) -> PyTree:
    """Return fresh variables for training; the same for the same key on one backend.

    The draws use JAX's "rbg" generator: with the default one, XLA takes a second per weight shape to compile on CPUs.
    """
    rbg_key = jax.random.wrap_key_data(jax.random.bits(key, (4,), jnp.uint32), impl="rbg")
    return _initializer(spec)(rbg_key, *(jnp.zeros(one.shape, one.dtype) for one in spec.example()))


@functools.lru_cache(maxsize=32)
def _initializer(spec: NetworkSpec) -> Callable[..., PyTree]:
    return jax.jit(build(spec).init)


@functools.lru_cache(maxsize=32)
def param_shapes(spec: NetworkSpec) -> PyTree:
    """Return the variables' shapes and dtypes, computing nothing. (Do not change the tree: it is shared.)"""
    return jax.eval_shape(build(spec).init, jax.random.key(0), *spec.example())


def model_shapes(spec: ModelSpec) -> PyTree:
    """Return `param_shapes` of a model: those of its one network, or {part: those of its network}."""
    shapes = {name: param_shapes(part) for name, part in spec.parts.items()}
    return shapes["denoiser"] if list(shapes) == ["denoiser"] else shapes


def count_values(tree: PyTree) -> int:
    """Return how many numbers a tree of variables or of their shapes holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@functools.lru_cache(maxsize=32)
def denoise(spec: ModelSpec) -> ApplyFn:
    """Return the function `apply(variables, x, t, condition) -> eps` of x [B, *spec.shape].

    The variables are the denoiser's. The condition is text embeddings [B, tokens, width], int classes [B], or None.
    Learned variances are cut off, and other predictions turned into noise (`NoiseSchedule.noise_of`).
    """
    network, schedule, channels = build(spec.denoiser), spec.schedule.build(), spec.shape[-1]

    def apply(variables: PyTree, x: jax.Array, t: jax.Array, condition: PyTree) -> jax.Array:
        output = cast(jax.Array, network.apply(variables, x, t, condition))
        return schedule.noise_of(output[..., :channels], spec.prediction, x, t)

    return apply


@functools.lru_cache(maxsize=32)
def encode(spec: AutoencoderSpec) -> Callable[..., jax.Array]:
    """Return the function `apply(variables, images, noise=None) -> latents`, (z - shift_factor) * scaling_factor.

    z is the posterior's mean, or mean + std * noise if standard normal noise of the latents' shape is given. Of the
    variables, the decoder's may be missing.
    """
    network = build(spec)

    def apply(variables: PyTree, images: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        posterior = cast(Posterior, network.apply(variables, images, method="encode"))
        z = posterior.mean if noise is None else posterior.mean + jnp.exp(0.5 * posterior.log_variance) * noise
        return (z - spec.shift_factor) * spec.scaling_factor

    return apply


@functools.lru_cache(maxsize=32)
def decode(spec: AutoencoderSpec) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Return the function `apply(variables, latents) -> images` about in [-1, 1]: the way back from `encode`."""
    network = build(spec)

    def apply(variables: PyTree, latents: jax.Array) -> jax.Array:
        z = latents / spec.scaling_factor + spec.shift_factor
        return cast(jax.Array, network.apply(variables, z, method="decode"))

    return apply


@functools.lru_cache(maxsize=32)
def embed_tokens(spec: ClipTextSpec) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Return the function `apply(variables, tokens) -> embeddings` [B, tokens, width] of int tokens [B, N]."""
    network = build(spec)
    return lambda variables, tokens: cast(jax.Array, network.apply(variables, tokens))
