"""SimA: the norm of the predicted noise, which is proportional to the score (Rao et al. 2026)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dime_jax._util import validate
from dime_jax.attacks.base import (
    BASELINE_GRIDS,
    Attack,
    Reading,
    Recipe,
    Setting,
    asking,
    check_draws,
    draw_numbers,
    images,
    norm,
    one_number,
)
from dime_jax.attacks.calls import Noisy, Raw
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.draws import Given
from dime_jax.core.schedule import NoiseSchedule


def sima(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, t: Any, p: float = 4) -> jax.Array:
    """‖ε_θ(x, t)‖_p on the raw image (not scaled by √ᾱ): 1 query."""
    ask = asking(eps_fn, schedule, images(x))
    return norm(ask(Raw(t)).state.eps, p)


def sima_mc(
    eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, noise: Any, t: Any, p: float = 4, average: str = "norms"
) -> jax.Array:
    """The same over N noised images, noise [N, B, ...]: N queries.

    average="norms" is mean_n ‖ε_n‖_p, as the DIME paper prints; "vector" is ‖mean_n ε_n‖_p, as its code runs.
    """
    x = images(x)
    validate.check_choice(average, ("norms", "vector"), "average")
    noise = check_draws(noise, x, "noise")
    ask, calls = asking(eps_fn, schedule, x, Given(noise)), [Noisy(t, n) for n in range(len(noise))]
    if average == "norms":  # a call that starts from no other leaves its own response as the sum
        return jnp.mean(jnp.stack([norm(ask(call).state, p) for call in calls]), axis=0)
    total = None
    for call in calls:
        total = ask(call, total).state
    assert total is not None
    return norm(total / len(calls), p)


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
_entry = functools.partial(Attack, citation=_CITATION, grids=BASELINE_GRIDS, family="SimA")

ATTACKS = (
    _entry("sima_l4", "SimA (l4)", recipe=recipe),
    _entry("sima_mc_norms", "SimA-MC (l4, norms)", recipe=recipe_of_norms, tiers=(10, 30)),
    _entry("sima_mc_vector", "SimA-MC (l4, vector)", recipe=recipe_of_vector, tiers=(10, 30)),
)
