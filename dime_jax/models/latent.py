"""From the spec of a latent model to its pure functions: eps on latents, images to latents and back, captions to text.

    eps = denoise_latents(spec)(variables["denoiser"], x, t, condition)
    x = encode(spec.autoencoder)(variables["autoencoder"], images)
    condition = embed_tokens(spec.text_encoder)(variables["text_encoder"], tokens)

Equal specs get the same function, so that models of one architecture share one compilation. They compute in float32 at
the caller's precision.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models.autoencoder import Autoencoder
from dime_jax.models.clip_text import ClipText
from dime_jax.models.conditional_unet import ConditionalUnet
from dime_jax.models.dit import Dit
from dime_jax.models.latent_spec import (
    AutoencoderSpec,
    ClipTextSpec,
    ConditionalUnetSpec,
    DitSpec,
    LatentModelSpec,
    NetworkSpec,
)

Shapes = Any  # a tree of jax.ShapeDtypeStruct


class _Network(NamedTuple):
    """How to build a network, and the inputs [1, ...] that show its variables."""

    module: Callable[[Any], nn.Module]
    inputs: Callable[[Any], tuple[jax.ShapeDtypeStruct, ...]]


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *shape), jnp.float32)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *shape), jnp.int32)


def _unet_inputs(spec: ConditionalUnetSpec) -> tuple[jax.ShapeDtypeStruct, ...]:
    size = spec.size_multiple
    return _floats(size, size, spec.channels), _integers(), _floats(1, spec.context_channels)


def _dit_inputs(spec: DitSpec) -> tuple[jax.ShapeDtypeStruct, ...]:
    return _floats(spec.latent_size, spec.latent_size, spec.channels), _integers(), _integers()


def _autoencoder_inputs(spec: AutoencoderSpec) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (_floats(spec.reduction, spec.reduction, spec.image_channels),)


NETWORKS: dict[str, _Network] = {
    ConditionalUnetSpec.kind: _Network(ConditionalUnet, _unet_inputs),
    DitSpec.kind: _Network(Dit, _dit_inputs),
    AutoencoderSpec.kind: _Network(Autoencoder, _autoencoder_inputs),
    ClipTextSpec.kind: _Network(ClipText, lambda spec: (_integers(1),)),
}


def build_network(spec: NetworkSpec) -> nn.Module:
    """The network of the spec."""
    return NETWORKS[spec.kind].module(spec)


@functools.lru_cache(maxsize=32)
def network_shapes(spec: NetworkSpec) -> Shapes:
    """Shapes and dtypes of a network's variables, without computing any. (Do not change the tree: it is shared.)"""
    inputs = NETWORKS[spec.kind].inputs(spec)
    return jax.eval_shape(build_network(spec).init, jax.random.key(0), *inputs)


def latent_model_shapes(spec: LatentModelSpec) -> Shapes:
    """Those of all variables of a model: {"denoiser", "autoencoder", and "text_encoder" if it has one}."""
    parts = {"denoiser": spec.denoiser, "autoencoder": spec.autoencoder, "text_encoder": spec.text_encoder}
    return {name: network_shapes(part) for name, part in parts.items() if part is not None}


def count_values(shapes: Shapes) -> int:
    """How many numbers a tree of variables or of their shapes holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@functools.lru_cache(maxsize=32)
def denoise_latents(spec: LatentModelSpec) -> Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]:
    """The function `apply(variables, x, t, condition) -> eps` on latents [B, *latent_shape], scaled as trained on.

    The condition is text embeddings [B, tokens, width] for captions, int classes [B] for a `DitSpec`. Learned
    variances are cut off, and other predictions turned into noise.
    """
    network, schedule = build_network(spec.denoiser), spec.schedule.build()

    def apply(variables: Any, x: jax.Array, t: jax.Array, condition: jax.Array) -> jax.Array:
        output: Any = network.apply(variables, x, t, condition)
        return schedule.noise_of(output[..., : spec.denoiser.channels], spec.prediction, x, t)

    return apply


@functools.lru_cache(maxsize=32)
def encode(spec: AutoencoderSpec) -> Callable[..., jax.Array]:
    """The function `apply(variables, images, noise=None) -> latents`, (z - shift_factor) * scaling_factor.

    z is the posterior's mean, or mean + std * noise if standard normal noise [B, *latent_shape] is given. Of the
    variables, the decoder's may be missing.
    """
    network = Autoencoder(spec)

    def apply(variables: Any, images: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        posterior: Any = network.apply(variables, images, method="encode")
        z = posterior.mean if noise is None else posterior.mean + jnp.exp(0.5 * posterior.log_variance) * noise
        return (z - spec.shift_factor) * spec.scaling_factor

    return apply


@functools.lru_cache(maxsize=32)
def decode(spec: AutoencoderSpec) -> Callable[[Any, jax.Array], jax.Array]:
    """The function `apply(variables, latents) -> images` about in [-1, 1]: the way back from `encode`."""
    network = Autoencoder(spec)

    def apply(variables: Any, latents: jax.Array) -> jax.Array:
        images: Any = network.apply(variables, latents / spec.scaling_factor + spec.shift_factor, method="decode")
        return images

    return apply


@functools.lru_cache(maxsize=32)
def embed_tokens(spec: ClipTextSpec) -> Callable[[Any, jax.Array], jax.Array]:
    """The function `apply(variables, tokens) -> embeddings` [B, tokens, width] of int tokens [B, N]."""
    network = ClipText(spec)

    def apply(variables: Any, tokens: jax.Array) -> jax.Array:
        embeddings: Any = network.apply(variables, tokens)
        return embeddings

    return apply
