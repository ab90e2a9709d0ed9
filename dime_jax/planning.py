"""The plan of a run: the distinct model calls behind a list of jobs, in units of work, and what they cost.

One base response per (image, t) serves every γ, tier and variant of DIME, probes and noises nest over query tiers, the
image's response at t = 0 serves PIA, SimA and SecMI, and SecMI's trajectory is walked once for every t_sec on it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from dime_jax.attacks import Attack, Setting, attack_names, get_attack
from dime_jax.attacks.calls import Answer, Call
from dime_jax.attacks.recipes import Reading, Recipe, Trees, calls_below, grow_trees
from dime_jax.denoiser import EpsFn
from dime_jax.draws import Draws
from dime_jax.schedule import NoiseSchedule

WITNESS = "level_only"
_WITNESS_GAMMA = 0.1


class Job(NamedTuple):
    """One attack at one setting."""

    attack: Attack
    setting: Setting

    @property
    def queries(self) -> int:
        """What it costs per image by itself."""
        return self.attack.queries(self.setting)

    @property
    def label(self) -> str:
        """ "attack@queries": how one row of the results is called."""
        return f"{self.attack.name}@{self.queries}"

    @property
    def recipe(self) -> Recipe:
        """The attack's recipe at the setting; for an attack without one, the whole of it as a single call."""
        if self.attack.recipe is not None:
            return self.attack.recipe(self.setting)
        columns = 1 if self.attack.angles is None else 2
        whole = Whole(self.attack.name, tuple(sorted(self.setting.items())))
        return Recipe(tuple(Reading(whole, f"column_{i}") for i in range(columns)), lambda readings: readings)


@dataclasses.dataclass(frozen=True, order=True)
class Whole(Call):
    """A registered attack without a recipe: its `run`, whatever it asks. Shares nothing, and is never jitted."""

    attack: str
    setting: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.attack}({', '.join(f'{name}={value}' for name, value in self.setting)})"

    @property
    def queries(self) -> int:
        """What the attack says it costs."""
        return get_attack(self.attack).queries(dict(self.setting))

    def check(self, schedule: NoiseSchedule) -> None:
        """The attack checks its setting itself."""

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, given: Any) -> Answer:
        """Numbers column_0, column_1: the attack's terms."""
        terms = get_attack(self.attack).run(eps_fn, schedule, x, draws, dict(self.setting))
        return Answer(None, {f"column_{i}": column for i, column in enumerate(terms)})


