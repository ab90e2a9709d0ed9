"""The training loss as a membership score (Matsumoto et al. 2023)."""

import functools

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax.attacks.base import BASELINE_GRIDS, Attack, Reading, Recipe, Setting, draw_numbers, one_number
from dime_jax.attacks.calls import Noisy, images
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.draws import Given
from dime_jax.core.schedule import NoiseSchedule


def loss(eps_fn: EpsFn, schedule: NoiseSchedule, x: ArrayLike, noise: ArrayLike, t: ArrayLike) -> Array:
    """Return ‖ε - ε_θ(√ᾱ x + σ ε, t)‖₂ per image [B]: 1 query.

    Args:
      eps_fn: the model ε_θ.
      schedule: its noise schedule.
      x: images [B, ...].
      noise: ε [B, ...].
      t: the timestep.
    """
    x = images(x)
    validate.check_shape(noise, x.shape, "noise")
    return Noisy(t, 0).ask(eps_fn, schedule, x, Given(jnp.asarray(noise, x.dtype)[None])).numbers["loss"]


def recipe(setting: Setting) -> Recipe:
    """The loss at the first noise."""
    return one_number(Noisy(int(setting["t"]), 0), "loss")


def recipe_of_mean(setting: Setting) -> Recipe:
    """The mean of the losses at the first q noises: one draw's luck averages out, and SimA-MC asks the same queries."""
    calls = [Noisy(int(setting["t"]), index) for index in draw_numbers(setting)]
    return Recipe(tuple(Reading(call, "loss") for call in calls), lambda readings: readings.mean(axis=0)[None])


_CITATION = "Matsumoto, Miura, Yanai: Membership inference attacks against diffusion models, 2023"

_entry = functools.partial(Attack, grids=BASELINE_GRIDS, family="Loss", positive=True)

ATTACKS = (
    _entry("loss", "Loss", _CITATION, recipe=recipe),
    _entry("loss_mc", "Loss (mean)", f"{_CITATION}; mean over draws added here", recipe=recipe_of_mean, tiers=(10, 30)),
)
