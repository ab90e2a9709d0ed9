"""What attacks are made of besides calls: recipes, which read calls, and the entry that describes an attack.

The unit of work is one batched model call, and calls are made in a Python loop, so an attack runs over any callable: a
jitted network, a NumPy function, a hosted model. Scores are **lower for members**, always.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Never

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax._util.typing import PyTree
from dime_jax.attacks.calls import STATE, Answer, Arrays, Call, Mask, images
from dime_jax.attacks.rules import SINGLE, Rule, Terms
from dime_jax.core.denoiser import OWN, EpsFn
from dime_jax.core.draws import NO_DRAWS, Randomness
from dime_jax.core.schedule import NoiseSchedule

Setting = Mapping[str, int | float]

# ------------------------------------------------------------------------------------------------------------- recipes


class Reading(NamedTuple):
    """One number per image: which call, and which of its numbers."""

    call: Call
    name: str

    def __str__(self) -> str:
        return f"{self.call}.{self.name}"


class Recipe(NamedTuple):
    """What an attack reads, and `assemble`: readings [r, B] -> terms [columns, B], NumPy in, NumPy out."""

    readings: tuple[Reading, ...]
    assemble: Callable[[Terms], Terms]


def one_number(call: Call, name: str) -> Recipe:
    """Return the recipe whose score is one number of one call."""
    return Recipe((Reading(call, name),), lambda readings: readings)


Trees = Mapping[Call | None, tuple[Call, ...]]


def grow_trees(readings: Iterable[Reading]) -> Trees:
    """Return the distinct calls behind some readings: those that start from each call, and the roots under None.

    A call starts from its source only if the source is asked anyway. The order is that of the calls' parameters,
    whatever order the readings come in.
    """
    asked = _calls_behind(readings)
    children: dict[Call | None, list[Call]] = {}
    for call in sorted(asked, key=lambda call: (type(call).__name__, call)):
        children.setdefault(call.source if call.source in asked else None, []).append(call)
    return {call: tuple(below) for call, below in children.items()}


def _calls_behind(readings: Iterable[Reading]) -> Collection[Call]:
    """Return the calls of some readings and those whose states they need, each once."""
    asked: dict[Call, None] = {}
    for call, name in readings:
        asked[call] = None
        while name in call.needs_source and call.source is not None:
            call, name = call.source, STATE
            asked[call] = None
    return asked


def calls_below(roots: Iterable[Call], trees: Trees) -> list[Call]:
    """Return the calls under the roots, depth first."""
    calls, stack = list[Call](), list(roots)[::-1]
    while stack:
        calls.append(stack.pop())
        stack.extend(reversed(trees.get(calls[-1], ())))
    return calls


def run_recipe(
    recipe: Recipe, eps_fn: EpsFn, schedule: NoiseSchedule, x: ArrayLike, draws: Randomness = NO_DRAWS
) -> Array:
    """Run an attack by itself, over any callable, and return its terms [columns, B].

    Args:
      recipe: of the attack at a setting.
      eps_fn: the model.
      schedule: its noise schedule.
      x: images [B, ...].
      draws: where the probes and noises come from.
    """
    trees, batch, numbers = grow_trees(recipe.readings), images(x), dict[Call, Arrays]()
    stack = [(root, None) for root in reversed(trees[None])]
    while stack:  # depth first: a state lives only as long as a call that starts from it is still to come
        call, given = stack.pop()
        state, numbers[call] = call.ask(eps_fn, schedule, batch, draws, given)
        stack.extend((child, state) for child in reversed(trees.get(call, ())))
    return jnp.asarray(recipe.assemble(jnp.stack([numbers[call][name] for call, name in recipe.readings])))


def count_queries(recipe: Recipe) -> int:
    """Count the model calls per image of an attack run by itself."""
    return sum(call.queries for call in _calls_behind(recipe.readings))


# ------------------------------------------------------------------------------------------------------------- entries

Run = Callable[[EpsFn, NoiseSchedule, Array, Randomness, Setting], Array]


def _not_given(*arguments: Any) -> Never:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, order=True)
class Whole(Call):
    """An attack that is known only by its `run`, at one setting, whatever that asks; it shares nothing with others.

    Where it may be compiled, t and all floats of its setting are arguments of the program, so that one serves the whole
    grid. Other integers, such as q, may be counts that a loop runs over, and are part of the program.
    """

    attack: str
    setting: tuple[tuple[str, int | float], ...]
    run: Run = dataclasses.field(compare=False, repr=False)
    cost: int = dataclasses.field(compare=False, repr=False)
    columns: int = dataclasses.field(compare=False, repr=False)
    jitted: bool = dataclasses.field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.attack}({', '.join(f'{name}={value}' for name, value in self.setting)})"

    @property
    def queries(self) -> int:
        """What the attack declares to cost per image."""
        return self.cost

    @property
    def traceable(self) -> bool:
        """Whether the attack declares that it may be compiled."""
        return self.jitted

    @property
    def template(self) -> "WholeTemplate":
        """The attack without t and floats."""
        fixed = tuple(item for item in self.setting if not _is_argument(*item))
        names = tuple(name for name, value in self.setting if _is_argument(name, value))
        return WholeTemplate(self.attack, fixed, names, self.run, self.cost, self.columns)

    @property
    def arguments(self) -> tuple[ArrayLike, ...]:
        """t and floats."""
        return tuple(value for name, value in self.setting if _is_argument(name, value))

    def check(self, schedule: NoiseSchedule) -> None:
        """Check nothing: the attack checks its setting itself."""

    def ask(
        self,
        eps_fn: EpsFn,
        schedule: NoiseSchedule,
        x: Array,
        draws: Randomness = NO_DRAWS,
        given: PyTree = None,
        mask: Mask = None,
    ) -> Answer:
        """Run the attack, which may ask no more often than it declares. Numbers column_0, column_1, …: its terms."""
        asked = 0

        def counted(x: Array, t: ArrayLike) -> Array:
            nonlocal asked
            asked += 1
            if asked > self.cost:
                raise ValueError(f"{self.attack} must make {self.cost} queries per image, as it declares, got {asked}")
            return eps_fn(x, t)

        terms = jnp.asarray(self.run(counted, schedule, x, draws, dict(self.setting)))
        validate.check_shape(terms, (self.columns, len(x)), f"terms of attack {self.attack!r}")
        return Answer(None, {f"column_{i}": column for i, column in enumerate(terms)})


@dataclasses.dataclass(frozen=True)
class WholeTemplate:
    """A whole attack at settings that differ in t and floats only."""

    attack: str
    fixed: tuple[tuple[str, int | float], ...]
    names: tuple[str, ...]
    run: Run
    cost: int
    columns: int

    def __call__(self, *values: Any) -> Whole:
        """Return the attack at these values."""
        setting = (*self.fixed, *zip(self.names, values))
        return Whole(self.attack, setting, self.run, self.cost, self.columns, jitted=True)


def _is_argument(name: str, value: int | float) -> bool:
    return name == "t" or isinstance(value, float)


@dataclasses.dataclass(frozen=True)
class Attack:
    """An attack as the registry, the calibration and the tables see it.

    It is given by its `recipe`, from which `run` and `queries` follow, or, if it cannot be taken apart into calls, by
    `run` and `queries`.

    Attributes:
      name: as in results.json.
      title: as in tables.
      citation: where it comes from.
      run: (eps_fn, schedule, x, draws, setting) -> terms [columns, B]: one column, the score; or several.
      queries: model calls per image at a setting.
      grids: the settings that calibration chooses from, by profile ("paper", "quick", "light").
      tiers: query tiers; each is reported on its own, as the setting's "q". Empty for attacks of fixed cost.
      signs: one for each term: 1 where theory says that it is lower for members, -1 where it is higher, 0 where it says
        nothing.
      rule: how terms become a score.
      recipe: the model calls of a setting and how terms follow from them, by which attacks share queries.
      family: whose attack it is: "DIME", or that of a baseline such as "PIA"; its own name if empty.
      traceable: for an attack without a recipe, whether `run` may be compiled. It then sees tracers for the images,
        and for t and all floats of its setting.
      conditions: names of the conditions that a model must offer to be asked (`Denoiser.conditions`).
      positive: whether the score is positive by construction, so that difficulty multiplies: its logarithm is what
        statistics of the picture are fitted to.
    """

    name: str
    title: str
    citation: str
    run: Run = _not_given
    queries: Callable[[Setting], int] = _not_given
    grids: Mapping[str, Sequence[Setting]] = dataclasses.field(default_factory=dict)
    tiers: tuple[int, ...] = ()
    signs: tuple[int, ...] = (1,)
    rule: Rule = SINGLE
    recipe: Callable[[Setting], Recipe] = _not_given
    family: str = ""
    traceable: bool = False
    conditions: tuple[str, ...] = (OWN,)
    positive: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"an attack's name must consist of letters, digits, _ and -, got {self.name!r}")
        derived: dict[str, Any] = {"family": self.family or self.name}
        if self.recipe is not _not_given:
            derived["run"] = lambda eps_fn, schedule, x, draws, setting: run_recipe(
                self.recipe(setting), eps_fn, schedule, x, draws
            )
            derived["queries"] = lambda setting: count_queries(self.recipe(setting))
        elif _not_given in (self.run, self.queries):
            raise ValueError(f"attack {self.name!r} must have a recipe, or run and queries, got neither")
        else:
            derived["recipe"] = self._whole
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def heading(self) -> str:
        """Return the title, with the family if the title does not begin with it."""
        return self.title if self.title.startswith(self.family) else f"{self.title}, {self.family}"

    def settings(self, profile: str, tier: int | None = None) -> list[Setting]:
        """Return the grid of a profile, at one query tier."""
        validate.check_choice(profile, tuple(self.grids), "profile")
        if not self.tiers:
            return list(self.grids[profile])
        if tier is None or tier < 1:
            raise ValueError(f"the query tier of {self.name} must be >= 1, got {tier}")
        return [{**setting, "q": tier} for setting in self.grids[profile]]

    def _whole(self, setting: Setting) -> Recipe:
        """Return the whole attack as a single call."""
        values, columns = tuple(sorted(setting.items())), len(self.signs)
        whole = Whole(self.name, values, self.run, self.queries(setting), columns, self.traceable)
        readings = tuple(Reading(whole, f"column_{i}") for i in range(columns))
        return Recipe(readings, lambda readings: readings)


def row_label(attack: str, queries: int) -> str:
    """Return "attack@queries", the label of a row of the results."""
    return f"{attack}@{queries}"


def draw_numbers(setting: Setting) -> range:
    """Return 0 … q - 1: the draws of a setting at its query tier."""
    validate.check_at_least(setting["q"], 1, "q")
    return range(int(setting["q"]))


def grid(**axes: Sequence[int | float]) -> list[Setting]:
    """Return all combinations of the given values, the last axis running fastest."""
    mesh = np.meshgrid(*axes.values(), indexing="ij")
    columns = [[value.item() for value in np.asarray(axis).ravel()] for axis in mesh]
    return [dict(zip(axes, row)) for row in zip(*columns)]


# The authors' grid for 32x32 DDPM checkpoints, one that a laptop gets through, and one for slow models.
BASELINE_TIMES = {"paper": [*range(10, 300, 20), 300], "quick": [30, 70, 120], "light": [70, 120]}
BASELINE_GRIDS = {profile: grid(t=times) for profile, times in BASELINE_TIMES.items()}
