"""The attacks as functions, and the registry of them by name."""

from dime_jax.attacks.base import Attack, Setting, grid
from dime_jax.attacks.dime import (
    DimeStats,
    DimeTerms,
    combine,
    decide,
    dime_central_terms,
    dime_norms,
    dime_score,
    dime_terms,
    theory_phi,
)
from dime_jax.attacks.loss import loss
from dime_jax.attacks.pia import pia
from dime_jax.attacks.registry import attack_names, get_attack, register_attack
from dime_jax.attacks.secmi import secmi
from dime_jax.attacks.sima import sima, sima_mc

__all__ = [
    "Attack",
    "DimeStats",
    "DimeTerms",
    "Setting",
    "attack_names",
    "combine",
    "decide",
    "dime_central_terms",
    "dime_norms",
    "dime_score",
    "dime_terms",
    "get_attack",
    "grid",
    "loss",
    "pia",
    "register_attack",
    "secmi",
    "sima",
    "sima_mc",
    "theory_phi",
]
