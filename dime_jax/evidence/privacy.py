"""From error rates to differential privacy: a lower bound on epsilon, and the curve a given epsilon allows."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from dime_jax._util import validate
from dime_jax.evidence import _checks
from dime_jax.evidence.metrics import Groups

# False-positive rates at which thresholds are tried. Few, since each costs confidence; low, since that is where epsilon
# shows, with 20 % for weak attacks.
FPR_GRID = (0.0, 0.001, 0.01, 0.05, 0.2)

MEMBERS_FLAGGED = "members flagged"
NON_MEMBERS_CLEARED = "non-members cleared"

NOT_AN_AUDIT = "not a DP audit: membership was not randomised before training"
ONE_MODEL_AUDIT = "a DP audit of one model: membership was randomised, and its images are counted as independent"


class EpsilonBound(NamedTuple):
    """With the given confidence, epsilon is at least this much; `ceiling` is what perfect separation would give here.

    The bound comes from one rule, whose TPR is at least `tpr_low` and FPR at most `fpr_high`: it is
    ln((tpr_low - δ)/fpr_high) if `direction` is "members flagged", ln((1 - fpr_high - δ)/(1 - tpr_low)) if it is
    "non-members cleared". `threshold` is the largest score that the rule calls a member (-inf if none).
    `label` says whether this may be called a DP audit.
    """

    epsilon: float
    ceiling: float
    threshold: float
    tpr_low: float
    fpr_high: float
    direction: str
    delta: float
    confidence: float
    thresholds_tried: int
    label: str


def epsilon_lower_bound(
    member_scores: npt.ArrayLike,
    heldout_scores: npt.ArrayLike,
    delta: float = 0.0,
    confidence: float = 0.95,
    randomised: bool = False,
    groups: Groups = (None, None),
) -> EpsilonBound:
    """Compute a lower confidence bound on epsilon from one set of scores; 0 if they show nothing.

    (ε, δ)-DP implies TPR <= e^ε FPR + δ and 1 - FPR <= e^ε (1 - TPR) + δ for every threshold. Thresholds are chosen by
    the data, and corrected for:

    - members flagged: the threshold lies just below the (x+1)-th lowest held-out score, with x fixed in advance as the
      share `FPR_GRID` of the held-out images. Its FPR is then at most the (x+1)-th of n uniform order statistics,
      a Beta(x+1, n-x) variable, whose upper quantile is Clopper-Pearson's limit for x of n. Members are independent of
      that threshold, so Clopper-Pearson holds for the TPR too.
    - non-members cleared: the same with the two classes, and the direction of scores, exchanged.
    - The largest bound is reported. With r thresholds over both directions each limit gets (1 - confidence)/(2r).

    So P(bound > ε) <= 1 - confidence for any n, any distribution and any ties, if the scores of each class are
    independent draws. That makes it a statement about how well this one model's members can be told from new images. To
    be one about the training procedure, members and held-out images must have been assigned at random before training;
    pass `randomised=True` only then.

    Where `groups` of images that belong together are given, as for `metrics.evaluate`, one image of each counts, the
    first: the promise then holds if the groups of each class are independent.
    """
    member = _one_of_each(_checks.finite_scores(member_scores, "member_scores"), groups[0])
    heldout = _one_of_each(_checks.finite_scores(heldout_scores, "heldout_scores"), groups[1])
    validate.check_unit(confidence, "confidence")
    validate.check_unit(delta, "delta", "[)")
    flag_counts, clear_counts = _allowed_errors(heldout.size), _allowed_errors(member.size)
    tried = len(flag_counts) + len(clear_counts)
    tail = (1 - confidence) / (2 * tried)

    best = None
    ceiling = 0.0
    for direction, counts, hits, errors in (
        (MEMBERS_FLAGGED, flag_counts, member, heldout),
        (NON_MEMBERS_CLEARED, clear_counts, -heldout, -member),
    ):
        for count in counts:
            cut = np.partition(errors, count)[count]
            hit_low = _lower_limit(int(np.sum(hits < cut)), hits.size, tail)
            error_high = _upper_limit(count, errors.size, tail)
            found = (_log_ratio(hit_low, error_high, delta), direction, float(cut), hit_low, error_high)
            best = found if best is None or found[0] > best[0] else best
            perfect = _log_ratio(_lower_limit(hits.size, hits.size, tail), error_high, delta)
            ceiling = max(ceiling, perfect)
    assert best is not None
    epsilon, direction, cut, hit_low, error_high = best
    flagged = direction == MEMBERS_FLAGGED
    scores = np.concatenate([member, heldout])
    return EpsilonBound(
        epsilon=max(0.0, epsilon),
        ceiling=ceiling,
        # Cleared is -score < cut, which is score > -cut.
        threshold=float(np.max(scores, where=scores < cut, initial=-np.inf)) if flagged else -cut,
        tpr_low=hit_low if flagged else 1 - error_high,
        fpr_high=error_high if flagged else 1 - hit_low,
        direction=direction,
        delta=delta,
        confidence=confidence,
        thresholds_tried=tried,
        label=ONE_MODEL_AUDIT if randomised else NOT_AN_AUDIT,
    )


def _one_of_each(scores: np.ndarray, groups: npt.ArrayLike | None) -> np.ndarray:
    """Return the score of the first image of each group."""
    first = np.unique(_checks.group_index(groups, scores.size, "groups"), return_index=True)[1]
    return scores[np.sort(first)]


def dp_tpr_bound(fpr: npt.ArrayLike, epsilon: float, delta: float = 0.0) -> np.ndarray:
    """Return the largest TPR that (ε, δ)-DP allows at each FPR: min(1, e^ε FPR + δ, 1 - e^-ε (1 - δ - FPR)).

    The first branch is the paper's and binds at low FPR; the second is its mirror image, for clearing non-members.
    """
    fpr = np.asarray(fpr, np.float64)
    validate.check_unit(fpr, "fpr", "[]")
    validate.check_finite(epsilon, "epsilon")
    validate.check_at_least(epsilon, 0, "epsilon")
    validate.check_unit(delta, "delta", "[]")
    # e^700 is near the largest float: beyond, the bound is 1 for any FPR that can occur.
    growth = np.exp(min(epsilon, 700.0))
    return np.minimum(1.0, np.minimum(growth * fpr + delta, 1 - (1 - delta - fpr) / growth))


def _allowed_errors(n: int) -> list[int]:
    """The distinct counts ⌊n f⌋ for f in FPR_GRID."""
    return sorted({int(n * fpr + 1e-9) for fpr in FPR_GRID})


def _lower_limit(count: int, n: int, tail: float) -> float:
    return float(special.betaincinv(count, n - count + 1, tail)) if count else 0.0


def _upper_limit(count: int, n: int, tail: float) -> float:
    return 1 - _lower_limit(n - count, n, tail)


def _log_ratio(hit_low: float, error_high: float, delta: float) -> float:
    return float(np.log((hit_low - delta) / error_high)) if hit_low > delta else -np.inf
