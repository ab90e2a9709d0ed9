"""Thrifty calibration: a small part of the calibration half tries every setting, the whole half those worth keeping.

One round of successive halving, which costs at most half the queries of the whole grid on the whole half:

    pilot   an eighth of the members and of the held-out images, drawn at random, is asked at every setting
    keep    each row (attack and query tier) ranks its settings by AUC there, and keeps what the queries left allow
    choose  the whole half is asked at the settings that were kept, and chooses among them as it always does

Queries are counted as they are made: attacks share calls, so a setting costs what it adds to those kept before it. The
test half plays no part.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dime_jax.attacks import Setting
from dime_jax.attacks.base import Call, calls_below, grow_trees
from dime_jax.attacks.rules import TermPair
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.data import Split
from dime_jax.protocol.calibration import calibrate
from dime_jax.scoring.planning import Job

PILOT = 8  # one image in so many is in the pilot
FEWEST = 4  # members, and held-out images, in the pilot


class PricedJob(NamedTuple):
    """One attack at one setting, and the calls that it makes."""

    job: Job
    calls: frozenset[Call]


class Ranked(NamedTuple):
    """A setting of a row: its place among the row's, 0 for the best, and its AUC in the pilot."""

    row: int
    place: int
    auc: float
    priced: PricedJob


class Thrift(NamedTuple):
    """pilot.json: what the pilot kept, and what calibration costs in all.

    Attributes:
      kept: attacks by name with the settings that the whole half is asked at, in the order of the grid.
      settings: how many the grid has.
      pilot_queries: of the whole grid on the pilot.
      kept_queries: of what was kept, and of the witness of direction, on the whole half.
      grid_queries: of the whole grid and the witness on the whole half: what is saved from.
    """

    kept: list[tuple[str, Setting]]
    settings: int
    pilot_queries: int
    kept_queries: int
    grid_queries: int

    def describe(self) -> str:
        """The savings in one line."""
        made = self.pilot_queries + self.kept_queries
        return (
            f"thrifty calibration: {made:,} of {self.grid_queries:,} queries ({made / self.grid_queries:.0%}), "
            f"{len(self.kept)} of {self.settings} settings kept"
        )


class Costs(NamedTuple):
    """Queries of thrifty calibration for a grid, known before the first one.

    Attributes:
      grid: of the whole grid and the witness on the whole half.
      pilot: of the whole grid on the pilot.
      most: what may be asked about each image of the whole half.
      least: what one setting for every row and the witness take, about each image.
    """

    grid: int
    pilot: int
    most: int
    least: int


def pilot(split: Split, seed: int) -> Split:
    """An eighth of the members and of the held-out images, rounded down.

    Raises:
      ValueError: if that is too few to rank settings by.
    """
    sides = (split.member, split.heldout)
    if min(map(len, sides)) < PILOT * FEWEST:
        raise ValueError(
            f"expected at least {PILOT * FEWEST} members and held-out images each in the calibration half for thrifty "
            f"calibration, got {len(split.member)} and {len(split.heldout)}"
        )
    rng = np.random.default_rng(seed)
    return Split(*(np.sort(rng.permutation(np.sort(side))[: len(side) // PILOT]) for side in sides))


def costs(jobs: Sequence[Job], witness: Sequence[Job], images: int, pilot_images: int) -> Costs:
    """What thrifty calibration may cost, and must, for a half and a pilot of so many images."""
    rows, known = rows_of(jobs), _calls(witness)
    whole = frozenset[Call]().union(*(one.calls for row in rows for one in row))
    grid, pilot_queries = _queries(whole | known) * images, _queries(whole) * pilot_images
    most = max(0, grid // 2 - pilot_queries) // images
    return Costs(grid, pilot_queries, most, _queries(known.union(*(one.calls for one in _cheapest(rows, known)))))


def check_possible(found: Costs) -> None:
    """Require a grid of which half the queries are enough.

    Raises:
      ValueError: in one line, if one setting for every row takes more.
    """
    if found.least > found.most:
        raise ValueError(
            f"the grid is too small for thrifty calibration: one setting for every attack takes {found.least} queries "
            f"per image, and half the grid's queries leave {found.most}; calibrate with the whole grid"
        )


def rows_of(jobs: Iterable[Job]) -> list[list[PricedJob]]:
    """The settings of each attack and query tier, in the order of the grid."""
    rows: dict[tuple[str, float | None], list[PricedJob]] = {}
    for job in jobs:
        rows.setdefault((job.attack.name, job.setting.get("q")), []).append(PricedJob(job, _calls([job])))
    return list(rows.values())


def rank(
    rows: Sequence[Sequence[PricedJob]], schedule: NoiseSchedule, terms: Callable[[Job], TermPair]
) -> list[Ranked]:
    """Every row's settings by their AUC in the pilot, of equals the first in the grid; everyone's best come first.

    Args:
      rows: from `rows_of`.
      schedule: the model's.
      terms: of a job, on the pilot.
    """
    found = []
    for number, row in enumerate(rows):
        aucs = [calibrate(job.attack, schedule, [job.setting], [terms(job)]).auc for job, _ in row]
        order = sorted(range(len(row)), key=lambda i: -aucs[i])
        found += [Ranked(number, place, aucs[i], row[i]) for place, i in enumerate(order)]
    return sorted(found, key=lambda one: (one.place, -one.auc, one.row))


def keep(ranked: Sequence[Ranked], rows: Sequence[Sequence[PricedJob]], witness: Sequence[Job], most: int) -> list[Job]:
    """What the whole half is asked at, in the order of the grid: at least one setting for every row.

    Everyone's best come first, then everyone's second best, and so on, among equal places by AUC. A setting is kept if
    it and all before it take at most `most` queries per image, with enough left for the rows that have none yet.
    """
    known, kept, without = _calls(witness), list[PricedJob](), set(range(len(rows)))
    for one in ranked:
        asked, others = known | one.priced.calls, [rows[i] for i in sorted(without - {one.row})]
        if _queries(asked.union(*(cheap.calls for cheap in _cheapest(others, asked)))) <= most:
            known, without = asked, without - {one.row}
            kept.append(one.priced)
    kept += _cheapest([rows[i] for i in sorted(without)], known)
    return [one.job for row in rows for one in row if any(one is other for other in kept)]


def _cheapest(rows: Iterable[Sequence[PricedJob]], known: frozenset[Call]) -> list[PricedJob]:
    """For one row after the other the setting that adds the fewest queries, of equals the first."""
    found = []
    for row in rows:
        best = min(row, key=lambda one: _queries(one.calls - known))
        found.append(best)
        known |= best.calls
    return found


def _calls(jobs: Iterable[Job]) -> frozenset[Call]:
    """The calls that a plan for these jobs makes."""
    trees = grow_trees(reading for job in jobs for reading in job.recipe.readings)
    return frozenset(calls_below(trees.get(None, ()), trees))


def _queries(calls: Iterable[Call]) -> int:
    return sum(call.queries for call in calls)
