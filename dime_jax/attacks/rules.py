"""How an attack's terms become its score: a weight for each, from which calibration chooses the best.

score = Σ_i weight_i · term_i, each term standardised first if the rule says so; lower for members
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dime_jax.schedule import NoiseSchedule


class TermPair(NamedTuple):
    """An attack's terms at one setting: [columns, n] for members and for held-out images."""

    member: np.ndarray
    heldout: np.ndarray


class TermStats(NamedTuple):
    """Mean and standard deviation of each term over calibration images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def standardize(self, terms: Any) -> list[Any]:
        """Each term in standard deviations from its mean."""
        return [(term - mean) / std for term, mean, std in zip(terms, self.mean, self.std)]


class Weights(NamedTuple):
    """The weights of one linear score, and the parameters they follow from, as results show them: {"phi": φ}."""

    values: tuple[float, ...]
    parameters: Mapping[str, float]


class Rule(Protocol):
    """Which weights calibration may choose from, at any setting."""

    @property
    def standardize(self) -> bool:
        """Whether terms are standardised with calibration statistics first."""
        ...

    @property
    def fitted(self) -> bool:
        """Whether the weights themselves are fitted to the labels of the terms."""
        ...

    def weights(self, schedule: NoiseSchedule, setting: Mapping[str, int | float], terms: TermPair) -> list[Weights]:
        """The weights to choose from; `terms` are those of the calibration half, standardised if the rule says so."""
        ...


@dataclasses.dataclass(frozen=True)
class Single:
    """The only term is the score."""

    standardize: bool = False
    fitted: bool = False

    def weights(self, schedule: NoiseSchedule, setting: Mapping[str, int | float], terms: TermPair) -> list[Weights]:
        """One."""
        del schedule, setting, terms
        return [Weights((1.0,), {})]


SINGLE = Single()


@dataclasses.dataclass(frozen=True)
class Angles:
    """cos φ and sin φ for two terms.

    Attributes:
      angles: the angles φ at a setting.
      standardize: whether both terms are standardised first.
    """

    angles: Callable[[NoiseSchedule, Mapping[str, int | float]], Sequence[float]]
    standardize: bool = True
    fitted: bool = False

    def weights(self, schedule: NoiseSchedule, setting: Mapping[str, int | float], terms: TermPair) -> list[Weights]:
        """One pair for each angle."""
        del terms
        return [at_angle(phi) for phi in self.angles(schedule, setting)]


def at_angle(phi: float) -> Weights:
    """cos φ and sin φ."""
    return Weights((float(np.cos(phi)), float(np.sin(phi))), {"phi": phi})


def weighted(terms: Any, weights: Sequence[Any], stats: TermStats | None = None) -> Any:
    """Scores [n] of terms [columns, n], standardised first if `stats` are given. NumPy in, NumPy out."""
    terms = terms if stats is None else stats.standardize(terms)
    return sum(weight * term for weight, term in zip(weights, terms, strict=True))
