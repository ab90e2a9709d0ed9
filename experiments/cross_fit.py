"""AUC at settings at which only the calibration half was asked, without the optimism of having chosen there.

The test half is asked at frozen settings alone. So the calibration half is cut in two: what remains to be chosen is
chosen on the one part and measured on the other, both ways, and the two results are averaged.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dime_jax.data import Pair
from dime_jax.evidence import Way, metrics
from dime_jax.protocol import calibration, stages, statistics
from dime_jax.scoring import planning, score_table
from experiments.kept_statistics import with_classical
from experiments.runs import Run


class Parts(NamedTuple):
    """A calibration half cut in two.

    Attributes:
      table: the terms of every image at every setting of every attack in `jobs`.
      member: which images of the table are members [n].
      first: which of them are in the first part [n].
      jobs: every attack at every setting that was asked for.
      pictures: statistics of the images [n, k]; None in a run without them.
    """

    table: score_table.ScoreTable
    member: np.ndarray
    first: np.ndarray
    jobs: Sequence[planning.Job]
    pictures: np.ndarray | None = None


class AucTpr(NamedTuple):
    """AUC and TPR@1%FPR."""

    auc: float
    tpr: float


def cut(run: Run) -> Parts:
    """Read the calibration half of a run, and cut both of its sides into two equal parts, drawn by the run's seed."""
    table = with_classical(score_table.read_table(run.directory / "calibration"), run.directory)
    member, rng = np.isin(table.index, run.halves.calibration.member), np.random.default_rng(run.results.seed)
    first = np.zeros(len(member), bool)
    for side in (member, ~member):
        first[rng.permutation(np.flatnonzero(side))[: np.sum(side) // 2]] = True
    pictures = statistics.read(run.directory).of(table.index) if statistics.exist(run.directory) else None
    return Parts(table, member, first, stages.read_jobs(run.directory), pictures)


def scores(parts: Parts, jobs: Sequence[planning.Job], adjusted: bool = False) -> np.ndarray:
    """Score images [n], lower for members, by one attack at settings to choose from, each by what the others chose.

    An adjusted score is one without what the picture explains by a fit over the others, which sees no labels.

    NaN for images without a finite answer at one of the settings. Scores of the two parts are on different scales.
    """
    terms = [parts.table.terms(job) for job in jobs]
    usable = np.all([np.isfinite(columns).all(axis=0) for columns in terms], axis=0)
    settings = [job.setting for job in jobs]
    found = np.full(len(parts.member), np.nan)
    for chooses in (parts.first & usable, ~parts.first & usable):
        pairs = [calibration.TermPair(one[:, chooses & parts.member], one[:, chooses & ~parts.member]) for one in terms]
        other, known, pictures = usable & ~chooses, None, parts.pictures if adjusted else None
        if pictures is not None:
            known = [Pair(pictures[chooses & parts.member], pictures[chooses & ~parts.member]) for _ in jobs]
        way = Way.PLAIN if pictures is None else Way.ADJUSTED
        frozen = calibration.calibrate(jobs[0].attack, parts.table.schedule, settings, pairs, known, way)
        judged = terms[settings.index(frozen.setting)][:, other]
        found[other] = frozen.score(judged, None if pictures is None else pictures[other])
    return found


def auc(parts: Parts, found: np.ndarray) -> float:
    """Return the mean AUC of the two parts."""
    return float(np.mean([metrics.auc(*_sides(parts, found, part)) for part in _both(parts, found)]))


def rates(parts: Parts, found: np.ndarray) -> AucTpr:
    """Return the mean AUC and the mean TPR@1%FPR of the two parts."""
    curves = [metrics.roc_curve(*_sides(parts, found, part)) for part in _both(parts, found)]
    return AucTpr(auc(parts, found), float(np.mean([max(one.tpr[one.fpr <= 0.01]) for one in curves])))


def difference(parts: Parts, first: np.ndarray, second: np.ndarray) -> metrics.Estimate:
    """Return the AUC of the first scores minus that of the second on the same images, with DeLong's paired interval.

    The mean of both parts' differences, whose errors are taken as independent.
    """
    usable = first + second
    found = [
        metrics.compare(_sides(parts, first, part), _sides(parts, second, part), fprs=()).auc_difference
        for part in _both(parts, usable)
    ]
    value = float(np.mean([one.value for one in found]))
    margin = float(np.linalg.norm([(one.high - one.low) / 2 for one in found])) / 2
    return metrics.Estimate(value, max(-1.0, value - margin), min(1.0, value + margin))


def _both(parts: Parts, found: np.ndarray) -> list[np.ndarray]:
    return [part & np.isfinite(found) for part in (parts.first, ~parts.first)]


def _sides(parts: Parts, found: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return found[part & parts.member], found[part & ~parts.member]
