"""The training objective: E ||f(√ᾱ_t x + σ_t ε, t) - target||² over images, t uniform on 0 … T-1 and ε ~ N(0, I).

The target is the noise ε for networks that predict noise (Ho et al. 2020, Eq. 14), and for the others x or
v = √ᾱ_t ε - σ_t x, in the words of `ModelSpec.prediction`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax._util.typing import Array, PyTree
from dime_jax.core.schedule import NoiseSchedule, per_image
from dime_jax.models import low_rank
from dime_jax.training.inputs import Examples
from dime_jax.training.keys import Keys, as_key

# (params, noised examples, dropout key) -> the loss of each image [B].
ImageLosses = Callable[[PyTree, "NoisedExamples", jax.Array], jax.Array]


class NoisedExamples(NamedTuple):
    """What the network is asked, and what it should answer; rows with mask False must not count."""

    x: jax.Array  # [B, H, W, C], √ᾱ_t x + σ_t ε
    t: jax.Array  # int32 [B]
    target: jax.Array  # [B, H, W, C]
    condition: Array | None
    mask: Array  # bool [B]


def noise_examples(
    keys: Keys, examples: Examples, schedule: NoiseSchedule, prediction: str, flips: bool
) -> NoisedExamples:
    """Draw t, ε and flips for every row.

    The draws are those of the whole batch whatever the number of devices it lies on.

    Args:
      keys: of this update.
      examples: the batch.
      schedule: of the noise.
      prediction: what the target is: "epsilon", "sample" or "v_prediction".
      flips: mirror images left to right, each with probability 1/2.
    """
    images = jnp.asarray(examples.images)
    if flips:
        flipped = jax.random.bernoulli(as_key(keys.flips), shape=images.shape[:1])
        images = jnp.where(flipped[:, None, None, None], images[:, :, ::-1], images)
    t = jax.random.randint(as_key(keys.t), images.shape[:1], 0, schedule.num_steps)
    noise = jax.random.normal(as_key(keys.noise), images.shape)
    sqrt_abar, sigma = per_image(schedule.sqrt_abar(t), images), per_image(schedule.sigma(t), images)
    targets = {"epsilon": noise, "sample": images, "v_prediction": sqrt_abar * noise - sigma * images}
    x = schedule.noised(images, noise, t)
    return NoisedExamples(x, t, targets[prediction], examples.condition, examples.mask)


def network_variables(params: PyTree, constants: Mapping[str, PyTree], base: PyTree = None) -> PyTree:
    """Return the variables of a network from what is trained of it.

    Args:
      params: its "params"; with a base, an adapter for it.
      constants: its other variables, which are not trained.
      base: the variables that an adapter is merged into.
    """
    return {"params": params, **constants} if base is None else low_rank.merge(base, params)


def image_losses(network: nn.Module, constants: Mapping[str, PyTree], base: PyTree = None) -> ImageLosses:
    """The function (params, noised, dropout key) -> mean squared error of each image over its pixels, [B].

    Outputs beyond the image's channels (learned variances) get no loss, hence no gradient: they stay as they began.

    Args:
      network: a U-Net from `models.build`.
      constants, base: see `network_variables`.
    """

    def losses(params: PyTree, noised: NoisedExamples, key: jax.Array) -> jax.Array:
        variables = network_variables(params, constants, base)
        output: PyTree = network.apply(
            variables, noised.x, noised.t, noised.condition, train=True, rngs={"dropout": key}
        )
        prediction = output[..., : noised.x.shape[-1]]
        return jnp.mean((prediction - noised.target) ** 2, axis=(1, 2, 3))

    return losses
