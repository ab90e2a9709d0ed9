"""Taking out what the picture explains: how low is a score for a picture of this difficulty?

A hard picture has a high score whether the model saw it or not. On natural images the picture alone explains most of
what makes scores differ, and membership hides below it. One small regression of scores on statistics of the pictures,
which sees no labels, leaves residuals in which membership shows. No known member is needed.

A second model, a reference, that was not trained on the images says more: its score of the same query with the same
noise is a statistic, too, one that is not penalised. What is left is what the model has learned and the reference has
not.

Where a score is positive by construction (a norm, a loss), pass its logarithm: difficulty multiplies.
"""

import dataclasses
import enum
import hashlib
import zlib
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.fft
import threadpoolctl

from dime_jax._util import validate
from dime_jax._util.records import Null
from dime_jax.evidence import _checks

# Residuals [c, n] of c scores -> one number [n] for each image, lower = member. It must treat all images alike:
# permuting the columns permutes the result.
Combine = Callable[[np.ndarray], np.ndarray]

# With this many images for each statistic a scale is fitted, too. On public SecMI scores of CIFAR-10 it cost two points
# of the members named with 8 images for each of 13 statistics, nothing with 15, and added two points with 23.
IMAGES_FOR_SCALE = 16

_PENALTIES = 10.0 ** np.arange(-3, 4)  # of ridge regression, per image; the last leaves little but the constant
_FARTHEST = 5.0  # standard deviations: a statistic farther out counts as this far
_LEAST_SCALE = 0.1  # of the typical residual: no picture counts as more predictable than that
_RESOLUTION = 1e-9  # of the scores' standard deviation, above what libraries of linear algebra disagree about

_BLOCKS = (4, 8)  # pixels
_NOISE_LEVELS = (0.08, 0.16, 0.31, 0.63)  # on the scale where images are in [-1, 1]
_PIXELS_AT_ONCE = 2**20


