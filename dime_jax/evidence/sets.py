"""A set of images, such as an artist's portfolio: is it more member-like than images the model never saw?"""

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from dime_jax._util import validate
from dime_jax.evidence import _checks

RESAMPLES = 9_999

# Sums that differ by rounding only count as equal.
_ROUNDING = 1e-12


class SetTest(NamedTuple):
    """Is the set more member-like than held-out images?

    `statistic` is the probability that an image of the set scores below a held-out image (ties count half), every
    group weighing the same: 1/2 under the null, 1 if every image of the set is below every held-out one.
    `p_value` is one-sided and never below `smallest_p`, the smallest that these numbers of groups and resamples allow.
    `effective_n` is the number of independent images that the n are worth, from the correlation within groups.
    """

    statistic: float
    p_value: float
    smallest_p: float
    n: int
    n_groups: int
    effective_n: float
    n_heldout: int
    n_heldout_groups: int
    warnings: list[str]


def set_test(
    scores: npt.ArrayLike,
    heldout_scores: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    seed: int = 0,
    *,
    heldout_groups: npt.ArrayLike | None = None,
    level: float = 0.05,
    resamples: int = RESAMPLES,
) -> SetTest:
    """Test a set against held-out images by permuting whole groups.

    Images of one owner, one shoot or one near-duplicate cluster resemble each other, and counting them one by one makes
    chance look like evidence. `groups` labels them (any labels; -1 for an image on its own): a group enters through its
    mean rank in the pool of both sides, and groups, not images, are permuted between the set and the held-out side.

    p = (1 + #{permuted statistic >= statistic}) / (resamples + 1); where all C(k + K, k) ways of choosing the set's k
    groups from the k + K are at most `resamples`, they are all tried instead. So P(p <= a) <= a if groups are
    exchangeable. One ungrouped image gets its conformal p-value. Deterministic in `seed`.

    A mean over few images varies more than one over many. Held-out groups are therefore cut at random to sizes drawn
    from the set's groups. Held-out groups smaller than the set's (heldout_groups=None: all of size 1) make the test
    conservative. A label on both sides means two groups: take near duplicates of the set out of the held-out images.

    A score of the set that is NaN or infinite counts as the least member-like of all. `level` is for warnings only.
    """
    scores = _checks.numbers(scores, "scores")
    heldout = _checks.finite_scores(heldout_scores, "heldout_scores")
    validate.check_unit(level, "level")
    validate.check_at_least(resamples, 1, "resamples")
    index = _checks.group_index(groups, scores.size, "groups")
    heldout_index = _checks.group_index(heldout_groups, heldout.size, "heldout_groups")
    rng = np.random.default_rng(seed)
    kept = _cut_to_sizes(heldout_index, np.bincount(index), rng)

    usable = np.isfinite(scores)
    pool = np.concatenate([np.where(usable, scores, np.inf), heldout[kept]])
    pool_index = np.concatenate([index, np.max(index) + 1 + heldout_index[kept]])
    shares = shares_below(pool, pool, group_weights(pool_index))
    values, heldout_values = np.split(group_means(shares, pool_index), [np.max(index) + 1])
    p_value, least = _permutation_p(np.concatenate([values, heldout_values]), values.size, resamples, rng)
    return SetTest(
        # A difference of mean shares below, in the pool of both, is AUC - 1/2.
        statistic=float(0.5 + np.mean(heldout_values) - np.mean(values)),
        p_value=p_value,
        smallest_p=least,
        n=scores.size,
        n_groups=values.size,
        effective_n=_effective_n(shares[: scores.size], index),
        n_heldout=heldout.size,
        n_heldout_groups=heldout_values.size,
        warnings=_warnings(groups is None, scores.size, values.size, int(np.sum(~usable)), least, level),
    )