class Unit(NamedTuple):
    """The smallest piece of work that is stored: some roots with all that starts from them, on one batch.

    `readings` are the numbers that are kept, in the order of the score table.
    """

    name: str
    roots: tuple[Call, ...]
    queries: int
    readings: tuple[Reading, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What to ask about every image. Equal for equal sets of jobs, whatever their order.

    Attributes:
      jobs: what the plan is for.
      trees: which call starts from which.
      units: the work, each unit independent of the others.
    """

    jobs: tuple[Job, ...]
    trees: Trees
    units: tuple[Unit, ...]

    @property
    def queries_per_image(self) -> int:
        """Queries with sharing."""
        return sum(unit.queries for unit in self.units)

    @property
    def naive_queries_per_image(self) -> int:
        """Queries of running every job by itself."""
        return sum(job.queries for job in self.jobs)

    def describe(self, images: int) -> str:
        """The cost in one line."""
        shared, naive = self.queries_per_image, self.naive_queries_per_image
        return (
            f"{len(self.jobs)} attack settings, {shared:,} queries per image x {images:,} images = "
            f"{shared * images:,} queries; one by one they would take {naive * images:,} ({shared / naive:.2f}x)"
        )


def make_plan(jobs: Sequence[Job], schedule: NoiseSchedule) -> Plan:
    """Share the calls of all jobs, and check them against the schedule before anything is asked."""
    if not jobs:
        raise ValueError("expected at least one attack setting to run, got none")
    readings = sorted({reading for job in jobs for reading in job.recipe.readings}, key=str)
    trees = grow_trees(readings)
    names: dict[Call, list[str]] = {}
    for call, name in readings:
        names.setdefault(call, []).append(name)
    groups: dict[str, list[Call]] = {}
    for root in trees[None]:  # roots of one kind and time share a unit: a probe without base response is a root
        groups.setdefault(_group(root), []).append(root)
    units = []
    for group, roots in groups.items():
        calls = calls_below(roots, trees)
        for call in calls:
            call.check(schedule)
        kept = tuple(Reading(call, name) for call in calls for name in names.get(call, ()))
        units.append(Unit(group, tuple(roots), sum(call.queries for call in calls), kept))
    return Plan(tuple(jobs), trees, tuple(units))


def grid_jobs(
    attacks: Iterable[str] | None = None,
    profile: str = "paper",
    tiers: Sequence[int] | None = None,
    settings: Sequence[Setting] | None = None,
) -> list[Job]:
    """Every setting of a profile's grid for the named attacks (all if None), at each of their query tiers.

    Args:
      attacks: names in the registry.
      profile: which of the attacks' grids.
      tiers: only these query tiers, and those attacks that have none; all if None.
      settings: parameters that replace the grid's, such as [{"t": 70}]: every one is combined with every grid setting.
    """
    chosen = [get_attack(name) for name in (attack_names() if attacks is None else attacks)]
    known = sorted({tier for attack in chosen for tier in attack.tiers or ()})
    if known and tiers is not None and not set(tiers) & set(known):
        raise ValueError(f"expected a query tier among {', '.join(map(str, known))}, got {', '.join(map(str, tiers))}")
    jobs = []
    for attack in chosen:
        for tier in attack.tiers or (None,):
            if tier is None or tiers is None or tier in tiers:
                jobs += [Job(attack, setting) for setting in _replaced(attack.settings(profile, tier), settings)]
    return jobs


def witness_jobs(jobs: Sequence[Job]) -> list[Job]:
    """What the witness of direction asks (`evidence.direction`): B̂² of one probe, at DIME's timesteps and smallest γ.

    One query per timestep, free where DIME asks it anyway. Where DIME is not run, the timesteps are those of the other
    attacks, and of DIME's shortest grid for attacks that have none.
    """
    witness = get_attack(WITNESS)
    asked = [job.setting for job in jobs]
    settings = [one for one in asked if "gamma" in one and "t" in one] or [one for one in asked if "t" in one]
    settings = settings or witness.settings("quick", 1)
    gamma = min((one["gamma"] for one in settings if "gamma" in one), default=_WITNESS_GAMMA)
    times = sorted({int(one["t"]) for one in settings})
    return [Job(witness, {"t": t, "gamma": gamma, "q": 1}) for t in times]


def check_tiers(attacks: Iterable[str] | None, tiers: Sequence[int] | None) -> None:
    """Require query tiers that a user names to be ones that some of the attacks have."""
    known = sorted({tier for name in attacks or attack_names() for tier in get_attack(name).tiers})
    unknown = [tier for tier in tiers or () if known and tier not in known]
    if unknown:
        raise ValueError(f"expected query tiers among {', '.join(map(str, known))}, got {unknown[0]}")


def row_labels(jobs: Iterable[Job]) -> list[str]:
    """The names "attack@queries" that rows of results may have after these jobs; of SecMI, only one of its own will."""
    return list(dict.fromkeys(job.label for job in jobs))


def _replaced(grid: Sequence[Setting], settings: Sequence[Setting] | None) -> list[Setting]:
    """The grid with some parameters replaced, without repeats."""
    changed = [
        {**setting, **{k: v for k, v in new.items() if k in setting}} for new in settings or [{}] for setting in grid
    ]
    return list({tuple(sorted(setting.items())): setting for setting in changed}.values())


def _group(root: Call) -> str:
    time = getattr(root, "t", None)
    return str(root) if time is None else f"{type(root).__name__}(t={time})"
