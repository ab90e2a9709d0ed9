"""Are the candidates pictures of the same kind as the held-out images? Judged without the model.

A conformal p-value compares a candidate with held-out images, which means something only if the two could have been
drawn from one pile. Blurred, dimmed, enlarged or otherwise unlike pictures can score like training images, or unlike
them, for reasons that have nothing to do with training.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
import scipy.linalg
import threadpoolctl

from dime_jax._util import validate
from dime_jax.evidence import _checks
from dime_jax.evidence.sets import group_means

ERROR_RATE = 0.01
RESAMPLES = 1_999
# Statistics are of order one. One that hardly varies among held-out images is not divided by less than this.
_LEAST_SPREAD = 1e-3
# Added to the correlations' diagonal: directions in which held-out images do not vary at all stay finite.
_RIDGE = 1e-2
_AT_ONCE = 100  # sets drawn at random


@dataclasses.dataclass(frozen=True, eq=False)
class Likeness:
    """How like the held-out images the candidates are, as pictures.

    Attributes:
      p_values: of each candidate [m]: the share of pictures, held-out ones and itself, that are as far out; NaN where
        the candidate has no statistics.
      unlike: which candidates are out of range: p <= ERROR_RATE, or the smallest p there can be.
      set_p: permutation p-value of the candidates' mean being as far from that of the held-out images.
      set_unlike: whether the set is out of range: set_p <= ERROR_RATE, or the smallest p there can be.
      heldout: with how many held-out images they were compared one by one, counting a group of them once.
    """

    p_values: np.ndarray
    unlike: np.ndarray
    set_p: float
    set_unlike: bool
    heldout: int


def likeness(
    statistics: npt.ArrayLike,
    heldout_statistics: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    heldout_groups: npt.ArrayLike | None = None,
    seed: int = 0,
) -> Likeness:
    """Compare candidates with held-out images by `image_statistics`.

    One by one: full conformal p-values of the Mahalanobis distance. The candidate is added to the held-out images, and
    its distance from their mean is ranked among theirs, so that a candidate drawn from the same pile is called unlike
    at most in a share ERROR_RATE of cases. Below 99 held-out images no p is that small, and the farthest picture of
    all is called unlike: the share is then 1/(n + 1). One picture stands for each group of held-out images, drawn at
    random: a picture that has copies lies nearer to the mean than one that has none.

    As a set: the Mahalanobis distance between the mean of the candidates and that of all pictures, among the same for
    sets drawn at random from the pool. Groups enter as their means and are drawn whole, since pictures of one owner
    resemble each other. A set of one picture is ranked like one picture.

    Args:
      statistics: of candidates [m, k]; rows with NaN are pictures without statistics.
      heldout_statistics: of held-out images [n, k], all finite.
      groups: labels of candidates, -1 for one on its own.
      heldout_groups: the same of held-out images.
      seed: of what is drawn at random.
    """
    candidates, heldout = np.asarray(statistics, np.float64), np.asarray(heldout_statistics, np.float64)
    validate.check_shape(candidates, (None, heldout.shape[1]), "statistics")
    validate.check_finite(heldout, "heldout_statistics")
    validate.check_at_least(len(heldout), 2, "number of held-out images")
    usable = np.all(np.isfinite(candidates), axis=1)
    p_values = np.full(len(candidates), np.nan)
    known = candidates[usable]
    index = _checks.group_index(None if groups is None else np.asarray(groups)[usable], len(known), "groups")
    heldout_index = _checks.group_index(heldout_groups, len(heldout), "heldout_groups")
    apart = heldout[_one_of_each(heldout_index, np.random.default_rng((seed, 1)))]
    set_p, least, least_set = 1.0, 1 / (len(apart) + 1), 1.0
    with threadpoolctl.threadpool_limits(1, "blas"):  # many small problems
        p_values[usable] = _conformal_p_values(known, apart)
        if len(known):
            means, heldout_means = _means(known, index), _means(heldout, heldout_index)
            set_p = _set_p_value(means, heldout_means, np.random.default_rng(seed))
            least_set = 1 / (1 + len(heldout_means)) if len(means) == 1 else 1 / (1 + RESAMPLES)
    unlike = p_values <= max(ERROR_RATE, least * (1 + 1e-9))
    set_unlike = bool(len(known)) and set_p <= max(ERROR_RATE, least_set * (1 + 1e-9))
    return Likeness(p_values, unlike, set_p, set_unlike, len(apart))


def _one_of_each(index: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Choose one image of each group at random; return their places in rising order."""
    order = rng.permutation(index.size)
    return np.sort(order[np.unique(index[order], return_index=True)[1]])


def _conformal_p_values(candidates: np.ndarray, heldout: np.ndarray) -> np.ndarray:
    """Return p of each candidate's distance among its own and the n held-out ones from their common mean."""
    p_values = np.empty(len(candidates))
    for number, candidate in enumerate(candidates):
        distances = np.sum(_whitened(np.concatenate([heldout, candidate[None]])) ** 2, axis=1)
        p_values[number] = np.mean(distances >= distances[-1] * (1 - 1e-9))
    return p_values


def _whitened(rows: np.ndarray) -> np.ndarray:
    """Whiten rows: mean 0 and, but for the ridge, the identity as covariance. All rows are treated alike.

    Their squared lengths are the rows' squared Mahalanobis distances from their mean.
    """
    standard = (rows - rows.mean(axis=0)) / np.maximum(rows.std(axis=0), _LEAST_SPREAD)
    correlation = standard.T @ standard / len(rows) + _RIDGE * np.eye(rows.shape[1])
    return scipy.linalg.solve_triangular(np.linalg.cholesky(correlation), standard.T, lower=True).T


def _set_p_value(candidates: np.ndarray, heldout: np.ndarray, rng: np.random.Generator) -> float:
    """Return how often as many rows, drawn at random from the pool, have a mean as far from the pool's."""
    pool, size = _whitened(np.concatenate([candidates, heldout])), len(candidates)
    if size == 1:
        distances = np.sum(pool**2, axis=1)
        return float(np.mean(distances >= distances[0] * (1 - 1e-9)))
    distance, farther = np.sum(pool[:size].mean(axis=0) ** 2), 0
    for start in range(0, RESAMPLES, _AT_ONCE):
        drawn = np.zeros((min(_AT_ONCE, RESAMPLES - start), len(pool)))
        for weights in drawn:
            weights[rng.choice(len(pool), size, replace=False)] = 1 / size
        farther += int(np.sum(np.sum((drawn @ pool) ** 2, axis=1) >= distance * (1 - 1e-9)))
    return (1 + farther) / (1 + RESAMPLES)


def _means(rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The mean row of each group."""
    return np.stack([group_means(column, index) for column in rows.T], axis=1)
