"""What thrifty calibration loses, replayed from finished runs over the whole grid; no model is asked.

    python -m experiments.thrift_study --runs=docs/results/digits/seed_0,docs/results/cifar10_laptop/seed_0

Each repetition draws three quarters of a run's calibration half. They choose every attack's setting twice, from the
whole grid and thriftily (see `dime_jax.thrift`), and the last quarter, which had no part in that, judges both choices.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from dime_jax import thrift
from dime_jax.data import Split
from dime_jax.evidence import metrics
from dime_jax.protocol import pipeline
from dime_jax.protocol.calibration import Calibration, calibrate
from dime_jax.protocol.frozen import best_calibrated
from dime_jax.scoring import planning, score_table
from experiments.launch import run_app


class GridTerms(NamedTuple):
    """A run's calibration half: its table, the members and held-out images in it, and all settings by row."""

    table: score_table.ScoreTable
    half: Split
    rows: list[list[thrift.PricedJob]]
    witness: list[planning.Job]

    def calibrate(self, job: planning.Job, split: Split) -> Calibration:
        """One setting, frozen on these images."""
        return calibrate(job.attack, self.table.schedule, [job.setting], [pipeline.term_pair(self.table, job, split)])

    def judge(self, frozen: Calibration, split: Split) -> float:
        """AUC on these images."""
        pair = pipeline.term_pair(self.table, pipeline.frozen_job(frozen), split)
        return metrics.auc(frozen.score(pair.member), frozen.score(pair.heldout))


class Replay(NamedTuple):
    """One repetition; a loss is the AUC of the whole grid's choice minus that of the thrifty one, on other images.

    Attributes:
      share: of the whole grid's queries.
      kept: how many settings.
      differs: whether each row froze another setting [rows].
      loss: of each row [rows].
      decider_differs: whether another attack, or setting of it, has the highest AUC and would decide.
      decider_loss: of the one that would decide.
    """

    share: float
    kept: int
    differs: np.ndarray
    loss: np.ndarray
    decider_differs: bool
    decider_loss: float


def read_terms(directory: pathlib.Path) -> GridTerms:
    """The calibration half of a finished run over the whole grid."""
    if pipeline.read_thrift(directory) is not None:
        raise ValueError(f"{directory} is thrifty itself: expected a run over the whole grid")
    jobs = pipeline.read_jobs(directory)
    table, half = score_table.read_table(directory / "calibration"), pipeline.read_halves(directory).calibration
    return GridTerms(table, half, thrift.rows_of(jobs), planning.witness_jobs(jobs))


def cut(half: Split, seed: int) -> tuple[Split, Split]:
    """Three quarters of each side, and the rest."""
    rng = np.random.default_rng(seed)
    member, heldout = (rng.permutation(np.sort(side)) for side in (half.member, half.heldout))
    places = 3 * len(member) // 4, 3 * len(heldout) // 4
    return Split(member[: places[0]], heldout[: places[1]]), Split(member[places[0] :], heldout[places[1] :])


def replay(terms: GridTerms, seed: int) -> Replay:
    """Choose from the whole grid and thriftily, and judge both."""
    chooses, judges = cut(terms.half, seed)
    pilot = thrift.pilot(chooses, seed)
    images, pilot_images = (len(split.member) + len(split.heldout) for split in (chooses, pilot))
    jobs = [one.job for row in terms.rows for one in row]
    costs = thrift.costs(jobs, terms.witness, images, pilot_images)
    thrift.check_possible(costs)
    ranked = thrift.rank(terms.rows, terms.table.schedule, lambda job: pipeline.term_pair(terms.table, job, pilot))
    kept = thrift.keep(ranked, terms.rows, terms.witness, costs.most)
    whole, thrifty = list[Calibration](), list[Calibration]()
    for row in terms.rows:
        found = [terms.calibrate(one.job, chooses) for one in row]
        whole.append(max(found, key=_auc))
        thrifty.append(max((one for one, priced in zip(found, row) if priced.job in kept), key=_auc))
    deciders = best_calibrated(whole), best_calibrated(thrifty)
    asked = planning.make_plan([*kept, *terms.witness], terms.table.schedule).queries_per_image * images
    return Replay(
        share=(costs.pilot + asked) / costs.grid,
        kept=len(kept),
        differs=np.array([one.setting != other.setting for one, other in zip(whole, thrifty)]),
        loss=np.array([terms.judge(one, judges) - terms.judge(other, judges) for one, other in zip(whole, thrifty)]),
        decider_differs=deciders[0] != deciders[1],
        decider_loss=terms.judge(deciders[0], judges) - terms.judge(deciders[1], judges),
    )


def _auc(frozen: Calibration) -> float:
    return frozen.auc


def describe(terms: GridTerms, replays: Sequence[Replay]) -> str:
    """All repetitions in a few lines."""
    loss, settings = 100 * np.array([one.loss for one in replays]), sum(map(len, terms.rows))
    low, high = np.quantile(loss, [0.05, 0.95])
    decider = 100 * np.array([one.decider_loss for one in replays])
    return (
        f"{len(replays)} repetitions, {len(terms.rows)} rows, at most {max(one.share for one in replays):.1%} of the "
        f"queries, {np.mean([one.kept for one in replays]):.0f} of {settings} settings kept\n"
        f"  rows: another setting in {np.mean([one.differs for one in replays]):.1%}; AUC lower by "
        f"{loss.mean():.2f} points on average, by {low:.1f} to {high:.1f} in nine of ten\n"
        f"  the attack that decides: another in {np.mean([one.decider_differs for one in replays]):.1%}; AUC lower by "
        f"{decider.mean():.2f} points on average, by {decider.max():.1f} at most"
    )


if __name__ == "__main__":
    _RUNS = flags.DEFINE_list("runs", None, "run directories, separated by commas", required=True)
    _REPETITIONS = flags.DEFINE_integer("repetitions", 200, "how many")

    def _main(argv: list[str]) -> None:
        del argv
        try:
            for run in _RUNS.value:
                terms = read_terms(pathlib.Path(run))
                print(f"{run}: {describe(terms, [replay(terms, seed) for seed in range(_REPETITIONS.value)])}")
        except ValueError as error:
            sys.exit(f"error: {error}")

    run_app(_main)
