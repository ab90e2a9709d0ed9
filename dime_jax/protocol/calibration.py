"""Choosing an attack's setting on the calibration half, once, and freezing it (paper, "Evaluation protocol").

The calibration half chooses everything: timestep and step size by grid search on AUC, the weights of the terms among
those that the attack's rule allows (for DIME the angle φ on the full circle), the statistics that standardise them, and
the threshold τ. The test half is only scored.

Every attack is calibrated in two ways, each at its own best setting: plain, and with what the pictures explain taken
out of its score (`evidence.difficulty`), by a fit over the calibration half that sees no labels and is frozen, too.
Beside a reference there are two more: minus what its score of the same query explains, and minus both (`Way`).
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np

from dime_jax._util import validate
from dime_jax._util.records import Absent, Null
from dime_jax.attacks import Attack, Setting, describe_attack, get_attack
from dime_jax.attacks.base import row_label
from dime_jax.attacks.rules import TermPair, TermStats, Weights, weighted
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.data import Pair
from dime_jax.evidence import Adjustment, Pile, Way, freeze_difficulty, metrics

# With this many held-out images, what the picture explains is taken out besides what a reference explains.
PICTURES_BESIDE = 100
_ROUNDING = 1e-9  # of the cosine of 3π/2
_LEAST = float(np.finfo(np.float32).tiny)  # that has a logarithm


class Calibration(NamedTuple):
    """A frozen attack: what to ask the model, how to turn the answer into a score, and where to cut it.

    Attributes:
      attack: its name in the registry.
      setting: what to ask.
      weights: of the terms.
      parameters: what the weights follow from, as results show it beside the setting: {"phi": φ} for DIME.
      stats: by which terms are standardised first; None where they are taken as they are.
      tau: the threshold, -inf where none beats calling nobody a member.
      auc: on the calibration half.
      queries: what it costs per image.
      adjustment: what is taken out of the score; None for the plain one.
    """

    attack: str
    setting: dict[str, int | float]
    weights: tuple[float, ...]
    parameters: dict[str, float]
    stats: TermStats | None
    tau: Annotated[float, Null(-np.inf)]
    auc: float
    queries: int
    adjustment: Absent[Adjustment] = None

    def score(self, terms: np.ndarray, statistics: np.ndarray | None = None) -> np.ndarray:
        """Return the scores [n] of terms [columns, n] at the frozen setting; lower for members.

        Args:
          terms: of the attack at that setting; followed by those of the reference if its score is taken out.
          statistics: of the pictures [n, k]; needed if what they explain is taken out.
        """
        if self.adjustment is None:
            return np.asarray(weighted(np.asarray(terms, np.float64), self.weights, self.stats))
        pile = self.pile(terms, statistics)
        return self.adjustment(pile.scores[..., 0], pile.statistics[:, :, 0])

    def pile(self, terms: np.ndarray, statistics: np.ndarray | None) -> Pile:
        """Return the scores of which something is taken out, and the statistics to fit them to; arguments as above."""
        terms, way = np.asarray(terms, np.float64), self.way
        terms, of_reference = np.split(terms, 2) if way.reference else (terms, None)
        scores = self._to_fit(terms)
        columns = [np.zeros((*scores.shape, 0))]
        if way.picture:
            if statistics is None:
                raise ValueError(f"{self.label} is adjusted for the difficulty of pictures: statistics must be given")
            columns += [np.broadcast_to(statistics, (len(scores), *np.shape(statistics))), self._covariates(terms)]
        if of_reference is not None:
            columns.append(self._to_fit(of_reference)[..., None])
        return Pile.of(scores, np.concatenate(columns, axis=-1), unpenalised=int(way.reference))

    def _to_fit(self, terms: np.ndarray) -> np.ndarray:
        """Return the scores [c, n] of which something is taken out."""
        covariates = describe_attack(self.attack).rule.covariates
        if covariates:
            return terms[: len(covariates)]
        score = self._replace(adjustment=None).score(terms)[None]
        return log_of(score) if self.adjustment is not None and self.adjustment.log else score

    def _covariates(self, terms: np.ndarray) -> np.ndarray:
        """Return what the terms say about the queries of each score [c, n, k]."""
        covariates = describe_attack(self.attack).rule.covariates or ((),)
        own = np.zeros((len(covariates), terms.shape[1], max(map(len, covariates))))
        for of_score, rows in zip(own, covariates):
            of_score[:, : len(rows)] = terms[list(rows)].T
        return own

    def combine(self, residuals: np.ndarray) -> np.ndarray:
        """Return one number [n] of residuals [c, n] of a pile, weighed by that pile alone; see `evidence.Pile`."""
        weights = describe_attack(self.attack).rule.mix(residuals)
        return np.sum(weights[:, None] * residuals, axis=0)

    @property
    def label(self) -> str:
        """The label "attack@queries" of its row of the results."""
        return row_label(self.attack, self.queries)

    @property
    def way(self) -> Way:
        """What is taken out of the score."""
        return Way.PLAIN if self.adjustment is None else self.adjustment.way

    @property
    def plain(self) -> bool:
        """Whether nothing is taken out of the score."""
        return self.adjustment is None

    @property
    def family(self) -> str:
        """The attack's: "DIME", or that of a baseline."""
        return describe_attack(self.attack).family

    @property
    def learned_direction(self) -> bool:
        """Whether the weights turn a term against theory (`Attack.signs`).

        Only labels can have taught it that; with swapped sets it would accuse images that were never seen.
        """
        attack = get_attack(self.attack)
        against = (sign * weight < -_ROUNDING for sign, weight in zip(attack.signs, self.weights))
        return any(against)

    @property
    def threshold(self) -> float | None:
        """τ for JSON, which has no infinity: None where no threshold beats calling nobody a member."""
        return self.tau if np.isfinite(self.tau) else None


