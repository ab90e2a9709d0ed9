"""A baseline that never sees the model: can members be told from held-out images by the pictures alone?

If it can, the two sets were collected or processed differently, and an attack's success may mean no more than that.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.fft
import threadpoolctl
from scipy import special, stats
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dime_jax._util import validate
from dime_jax.evidence import _checks, metrics

# Pixels handled at once (float32 work arrays of 16 MB), so that memory does not grow with the number of images.
_PIXELS_AT_ONCE = 2**22
_LEVELS = 8
_LOW_FREQUENCIES = 4
_BANDS = 6
_JPEG_BLOCK = 8


class GroupsTooLarge(ValueError):
    """Some fold cannot be judged: its groups hold all images of one class."""


class BlindBaseline(NamedTuple):
    """AUC of the model-free classifier, and its out-of-fold scores (lower = member) of every image in order."""

    auc: metrics.Estimate
    scores_member: np.ndarray
    scores_heldout: np.ndarray
    folds: int
    n_features: int


class Gap(NamedTuple):
    """Attack AUC minus blind AUC on the same images; `p_value` is two-sided.

    `explained`: the interval of the gap does not lie above 0, so the attack shows no more than the pictures alone.
    `blind_fires`: the blind AUC's own interval lies above 1/2. An explained gap without it means that the attack itself
    is weak, not that the sets differ.
    """

    difference: metrics.Estimate
    p_value: float
    explained: bool
    blind_fires: bool


def blind_baseline(
    member_images: npt.ArrayLike,
    heldout_images: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    folds: int = 5,
    seed: int = 0,
    *,
    confidence: float = 0.95,
) -> BlindBaseline:
    """Cross-validated logistic regression on `image_statistics`, members against held-out images.

    Every image is scored by a classifier that was fitted on the other folds. Classifiers of different folds are not on
    one scale, and pooling them would bias the AUC below 1/2, so scores become ranks within their fold, in (0, 1).
    `groups` (members first, then held-out; -1 for an image on its own) are never cut between folds. There are fewer
    folds if a class has fewer images, or if there are fewer groups. Deterministic in `seed`.

    Raises:
      GroupsTooLarge: if no classifier can be fitted outside some fold.
    """
    member, heldout = np.asarray(member_images), np.asarray(heldout_images)
    for images, name in ((member, "member_images"), (heldout, "heldout_images")):
        validate.check_shape(images, (None, *member.shape[1:]) if member.ndim == 4 else (None,) * 4, name)
        validate.check_at_least(len(images), 2, f"number of {name}")
    validate.check_at_least(folds, 2, "folds")
    features = np.concatenate([image_statistics(member), image_statistics(heldout)])
    is_heldout = np.repeat([0, 1], [len(member), len(heldout)])

    def decide(train: np.ndarray, test: np.ndarray) -> np.ndarray:
        classifier = make_pipeline(StandardScaler(), LogisticRegression(solver="newton-cholesky"))
        return classifier.fit(features[train], is_heldout[train]).decision_function(features[test])

    scores_member, scores_heldout, folds = cross_fitted(decide, is_heldout, groups, folds, seed)
    auc = blind_auc(scores_member, scores_heldout, confidence)
    return BlindBaseline(auc, scores_member, scores_heldout, folds, features.shape[1])


def cross_fitted(
    decide: Callable[[np.ndarray, np.ndarray], np.ndarray],
    is_heldout: np.ndarray,
    groups: npt.ArrayLike | None,
    folds: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return out-of-fold scores of members and held-out images, as ranks in (0, 1) within folds, and how many folds.

    Args:
      decide: `decide(train, test)` fits a classifier on the images `train` and gives its decision on `test`, higher for
        held-out images.
      is_heldout: 0 for members, which come first, and 1 for held-out images.
      groups: images never to be cut between folds, or None.
      folds: the most folds.
      seed: of the folds.
    """
    index = _checks.group_index(groups, is_heldout.size, "groups")
    n_groups = int(np.max(index)) + 1
    validate.check_at_least(n_groups, 2, "number of groups")
    folds = min(folds, *np.bincount(is_heldout).tolist(), n_groups)
    splitter = (StratifiedKFold if groups is None else StratifiedGroupKFold)(folds, shuffle=True, random_state=seed)
    scores = np.empty(is_heldout.size)
    # The problems are small: with two BLAS threads on a busy machine they took ten times longer.
    with threadpoolctl.threadpool_limits(1, "blas"):
        for train, test in splitter.split(is_heldout, is_heldout, None if groups is None else index):
            if np.unique(is_heldout[train]).size < 2:
                raise GroupsTooLarge(
                    f"both classes must be left outside every fold, got groups too large for {folds} folds"
                )
            scores[test] = (stats.rankdata(decide(train, test)) - 0.5) / test.size
    return scores[is_heldout == 0], scores[is_heldout == 1], folds


