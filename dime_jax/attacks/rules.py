"""How an attack's terms become its score: a weight for each, from which calibration chooses the best.

score = Σ_i weight_i · term_i, each term standardised first if the rule says so; lower for members
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from dime_jax.core.schedule import NoiseSchedule
from dime_jax.data.pairs import Pair

# Terms [columns, n], or what is computed from them: NumPy in, NumPy out.
Terms: TypeAlias = jax.Array | np.ndarray
TermPair = Pair[np.ndarray]  # an attack's terms at one setting, [columns, n]
_ROUNDING = 1e-6  # of the logarithm of a reading, which is a norm in float32


class TermStats(NamedTuple):
    """Mean and standard deviation of each term over calibration images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def standardize(self, terms: Terms) -> list[Terms]:
        """Return each term in standard deviations from its mean."""
        return [(term - mean) / std for term, mean, std in zip(terms, self.mean, self.std)]


class Weights(NamedTuple):
    """The weights of one linear score, and the parameters they follow from, as results show them: {"phi": φ}."""

    values: tuple[float, ...]
    parameters: Mapping[str, float]


class Rule:
    """Which weights calibration may choose from, at any setting, by their AUC there: few, and not fitted to labels.

    Attributes:
      standardize: whether terms are standardised with calibration statistics first.
      covariates: of a rule that weighs several scores once the pictures' difficulty is out: for each of them, the terms
        that say something about its query. The scores are the first terms. Empty if the score is one number.
    """

    standardize: bool = False
    covariates: tuple[tuple[int, ...], ...] = ()

    def weights(self, schedule: NoiseSchedule, setting: Mapping[str, int | float], terms: TermPair) -> list[Weights]:
        """Return the weights to choose from; `terms` are those of the calibration half, standardised if necessary."""
        raise NotImplementedError

    def mix(self, residuals: np.ndarray) -> np.ndarray:
        """Return the weights [c] of residuals [c, n], without labels and whatever the order of the images."""
        return np.ones(len(residuals))


@dataclasses.dataclass(frozen=True)
class Single(Rule):
    """The only term is the score."""

    def weights(self, schedule: NoiseSchedule, setting: Mapping[str, int | float], terms: TermPair) -> list[Weights]:
        """Return the weight 1."""
        del schedule, setting, terms
        return [Weights((1.0,), {})]


SINGLE = Single()


@dataclasses.dataclass(frozen=True)
class Angles(Rule):
    """cos φ and sin φ for two terms.

    Attributes:
      angles: the angles φ at a setting.
      standardize: whether both terms are standardised first.
    """

    angles: Callable[[NoiseSchedule, Mapping[str, int | float]], Sequence[float]]
    standardize: bool = True

    def weights(self, schedule: NoiseSchedule, setting: Mapping[str, int | float], terms: TermPair) -> list[Weights]:
        """Return one pair for each angle."""
        del terms
        return [at_angle(phi) for phi in self.angles(schedule, setting)]


def at_angle(phi: float) -> Weights:
    """cos φ and sin φ."""
    return Weights((float(np.cos(phi)), float(np.sin(phi))), {"phi": phi})


@dataclasses.dataclass(frozen=True)
class Agreement(Rule):
    """Two draws of one reading, and a third reading that takes over where those do not agree.

    score = ρ³ (r₀ + r₁)/2 + (1 - ρ)³ r₂, where r are the first three terms in standard deviations, or what is left of
    them once the pictures' difficulty is out (`mix`), and ρ is the correlation of the first two over all images alike.
    No label is used, and the order of the images does not matter, to the bit.

    Attributes:
      covariates: as in `Rule`.
    """

    covariates: tuple[tuple[int, ...], ...] = ()
    standardize: bool = True

    def weights(self, schedule: NoiseSchedule, setting: Mapping[str, int | float], terms: TermPair) -> list[Weights]:
        """Return the weights of the terms as they are; covariates have none."""
        del schedule, setting
        pooled = np.concatenate(terms, axis=1)
        rho = agreement(pooled)
        return [Weights((*_shares(rho), *(0.0,) * (len(pooled) - 3)), {"rho": rho})]

    def mix(self, residuals: np.ndarray) -> np.ndarray:
        """Return ρ³/2, ρ³/2 and (1 - ρ)³, each over its residuals' standard deviation; 0 if they do not vary."""
        deviations = _deviations(residuals)
        shares = np.array(_shares(agreement(residuals)))
        return np.divide(shares, deviations, out=np.zeros(3), where=deviations > 0)


