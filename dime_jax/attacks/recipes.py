"""Recipes: an attack's terms from readings of model calls, and the trees in which those calls are asked."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dime_jax.attacks.base import images
from dime_jax.attacks.calls import STATE, Answer, Call
from dime_jax.denoiser import EpsFn
from dime_jax.draws import Draws
from dime_jax.schedule import NoiseSchedule


class Reading(NamedTuple):
    """One number per image: which call, and which of its numbers."""

    call: Call
    name: str

    def __str__(self) -> str:
        return f"{self.call}.{self.name}"


class Recipe(NamedTuple):
    """What an attack reads, and `assemble`: readings [r, B] -> terms [columns, B], NumPy in, NumPy out."""

    readings: tuple[Reading, ...]
    assemble: Callable[[Any], Any]


Trees = Mapping[Call | None, tuple[Call, ...]]


def grow_trees(readings: Iterable[Reading]) -> Trees:
    """The distinct calls behind some readings: those that start from each call, and the roots under None.

    A call starts from its source only if the source is asked anyway. The order is that of the calls' parameters,
    whatever order the readings come in.
    """
    asked: dict[Call, None] = {}
    for call, name in readings:
        asked[call] = None
        while name in call.needs_source and call.source is not None:
            call, name = call.source, STATE
            asked[call] = None
    children: dict[Call | None, list[Call]] = {}
    for call in sorted(asked, key=lambda call: (type(call).__name__, call)):
        children.setdefault(call.source if call.source in asked else None, []).append(call)
    return {call: tuple(below) for call, below in children.items()}


def walk_trees(
    roots: Iterable[Call], trees: Trees, ask: Callable[[Call, Any], Answer]
) -> Iterator[tuple[Call, dict[str, Any]]]:
    """Ask every call under the roots, depth first, and yield its numbers.

    States live only as long as a call that starts from them is still to come.
    """
    stack = [(root, None) for root in reversed(tuple(roots))]
    while stack:
        call, given = stack.pop()
        state, numbers = ask(call, given)
        stack.extend((child, state) for child in reversed(trees.get(call, ())))
        del state, given
        yield call, numbers


def calls_below(roots: Iterable[Call], trees: Trees) -> list[Call]:
    """The calls that `walk_trees` asks, in its order."""
    return [call for call, _ in walk_trees(roots, trees, lambda call, given: Answer(None, {}))]


def start_from(call: Call, given: Any, x: jax.Array) -> Any:
    """The source's state, or what a call without source starts from."""
    return call.start(x) if given is None else given


def run_recipe(recipe: Recipe, eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, draws: Draws) -> jax.Array:
    """An attack's terms [columns, B] by itself, over any callable."""
    x = images(x)
    trees = grow_trees(recipe.readings)

    def ask(call: Call, given: Any) -> Answer:
        call.check(schedule)
        return call.ask(eps_fn, schedule, x, draws, start_from(call, given, x))

    numbers = dict(walk_trees(trees[None], trees, ask))
    return recipe.assemble(jnp.stack([numbers[call][name] for call, name in recipe.readings]))


def count_queries(recipe: Recipe) -> int:
    """Model calls per image of an attack by itself."""
    trees = grow_trees(recipe.readings)
    return sum(call.queries for call in calls_below(trees[None], trees))