def gap_over_blind(
    attack_member: npt.ArrayLike,
    attack_heldout: npt.ArrayLike,
    blind_member: npt.ArrayLike,
    blind_heldout: npt.ArrayLike,
    confidence: float = 0.95,
    groups: npt.ArrayLike | None = None,
) -> Gap:
    """Attack AUC minus blind AUC, paired on the same images in the same order.

    DeLong's paired interval takes the scores of different images as independent. Blind scores are out of fold, which at
    chance doubles the variance of their AUC (`blind_auc`); so that variance is added once more. The p-value is the one
    that belongs to the interval. With `groups` (members first), `blind_fires` allows for images that fall together.
    """
    gap = metrics.compare((attack_member, attack_heldout), (blind_member, blind_heldout), (), confidence).auc_difference
    blind = metrics.auc_interval(blind_member, blind_heldout, confidence)
    below = float(np.hypot(gap.value - gap.low, blind.high - blind.value))
    above = float(np.hypot(gap.high - gap.value, blind.value - blind.low))
    difference = metrics.Estimate(gap.value, max(-1.0, gap.value - below), min(1.0, gap.value + above))
    margins = abs(gap.value) / (below if gap.value > 0 else above)
    return Gap(
        difference=difference,
        p_value=float(2 * stats.norm.sf(margins * _quantile(confidence))),
        explained=difference.low <= 0,
        blind_fires=blind_auc(blind_member, blind_heldout, confidence, groups).low > 0.5,
    )


def blind_auc(
    member: npt.ArrayLike, heldout: npt.ArrayLike, confidence: float, groups: npt.ArrayLike | None = None
) -> metrics.Estimate:
    """AUC of out-of-fold scores, with DeLong's interval at √2 times its standard error, and more with groups.

    Out-of-fold scores are not independent: an image is scored by classifiers that its fellows trained, and trains those
    that score them. At chance every pair of images thus enters twice with the same sign, which doubles the variance
    that independent scores would have (measured on digits: 1.42 to 1.45 times the standard error).
    Away from chance the interval is wider than it need be.
    """
    wider = 2 * stats.norm.cdf(np.sqrt(2) * _quantile(confidence)) - 1
    auc = metrics.auc_interval(member, heldout, float(wider))
    return auc if groups is None else _widened(auc, error_within_groups(member, heldout, groups))


def _widened(auc: metrics.Estimate, factor: float) -> metrics.Estimate:
    """Widen an interval's margins on the logit scale by a factor; an AUC of 0 or 1 has no such scale and stays."""
    if not 0 < auc.value < 1:
        return auc
    centre, *limits = special.logit(np.array(auc))
    low, high = special.expit(centre + factor * (np.array(limits) - centre))
    return metrics.Estimate(auc.value, float(low), float(high))


def error_within_groups(member: npt.ArrayLike, heldout: npt.ArrayLike, groups: npt.ArrayLike) -> float:
    """Return how many times larger an AUC's standard error is than for independent images; at least 1.

    Obuchowski (1997): the AUC is a mean of placements, one per image, and those of a group vary together. √k for groups
    of k images of one score.
    """
    first, second = np.asarray(member, np.float64), np.asarray(heldout, np.float64)
    ranks = stats.rankdata(np.concatenate([first, second]))
    above = 1 - (ranks[: first.size] - stats.rankdata(first)) / second.size
    below = (ranks[first.size :] - stats.rankdata(second)) / first.size
    parts = np.concatenate([(above - above.mean()) / first.size, (below - below.mean()) / second.size])
    sums = np.bincount(_checks.group_index(groups, parts.size, "groups"), parts)
    independent = np.sum(parts**2)
    return float(np.sqrt(max(1.0, np.sum(sums**2) / independent))) if independent > 0 else 1.0


def _quantile(confidence: float) -> float:
    return float(stats.norm.isf((1 - confidence) / 2))


