"""Attacks as finished runs name them, known here or not."""

from dime_jax.attacks.base import Attack, Recipe, Setting
from dime_jax.attacks.registry import attack_names, get_attack


def describe_attack(name: str) -> Attack:
    """The registered attack of that name, or one that has nothing but the name, to show what a finished run found.

    The latter cannot be asked: its recipe raises ValueError.
    """
    if name in attack_names():
        return get_attack(name)

    def recipe(setting: Setting) -> Recipe:
        del setting
        raise ValueError(f"attack {name!r} is not known here: give the file that registers it as --attack-module")

    return Attack(name, name, "", recipe=recipe)
