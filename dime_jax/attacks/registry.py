"""The registry of attacks by name."""

from collections.abc import Collection

from dime_jax._util import validate
from dime_jax.attacks.base import Attack

_REGISTRY: dict[str, Attack] = {}


def register_attack(attack: Attack, *, replace: bool = False) -> Attack:
    """Add an attack, yours or ours, to the registry under its name."""
    if attack.name in _REGISTRY and not replace:
        raise ValueError(f"an attack named {attack.name!r} is registered already; pass replace=True to replace it")
    _REGISTRY[attack.name] = attack
    return attack


def get_attack(name: str) -> Attack:
    """The registered attack of that name."""
    validate.check_choice(name, attack_names(), "attack")
    return _REGISTRY[name]


def attack_names(conditions: Collection[str] | None = None) -> tuple[str, ...]:
    """All registered names, ours first: baselines, then DIME's; or those for models that offer these conditions."""
    return tuple(
        name for name, attack in _REGISTRY.items() if conditions is None or set(attack.conditions) <= set(conditions)
    )
