"""The plan of a run: the distinct model calls behind a list of jobs, in units of work, and what they cost.

One base response per (image, t) serves every γ, tier and variant of DIME, probes and noises nest over query tiers, the
image's response at t = 0 serves PIA, SimA and SecMI, and SecMI's trajectory is walked once for every t_sec on it.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dime_jax.attacks import Attack, Setting, attack_names, get_attack
from dime_jax.attacks.base import Reading, Recipe, Trees, calls_below, grow_trees, row_label
from dime_jax.attacks.calls import Call
from dime_jax.core.denoiser import BESIDE, OWN
from dime_jax.core.schedule import NoiseSchedule

WITNESS = "level_only"
WITNESS_LABEL = row_label(WITNESS, 1)
_WITNESS_GAMMA = 0.1
_TIMESTEPS = ("t", "t_sec", "t_loss", "t_level")  # in the settings of attacks


class Job(NamedTuple):
    """One attack at one setting."""

    attack: Attack
    setting: Setting

    @property
    def queries(self) -> int:
        """What the job costs per image by itself."""
        return self.attack.queries(self.setting)

    @property
    def label(self) -> str:
        """Its label "attack@queries", by which rows of the results go."""
        return row_label(self.attack.name, self.queries)

    @property
    def recipe(self) -> Recipe:
        """The attack's recipe at the setting."""
        return self.attack.recipe(self.setting)


def at_same_noise(job: Job, schedule: NoiseSchedule, other: NoiseSchedule) -> Job:
    """Return a job of one schedule for a model of another: the timesteps of the nearest noise levels there."""
    if np.array_equal(schedule.sigma_table, other.sigma_table):
        return job
    setting = {
        name: other.timestep_at(float(schedule.sigma(int(value)))) if name in _TIMESTEPS else value
        for name, value in job.setting.items()
    }
    return job._replace(setting=setting)


def far_apart(job: Job, schedule: NoiseSchedule, other: NoiseSchedule) -> list[tuple[float, float]]:
    """Return the noise levels of a job whose nearest one in another schedule is far from them, each with that one."""
    times = [
        (int(value), at_same_noise(job, schedule, other).setting[name])
        for name, value in job.setting.items()
        if name in _TIMESTEPS
    ]
    pairs = [(float(schedule.sigma(ours)), float(other.sigma(int(theirs)))) for ours, theirs in times]
    return [pair for pair in pairs if is_far(*pair)]


def is_far(level: float, other: float) -> bool:
    """Whether two noise levels are more than a quarter apart."""
    return abs(np.log(other / level)) >= np.log(1.25)


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
        """Describe the cost in one line."""
        shared, naive = self.queries_per_image, self.naive_queries_per_image
        ratio = shared / max(1, naive)
        return (
            f"{len(self.jobs)} attack settings, {shared:,} queries per image x {images:,} images = "
            f"{shared * images:,} queries; one by one they would take {naive * images:,} ({ratio:.2f}x)"
        )


def make_plan(jobs: Sequence[Job], schedule: NoiseSchedule) -> Plan:
    """Share the calls of all jobs, and check them against the schedule before anything is asked."""
    if not jobs:
        raise ValueError("there must be at least one attack setting to run, got none")
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
    budgets: Sequence[int] | None = None,
    settings: Sequence[Setting] | None = None,
    most: int | None = None,
    conditions: Collection[str] = (OWN,),
) -> list[Job]:
    """List every setting of a profile's grid for the named attacks, at each of their query tiers.

    Args:
      attacks: names in the registry; all that the model can be asked for if None.
      profile: which of the attacks' grids.
      budgets: queries per image; for each number, only the largest tier of an attack that costs no more. None for all
        tiers. Attacks of fixed cost have no tiers, and are asked whatever the budgets are.
      settings: parameters that replace the grid's, such as [{"t": 70}]: every one is combined with every grid setting.
      most: leave out every setting that costs more queries per image, of fixed cost or not.
      conditions: that the model offers.

    Raises:
      ValueError: if nothing is left.
    """
    chosen = [get_attack(name) for name in (attack_names(conditions) if attacks is None else attacks)]
    check_offered(chosen, conditions)
    jobs = [job for attack in chosen for job in _tier_jobs(attack, profile, budgets, settings)]
    kept = [job for job in jobs if most is None or job.queries <= most]
    if not kept:
        offered = (job for attack in chosen for job in _all_jobs(attack, profile, settings))
        cheapest = min(offered, key=lambda job: job.queries)
        least, name = cheapest.queries, cheapest.attack.name
        raise ValueError(f"queries per image must be >= {least}, the cost of {name}, got {max(budgets or [most or 0])}")
    return kept