class Outcome(NamedTuple):
    """A frozen attack on the test half: the paper's metrics, and the rates at the threshold that was frozen."""

    calibration: Calibration
    metrics: metrics.Metrics
    at_threshold: metrics.Rates


def log_of(scores: np.ndarray) -> np.ndarray:
    """Return the logarithm of scores that are positive by construction; finite for 0, NaN for NaN."""
    return np.log(np.maximum(scores, _LEAST))


def standardization(terms: np.ndarray) -> TermStats:
    """Return the mean and population standard deviation of each term [columns, n] (+1e-8, for a constant one)."""
    return TermStats(tuple(float(term.mean()) for term in terms), tuple(float(term.std() + 1e-8) for term in terms))


def calibrate(
    attack: Attack,
    schedule: NoiseSchedule,
    settings: Sequence[Setting],
    terms: Sequence[TermPair],
    statistics: Sequence[Pair[np.ndarray] | None] | None = None,
    way: Way = Way.PLAIN,
) -> Calibration:
    """Choose the setting and weights of highest calibration AUC; ties go to the first in the grid.

    Args:
      attack: what was run.
      schedule: the model's, for weights that depend on σ_t.
      settings: the grid that was run.
      terms: the attack's terms on the calibration half, one pair per setting; see `Calibration.score`.
      statistics: of the same pictures [n, k], if what they explain is taken out.
      way: what is taken out.
    """
    if not settings or len(settings) != len(terms):
        raise ValueError(
            f"settings must be one or more, each with a pair of terms, got {len(settings)} and {len(terms)}"
        )
    pairs = [pair.map(lambda side: np.asarray(side, np.float64)) for pair in terms]
    choices = []
    for setting, pair, of_pictures in zip(settings, pairs, statistics or [None] * len(pairs)):
        own = pair.map(lambda side: side[: len(attack.signs)])
        for frozen in _candidates(attack, schedule, setting, own):
            if way is not Way.PLAIN:
                together = None if of_pictures is None else np.concatenate(of_pictures)
                frozen = adjust(frozen, np.concatenate(pair, axis=1), together, way)
                frozen = frozen._replace(auc=metrics.auc(*_scores(frozen, pair, of_pictures)))
            choices.append((frozen, pair, of_pictures))
    frozen, pair, of_pictures = max(choices, key=lambda choice: choice[0].auc)
    return frozen._replace(tau=metrics.best_threshold(*_scores(frozen, pair, of_pictures)))


