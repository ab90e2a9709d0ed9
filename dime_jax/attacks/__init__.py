"""The attacks as functions, and the registry of them by name: one file for each, and one line below."""

from dime_jax.attacks.bands import ATTACKS as _BANDS
from dime_jax.attacks.bands import band_energies, dime_bands
from dime_jax.attacks.base import Attack, Reading, Recipe, Setting, grid
from dime_jax.attacks.calls import Answer, Call, Query, masked, norm
from dime_jax.attacks.clid import ATTACKS as _CLID
from dime_jax.attacks.dime import ATTACKS as _DIME
from dime_jax.attacks.dime import (
    DimeStats,
    DimeTerms,
    decide,
    dime_central_terms,
    dime_norms,
    dime_score,
    dime_terms,
    theory_phi,
)
from dime_jax.attacks.loss import ATTACKS as _LOSS
from dime_jax.attacks.loss import loss
from dime_jax.attacks.modules import load_attack_module
from dime_jax.attacks.pia import ATTACKS as _PIA
from dime_jax.attacks.pia import pia
from dime_jax.attacks.registry import attack_names, describe_attack, get_attack, register_attack
from dime_jax.attacks.rules import Angles, Discriminant, Rule, Single
from dime_jax.attacks.secmi import ATTACKS as _SECMI
from dime_jax.attacks.secmi import secmi
from dime_jax.attacks.sima import ATTACKS as _SIMA
from dime_jax.attacks.sima import sima, sima_mc
from dime_jax.core.draws import Draw

for _attack in (*_LOSS, *_PIA, *_SECMI, *_SIMA, *_CLID, *_DIME, *_BANDS):
    register_attack(_attack)

BUILT_IN = {name: get_attack(name) for name in attack_names()}

__all__ = [
    "BUILT_IN",
    "Angles",
    "Answer",
    "Attack",
    "Call",
    "DimeStats",
    "DimeTerms",
    "Discriminant",
    "Draw",
    "Query",
    "Reading",
    "Recipe",
    "Rule",
    "Setting",
    "Single",
    "attack_names",
    "band_energies",
    "decide",
    "describe_attack",
    "dime_bands",
    "dime_central_terms",
    "dime_norms",
    "dime_score",
    "dime_terms",
    "get_attack",
    "grid",
    "load_attack_module",
    "loss",
    "masked",
    "norm",
    "pia",
    "register_attack",
    "secmi",
    "sima",
    "sima_mc",
    "theory_phi",
]