def left_out(
    attacks: Iterable[str] | None,
    profile: str,
    budgets: Sequence[int] | None = None,
    settings: Sequence[Setting] | None = None,
    most: int | None = None,
    conditions: Collection[str] = (OWN,),
) -> list[str]:
    """Say what `grid_jobs` leaves out because it costs too much, a line for each attack; arguments as there."""
    kept: dict[str, int] = {}
    for job in grid_jobs(attacks, profile, budgets, settings, most, conditions):
        kept[job.attack.name] = kept.get(job.attack.name, 0) + 1
    lines = []
    for name in attack_names(conditions) if attacks is None else attacks:
        jobs = _all_jobs(get_attack(name), profile, settings)
        if name not in kept:
            lines.append(f"{name} is left out: it costs at least {min(job.queries for job in jobs)} queries per image")
        elif not get_attack(name).tiers and kept[name] < len(jobs):
            lines.append(f"{name} is asked at {kept[name]} of its {len(jobs)} settings: the others cost more queries")
    return lines


def _tier_jobs(
    attack: Attack, profile: str, budgets: Sequence[int] | None, settings: Sequence[Setting] | None
) -> list[Job]:
    """List an attack's settings at the tiers that the budgets allow, or at its fixed cost."""
    jobs = _all_jobs(attack, profile, settings)
    if budgets is None or not attack.tiers:
        return jobs
    costs = {tier: max(job.queries for job in jobs if job.setting["q"] == tier) for tier in attack.tiers}
    affordable = [[tier for tier, cost in costs.items() if cost <= budget] for budget in budgets]
    tiers = {max(tiers, key=lambda tier: costs[tier]) for tiers in affordable if tiers}
    return [job for job in jobs if job.setting["q"] in tiers]


def _all_jobs(attack: Attack, profile: str, settings: Sequence[Setting] | None) -> list[Job]:
    tiers: tuple[int | None, ...] = attack.tiers or (None,)
    return [Job(attack, setting) for tier in tiers for setting in _replaced(attack.settings(profile, tier), settings)]


def check_offered(attacks: Iterable[Attack], conditions: Collection[str]) -> None:
    """Require a model that offers the conditions under which the attacks ask."""
    for attack in attacks:
        missing = [name for name in attack.conditions if name not in conditions]
        if BESIDE in missing:
            raise ValueError(f"attack {attack.name} asks a second model besides: name one with --reference")
        if missing:
            raise ValueError(
                f"attack {attack.name} is for text-conditioned models: it asks under "
                f"{', '.join(missing)}, and this one offers only {', '.join(conditions)}"
            )


def witness_jobs(jobs: Sequence[Job]) -> list[Job]:
    """List what the witness of direction asks (`evidence.direction`): B̂² of a probe, at DIME's timesteps and least γ.

    One query per timestep, free where DIME asks it anyway. Where DIME is not run, the timesteps are those of the other
    attacks, and of DIME's shortest grid for attacks that have none.
    """
    witness = get_attack(WITNESS)
    asked = [job.setting for job in jobs]
    settings = [one for one in asked if "gamma" in one and "t" in one] or [one for one in asked if "t" in one]
    settings = settings or witness.settings("quick", 1)
    gamma = min((one["gamma"] for one in settings if one.get("gamma", 0) > 0), default=_WITNESS_GAMMA)
    times = sorted({int(one["t"]) for one in settings})
    return [Job(witness, {"t": t, "gamma": gamma, "q": 1}) for t in times]


def row_labels(jobs: Iterable[Job]) -> list[str]:
    """List the labels "attack@queries" that rows of results may have after these jobs; of SecMI's, one will occur."""
    return list(dict.fromkeys(job.label for job in jobs))


def _replaced(grid: Sequence[Setting], settings: Sequence[Setting] | None) -> list[Setting]:
    """Return the grid with some parameters replaced, without repeats."""
    changed = [{name: new.get(name, one[name]) for name in one} for new in settings or [{}] for one in grid]
    return list({tuple(sorted(setting.items())): setting for setting in changed}.values())


def _group(root: Call) -> str:
    time = getattr(root, "t", None)
    return str(root) if time is None else f"{type(root).__name__}(t={time})"