@dataclasses.dataclass(frozen=True)
class Difficulty:
    """What scores [n] follow from statistics [n, k + j] of pictures, as a fixed function; made by `fit_difficulty`.

    Attributes:
      mean, std: of the statistics, by which they are standardised; std is infinite for those that do not vary.
      missing: bool [k], which of the first k some image of the fit lacks: each of those has an indicator of its own.
      location: coefficients of the expected score: of the first k, of the indicators, of the last j, and the constant.
      scale: coefficients of the log of its relative deviation, of mean 0 over the fit, which the last j do not explain;
        None if there was nothing to fit it to.
    """

    mean: tuple[float, ...]
    std: tuple[Annotated[float, Null(np.inf)], ...]
    missing: tuple[bool, ...]
    location: tuple[float, ...]
    scale: tuple[float, ...] | None

    def __call__(self, scores: npt.ArrayLike, statistics: npt.ArrayLike) -> np.ndarray:
        """Return (score - expected) / relative deviation [n]; a statistic that is NaN counts as its mean."""
        columns, others = self._columns(np.asarray(statistics, np.float64))
        residuals = np.asarray(scores, np.float64) - _linear(np.hstack([columns, others]), self.location)
        return residuals if self.scale is None else residuals * np.exp(-_linear(columns, self.scale))

    def expected(self, statistics: npt.ArrayLike) -> np.ndarray:
        """Return the scores [n] to expect from these statistics [n, k + j]."""
        return _linear(np.hstack(self._columns(np.asarray(statistics, np.float64))), self.location)

    def _columns(self, statistics: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns that are penalised, and those that are not."""
        standardised, k = (statistics - np.array(self.mean)) / np.array(self.std), len(self.missing)
        known, lacking = np.clip(standardised[:, :k], -_FARTHEST, _FARTHEST), np.isnan(statistics[:, :k])
        indicators = lacking[:, np.array(self.missing, bool)]
        return np.hstack([np.where(lacking, 0.0, known), indicators]), standardised[:, k:]


def _linear(columns: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    # Neither a matrix product, in which the rounding of a row depends on where it stands, nor on the layout in memory.
    return (np.ascontiguousarray(columns) * np.array(coefficients[:-1])).sum(axis=1) + coefficients[-1]


class Way(enum.StrEnum):
    """What is taken out of a score: nothing, what the picture explains, what a reference's score does, or both."""

    PLAIN = "plain"
    ADJUSTED = "adjusted"
    BESIDE = "beside"
    BESIDE_ADJUSTED = "beside_adjusted"

    @property
    def picture(self) -> bool:
        """Whether what the picture explains is taken out."""
        return self in (Way.ADJUSTED, Way.BESIDE_ADJUSTED)

    @property
    def reference(self) -> bool:
        """Whether what a reference's score explains is taken out."""
        return self in (Way.BESIDE, Way.BESIDE_ADJUSTED)


class Adjustment(NamedTuple):
    """c scores of each image minus what is taken out of them, weighed and added: a fixed function of an image.

    Attributes:
      fits: of each score.
      weights: of their residuals.
      log: whether the scores are logarithms of what an attack gives.
      way: what is taken out.
    """

    fits: tuple[Difficulty, ...]
    weights: tuple[float, ...]
    log: bool = False
    way: Way = Way.ADJUSTED

    def __call__(self, scores: np.ndarray, statistics: np.ndarray) -> np.ndarray:
        """Return one number [n] from scores [c, n] and statistics [c, n, k]; NaN where a score is."""
        each = zip(self.weights, self.fits, scores, statistics, strict=True)
        return np.sum([weight * fit(*of) for weight, fit, *of in each], axis=0)

    def expected(self, statistics: np.ndarray) -> np.ndarray:
        """Return the weighed scores [n] to expect from the pictures' statistics [c, n, k]."""
        each = zip(self.weights, self.fits, statistics, strict=True)
        return np.sum([weight * fit.expected(of) for weight, fit, of in each], axis=0)


def fit_difficulty(scores: npt.ArrayLike, statistics: npt.ArrayLike, unpenalised: int = 0) -> Difficulty:
    """Fit scores [n] on statistics of the pictures [n, k + j] by ridge regression, without labels.

    Each penalty is the one with the least squared error when every image is predicted from the others, so that little
    is taken out where pictures explain nothing. Statistics are standardised and clipped over the images of the fit;
    those that vary by less than 1e-8 have no weight. A statistic that is NaN counts as the mean of the others, with an
    indicator. The scale of the residuals is fitted, too, if there are `IMAGES_FOR_SCALE` images for each statistic, a
    matter of numbers alone, and anything is left but rounding. The order of the images does not matter, to the bit.

    Args:
      scores: of the images.
      statistics: of their pictures; the last `unpenalised` of them are scores of the same queries by other models,
        which are fitted by least squares, are not clipped, and must be finite. One that varies by less than 1e-8 of its
        size has no weight.
      unpenalised: j.
    """
    scores = _checks.finite_scores(scores, "scores")
    statistics = np.asarray(statistics, np.float64)
    validate.check_shape(statistics, (len(scores), None), "statistics")
    if np.any(np.isinf(statistics)):
        raise ValueError("statistics must be finite or NaN (missing), got an infinite one")
    order, k = np.lexsort((*statistics.T, scores)), statistics.shape[1] - unpenalised
    scores, statistics = scores[order], statistics[order]
    validate.check_at_least(k, 0, "the number of statistics that are penalised")
    validate.check_finite(statistics[:, k:], "unpenalised statistics")
    known = np.isfinite(statistics)
    counts, filled = np.maximum(known.sum(axis=0), 1), np.where(known, statistics, 0.0)
    mean = filled.sum(axis=0) / counts
    std = np.sqrt((np.where(known, statistics - mean, 0.0) ** 2).sum(axis=0) / counts)
    size = np.where(np.arange(len(mean)) < k, 1.0, np.abs(filled).max(axis=0, initial=0.0))
    std = np.where(std > 1e-8 * size, std, np.inf)
    missing = ~known[:, :k].all(axis=0)
    fit = Difficulty(tuple(mean.tolist()), tuple(std.tolist()), tuple(missing.tolist()), (), None)
    columns, others = fit._columns(statistics)
    location, residuals = _ridge(columns, scores, others)
    fit = dataclasses.replace(fit, location=tuple(location.tolist()))
    if not k or len(scores) < IMAGES_FOR_SCALE * k:
        return fit
    deviations = np.abs(residuals)
    typical = float(np.median(deviations))
    if typical <= _RESOLUTION * np.std(scores):  # what is left is rounding, and must not be blown up
        return fit
    scale, _ = _ridge(columns, np.log(np.maximum(deviations, _LEAST_SCALE * typical)), others[:, :0])
    scale[-1] -= _linear(columns, tuple(scale)).mean()
    return dataclasses.replace(fit, scale=tuple(scale.tolist()))


def difficulty_residuals(scores: npt.ArrayLike, statistics: npt.ArrayLike, unpenalised: int = 0) -> np.ndarray:
    """Return the residuals [n] or [c, n] of one pile of images, each score fitted over the whole pile.

    They are rounded so that images that are alike tie, whatever library does the linear algebra and whatever the unit
    of the scores.

    Args:
      scores: [n], or [c, n] for c scores of each image.
      statistics: of the pictures [n, k], or [c, n, k] if they differ between scores.
      unpenalised: how many of the last statistics are not penalised, as for `fit_difficulty`.
    """
    scores, statistics = np.asarray(scores, np.float64), np.asarray(statistics, np.float64)
    if scores.ndim == 2:
        statistics = np.broadcast_to(statistics, (len(scores), *statistics.shape[-2:]))
        return np.stack([difficulty_residuals(*each, unpenalised) for each in zip(scores, statistics)])
    unit = float(np.std(np.sort(scores)))
    if unit == 0:
        return np.zeros_like(scores)
    fit = fit_difficulty(scores / unit, statistics, unpenalised)
    residuals = np.round(fit(scores / unit, statistics) / _RESOLUTION) * _RESOLUTION
    return residuals * unit


class Pile(NamedTuple):
    """Images with c scores of each of their v versions, the image itself first.

    Attributes:
      scores: [c, n, v]; NaN where there is none.
      statistics: of the pictures [c, n, v, k]; NaN for what is missing.
      unpenalised: how many of the last statistics are not penalised, as for `fit_difficulty`.
    """

    scores: np.ndarray
    statistics: np.ndarray
    unpenalised: int = 0

    @classmethod
    def of(cls, scores: npt.ArrayLike, statistics: npt.ArrayLike, unpenalised: int = 0, name: str = "scores") -> "Pile":
        """Make a pile of scores [n] or [c, n] and statistics [n, k] or [c, n, k], or of the full shapes.

        Args:
          scores: of the images.
          statistics: of their pictures.
          unpenalised: how many of the last statistics are not penalised.
          name: of the scores, in messages.
        """
        scores, statistics = np.asarray(scores, np.float64), np.asarray(statistics, np.float64)
        if scores.ndim < 3:
            if scores.ndim not in (1, 2) or statistics.ndim not in (2, 3):
                expected = "[n] or [c, n] with statistics [n, k] or [c, n, k]"
                raise ValueError(f"{name} must be {expected}, got {list(scores.shape)} and {list(statistics.shape)}")
            scores, statistics = np.atleast_2d(scores)[..., None], statistics[..., None, :]
        statistics = np.broadcast_to(statistics, (len(scores), *statistics.shape[-3:]))
        validate.check_shape(statistics, (*scores.shape, None), f"statistics of {name}")
        return cls(scores, statistics, unpenalised)

    @property
    def known(self) -> np.ndarray:
        """Return which images have all scores of their own, bool [n]; the others have no residual either."""
        return np.all(np.isfinite(self.scores[..., 0]), axis=0)

    def take(self, images: np.ndarray | slice | list[int]) -> "Pile":
        """Return the pile of some of the images, by their positions or a mask."""
        return Pile(self.scores[:, images], self.statistics[:, images], self.unpenalised)

    def __add__(self, other: object) -> "Pile":
        """Return one pile of the images of both."""
        if not isinstance(other, Pile):
            return NotImplemented
        scores, statistics = (np.concatenate(both, axis=1) for both in zip(self[:2], other[:2]))
        return Pile(scores, statistics, self.unpenalised)

    def residuals(self, combine: Combine | None = None) -> np.ndarray:
        """Return the lowest residual of each image's versions [n], from one fit over all versions of all images.

        Every version enters the fit with its own statistics; one without a score is left out. NaN for images that have
        no score of their own.
        """
        _, n, versions = self.scores.shape
        usable = np.all(np.isfinite(self.scores), axis=0) & self.known[:, None]
        each = difficulty_residuals(self.scores[:, usable], self.statistics[:, usable], self.unpenalised)
        lowest = np.full((n, versions), np.inf)
        lowest[usable] = each[0] if combine is None else combine(each)
        return np.where(self.known, lowest.min(axis=1), np.nan)


def freeze_difficulty(pile: Pile, mix: Callable[[np.ndarray], np.ndarray]) -> Adjustment:
    """Fit a pile of images without labels, and freeze what was fitted.

    Args:
      pile: the images; their versions take no part in the fit.
      mix: gives the weights [c] of residuals [c, n].
    """
    known = pile.take(pile.known)
    keys = np.concatenate([known.scores[..., 0], *known.statistics[:, :, 0].transpose(0, 2, 1)])
    known = known.take(np.lexsort(keys))  # so that the order of the images changes no rounding
    of_each = list(zip(known.scores[..., 0], known.statistics[:, :, 0]))
    fits = [fit_difficulty(*of, pile.unpenalised) for of in of_each]
    steps = [_RESOLUTION * (1.0 if fit.scale else np.std(of[0]) or 1.0) for fit, of in zip(fits, of_each)]
    residuals = np.stack([np.round(fit(*of) / step) * step for fit, of, step in zip(fits, of_each, steps)])
    return Adjustment(tuple(fits), tuple(mix(residuals).tolist()))


def difficulty_p_values(
    scores: npt.ArrayLike,
    statistics: npt.ArrayLike,
    heldout_scores: npt.ArrayLike,
    heldout_statistics: npt.ArrayLike,
    heldout_groups: npt.ArrayLike | None = None,
    combine: Combine | None = None,
    seed: int = 0,
    unpenalised: int = 0,
) -> np.ndarray:
    """Return p = (1 + #{held-out residual <= the candidate's}) / (n + 1) for each candidate, [m].

    The residuals are those of a fit over the n held-out images *and this candidate only* (full conformal prediction),
    so a p-value does not depend on who else was asked about.

    Theorem: if this candidate was never seen, and could have been swapped with any held-out image before anything was
    looked at, then P(p <= a) <= a for every a, over candidate and held-out images together. The regression sees no
    labels and treats every image of its fit alike; a bad fit costs power, never validity. Benjamini-Hochberg over
    candidates held its level in simulations; for one pile of all candidates it is a theorem (Marandon, Lei, Mary &
    Roquain 2024).

    The theorem does not hold where candidates were chosen by looking at this model, are of another kind than the
    held-out images, are copies of training images, or were asked otherwise than the held-out images.

    Args:
      scores: of the candidates [m], or [c, m] with `combine`, or [c, m, v] for v versions of each image (see `Pile`);
        NaN where there is none, whose p is NaN.
      statistics: of their pictures [m, k], or [c, m, k], or [c, m, v, k]; NaN for what is missing.
      heldout_scores: [n], [c, n] or [c, n, v]; those of the images themselves must be finite.
      heldout_statistics: [n, k], [c, n, k] or [c, n, v, k].
      heldout_groups: labels [n] of held-out images that belong together, -1 for an image on its own. One image of each
        group, drawn by `seed`, enters fit and count: shares of a group are not exact for fitted residuals.
      combine: makes one number of the c residuals of each image of a pile; see `Combine`.
      seed: of the draw from groups.
      unpenalised: how many of the last statistics are scores of the same queries by other models, which are not
        penalised; they must be finite. The theorem then asks that candidate and held-out images could be swapped before
        those models, too: that none of them, or each of them alike, was trained on these images.
    """
    candidates = Pile.of(scores, statistics, unpenalised)
    heldout = Pile.of(heldout_scores, heldout_statistics, unpenalised, "heldout_scores")
    c, _, versions, k = candidates.statistics.shape
    validate.check_shape(heldout.statistics, (c, None, versions, k), "heldout_statistics")
    validate.check_finite(heldout.scores[..., 0], "heldout_scores")
    if (c > 1) != (combine is not None):
        raise ValueError("combine must be given with several scores of each image, and only then")
    heldout = heldout.take(_one_of_each_group(heldout, heldout_groups, seed))
    p_values = np.full(len(candidates.known), np.nan)
    # The fits are small: with several BLAS threads on a busy machine they would take longer.
    with threadpoolctl.threadpool_limits(1, "blas"):
        for index in np.flatnonzero(candidates.known):
            residuals = (heldout + candidates.take([int(index)])).residuals(combine)
            p_values[index] = np.mean(residuals <= residuals[-1])
    return p_values


def difficulty_statistics(images: npt.ArrayLike) -> np.ndarray:
    """Return statistics [n, 13] of images [n, H, W, C] in [-1, 1] that say how hard they are to denoise. No query.

    statistic                                                                                         number
    log of what thresholding would cost at four noise levels: the mean of min(c², σ²) over the        8
      cosine coefficients c of all overlapping blocks of 4 and of 8 pixels, channels included
    log of the zlib length per value, of the image in 8 bits                                          1
    log of the mean absolute difference of neighbours, down and across, of the channel mean           2
    mean and standard deviation of the channel mean                                                   2

    They were found on public SecMI scores of CIFAR-10, on which they name more members than 38 statistics of radial
    frequency bands: fewer columns cost a fit less. An image smaller than a block is one block.
    """
    images = np.asarray(images)
    validate.check_shape(images, (None, None, None, None), "images")
    validate.check_not_empty(images, "images")
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"images must be of a floating type, in [-1, 1], got {images.dtype}")
    validate.check_finite(images, "images")
    at_once = max(1, _PIXELS_AT_ONCE // images[0].size)
    return np.concatenate([_statistics(images[i : i + at_once]) for i in range(0, len(images), at_once)])


def _statistics(images: np.ndarray) -> np.ndarray:
    images = images.astype(np.float32)
    grey = images.mean(axis=-1)
    eight_bit = np.clip(np.rint((images + 1) * 127.5), 0, 255).astype(np.uint8)
    lengths = np.array([len(zlib.compress(image.tobytes(), 6)) for image in eight_bit]) / images[0].size
    slopes = [_mean_step(grey, axis) for axis in (1, 2)]
    columns = [np.log(lengths), *slopes, grey.mean(axis=(1, 2)), grey.std(axis=(1, 2))]
    costs = [_thresholding_costs(images, side) for side in _BLOCKS]
    return np.column_stack([*costs, *columns]).astype(np.float64)


def _mean_step(grey: np.ndarray, axis: int) -> np.ndarray:
    steps = np.abs(np.diff(grey, axis=axis))
    return np.log((steps.mean(axis=(1, 2)) if steps.size else np.zeros(len(grey))) + 1e-3)


def _thresholding_costs(images: np.ndarray, side: int) -> np.ndarray:
    """Return the log mean of min(c², σ²) at each noise level [n, levels], over blocks that overlap by half."""
    height, width = images.shape[1:3]
    blocks = [
        images[:, top : top + side, left : left + side]
        for top in range(0, max(1, height - side + 1), side // 2)
        for left in range(0, max(1, width - side + 1), side // 2)
    ]
    totals = np.zeros((len(images), len(_NOISE_LEVELS)))
    for block in blocks:
        energies = scipy.fft.dctn(block, axes=(1, 2, 3), norm="ortho") ** 2
        totals += np.stack([np.minimum(energies, level**2).mean(axis=(1, 2, 3)) for level in _NOISE_LEVELS], axis=1)
    return np.log(totals / len(blocks) + 1e-7)


def _one_of_each_group(pile: Pile, groups: npt.ArrayLike | None, seed: int) -> np.ndarray:
    """Choose one image of each group: the one whose numbers have the least keyed digest, whatever the order."""
    count = pile.scores.shape[1]
    if groups is None:
        return np.arange(count)
    index = _checks.group_index(groups, count, "heldout_groups")
    numbers = np.concatenate([pile.scores[..., None], pile.statistics], axis=-1)
    key = str(seed).encode()
    digests = [hashlib.blake2b(numbers[:, i].tobytes(), key=key, digest_size=16).digest() for i in range(count)]
    chosen: dict[int, int] = {}
    for position in sorted(range(count), key=digests.__getitem__):
        chosen.setdefault(int(index[position]), position)
    return np.array(sorted(chosen.values()))


def _ridge(columns: np.ndarray, target: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit coefficients of columns [n, k], of others [n, j] and of the constant; return them and the residuals [n].

    Only the columns are penalised. With the hat matrix H of a linear fit, leaving out image i would leave the residual
    rᵢ / (1 - Hᵢᵢ).
    """
    n, middle, centre = len(target), columns.mean(axis=0), target.mean()
    left, lengths, right = np.linalg.svd(others - others.mean(axis=0), full_matrices=False)
    basis = left[:, lengths > 1e-8 * lengths.max(initial=1e-300)]
    columns, target = columns - middle, target - centre
    rest_of_columns, rest = columns - basis @ (basis.T @ columns), target - basis @ (basis.T @ target)
    energies, axes = np.linalg.eigh(rest_of_columns.T @ rest_of_columns)
    rotated = rest_of_columns @ axes
    along = rotated.T @ rest
    fits = []
    for penalty in n * _PENALTIES:
        weights = 1 / (np.maximum(energies, 0.0) + penalty)
        residuals = rest - rotated @ (weights * along)
        left_out = residuals / np.maximum(1 - 1 / n - (basis**2).sum(axis=1) - rotated**2 @ weights, 1e-9)
        fits.append((float(np.sum(left_out**2)), axes @ (weights * along), residuals))
    _, slopes, residuals = min(fits, key=lambda fit: fit[0])
    used = basis.shape[1]
    of_others = right[:used].T @ (basis.T @ (target - columns @ slopes) / lengths[:used])
    constant = centre - middle @ slopes - others.mean(axis=0) @ of_others
    return np.concatenate([slopes, of_others, [constant]]), residuals