def group_means(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The mean of `values` in each group of `_checks.group_index`."""
    return np.bincount(index, values) / np.bincount(index)


def count_groups(groups: npt.ArrayLike | None, n: int) -> int:
    """Count the groups that n images are in; -1 labels one on its own, and without labels all are."""
    return int(_checks.group_index(groups, n, "groups").max()) + 1


def group_weights(index: np.ndarray) -> np.ndarray:
    """Weights of images that sum to one, every group weighing the same."""
    sizes = np.bincount(index)
    return 1 / (sizes.size * sizes[index])


def shares_below(scores: np.ndarray, others: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weight of `others` below each score; ties count half."""
    order = np.argsort(others)
    below = np.concatenate([[0.0], np.cumsum(weights[order])])
    left, right = (below[np.searchsorted(others[order], scores, side)] for side in ("left", "right"))
    return (left + right) / 2


def false_alarm_rate(n: int, correlation: float, level: float) -> float:
    """How often a test at `level` that takes n equally correlated images as independent calls a null set members.

    The mean of n images has 1 + (n - 1) ρ times the variance it is given credit for, so the rate is
    Φ(Φ⁻¹(level) / √(1 + (n - 1) ρ)), for normal scores: about 10.5 % and 24 % at n = 50, ρ = 0.05 and 0.2, level 1 %.
    """
    return float(stats.norm.cdf(stats.norm.ppf(level) / np.sqrt(1 + (n - 1) * correlation)))


def _permutation_p(values: np.ndarray, k: int, resamples: int, rng: np.random.Generator) -> tuple[float, float]:
    """How often k of `values` have a sum as small as the first k have, and the smallest p that could have come out.

    Exact over all choices of k where those are at most `resamples`, or k = 1. SciPy's permutation test refuses sets of
    one group, and shuffles all values for every resample where drawing k of them is enough.
    """
    if k > values.size - k:  # the fewer others, with their signs changed, say the same and are quicker to draw
        values, k = -values[::-1], values.size - k
    ways = special.comb(values.size, k)
    if ways <= max(resamples, values.size):
        chosen = np.array(list(itertools.combinations(range(values.size), k)))
        added, tried = 0, len(chosen)
        sums = values[chosen].sum(axis=1)
    else:
        added, tried = 1, resamples
        sums = np.array([values[rng.choice(values.size, k, replace=False, shuffle=False)].sum() for _ in range(tried)])
    observed = values[:k].sum()
    as_small = int(np.sum(sums <= observed + _ROUNDING * abs(observed)))
    return (as_small + added) / (tried + added), 1 / (tried + added)


def _cut_to_sizes(index: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Choose the images to keep, in rising order: from each group, at random, at most a number drawn from `sizes`."""
    limit = rng.choice(sizes, np.max(index) + 1)
    order = rng.permutation(index.size)
    order = order[np.argsort(index[order], kind="stable")]
    group_start = np.searchsorted(index[order], np.arange(limit.size))
    place_in_group = np.arange(index.size) - group_start[index[order]]
    return np.sort(order[place_in_group < limit[index[order]]])


def _effective_n(shares: np.ndarray, index: np.ndarray) -> float:
    """n / (1 + (s - 1) ρ), with s the size of an image's group on average and ρ the intra-group correlation.

    ρ is the one-way analysis-of-variance estimate, cut to [0, 1]. A single group counts as one image.
    """
    sizes = np.bincount(index)
    n, k = shares.size, sizes.size
    if k == 1 or k == n:
        return float(k)
    means = group_means(shares, index)
    between = np.sum(sizes * (means - np.mean(shares)) ** 2) / (k - 1)
    within = np.sum((shares - means[index]) ** 2) / (n - k)
    typical_size = (n - np.sum(sizes**2) / n) / (k - 1)
    total = between + (typical_size - 1) * within
    correlation = np.clip((between - within) / total, 0, 1) if total > 0 else 1.0
    return float(n / (1 + (np.sum(sizes**2) / n - 1) * correlation))


def _warnings(ungrouped: bool, n: int, n_groups: int, unusable: int, least: float, level: float) -> list[str]:
    warnings = []
    if ungrouped and n > 1:
        rates = [f"{100 * false_alarm_rate(n, correlation, 0.01):.0f} %" for correlation in (0.05, 0.2)]
        warnings.append(
            f"no groups were given, so the {n} images count as independent; if their scores correlate by 0.05 (0.2), a "
            f"test that should raise 1 % false alarms raises about {rates[0]} ({rates[1]}): say which images share an "
            "owner or a shoot"
        )
    if least > level:
        warnings.append(
            f"too few groups ({n_groups}) to decide anything: the smallest attainable p is {least:.3g} > {level}"
        )
    if unusable:
        warnings.append(f"{unusable} of {n} images have no usable score and count as the least member-like")
    return warnings
