"""The registry of attacks by name."""

from collections.abc import Collection

from dime_jax._util import validate
from dime_jax.attacks.base import Attack, Recipe, Setting

_REGISTRY: dict[str, Attack] = {}


def register_attack(attack: Attack, *, replace: bool = False) -> Attack:
    """Add an attack, yours or ours, to the registry under its name."""
    if attack.name in _REGISTRY and not replace:
        raise ValueError(f"an attack named {attack.name!r} is registered already; pass replace=True to replace it")
    _REGISTRY[attack.name] = attack
    return attack


def get_attack(name: str) -> Attack:
    """Return the registered attack of that name."""
    validate.check_choice(name, attack_names(), "attack")
    return _REGISTRY[name]


def attack_names(conditions: Collection[str] | None = None) -> tuple[str, ...]:
    """List the registered names, ours first (baselines, then DIME's), or those that these conditions suffice for."""
    if conditions is None:
        return tuple(_REGISTRY)
    return tuple(name for name, attack in _REGISTRY.items() if set(attack.conditions) <= set(conditions))


def describe_attack(name: str) -> Attack:
    """Return the registered attack of that name, or one that has nothing but the name, to show a finished run.

    The latter cannot be asked: its recipe raises ValueError.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]

    def recipe(setting: Setting) -> Recipe:
        raise ValueError(f"attack {name!r} is not known here: give the file that registers it as --attack-module")

    return Attack(name, name, "", recipe=recipe)
