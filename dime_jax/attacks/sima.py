"""SimA: the norm of the predicted noise, which is proportional to the score (Rao et al. 2026)."""

import functools

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax.attacks.base import BASELINE_GRIDS, Attack, Reading, Recipe, Setting, draw_numbers, one_number
from dime_jax.attacks.calls import Noisy, Raw, check_draws, images, norm
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.draws import Given
from dime_jax.core.schedule import NoiseSchedule


def sima(eps_fn: EpsFn, schedule: NoiseSchedule, x: ArrayLike, t: ArrayLike, p: float = 4) -> Array:
    """Return ‖ε_θ(x, t)‖_p per image [B] on the raw image (not scaled by √ᾱ): 1 query.

    Args:
      eps_fn: the model ε_θ.
      schedule: its noise schedule.
      x: images [B, ...].
      t: the timestep.
      p: of the norm.
    """
    return norm(Raw(t).ask(eps_fn, schedule, images(x)).state.eps, p)


def sima_mc(
    eps_fn: EpsFn,
    schedule: NoiseSchedule,
    x: ArrayLike,
    noise: ArrayLike,
    t: ArrayLike,
    p: float = 4,
    average: str = "norms",
) -> Array:
    """Return SimA's norm over N noised images, per image [B]: N queries.

    Args:
      eps_fn: the model ε_θ.
      schedule: its noise schedule.
      x: images [B, ...].
      noise: [N, B, ...].
      t: the timestep.
      p: of the norm.
      average: "norms" is mean_n ‖ε_n‖_p, as the DIME paper prints; "vector" is ‖mean_n ε_n‖_p, as its code runs.
    """
    x = images(x)
    validate.check_choice(average, ("norms", "vector"), "average")
    noise = check_draws(noise, x, "noise")
    draws, calls = Given(noise), [Noisy(t, n) for n in range(len(noise))]
    # A call that does not start from another leaves its own response as the sum.
    responses = (call.ask(eps_fn, schedule, x, draws).state for call in calls)
    if average == "vector":
        return norm(sum(responses) / len(calls), p)
    return jnp.mean(jnp.stack([norm(eps, p) for eps in responses]), axis=0)


def recipe(setting: Setting) -> Recipe:
    """SimA: the norm of one response."""
    return one_number(Raw(int(setting["t"])), "l4")


def recipe_of_norms(setting: Setting) -> Recipe:
    """SimA-MC: the mean of the responses' norms."""
    calls = [Noisy(int(setting["t"]), index) for index in draw_numbers(setting)]
    return Recipe(tuple(Reading(call, "l4") for call in calls), lambda readings: readings.mean(axis=0)[None])


def recipe_of_vector(setting: Setting) -> Recipe:
    """SimA-MC: the norm of the mean response."""
    return one_number(Noisy(int(setting["t"]), draw_numbers(setting)[-1]), "mean_l4")


_CITATION = "Rao et al.: Score-based membership inference on diffusion models, 2026"
_entry = functools.partial(Attack, citation=_CITATION, grids=BASELINE_GRIDS, family="SimA", positive=True)

ATTACKS = (
    _entry("sima_l4", "SimA (l4)", recipe=recipe),
    _entry("sima_mc_norms", "SimA-MC (l4, norms)", recipe=recipe_of_norms, tiers=(10, 30)),
    _entry("sima_mc_vector", "SimA-MC (l4, vector)", recipe=recipe_of_vector, tiers=(10, 30)),
)
