"""The training loss as a membership score (Matsumoto et al. 2023)."""

from typing import Any

import jax
import jax.numpy as jnp

from dime_jax import _validate
from dime_jax.attacks import base
from dime_jax.denoiser import EpsFn
from dime_jax.schedule import NoiseSchedule


def loss(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, noise: Any, t: Any) -> jax.Array:
    """‖ε - ε_θ(√ᾱ x + σ ε, t)‖₂ for given noise ε [B, ...]: 1 query."""
    x = base.images(x)
    _validate.check_timestep(t, schedule.num_steps)
    _validate.check_shape(noise, x.shape, "noise")
    noise = jnp.asarray(noise, x.dtype)
    return base.norm(noise - base.query(eps_fn, base.noised(schedule, x, noise, t), t))
