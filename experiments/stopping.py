"""How long to train the shipped model: until the example shows what an audit is for, by a rule fixed beforehand.

    python -m experiments.stopping --workdir=W

trains `experiments/configs/digits.py` in W, a thousand updates at a time, and after each thousand asks the attack that
an audit would choose, on that audit's own calibration half: what share of the members scores below all held-out images
but one? The model is the first whose share reaches 60 % in two checks in a row, since the first crossing alone is
biased upwards. Test half and candidates play no part. An interrupted run resumes when it is started again.
"""

import pathlib
import shutil

import numpy as np
from absl import flags

from dime_jax import auditing, scoring
from dime_jax.auditing.deciding import Decision, decide
from dime_jax.auditing.images import open_images
from dime_jax.loading.opening import open_model
from dime_jax.protocol import stages
from dime_jax.scoring import score_table
from experiments import train
from experiments.configs import digits
from experiments.launch import run_app

WANTED = 0.6
CHECKS_RUNNING = 2
UPDATES = 1000

_WORKDIR = flags.DEFINE_string("workdir", None, "where to train", required=True)
_FIRST = flags.DEFINE_integer("first", UPDATES, "the first number of updates to check at")
_LAST = flags.DEFINE_integer("last", 30 * UPDATES, "where to give up")


def found_below_all_but_one(member: np.ndarray, heldout: np.ndarray) -> float:
    """Return the share of members that a threshold with at most one false alarm finds."""
    return float(np.mean(member < np.sort(heldout)[1]))


def enough(found: list[float]) -> int | None:
    """The number of the first check of the first CHECKS_RUNNING in a row that reach the goal; None so far."""
    for first in range(len(found) - CHECKS_RUNNING + 1):
        if min(found[first : first + CHECKS_RUNNING]) >= WANTED:
            return first
    return None


def check(model: pathlib.Path, updates: int, output: pathlib.Path) -> float:
    """Calibrate as the default audit of the model would; print and return the share of members that it finds."""
    config = auditing.AuditConfig(output, model=model, options=scoring.ScoringOptions(silent=True))
    denoiser = open_model(model, cache=output, **vars(config.conversion), **vars(config.use)).denoiser
    images = open_images(config, denoiser)
    decision: Decision = decide(config, denoiser, images, ("calibration", "calibrate"))
    assert decision.halves is not None
    table, half = score_table.read_table(output / "calibration"), decision.halves.calibration
    member = stages.frozen_scores(table, decision.decider, half.member)
    heldout = stages.frozen_scores(table, decision.decider, half.heldout)
    found = found_below_all_but_one(member, heldout)
    auc = 100 * decision.decider.auc
    print(f"{updates:,} updates: {decision.label}, AUC {auc:.1f}, finds {100 * found:.1f} %", flush=True)
    return found


def train_to(updates: int, workdir: pathlib.Path) -> pathlib.Path:
    """Train to `updates` updates, from the last model before; the model is stored beside the others."""
    kept = workdir / "snapshots" / str(updates)
    if not kept.exists():
        config = digits.get_config().unlock()
        config.train.recipe.steps = updates
        config.train.snapshot_every = 0  # they are kept here, with split and log
        shutil.copytree(train.run(config.lock(), workdir), kept)
    return kept


def main() -> None:
    """Train and check in turn, and print which model it is."""
    workdir, found = pathlib.Path(_WORKDIR.value), dict[int, float]()
    for updates in range(_FIRST.value, _LAST.value + 1, UPDATES):
        found[updates] = check(train_to(updates, workdir), updates, workdir / "stopping" / str(updates))
        chosen = enough(list(found.values()))
        if chosen is not None:
            print(f"the model: {workdir / 'snapshots' / str(list(found)[chosen])}")
            return
    raise ValueError(f"no model reached {WANTED:.0%} in {CHECKS_RUNNING} checks in a row by {_LAST.value:,} updates")


if __name__ == "__main__":
    run_app(main)