def image_statistics(images: npt.ArrayLike) -> np.ndarray:
    """Return statistics [n, k] of images [n, H, W, C] in [-1, 1] that betray how pictures were made and processed.

    statistic (of the channel mean unless said)                     number   betrays
    mean and standard deviation of each channel                     2 C      exposure, colour balance
    share of pixels in 8 equal ranges of brightness                 8        tone curve, padding, clipping
    share of pixel values off the 8-bit grid                        1        resizing after decoding
    mean absolute difference of neighbours, down and across         2        sharpness, direction
    that of differences across 8 x 8 block edges over all others    2        JPEG
    lowest 4 x 4 cosine coefficients but the mean                   15       layout, framing
    mean and spread of the gap between channels, if there are more  2        saturation, greyscale
    log energy in 6 bands of spatial frequency                      6        resampling, denoising, compression

    Images of a side below 16 pixels have no block edges to speak of: those two are 0. Images of a side below 6 do not
    reach every band, and have fewer of these.
    """
    images = np.asarray(images)
    validate.check_shape(images, (None, None, None, None), "images")
    validate.check_not_empty(images, "images")
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"images must be of a floating type, in [-1, 1], got {images.dtype}")
    validate.check_finite(images, "images")
    per_chunk = max(1, _PIXELS_AT_ONCE // images[0].size)
    return np.concatenate([_statistics(images[i : i + per_chunk]) for i in range(0, len(images), per_chunk)])


def _statistics(images: np.ndarray) -> np.ndarray:
    # Channels first: sums over whole planes are several times faster.
    planes = np.ascontiguousarray(np.moveaxis(images, -1, 1), np.float32)
    grey = planes.mean(axis=1)
    levels = np.clip((grey + 1) * (_LEVELS / 2), 0, _LEVELS - 1).astype(np.int8)
    histogram = np.stack([np.mean(levels == level, axis=(1, 2)) for level in range(_LEVELS)], axis=1)
    eight_bit = (planes + 1) * 127.5
    off_grid = np.mean(np.abs(eight_bit - np.rint(eight_bit)) > 1e-2, axis=(1, 2, 3))
    down, across = np.abs(np.diff(grey, axis=1)), np.abs(np.diff(grey, axis=2))
    spectrum = scipy.fft.dctn(grey, axes=(1, 2), norm="ortho") / np.sqrt(grey[0].size)
    low = spectrum[:, :_LOW_FREQUENCIES, :_LOW_FREQUENCIES].reshape(len(images), -1)[:, 1:]
    columns = [
        planes.mean(axis=(2, 3)),
        planes.std(axis=(2, 3)),
        histogram,
        off_grid[:, None],
        np.stack([down.mean(axis=(1, 2)), across.mean(axis=(1, 2))], axis=1),
        np.stack([_blockiness(down.mean(axis=2)), _blockiness(across.mean(axis=1))], axis=1),
        low,
        *([] if planes.shape[1] == 1 else [_saturation(planes)]),
        _band_energies(spectrum),
    ]
    return np.concatenate(columns, axis=1).astype(np.float64)


def _saturation(planes: np.ndarray) -> np.ndarray:
    """Mean and standard deviation over pixels of the largest minus the smallest channel; [n, C, H, W] -> [n, 2]."""
    gaps = np.ptp(planes, axis=1)
    return np.stack([gaps.mean(axis=(1, 2)), gaps.std(axis=(1, 2))], axis=1)


def _blockiness(differences: np.ndarray) -> np.ndarray:
    """Return log (mean difference at edges of 8-pixel blocks / that elsewhere); [n, side - 1] -> [n]."""
    side = differences.shape[1] + 1
    if side < 2 * _JPEG_BLOCK:
        return np.zeros(len(differences))
    edge = np.arange(1, side) % _JPEG_BLOCK == 0
    # A grey level of 8-bit images is 1/127.5: flat images have ratio 1, not 0/0.
    return np.log((differences[:, edge].mean(axis=1) + 1e-3) / (differences[:, ~edge].mean(axis=1) + 1e-3))


def _band_energies(spectrum: np.ndarray) -> np.ndarray:
    """Log mean energy of cosine coefficients in bands of the larger relative frequency; [n, H, W] -> [n, bands]."""
    height, width = spectrum.shape[1:]
    frequency = np.maximum.outer(np.arange(height) / height, np.arange(width) / width)
    band = (frequency * _BANDS).astype(int)
    energies = [np.mean(spectrum[:, band == number] ** 2, axis=1) for number in np.unique(band)]
    return np.log(np.stack(energies, axis=1) + 1e-10)