@dataclasses.dataclass(frozen=True)
class FirstIfSharp(Rule):
    """Logarithms of two readings: the first decides where it is known sharply, the second elsewhere.

    score = u r₀/s₀ + (1 - u) r₁/s₁,  u = 1/(1 + (s₀/τ)²)

    where r are the terms, or what is left of them once something is taken out, and s their standard deviations over all
    images alike (`mix`). Of a logarithm, s₀ says which change by a factor can be told from noise. No label is used, and
    the order of the images does not matter, to the bit.

    Attributes:
      sharp: τ.
      covariates: as in `Rule`.
    """

    sharp: float
    covariates: tuple[tuple[int, ...], ...] = ()

    def weights(self, schedule: NoiseSchedule, setting: Mapping[str, int | float], terms: TermPair) -> list[Weights]:
        """Return the weights of the terms as they are."""
        del schedule, setting
        return [Weights(tuple(self.mix(np.concatenate(terms, axis=1)).tolist()), {})]

    def mix(self, residuals: np.ndarray) -> np.ndarray:
        """Return u/s₀ and (1 - u)/s₁; 0 for a reading that does not vary, and all to the other one."""
        deviations = _deviations(residuals)
        deviations = np.where(deviations > _ROUNDING, deviations, 0.0)
        share = 1 / (1 + (deviations[0] / self.sharp) ** 2) if deviations[0] > 0 else 0.0
        shares = np.array([share, 1 - share])
        return np.divide(shares, deviations, out=np.zeros(2), where=deviations > 0)


def agreement(rows: np.ndarray) -> float:
    """Correlate the first two rows [c, n], clipped to [0, 1]; 0 where one does not vary, NaN without images."""
    if not rows.shape[1]:
        return float("nan")
    first, second = _centred(rows[:2])
    together, *apart = (np.sort(products).sum() for products in (first * second, first**2, second**2))
    spread = np.sqrt(apart[0] * apart[1])
    return float(np.clip(together / spread, 0.0, 1.0)) if spread > 0 else 0.0


def _shares(rho: float) -> tuple[float, float, float]:
    """Return the weights of two rows that agree by ρ, and of the third; those for ρ = 1/2 if ρ is unknown."""
    rho = 0.5 if np.isnan(rho) else rho
    return rho**3 / 2, rho**3 / 2, (1 - rho) ** 3


def _deviations(rows: np.ndarray) -> np.ndarray:
    """The standard deviation of each row [c, n]; 0 if it is rounding, 1 without images."""
    if not rows.shape[1]:
        return np.ones(len(rows))
    deviations = np.sqrt(np.sort(_centred(rows) ** 2, axis=1).mean(axis=1))
    return np.where(deviations > 1e-12 * np.abs(rows).max(axis=1), deviations, 0.0)


def _centred(rows: np.ndarray) -> np.ndarray:
    """Subtract from each row [c, n] its mean; the sum runs in sorted order, and along rows that are laid out alike."""
    rows = np.ascontiguousarray(rows, np.float64)
    return rows - np.sort(rows, axis=1).mean(axis=1, keepdims=True)


def weighted(terms: Terms, weights: Sequence[float | jax.Array], stats: TermStats | None = None) -> Terms:
    """Return the scores [n] of terms [columns, n], standardised first if `stats` are given."""
    rows = list(terms) if stats is None else stats.standardize(terms)
    return functools.reduce(operator.add, (weight * term for weight, term in zip(weights, rows, strict=True)))
