"""The attacks as functions, and the registry of them by name; each has a file of its own, and an import below."""

from dime_jax.attacks.base import Attack as Attack
from dime_jax.attacks.base import Reading as Reading
from dime_jax.attacks.base import Recipe as Recipe
from dime_jax.attacks.base import Setting as Setting
from dime_jax.attacks.base import grid as grid
from dime_jax.attacks.calls import Answer as Answer
from dime_jax.attacks.calls import Call as Call
from dime_jax.attacks.calls import Query as Query
from dime_jax.attacks.calls import masked as masked
from dime_jax.attacks.calls import norm as norm
from dime_jax.attacks.clid import ATTACKS as _CLID
from dime_jax.attacks.dime import ATTACKS as _DIME
from dime_jax.attacks.dime import DimeStats as DimeStats
from dime_jax.attacks.dime import DimeTerms as DimeTerms
from dime_jax.attacks.dime import decide as decide
from dime_jax.attacks.dime import dime_central_terms as dime_central_terms
from dime_jax.attacks.dime import dime_norms as dime_norms
from dime_jax.attacks.dime import dime_score as dime_score
from dime_jax.attacks.dime import dime_terms as dime_terms
from dime_jax.attacks.dime import theory_phi as theory_phi
from dime_jax.attacks.level import ATTACKS as _LEVEL
from dime_jax.attacks.loss import ATTACKS as _LOSS
from dime_jax.attacks.loss import loss as loss
from dime_jax.attacks.loss_level import ATTACKS as _LOSS_LEVEL
from dime_jax.attacks.loss_level import loss_level as loss_level
from dime_jax.attacks.modules import load_attack_module as load_attack_module
from dime_jax.attacks.pia import ATTACKS as _PIA
from dime_jax.attacks.pia import pia as pia
from dime_jax.attacks.registry import attack_names as attack_names
from dime_jax.attacks.registry import describe_attack as describe_attack
from dime_jax.attacks.registry import get_attack as get_attack
from dime_jax.attacks.registry import register_attack as register_attack
from dime_jax.attacks.rules import Agreement as Agreement
from dime_jax.attacks.rules import Angles as Angles
from dime_jax.attacks.rules import Rule as Rule
from dime_jax.attacks.rules import Single as Single
from dime_jax.attacks.secmi import ATTACKS as _SECMI
from dime_jax.attacks.secmi import secmi as secmi
from dime_jax.attacks.sima import ATTACKS as _SIMA
from dime_jax.attacks.sima import sima as sima
from dime_jax.attacks.sima import sima_mc as sima_mc
from dime_jax.core.draws import Draw as Draw

for _attack in (*_LOSS, *_PIA, *_SECMI, *_SIMA, *_CLID, *_DIME, *_LEVEL, *_LOSS_LEVEL):
    register_attack(_attack)

BUILT_IN = {name: get_attack(name) for name in attack_names()}
