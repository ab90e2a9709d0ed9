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
from dime_jax.core.denoiser import ApplyFn, Denoiser
from dime_jax.models.architectures import NETWORKS
from dime_jax.models.autoencoder import AutoencoderSpec
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
    """Count the numbers that a tree of variables, or of their shapes, holds."""
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


def image_denoiser(
    spec: ModelSpec,
    variables: PyTree,
    fingerprint: str = "",
    name: str = "denoiser",
    reload: Callable[[], PyTree] | None = None,
) -> Denoiser:
    """Return the model of a network on images.

    Args:
      spec: without an autoencoder.
      variables: of the network.
      fingerprint, name, reload: as in `Denoiser`.
    """
    return Denoiser(
        denoise(spec),
        variables,
        spec.schedule.build(),
        spec.image_shape,
        num_classes=spec.num_classes,
        fingerprint=fingerprint,
        name=name,
        reload=reload,
    )


def encode(spec: AutoencoderSpec) -> Callable[..., jax.Array]:
    """Return the function `apply(variables, images, noise=None) -> latents`; see `Autoencoder.encode`.

    Of the variables, the decoder's may be missing.
    """
    return _method(spec, "encode")


def decode(spec: AutoencoderSpec) -> Callable[..., jax.Array]:
    """Return the function `apply(variables, latents) -> images` about in [-1, 1]: the way back from `encode`."""
    return _method(spec, "decode")


def embed_tokens(spec: ClipTextSpec) -> Callable[..., jax.Array]:
    """Return the function `apply(variables, tokens) -> embeddings` [B, tokens, width] of int tokens [B, N]."""
    return _method(spec, "__call__")


@functools.lru_cache(maxsize=32)
def _method(spec: NetworkSpec, name: str) -> Callable[..., jax.Array]:
    network = build(spec)
    return lambda variables, *inputs: cast(jax.Array, network.apply(variables, *inputs, method=name))
