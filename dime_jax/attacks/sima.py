"""SimA: the norm of the predicted noise, which is proportional to the score (Rao et al. 2026)."""

from typing import Any

import jax
import jax.numpy as jnp

from dime_jax import _validate
from dime_jax.attacks import base
from dime_jax.denoiser import EpsFn
from dime_jax.schedule import NoiseSchedule


def sima(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, t: Any, p: float = 4) -> jax.Array:
    """‖ε_θ(x, t)‖_p on the raw image (not scaled by √ᾱ): 1 query."""
    x = base.images(x)
    _validate.check_timestep(t, schedule.num_steps)
    return base.norm(base.query(eps_fn, x, t), p)


def sima_mc(
    eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, noise: Any, t: Any, p: float = 4, average: str = "norms"
) -> jax.Array:
    """The same over N noised images, noise [N, B, ...]: N queries.

    average="norms" is mean_n ‖ε_n‖_p, as the DIME paper prints; "vector" is ‖mean_n ε_n‖_p, as its code runs.
    """
    x = base.images(x)
    _validate.check_timestep(t, schedule.num_steps)
    _validate.check_choice(average, ("norms", "vector"), "average")
    eps = [base.query(eps_fn, base.noised(schedule, x, z, t), t) for z in base.check_draws(noise, x, "noise")]
    if average == "vector":
        return base.norm(sum(eps[1:], eps[0]) / len(eps), p)
    return jnp.mean(jnp.stack([base.norm(e, p) for e in eps]), axis=0)
