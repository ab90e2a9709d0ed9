"""DIME in JAX: which images was a diffusion model trained on?

Lower scores mean member, for every statistic, everywhere.
"""

from dime_jax import attacks, calibration, data, metrics
from dime_jax.attacks import (
    Attack,
    DimeStats,
    DimeTerms,
    decide,
    dime_central_terms,
    dime_score,
    dime_terms,
    loss,
    pia,
    register_attack,
    secmi,
    sima,
    sima_mc,
    theory_phi,
)
from dime_jax.denoiser import Denoiser
from dime_jax.ideal import ErrorDecomposition, IdealDenoiser
from dime_jax.schedule import NoiseSchedule, cosine_schedule, linear_schedule, schedule_from_betas

__all__ = [
    "Attack",
    "Denoiser",
    "DimeStats",
    "DimeTerms",
    "ErrorDecomposition",
    "IdealDenoiser",
    "NoiseSchedule",
    "attacks",
    "calibration",
    "cosine_schedule",
    "data",
    "decide",
    "dime_central_terms",
    "dime_score",
    "dime_terms",
    "linear_schedule",
    "loss",
    "metrics",
    "pia",
    "register_attack",
    "schedule_from_betas",
    "secmi",
    "sima",
    "sima_mc",
    "theory_phi",
]
