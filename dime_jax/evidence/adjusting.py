"""Comparing like with like: scores after what the picture alone explains of them.

A hard picture has a high score whether the model saw it or not, and an easy one a low score. Among all held-out images
such a score is a weak argument; among held-out images *of the same complexity* it is a stronger or an even weaker one.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dime_jax._util import validate
from dime_jax.evidence import _checks
from dime_jax.evidence.candidates import conformal_p_values

_PENALTIES = 10.0 ** np.arange(-3, 4)  # of ridge regression, per image; the last leaves little but the constant
_FARTHEST = 5.0  # standard deviations: a statistic farther out counts as this far, and nothing is extrapolated beyond
_LEAST_SCALE = 0.1  # of the typical residual: a picture never counts as more predictable than that


class ScoredPictures(NamedTuple):
    """Scores [n] of some images, and statistics [n, k] of their pictures; NaN for what is not known."""

    scores: np.ndarray
    statistics: np.ndarray

    @property
    def complete(self) -> np.ndarray:
        """Which of them have both, bool [n]."""
        return np.isfinite(self.scores) & np.all(np.isfinite(self.statistics), axis=1)

    def known(self) -> "ScoredPictures":
        """Those that have both."""
        return ScoredPictures(self.scores[self.complete], self.statistics[self.complete])


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
        standardised = np.clip((np.asarray(statistics, np.float64) - self.mean) / self.std, -_FARTHEST, _FARTHEST)
        expected, log_scale = (standardised @ of[:-1] + of[-1] for of in (self.location, self.scale))
        return (np.asarray(scores, np.float64) - expected) * np.exp(-log_scale)


def adjusted_p_values(
    images: ScoredPictures,
    heldout: ScoredPictures,
    fitted_to: ScoredPictures,
    heldout_groups: npt.ArrayLike | None = None,
) -> np.ndarray:
    """`conformal_p_values` [m] of scores after what the picture alone explains of them; NaN where something is NaN.

    Valid for images that are exchangeable with `heldout`, as the plain ones are (see `fit_adjustment`). Held-out images
    that lack a score or statistics are left out, in the fit and in the comparison.

    Args:
      images: to judge, m of them.
      heldout: to compare them with.
      fitted_to: other held-out images, which say what a picture explains.
      heldout_groups: of `heldout`, as for `conformal_p_values`.
    """
    adjust, compared = fit_adjustment(*fitted_to.known()), heldout.known()
    groups = None if heldout_groups is None else np.asarray(heldout_groups)[heldout.complete]
    return conformal_p_values(adjust(*images), adjust(*compared), groups)


def least_to_fit(statistics: np.ndarray) -> int:
    """How many held-out images an adjustment on these statistics [n, k] takes to be worth it: as many as statistics.

    Fewer make it no less valid, but noise. With 36 statistics that explain nothing, 60 images cost 2 points of the
    power of 63 %, and 30 images 8 points.
    """
    return statistics.shape[1]


def fit_adjustment(scores: npt.ArrayLike, statistics: npt.ArrayLike) -> Adjustment:
    """Fit location and scale of held-out scores [n] on statistics of their pictures [n, k], by ridge regression.

    The images it is fitted to must be none of those that p-values are counted on. Then an adjusted score is a fixed
    function of score and picture, and `conformal_p_values` of adjusted scores are as valid as those of plain ones:
    whatever the fit is worth, P(p <= a) <= a for candidates that are exchangeable with the reference images. A good
    fit only adds power. Each penalty is the one with the least squared error when every image is predicted from the
    others; where pictures explain nothing, little is taken out. Statistics that vary by less than 1e-8 have no weight.
    """
    scores = _checks.finite_scores(scores, "scores")
    statistics = np.asarray(statistics, np.float64)
    validate.check_shape(statistics, (len(scores), None), "statistics")
    validate.check_finite(statistics, "statistics")
    mean, std = statistics.mean(axis=0), statistics.std(axis=0)
    std = np.where(std > 1e-8, std, np.inf)
    standardised = (statistics - mean) / std
    location, left = _ridge(standardised, scores)
    residual = np.abs(left)
    typical = float(np.median(residual)) or 1.0
    scale, _ = _ridge(standardised, np.log(np.maximum(residual, _LEAST_SCALE * typical)))
    return Adjustment(mean, std, location, scale)


def _ridge(standardised: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients [k + 1], the constant last and not held back, and what each target is off the others' fit [n].

    With the hat matrix H of a linear fit, leaving out image i would leave the residual rᵢ / (1 - Hᵢᵢ).
    """
    n, centre = len(target), target.mean()
    left, singular, right = np.linalg.svd(standardised, full_matrices=False)
    along = left.T @ (target - centre)
    fits = []
    for penalty in n * _PENALTIES:
        shrink = singular**2 / (singular**2 + penalty)
        leverage = 1 / n + left**2 @ shrink
        off = (target - centre - left @ (shrink * along)) / np.maximum(1 - leverage, 1e-9)
        fits.append((off, right.T @ (singular / (singular**2 + penalty) * along)))
    off, slopes = min(fits, key=lambda fit: float(np.sum(fit[0] ** 2)))
    return np.append(slopes, centre), off
