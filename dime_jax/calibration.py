"""Choosing an attack's setting on the calibration half, once, and freezing it (paper, "Evaluation protocol").

The calibration half chooses everything: timestep and step size by grid search on AUC, the angle φ on the full circle,
the statistics that standardise the two terms, and the threshold τ. The test half is only scored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import _validate, metrics
from dime_jax.attacks import Attack, DimeStats, Setting, combine
from dime_jax.schedule import NoiseSchedule

_ROUNDING = 1e-9  # of the cosine of 3π/2


class TermPair(NamedTuple):
    """An attack's terms at one setting: [columns, n] for members and for held-out images."""

    member: np.ndarray
    heldout: np.ndarray


class Calibration(NamedTuple):
    """A frozen attack: what to ask the model, how to turn the answer into a score, and where to cut it."""

    attack: str
    setting: dict[str, int | float]
    phi: float | None
    stats: DimeStats | None
    tau: float
    auc: float

    def score(self, terms: np.ndarray) -> np.ndarray:
        """Scores [n] of terms [columns, n] at the frozen setting; lower for members."""
        return _score(np.asarray(terms, np.float64), self.phi, self.stats)

    @property
    def learned_direction(self) -> bool:
        """Whether the angle turns a term against theory, in which B̂² is lower and V̂ higher for members.

        Only labels can have taught it that; with swapped sets it would accuse those who were never seen.
        """
        return self.phi is not None and bool(np.cos(self.phi) < -_ROUNDING or np.sin(self.phi) > _ROUNDING)


class Outcome(NamedTuple):
    """A frozen attack on the test half: the paper's metrics, and the rates at the threshold that was frozen."""

    calibration: Calibration
    metrics: metrics.Metrics
    at_threshold: metrics.Rates


def standardization(level: np.ndarray, trace: np.ndarray) -> DimeStats:
    """Pooled mean and population standard deviation of B̂² and V̂ (+1e-8, for a constant term)."""
    return DimeStats(*(float(value) for value in (level.mean(), level.std() + 1e-8, trace.mean(), trace.std() + 1e-8)))


def calibrate(
    attack: Attack, schedule: NoiseSchedule, settings: Sequence[Setting], terms: Sequence[TermPair]
) -> Calibration:
    """The setting (and angle) of highest calibration AUC; of equals, the first in the grid.

    Args:
      attack: what was run.
      schedule: the model's, for angles that depend on σ_t.
      settings: the grid that was run.
      terms: the attack's terms on the calibration half, one pair per setting.
    """
    if not settings or len(settings) != len(terms):
        raise ValueError(
            f"expected one pair of terms per setting and at least one, got {len(settings)} and {len(terms)}"
        )
    best: tuple[Setting, float | None, DimeStats | None, float] | None = None
    for setting, pair in zip(settings, terms):
        member, heldout = (np.asarray(column, np.float64) for column in pair)
        for side, name in ((member, "member"), (heldout, "held-out")):
            _validate.check_finite(side, f"{name} terms of {attack.name} at {dict(setting)}")
        stats = None
        if attack.angles is not None and attack.standardize:
            stats = standardization(*np.concatenate([member, heldout], axis=1))
        angles: Sequence[float | None] = [None] if attack.angles is None else attack.angles(schedule, setting)
        for phi in angles:
            auc = metrics.auc(_score(member, phi, stats), _score(heldout, phi, stats))
            if best is None or auc > best[3]:
                best, best_pair = (setting, phi, stats, auc), (member, heldout)
    assert best is not None
    setting, phi, stats, auc = best
    tau = metrics.best_threshold(*(_score(side, phi, stats) for side in best_pair))
    return Calibration(attack.name, dict(setting), phi, stats, tau, auc)


def evaluate(
    calibration: Calibration,
    terms: TermPair,
    fprs: Sequence[float] = (0.01,),
    confidence: float = 0.95,
    seed: int = 0,
) -> Outcome:
    """Metrics of a frozen attack from its terms on the test half."""
    member, heldout = calibration.score(terms.member), calibration.score(terms.heldout)
    return Outcome(
        calibration,
        metrics.evaluate(member, heldout, fprs=fprs, confidence=confidence, seed=seed),
        metrics.rates_at_threshold(member, heldout, calibration.tau),
    )


def _score(terms: np.ndarray, phi: float | None, stats: DimeStats | None) -> np.ndarray:
    return terms[0] if phi is None else combine(terms[0], terms[1], phi, stats)
