"""Choosing an attack's setting on the calibration half, once, and freezing it (paper, "Evaluation protocol").

The calibration half chooses everything: timestep and step size by grid search on AUC, the weights of the terms among
those that the attack's rule allows (for DIME the angle φ on the full circle), the statistics that standardise them, and
the threshold τ. The test half is only scored.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np

from dime_jax._util import validate
from dime_jax._util.records import Null
from dime_jax.attacks import Attack, Setting, describe_attack, get_attack
from dime_jax.attacks.base import row_label
from dime_jax.attacks.rules import TermPair, TermStats, Weights, weighted
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.evidence import metrics

_ROUNDING = 1e-9  # of the cosine of 3π/2


class Calibration(NamedTuple):
    """A frozen attack: what to ask the model, how to turn the answer into a score, and where to cut it.

    Attributes:
      attack: its name in the registry.
      setting: what to ask.
      weights: of the terms.
      parameters: what the weights follow from, as results show it beside the setting: {"phi": φ} for DIME.
      stats: by which terms are standardised first; None where they are taken as they are.
      tau: the threshold, -inf where none beats calling nobody a member.
      auc: on the calibration half; cross-validated there if the weights were fitted to its labels.
      queries: what it costs per image.
    """

    attack: str
    setting: dict[str, int | float]
    weights: tuple[float, ...]
    parameters: dict[str, float]
    stats: TermStats | None
    tau: Annotated[float, Null(-np.inf)]
    auc: float
    queries: int

    def score(self, terms: np.ndarray) -> np.ndarray:
        """Scores [n] of terms [columns, n] at the frozen setting; lower for members."""
        return np.asarray(weighted(np.asarray(terms, np.float64), self.weights, self.stats))

    @property
    def label(self) -> str:
        """ "attack@queries": how one row of the results is called."""
        return row_label(self.attack, self.queries)

    @property
    def family(self) -> str:
        """The attack's: "DIME", or that of a baseline."""
        return describe_attack(self.attack).family

    @property
    def learned_direction(self) -> bool:
        """Whether the weights were fitted to the labels, or turn a term against theory (`Attack.signs`).

        Only labels can have taught it that; with swapped sets it would accuse those who were never seen.
        """
        attack = get_attack(self.attack)
        against = (sign * weight < -_ROUNDING for sign, weight in zip(attack.signs, self.weights))
        return attack.rule.fitted or any(against)

    @property
    def threshold(self) -> float | None:
        """τ for JSON, which has no infinity: None where no threshold beats calling nobody a member."""
        return self.tau if np.isfinite(self.tau) else None


class Outcome(NamedTuple):
    """A frozen attack on the test half: the paper's metrics, and the rates at the threshold that was frozen."""

    calibration: Calibration
    metrics: metrics.Metrics
    at_threshold: metrics.Rates


def standardization(terms: np.ndarray) -> TermStats:
    """Mean and population standard deviation of each term [columns, n] (+1e-8, for a constant one)."""
    return TermStats(tuple(float(term.mean()) for term in terms), tuple(float(term.std() + 1e-8) for term in terms))


def calibrate(
    attack: Attack, schedule: NoiseSchedule, settings: Sequence[Setting], terms: Sequence[TermPair]
) -> Calibration:
    """The setting and weights of highest calibration AUC; of equals, the first in the grid.

    Args:
      attack: what was run.
      schedule: the model's, for weights that depend on σ_t.
      settings: the grid that was run.
      terms: the attack's terms on the calibration half, one pair per setting.
    """
    if not settings or len(settings) != len(terms):
        raise ValueError(
            f"expected one pair of terms per setting and at least one, got {len(settings)} and {len(terms)}"
        )
    pairs = [pair.map(lambda side: np.asarray(side, np.float64)) for pair in terms]
    choices = [
        (frozen, pair)
        for setting, pair in zip(settings, pairs)
        for frozen in _candidates(attack, schedule, setting, pair)
    ]
    frozen, pair = max(choices, key=lambda choice: choice[0].auc)
    return frozen._replace(tau=metrics.best_threshold(*(frozen.score(side) for side in pair)))


def theory_weights(attack: Attack, schedule: NoiseSchedule, setting: Setting) -> Calibration:
    """An attack whose weights theory gives, at a stated setting: nothing is calibrated, and there is no threshold."""
    nothing = TermPair(*[np.zeros((len(attack.signs), 0))] * 2)
    (weights,) = attack.rule.weights(schedule, setting, nothing)
    return _frozen(attack, setting, weights, None, np.nan)


def evaluate(
    calibration: Calibration,
    terms: TermPair,
    fprs: Sequence[float] = (0.01,),
    confidence: float = 0.95,
    seed: int = 0,
    groups: metrics.Groups = (None, None),
) -> Outcome:
    """Metrics of a frozen attack from its terms on the test half; arguments as for `metrics.evaluate`."""
    member, heldout = calibration.score(terms.member), calibration.score(terms.heldout)
    return Outcome(
        calibration,
        metrics.evaluate(member, heldout, fprs=fprs, confidence=confidence, seed=seed, groups=groups),
        metrics.rates_at_threshold(member, heldout, calibration.tau),
    )


def _candidates(attack: Attack, schedule: NoiseSchedule, setting: Setting, pair: TermPair) -> Iterator[Calibration]:
    """The attack at one setting with every weights that its rule allows."""
    for side, name in zip(pair, ("member", "held-out")):
        validate.check_finite(side, f"{name} terms of {attack.name} at {dict(setting)}")
    stats = standardization(np.concatenate(pair, axis=1)) if attack.rule.standardize else None
    terms = pair if stats is None else pair.map(lambda side: np.stack(stats.standardize(side)))
    for weights in attack.rule.weights(schedule, setting, terms):
        auc = weights.auc
        if auc is None:
            auc = metrics.auc(*(weighted(side, weights.values) for side in terms))
        yield _frozen(attack, setting, weights, stats, auc)


def _frozen(attack: Attack, setting: Setting, weights: Weights, stats: TermStats | None, auc: float) -> Calibration:
    """A calibration without threshold."""
    values, parameters = tuple(map(float, weights.values)), dict(weights.parameters)
    return Calibration(attack.name, dict(setting), values, parameters, stats, -np.inf, auc, attack.queries(setting))
