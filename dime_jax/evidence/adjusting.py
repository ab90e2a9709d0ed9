"""Comparing like with like: scores after what the picture alone explains of them.

A hard picture has a high score whether the model saw it or not, and an easy one a low score. Among all held-out images
such a score is a weak argument; among held-out images *of the same complexity* it is a stronger or an even weaker one.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from dime_jax import _validate
from dime_jax.evidence import _checks

_RIDGE = 1.0  # per standardised statistic and image
_LEAST_SCALE = 0.1  # of the typical residual: a picture never counts as more predictable than that


@dataclasses.dataclass(frozen=True, eq=False)
class Adjustment:
    """What a score should be, and how far it strays, for a picture with given statistics; made by `fit_adjustment`.

    Attributes:
      mean, std: of the statistics [k], by which they are standardised.
      location: coefficients [k + 1] of the expected score, the constant last.
      scale: coefficients [k + 1] of the log of its typical deviation.
    """

    mean: np.ndarray
    std: np.ndarray
    location: np.ndarray
    scale: np.ndarray

    def __call__(self, scores: npt.ArrayLike, statistics: npt.ArrayLike) -> np.ndarray:
        """(score - expected) / typical deviation [n], from scores [n] and statistics [n, k]; NaN where either is."""
        design = _design((np.asarray(statistics, np.float64) - self.mean) / self.std)
        return (np.asarray(scores, np.float64) - design @ self.location) * np.exp(-(design @ self.scale))


def fit_adjustment(scores: npt.ArrayLike, statistics: npt.ArrayLike) -> Adjustment:
    """Fit location and scale of held-out scores [n] on statistics of their pictures [n, k], by ridge regression.

    The images it is fitted to must be none of those that p-values are counted on. Then an adjusted score is a fixed
    function of score and picture, and `conformal_p_values` of adjusted scores are as valid as those of plain ones:
    whatever the fit is worth, P(p <= a) <= a for candidates that are exchangeable with the reference images. A good
    fit only adds power. Statistics that vary by less than 1e-8 have no weight.
    """
    scores = _checks.finite_scores(scores, "scores")
    statistics = np.asarray(statistics, np.float64)
    _validate.check_shape(statistics, (len(scores), None), "statistics")
    _validate.check_finite(statistics, "statistics")
    mean, std = statistics.mean(axis=0), statistics.std(axis=0)
    std = np.where(std > 1e-8, std, np.inf)
    design = _design((statistics - mean) / std)
    location = _ridge(design, scores)
    residual = np.abs(scores - design @ location)
    typical = float(np.median(residual)) or 1.0
    scale = _ridge(design, np.log(np.maximum(residual, _LEAST_SCALE * typical)))
    return Adjustment(mean, std, location, scale)


def _design(standardised: np.ndarray) -> np.ndarray:
    return np.concatenate([standardised, np.ones((len(standardised), 1))], axis=1)


def _ridge(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Coefficients [k + 1]; the constant is not held back."""
    penalty = _RIDGE * np.sqrt(len(target)) * np.eye(design.shape[1])
    penalty[-1, -1] = 0
    return np.linalg.solve(design.T @ design + penalty, design.T @ target)
