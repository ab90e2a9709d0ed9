"""How well an attack separates members from held-out images: ROC, AUC, ASR, TPR at a fixed FPR, with intervals.

Everywhere a lower score means member: an image is called a member iff score <= tau, so that
TPR(tau) = P(member score <= tau) and FPR(tau) = P(held-out score <= tau). Rates are fractions, not per cent.

What the intervals promise at confidence 1 - α, for images drawn independently:

  metric     interval                                           holds
  AUC        DeLong on the logit scale                          asymptotically; never inside the last line's
  ASR        random halves (`_advantage_limits`)                at least 1 - α for any ROC curve, asymptotically
  TPR@FPR    resampled false positives and members              asymptotically; starts at 0 if n_heldout · fpr < 3
  no spread  `interval_without_spread`                          at least 1 - α, for any n

Images of one group (one person, one shoot, copies) are not independent. Where groups are given, only groups need be:
the AUC has DeLong's error with the placements of a group added up, the other two have their intervals at the number of
independent images that vary as much (`effective_size`), and halves are made of whole groups. Groups of one image give
the plain intervals.

Scores must be finite one-dimensional arrays; any NaN or infinity is refused.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from dime_jax._util import validate
from dime_jax.data.groups import ALONE
from dime_jax.evidence import _checks

ScorePair = tuple[npt.ArrayLike, npt.ArrayLike]
Groups = tuple[npt.ArrayLike | None, npt.ArrayLike | None]  # of members and held-out images, -1 for one on its own

# The Monte-Carlo error of a 95 % limit is then 1 % of the interval's width. A resample costs O(1), not O(n).
_RESAMPLES = 5_000
_HALVINGS = 8  # of the images, at random, for the ASR's interval


class Estimate(NamedTuple):
    """A value and its confidence interval, low <= value <= high."""

    value: float
    low: float
    high: float


class Metrics(NamedTuple):
    """The paper's three metrics; the dictionaries are keyed by the FPR that was asked for.

    `attained_fpr` and `false_positives` are those at the most permissive threshold with FPR(tau) <= fpr.
    """

    auc: Estimate
    asr: Estimate
    tpr_at_fpr: dict[float, Estimate]
    attained_fpr: dict[float, float]
    false_positives: dict[float, int]


class RocCurve(NamedTuple):
    """Rates at `score <= thresholds`: one point per distinct score, after (0, 0) at threshold -inf."""

    fpr: np.ndarray
    tpr: np.ndarray
    thresholds: np.ndarray


class Rates(NamedTuple):
    """Rates of one decision rule; accuracy is balanced, (TPR + 1 - FPR)/2."""

    tpr: float
    fpr: float
    accuracy: float


class Comparison(NamedTuple):
    """First attack minus second on the same images; `p_value` is two-sided, for equal AUC."""

    auc_difference: Estimate
    p_value: float
    tpr_difference_at_fpr: dict[float, Estimate]


def evaluate(
    member_scores: npt.ArrayLike,
    heldout_scores: npt.ArrayLike,
    fprs: Iterable[float] = (0.01,),
    confidence: float = 0.95,
    seed: int = 0,
    groups: Groups = (None, None),
) -> Metrics:
    """Compute AUC, ASR and TPR at each of `fprs`, with confidence intervals.

    AUC     = P(member < held-out) + P(member = held-out)/2.
    ASR     = max_tau (TPR(tau) + 1 - FPR(tau))/2, over all tau including -inf: never below 1/2.
    TPR@fpr = max {TPR(tau) : FPR(tau) <= fpr}. With fewer than 1/fpr held-out images no false positive is allowed: it
              is then the share of members below every held-out score; its interval starts at 0 (above 64 % confidence).

    Args:
      member_scores, heldout_scores: [n] and [m], lower for members.
      fprs: false positive rates to give the TPR at.
      confidence: of every interval.
      seed: of resampling.
      groups: which members, and which held-out images, belong together; a group may have both.

    Deterministic in `seed`; the interval at one fpr does not depend on which others are asked for.
    """
    member, heldout = _check_scores(member_scores, heldout_scores)
    fprs = _check_levels(fprs, confidence)
    of_member, of_heldout = _group_numbers(groups, (member.size, heldout.size))
    sizes = effective_size(member, of_member), effective_size(heldout, of_heldout)
    operating_points = {fpr: _tpr_at_fpr(member, heldout, fpr, confidence, seed, sizes) for fpr in fprs}
    return Metrics(
        auc=_auc(member, heldout, confidence, (of_member, of_heldout)),
        asr=_asr(member, heldout, confidence, seed, (of_member, of_heldout), sizes),
        tpr_at_fpr={fpr: tpr for fpr, (tpr, _) in operating_points.items()},
        attained_fpr={fpr: false / heldout.size for fpr, (_, false) in operating_points.items()},
        false_positives={fpr: false for fpr, (_, false) in operating_points.items()},
    )


def auc(member_scores: npt.ArrayLike, heldout_scores: npt.ArrayLike) -> float:
    """AUC alone, for searches over many settings: P(member < held-out) + P(member = held-out)/2."""
    return _mean_and_error(*_placements(*_check_scores(member_scores, heldout_scores)))[0]


def auc_interval(
    member_scores: npt.ArrayLike, heldout_scores: npt.ArrayLike, confidence: float = 0.95, groups: Groups = (None, None)
) -> Estimate:
    """AUC with its interval, as in `evaluate`, without the other metrics."""
    _check_levels((), confidence)
    member, heldout = _check_scores(member_scores, heldout_scores)
    return _auc(member, heldout, confidence, _group_numbers(groups, (member.size, heldout.size)))


def roc_curve(member_scores: npt.ArrayLike, heldout_scores: npt.ArrayLike) -> RocCurve:
    """Return the ROC curve from (0, 0) to (1, 1); tied scores, which no threshold can split, share one point."""
    member, heldout = _check_scores(member_scores, heldout_scores)
    thresholds, hits, false = _counts(member, heldout)
    return RocCurve(fpr=false / heldout.size, tpr=hits / member.size, thresholds=thresholds)


def rates_at_threshold(member_scores: npt.ArrayLike, heldout_scores: npt.ArrayLike, tau: float) -> Rates:
    """TPR, FPR and balanced accuracy of the rule `score <= tau`; tau may be infinite."""
    member, heldout = _check_scores(member_scores, heldout_scores)
    if np.isnan(tau):
        raise ValueError(f"tau must be a number, got {tau}")
    tpr, fpr = float(np.mean(member <= tau)), float(np.mean(heldout <= tau))
    return Rates(tpr, fpr, (tpr + 1 - fpr) / 2)


def best_threshold(member_scores: npt.ArrayLike, heldout_scores: npt.ArrayLike) -> float:
    """Return the tau of the highest balanced accuracy; the lowest such tau (fewest images flagged) when several tie.

    It lies midway between two neighbouring scores, so that it favours neither on new images, and is exact in the
    precision of the scores. If no threshold beats calling nobody a member, it is -inf.
    """
    member, heldout = _check_scores(member_scores, heldout_scores)
    thresholds, hits, false = _counts(member, heldout)
    # In integers, so that rounding breaks no tie. The last threshold flags everyone and ties with -inf at best.
    best = int(np.argmax(hits * heldout.size - false * member.size))
    if best == 0:
        return -np.inf
    below, above = thresholds[best], thresholds[best + 1]
    middle = below / 2 + above / 2
    return float(middle if below <= middle < above else below)


def compare(
    first: ScorePair, second: ScorePair, fprs: Iterable[float] = (0.01,), confidence: float = 0.95, seed: int = 0
) -> Comparison:
    """Compare two attacks, paired, each given as (member scores, held-out scores) of the same images in order.

    AUC: DeLong's paired test. With ψ_a an image's placement by attack a (the share of the other class on its right
    side), Var(AUC_1 - AUC_2) = Var(ψ_1 - ψ_2 | members)/n_member + Var(ψ_1 - ψ_2 | held-out)/n_heldout, which holds all
    four covariances.
    TPR at each fpr: as `evaluate`, with the same resampled images for both attacks.

    Equal rankings give difference 0 and p = 1. Other differences without any spread (one attack perfect, the other
    perfectly wrong) get the bound of `interval_without_spread` and the p-value that belongs to it.
    """
    pairs = [_check_scores(*pair, f"{name} ") for pair, name in ((first, "first"), (second, "second"))]
    for one, two, name in zip(*pairs, ("member", "held-out")):
        if one.size != two.size:
            raise ValueError(f"both attacks must score the same {name} images, got {one.size} and {two.size} scores")
    fprs = _check_levels(fprs, confidence)
    auc_difference, p_value = _compare_auc(pairs, confidence)
    return Comparison(
        auc_difference, p_value, {fpr: _tpr_difference_at_fpr(pairs, fpr, confidence, seed) for fpr in fprs}
    )


# ---------------------------------------------------------------------------------------------------------------- AUC


def _placements(member: np.ndarray, heldout: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count twice the held-out scores above each member and the members below each held-out score; ties count half.

    Twice, so that they are integers, whose spread is 0 exactly when they are all equal.
    """

    def twice_below(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
        others = np.sort(others)
        return np.searchsorted(others, scores, "left") + np.searchsorted(others, scores, "right")

    return 2 * heldout.size - twice_below(member, heldout), twice_below(heldout, member)


def _mean_and_error(of_members: np.ndarray, of_heldout: np.ndarray) -> tuple[float, float]:
    """AUC (or difference of AUCs) from placements (or their differences), and DeLong's standard error.

    A class of a single image adds no spread: the caller treats that case separately.
    """
    pairs = of_members.size * of_heldout.size
    spreads = [np.var(p, ddof=1) * p.size for p in (of_members, of_heldout) if p.size > 1]
    return float(np.sum(of_members) / (2 * pairs)), float(np.sqrt(sum(spreads)) / (2 * pairs))


def _grouped_error(placements: tuple[np.ndarray, np.ndarray], groups: tuple[np.ndarray, np.ndarray]) -> float:
    """DeLong's standard error of an AUC, with groups in place of images: √Σ_g (what g moves the AUC by)²."""
    moves = np.zeros(1 + max(index.max() for index in groups))
    pairs = 2 * placements[0].size * placements[1].size
    for placed, index in zip(placements, groups):
        count = np.unique(index).size
        if count > 1:
            unbiased = np.sqrt(count / (count - 1))
            moves += np.bincount(index, (placed - placed.mean()) * unbiased / pairs, minlength=moves.size)
    return float(np.sqrt(np.sum(moves**2)))


def _auc(member: np.ndarray, heldout: np.ndarray, confidence: float, groups: tuple[np.ndarray, np.ndarray]) -> Estimate:
    placements = _placements(member, heldout)
    auc, error = _mean_and_error(*placements)
    draws = min(np.unique(index).size for index in groups)
    if draws < min(member.size, heldout.size) or np.intersect1d(*groups).size:
        error = _grouped_error(placements, groups)
    bound = interval_without_spread(auc, draws, confidence)
    if error == 0 or draws == 1:
        return bound
    # On the logit scale the interval stays inside (0, 1) and leans the right way near the ends.
    margin = stats.norm.isf((1 - confidence) / 2) * error / (auc * (1 - auc))
    low, high = special.expit(special.logit(auc) + np.array([-margin, margin]))
    # Near 0 and 1 a handful of misplaced images is too few for the normal law, and the bound takes over.
    return Estimate(auc, float(min(low, bound.low)), float(max(high, bound.high)))


def _compare_auc(pairs: list[tuple[np.ndarray, np.ndarray]], confidence: float) -> tuple[Estimate, float]:
    first, second = (_placements(*pair) for pair in pairs)
    difference, error = _mean_and_error(first[0] - second[0], first[1] - second[1])
    draws = min(first[0].size, first[1].size)
    if error == 0 or draws == 1:
        p_value = min(1.0, 2 * (1 + abs(difference)) ** -draws)
        return interval_without_spread(difference, draws, confidence, least=-1.0), p_value
    margin = float(stats.norm.isf((1 - confidence) / 2)) * error
    interval = Estimate(difference, max(-1.0, difference - margin), min(1.0, difference + margin))
    return interval, float(2 * stats.norm.sf(abs(difference) / error))


def interval_without_spread(value: float, n: int, confidence: float, least: float = 0.0) -> Estimate:
    """Interval for the mean μ of a variable in [least, 1] that took the same value in n independent draws.

    By Markov's inequality P(X >= v) <= (μ - least)/(v - least), so n draws at v have probability at most
    ((μ - least)/(v - least))^n, which is α/2 at the lower limit; the upper limit mirrors it. At v = 1 this is the rule
    of three, μ >= (α/2)^(1/n) ≈ 1 - 3.7/n at 95 %. An AUC has min(n_member, n_heldout) disjoint pairs as its draws.
    """
    shrink = ((1 - confidence) / 2) ** (1 / n)
    return Estimate(value, least + (value - least) * shrink, 1 - (1 - value) * shrink)


# ---------------------------------------------------------------------------------------------------------------- ASR


def _asr(
    member: np.ndarray,
    heldout: np.ndarray,
    confidence: float,
    seed: int,
    groups: tuple[np.ndarray, np.ndarray],
    sizes: tuple[float, float],
) -> Estimate:
    _, hits, false = _counts(member, heldout)
    advantage = float(np.max(hits / member.size - false / heldout.size))
    halves = _halved_advantages(member, heldout, groups, seed)
    low, high = _advantage_limits(advantage, halves, *sizes, (1 - confidence) / 2)
    return Estimate((1 + advantage) / 2, (1 + low) / 2, (1 + high) / 2)


class _HalvedAdvantages(NamedTuple):
    """TPR - FPR at the best threshold of a random half: `inside` that half, and `across`, on the other images."""

    inside: float
    across: float


def _halved_advantages(
    member: np.ndarray, heldout: np.ndarray, groups: tuple[np.ndarray, np.ndarray], seed: int
) -> _HalvedAdvantages:
    """Average over both halves of several random halvings of the groups; each half has its share of both classes.

    Across, a threshold stands for all between two scores of its half; scores of the other half in between count half.
    Where a half has no member, or no held-out image, nothing is learned: `across` has a 0, and `inside` is 0 if it
    never has both, which corrects nothing.
    """
    scores, group = np.concatenate([member, heldout]), np.concatenate(groups)
    order = np.argsort(scores, kind="stable")
    scores, group, is_member = scores[order], group[order], order < member.size
    last_of_ties = np.append(scores[1:] != scores[:-1], True)
    share = np.bincount(group, is_member) / np.bincount(group)  # of members in each group
    rng = np.random.default_rng(seed)
    inside, across = [], []
    for _ in range(_HALVINGS):
        half = np.empty(share.size, bool)
        half[np.lexsort((rng.random(share.size), share))] = np.arange(share.size) % 2
        for chosen in (half[group], ~half[group]):
            own = [chosen & role for role in (is_member, ~is_member)]
            others = [~chosen & role for role in (is_member, ~is_member)]
            if not all(map(np.any, own + others)):
                across.append(0.0)
                continue
            counts = np.sum(own, axis=1)
            advantages = np.cumsum(own[0] * counts[1] - own[1] * counts[0])  # in integers: rounding breaks no tie
            best = int(np.argmax(np.where(last_of_ties, advantages, 0)))
            inside.append(max(0.0, advantages[best] / np.prod(counts)))
            above = scores[best + 1 :][chosen[best + 1 :]]
            flagged = ((scores <= scores[best]) + (scores < np.append(above, np.inf)[0]).astype(float)) / 2
            found = np.mean(flagged[others[0]]) - np.mean(flagged[others[1]])
            across.append(found if advantages[best] > 0 else 0.0)
    return _HalvedAdvantages(float(np.mean(inside or [0.0])), float(np.mean(across)))


def _advantage_limits(
    advantage: float, halves: _HalvedAdvantages, n: float, m: float, tail: float
) -> tuple[float, float]:
    """Confidence limits, each wrong with probability about `tail` at most, for D = sup_tau (TPR - FPR) = 2 ASR - 1.

    The estimate D̂ is a maximum, hence biased upwards, by an amount that depends on the whole ROC curve. So each limit
    is a normal one, at the largest variance that it allows, around an estimate that errs to its own side on any curve:

    lower: the advantage of one half's best threshold on the other half. On average it is that of some threshold, hence
      at most D; on a curve with a flat top it is D.
    upper: D̂ less the bias that halving adds. The bias of n images falls as 1/n or slower (a corner; n^-2/3 at a smooth
      top, n^-1/2 on a flat one), so that of half as many is at most twice as large, and what is left is at least D.
    """

    def largest_error(d: float) -> float:
        fpr = np.clip(0.5 - d * m / (n + m), 0, 1 - d)
        tpr = fpr + d
        return float(np.sqrt(max(0.0, tpr * (1 - tpr) / n + fpr * (1 - fpr) / m)))

    quantile = stats.norm.isf(tail)
    at_most, at_least = halves.across, advantage - max(0.0, halves.inside - advantage)
    low, high = 0.0, 1.0
    if at_most > quantile * largest_error(0.0):
        low = optimize.brentq(lambda d: d + quantile * largest_error(d) - at_most, 0.0, at_most)
    if at_least < 1:
        high = optimize.brentq(lambda d: at_least + quantile * largest_error(d) - d, min(at_least, 0.0), 1.0)
    return min(low, advantage), max(high, advantage)


# ------------------------------------------------------------------------------------------------------------ TPR@FPR


def _tpr_at_fpr(
    member: np.ndarray,
    heldout: np.ndarray,
    fpr: float,
    confidence: float,
    seed: int,
    sizes: tuple[float, float] | None = None,
) -> tuple[Estimate, int]:
    """TPR at the most permissive threshold with FPR <= fpr, and the number of false positives there.

    The interval is a percentile bootstrap of both classes, with one change. The number J of held-out scores below the
    threshold whose *population* FPR is fpr has a known law, Binomial(n_heldout, fpr). So J is drawn from it, the
    threshold is put where it leaves J held-out scores below, and the members are resampled. (Resampling the held-out
    scores centres J half a score too high: at n = 500 and TPR 20 % that covers 93 %, this 95-96 %.)

    If J = 0 is likelier than 1 - confidence (below about 3 expected false positives at 95 %), the data cannot tell how
    far the threshold lies below every held-out score, and the interval starts at 0.

    Both are drawn for `sizes` independent images, rounded down, if there are fewer of these.
    """
    n, m = (member.size, heldout.size) if sizes is None else (int(size) for size in sizes)
    cuts = _cuts(heldout)
    below = np.searchsorted(np.sort(member), cuts, "left")
    allowed = _allowed_false_positives(heldout.size, fpr)
    tpr = float(below[allowed] / member.size)

    rng = np.random.default_rng(seed)
    false = np.rint(rng.binomial(m, fpr, _RESAMPLES) * (heldout.size / m)).astype(int)
    resampled = rng.binomial(n, below[false] / member.size) / n
    low, high = np.quantile(resampled, _tails(confidence))
    if _too_few(m, fpr, confidence):
        low = 0.0
    # When all members, or none, lie below, resampling shows no spread, though the truth may differ.
    bound = interval_without_spread(tpr, n, confidence)
    estimate = Estimate(tpr, float(min(low, bound.low)), float(max(high, bound.high)))
    return estimate, int(np.searchsorted(cuts, cuts[allowed], "left"))


def _tpr_difference_at_fpr(
    pairs: list[tuple[np.ndarray, np.ndarray]], fpr: float, confidence: float, seed: int
) -> Estimate:
    """TPR@fpr of the first attack minus the second, resampled as in `_tpr_at_fpr` with both attacks on the same images.

    The two false-positive counts are each Binomial(n_heldout, fpr) and share the images that both attacks flag. With
    too few held-out images for lower limits on the TPRs, the interval is what their upper limits leave.
    """
    (member_1, heldout_1), (member_2, heldout_2) = pairs
    n, m = member_1.size, heldout_1.size
    cuts_1, cuts_2 = _cuts(heldout_1), _cuts(heldout_2)
    allowed = _allowed_false_positives(m, fpr)
    difference = float(np.mean(member_1 < cuts_1[allowed]) - np.mean(member_2 < cuts_2[allowed]))
    if _too_few(m, fpr, confidence):
        first, second = (_tpr_at_fpr(*pair, fpr, confidence, seed)[0] for pair in pairs)
        return Estimate(difference, -second.high, first.high)

    rng = np.random.default_rng(seed)
    shared = np.mean((heldout_1 < cuts_1[allowed]) & (heldout_2 < cuts_2[allowed]))
    shared = max(shared, 2 * fpr - 1)  # ties can leave fewer than two events of probability fpr must share
    cells = [shared, fpr - shared, fpr - shared, max(0.0, 1 - 2 * fpr + shared)]
    both, only_1, only_2, _ = rng.multinomial(m, cells, _RESAMPLES).T
    # Few distinct pairs of counts occur, and only their members need counting.
    counts, pair_index = np.unique(np.stack([both + only_1, both + only_2]), axis=1, return_inverse=True)
    members = np.empty((counts.shape[1], 3))
    for row, (false_1, false_2) in zip(members, counts.T):
        flagged_1, flagged_2 = member_1 < cuts_1[false_1], member_2 < cuts_2[false_2]
        row[:] = np.mean(flagged_1 & ~flagged_2), np.mean(flagged_2 & ~flagged_1), np.mean(flagged_1 == flagged_2)
    won, lost, _ = rng.multinomial(n, members[pair_index.ravel()]).T
    low, high = np.quantile((won - lost) / n, _tails(confidence))
    if low == high:
        return interval_without_spread(difference, n, confidence, least=-1.0)
    return Estimate(difference, float(min(low, difference)), float(max(high, difference)))


def _cuts(heldout: np.ndarray) -> np.ndarray:
    """cuts[j]: calling scores < cuts[j] members makes at most j false positives (exactly j without ties)."""
    return np.append(np.sort(heldout), np.inf)


def _allowed_false_positives(heldout_size: int, fpr: float) -> int:
    """The largest j with j/n <= fpr, compared as rates: ⌊0.29 · 100⌋ is 28 in floating point."""
    return int(np.searchsorted(np.arange(heldout_size + 1) / heldout_size, fpr, "right")) - 1


def _too_few(heldout_size: int, fpr: float, confidence: float) -> bool:
    """Whether all held-out scores lie above the population's threshold with probability over 1 - confidence."""
    return (1 - fpr) ** heldout_size > 1 - confidence


def _tails(confidence: float) -> tuple[float, float]:
    """The two quantiles that leave 1 - confidence outside, half on each side."""
    return (1 - confidence) / 2, (1 + confidence) / 2


# ------------------------------------------------------------------------------------------------------------- groups


def effective_size(scores: np.ndarray, groups: np.ndarray) -> float:
    """Return how many independent images have shares below a threshold that vary as much; at most `scores.size`.

    The variance of the share over whole groups, as a ratio to that over single images, both summed over the nine
    deciles of the scores: one threshold alone would make the ratio a matter of luck.

    Args:
      scores: [n].
      groups: the number of each image's group, from 0 [n].
    """
    count = np.unique(groups).size
    if count in (1, scores.size):
        return float(count)
    below = scores[None] <= np.quantile(scores, np.arange(1, 10) / 10)[:, None]
    deviations = below - below.mean(axis=1, keepdims=True)
    sums = np.stack([np.bincount(groups, row) for row in deviations])
    single = np.sum(deviations**2) * scores.size / (scores.size - 1)
    together = np.sum(sums**2) * count / (count - 1)
    return float(scores.size / max(1.0, together / single)) if single else float(count)


def _group_numbers(groups: Groups, sizes: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Number the groups of both classes from 0; an image on its own gets a number of its own."""
    labels = [np.full(size, ALONE) if group is None else np.asarray(group) for group, size in zip(groups, sizes)]
    for label, size, name in zip(labels, sizes, ("member", "held-out")):
        validate.check_shape(label, (size,), f"{name} groups")
    numbers = _checks.group_index(np.concatenate(labels), sum(sizes), "groups")
    return numbers[: sizes[0]], numbers[sizes[0] :]


# ------------------------------------------------------------------------------------------------------------- shared


def _counts(member: np.ndarray, heldout: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-inf and the distinct scores in rising order; the members, and the held-out scores, at or below each."""
    scores = np.concatenate([member, heldout])
    thresholds = np.concatenate([np.array([-np.inf], scores.dtype), np.unique(scores)])
    hits, false = (np.searchsorted(np.sort(group), thresholds, "right") for group in (member, heldout))
    return thresholds, hits, false


def _check_scores(
    member_scores: npt.ArrayLike, heldout_scores: npt.ArrayLike, prefix: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Return both as one-dimensional arrays of one floating type; they must be finite, and at least one each."""
    member = _checks.one_dimensional(member_scores, f"{prefix}member_scores")
    heldout = _checks.one_dimensional(heldout_scores, f"{prefix}heldout_scores")
    validate.check_finite(member, f"{prefix}member_scores")
    validate.check_finite(heldout, f"{prefix}heldout_scores")
    dtype = np.result_type(member, heldout)
    dtype = dtype if np.issubdtype(dtype, np.floating) else np.dtype(np.float64)
    return member.astype(dtype), heldout.astype(dtype)


def _check_levels(fprs: Iterable[float], confidence: float) -> list[float]:
    """Return the FPRs asked for as floats in [0, 1); confidence must be in (0, 1)."""
    validate.check_unit(confidence, "confidence")
    fprs = [float(fpr) for fpr in fprs]
    for fpr in fprs:
        validate.check_unit(fpr, "fpr", "[)")
    return fprs
