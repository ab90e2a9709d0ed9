"""PIA: the proximal initialisation attack (Kong et al. 2024), and its normalised form PIAN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax import _validate
from dime_jax.attacks import base
from dime_jax.denoiser import EpsFn
from dime_jax.schedule import NoiseSchedule, per_image


def proximal_noise(eps0: jax.Array, normalize: Any) -> jax.Array:
    """ε₀ = ε_θ(x, 0) as it is, or for PIAN rescaled per image to the mean magnitude √(2/π) of a standard Gaussian."""
    magnitude = jnp.mean(jnp.abs(eps0).reshape(len(eps0), -1), axis=1)
    return eps0 * per_image(jnp.where(normalize, np.sqrt(2 / np.pi) / magnitude, 1), eps0)


def pia(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, t: Any, p: float = 4, normalize: bool = False) -> jax.Array:
    """‖ε₀ - ε_θ(√ᾱ x + σ ε₀, t)‖_p with ε₀ = ε_θ(x, 0) on the unscaled image: 2 queries.

    p = 4 is what the official code computes, p = 2 what the DIME paper prints; `normalize` makes it PIAN
    (see `proximal_noise`).
    """
    x = base.images(x)
    _validate.check_timestep(t, schedule.num_steps)
    eps0 = proximal_noise(base.query(eps_fn, x, 0), normalize)
    return base.norm(eps0 - base.query(eps_fn, base.noised(schedule, x, eps0, t), t), p)