def to_adjust(frozen: Calibration, way: Way = Way.ADJUSTED) -> Calibration:
    """Return the same attack as one whose score is adjusted, though nothing is fitted yet: `pile` is as it will be."""
    attack = describe_attack(frozen.attack)
    return frozen._replace(adjustment=Adjustment((), (), attack.positive and not attack.rule.covariates, way))


def adjust(
    frozen: Calibration, terms: np.ndarray, statistics: np.ndarray | None, way: Way = Way.ADJUSTED
) -> Calibration:
    """Take something out of a frozen attack's score, fitted over some images without labels.

    Args:
      frozen: the attack; its threshold and AUC are those of before.
      terms: of the images [columns, n], as for `Calibration.score`.
      statistics: of their pictures [n, k], if what they explain is taken out.
      way: what is taken out.
    """
    empty = to_adjust(frozen, way)
    assert empty.adjustment is not None
    fitted = freeze_difficulty(empty.pile(terms, statistics), describe_attack(frozen.attack).rule.mix)
    return frozen._replace(adjustment=fitted._replace(log=empty.adjustment.log, way=way))


def fixed_rule(attack: Attack, schedule: NoiseSchedule, setting: Setting) -> Calibration:
    """Freeze an attack that needs no labels, at a stated setting: nothing is calibrated, without a threshold."""
    nothing = TermPair(*[np.zeros((len(attack.signs), 0))] * 2)
    (weights,) = attack.rule.weights(schedule, setting, nothing)
    return _frozen(attack, setting, weights, None, np.nan)


def way_of_rule(heldout: int, reference: bool) -> Way:
    """Return what is taken out where no member is known: with a reference, the picture only with enough images."""
    if not reference:
        return Way.ADJUSTED
    return Way.BESIDE_ADJUSTED if heldout >= PICTURES_BESIDE else Way.BESIDE


def _scores(frozen: Calibration, terms: TermPair, statistics: Pair[np.ndarray] | None) -> Pair[np.ndarray]:
    of_pictures = Pair(None, None) if statistics is None else statistics
    return Pair(*(frozen.score(*of) for of in zip(terms, of_pictures)))


def evaluate(
    calibration: Calibration,
    terms: TermPair,
    fprs: Sequence[float] = (0.01,),
    confidence: float = 0.95,
    seed: int = 0,
    groups: metrics.Groups = (None, None),
    statistics: Pair[np.ndarray] | None = None,
) -> Outcome:
    """Evaluate a frozen attack from its terms on the test half.

    Args:
      calibration: the attack.
      terms: of members and held-out images.
      fprs, confidence, seed, groups: as for `metrics.evaluate`.
      statistics: of their pictures, if the score is adjusted.
    """
    member, heldout = _scores(calibration, terms, statistics)
    return Outcome(
        calibration,
        metrics.evaluate(member, heldout, fprs=fprs, confidence=confidence, seed=seed, groups=groups),
        metrics.rates_at_threshold(member, heldout, calibration.tau),
    )


def _candidates(attack: Attack, schedule: NoiseSchedule, setting: Setting, pair: TermPair) -> Iterator[Calibration]:
    """Yield the attack at one setting with all weights that its rule allows."""
    for side, name in zip(pair, ("member", "held-out")):
        validate.check_finite(side, f"{name} terms of {attack.name} at {dict(setting)}")
    stats = standardization(np.concatenate(pair, axis=1)) if attack.rule.standardize else None
    terms = pair if stats is None else pair.map(lambda side: np.stack(stats.standardize(side)))
    for weights in attack.rule.weights(schedule, setting, terms):
        auc = metrics.auc(*(weighted(side, weights.values) for side in terms))
        yield _frozen(attack, setting, weights, stats, auc)


def _frozen(attack: Attack, setting: Setting, weights: Weights, stats: TermStats | None, auc: float) -> Calibration:
    """Return a calibration without a threshold."""
    values, parameters = tuple(map(float, weights.values)), dict(weights.parameters)
    return Calibration(attack.name, dict(setting), values, parameters, stats, -np.inf, auc, attack.queries(setting))
