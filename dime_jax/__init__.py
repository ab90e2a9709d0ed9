"""DIME in JAX: which images was a diffusion model trained on?"""

from dime_jax.denoiser import Denoiser
from dime_jax.schedule import NoiseSchedule, cosine_schedule, linear_schedule, schedule_from_betas

__all__ = [
    "Denoiser",
    "NoiseSchedule",
    "cosine_schedule",
    "linear_schedule",
    "schedule_from_betas",
]
