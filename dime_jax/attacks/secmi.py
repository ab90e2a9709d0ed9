"""SecMI: the error of one deterministic step there and back on the image's own DDIM trajectory (Duan et al. 2023)."""

from typing import Any

import jax
import jax.numpy as jnp

from dime_jax import _validate
from dime_jax.attacks import base
from dime_jax.denoiser import EpsFn
from dime_jax.schedule import NoiseSchedule, per_image


def ddim_step(schedule: NoiseSchedule, x: jax.Array, eps: jax.Array, t_from: Any, t_to: Any) -> jax.Array:
    """One deterministic DDIM step, either way: the clean image that eps = ε_θ(x, t_from) implies, noised to t_to."""
    clean = (x - per_image(schedule.sigma(t_from), x) * eps) / per_image(schedule.sqrt_abar(t_from), x)
    return base.noised(schedule, clean, eps, t_to)


def ddim_hop(eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, t_from: Any, t_to: Any) -> jax.Array:
    """The model call and the DDIM step that follows from it."""
    return ddim_step(schedule, x, base.query(eps_fn, x, t_from), t_from, t_to)


def trajectory_steps(t_sec: int, k: int) -> list[int]:
    """The timesteps that the trajectory visits on its way to t_sec: k, 2k, … below t_sec."""
    return list(range(0, t_sec, k))[1:]


def secmi(
    eps_fn: EpsFn,
    schedule: NoiseSchedule,
    x: Any,
    t_sec: int = 100,
    k: int = 10,
    variant: str = "official",
    noise: Any = None,
) -> jax.Array:
    """SecMI_stat.

    "official": walk the DDIM trajectory from the clean image in hops of k to the last step below t_sec, hop once more
    and back; the squared l2 distance to where it started. ⌈t_sec/k⌉ + 1 queries: 11 at the defaults. With t_sec <= k
    the walk is empty and the hop starts at the image itself.

    "paper": the one-step formula that the DIME paper prints, ‖σ_t (ε(x, t) - ε(√ᾱ_{t+1} x + σ_{t+1} ε, t + 1))‖ at
    t = t_sec, with given `noise` [B, ...]: 2 queries.
    """
    x = base.images(x)
    _validate.check_choice(variant, ("official", "paper"), "variant")
    _validate.check_at_least(k, 1, "k")
    _validate.check_timestep(t_sec, schedule.num_steps, "t_sec")
    if variant == "paper":
        if noise is None:
            raise ValueError("secmi variant='paper' needs noise of the images' shape, got noise=None")
        _validate.check_shape(noise, x.shape, "noise")
        _validate.check_timestep(t_sec + 1, schedule.num_steps, "t_sec + 1")
        clean = base.query(eps_fn, x, t_sec)
        noisy = base.query(eps_fn, base.noised(schedule, x, jnp.asarray(noise, x.dtype), t_sec + 1), t_sec + 1)
        return base.norm(per_image(schedule.sigma(t_sec), x) * (clean - noisy))
    last = 0
    for t in trajectory_steps(t_sec, k):
        x, last = ddim_hop(eps_fn, schedule, x, last, t), t
    _validate.check_timestep(last + k, schedule.num_steps, "the step after t_sec's last")
    there = ddim_hop(eps_fn, schedule, x, last, last + k)
    back = ddim_hop(eps_fn, schedule, there, last + k, last)
    return base.norm(back - x) ** 2
