"""The training loss as a membership score (Matsumoto et al. 2023)."""

from typing import Any

import jax
import jax.numpy as jnp

from dime_jax import _validate
from dime_jax.attacks.base import BASELINE_GRIDS, Attack, Recipe, Setting, asking, images, one_number
from dime_jax.attacks.calls import Noisy
from dime_jax.denoiser import EpsFn
from dime_jax.draws import Given
from dime_jax.schedule import NoiseSchedule


def loss(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, noise: Any, t: Any) -> jax.Array:
    """‖ε - ε_θ(√ᾱ x + σ ε, t)‖₂ for given noise ε [B, ...]: 1 query."""
    x = images(x)
    _validate.check_shape(noise, x.shape, "noise")
    ask = asking(eps_fn, schedule, x, Given(jnp.asarray(noise, x.dtype)[None]))
    return ask(Noisy(t, 0)).numbers["loss"]


def recipe(setting: Setting) -> Recipe:
    """The loss at the first noise."""
    return one_number(Noisy(int(setting["t"]), 0), "loss")


_CITATION = "Matsumoto, Miura, Yanai: Membership inference attacks against diffusion models, 2023"

ATTACKS = (Attack("loss", "Loss", _CITATION, recipe=recipe, grids=BASELINE_GRIDS, family="Loss"),)
