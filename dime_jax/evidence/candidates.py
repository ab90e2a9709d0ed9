"""One image at a time: how surprising is its score among held-out images, and what may be said after many looks."""

import enum
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from dime_jax._util import validate
from dime_jax.evidence import _checks, metrics

# p-values are ratios of integers and levels round numbers: p m / k and level often tie, and rounding must not decide.
_ROUNDING = 1e-9


class Verdict(enum.StrEnum):
    """What may be said about one candidate, in the words of candidates.csv."""

    EVIDENCE = "evidence of membership"
    NO_EVIDENCE = "no evidence"
    CANNOT_TELL = "cannot tell"


class Verdicts(NamedTuple):
    """What may be said about each of m candidates; `rejected` marks the ones with evidence of membership.

    `q_values` [m] are Benjamini-Hochberg adjusted p-values (NaN where p is NaN): q <= level exactly where rejected.
    `can_decide` is whether any outcome could have been evidence: smallest_p <= level.
    `candidates_needed` must reach the smallest p together before any of them is evidence; ideally that is 1.
    `heldout_needed` held-out images would make it 1.
    """

    verdict: list[Verdict]
    q_values: np.ndarray
    rejected: np.ndarray
    smallest_p: float
    can_decide: bool
    candidates_needed: int
    heldout_needed: int
    warnings: list[str]


def conformal_p_values(
    scores: npt.ArrayLike, heldout_scores: npt.ArrayLike, heldout_groups: npt.ArrayLike | None = None
) -> np.ndarray:
    """p = (1 + #{held-out <= score}) / (n + 1) for each score: how often an image the model never saw is as low.

    If a candidate is exchangeable with the n held-out images and those chose neither attack nor setting, then
    P(p <= a) <= a for every a, with equality at multiples of 1/(n + 1) when no scores tie. The probability is over
    both the candidate and the held-out images; given the latter, the rate at a varies with variance a(1 - a)/(n + 2).

    Copies of one picture, or photos of one shoot, are not independent images. Where held-out images are grouped, each
    of the G groups counts once, by the share of it that is as low: p = (1 + Σ_g share_g) / (G + 1), for which the same
    holds if the candidate is an image of a group like theirs (Lee, Barber & Willett 2023, hierarchical conformal
    prediction).

    A score that is NaN or infinite says nothing, and its p is NaN. Held-out scores must be finite.

    Args:
      scores: of the candidates [m].
      heldout_scores: to compare them with [n].
      heldout_groups: labels of these [n], -1 for an image on its own; all on their own if None.
    """
    scores = _checks.numbers(scores, "scores")
    heldout = _checks.finite_scores(heldout_scores, "heldout_scores")
    index = _checks.group_index(heldout_groups, heldout.size, "heldout_groups")
    order, sizes = np.argsort(heldout), np.bincount(index)
    as_low = np.concatenate([[0.0], np.cumsum(1 / sizes[index[order]])])
    p = (1 + as_low[np.searchsorted(heldout[order], scores, "right")]) / (sizes.size + 1)
    return np.where(np.isfinite(scores), np.minimum(p, 1.0), np.nan)


def smallest_p(n_heldout: int) -> float:
    """The smallest p-value that n held-out images can give, 1/(n + 1)."""
    validate.check_at_least(n_heldout, 1, "n_heldout")
    return 1 / (n_heldout + 1)


def power(
    p_values: npt.ArrayLike, level: float, groups: npt.ArrayLike | None = None, confidence: float = 0.95
) -> metrics.Estimate:
    """Return the share of known members [n] with p <= level, and Clopper-Pearson's interval given the held-out images.

    With `groups` (-1 for an image on its own) the interval is that of as many independent members as vary as much
    (`metrics.effective_size`).
    """
    p_values = _checks.finite_scores(p_values, "p_values")
    validate.check_unit(level, "level")
    validate.check_unit(confidence, "confidence")
    share = float(np.mean(p_values <= level * (1 + _ROUNDING)))
    n = metrics.effective_size(p_values, _checks.group_index(groups, p_values.size, "groups"))
    tail, hits, misses = (1 - confidence) / 2, share * n, (1 - share) * n
    return metrics.Estimate(
        share,
        float(special.betaincinv(hits, misses + 1, tail)) if hits else 0.0,
        float(special.betaincinv(hits + 1, misses, 1 - tail)) if misses else 1.0,
    )


def candidate_verdicts(p_values: npt.ArrayLike, n_heldout: int, level: float = 0.05) -> Verdicts:
    """Give m candidates one of three verdicts each; Benjamini-Hochberg holds the false discovery rate at `level`.

    verdict                    when                                 meaning
    "evidence of membership"   rejected by Benjamini-Hochberg       among all such images, at most a share `level` are
                                                                    expected to be non-members
    "no evidence"              p > level                            would not be flagged even as the only candidate
    "cannot tell"              p <= level, but not rejected         would be flagged alone, but may be chance among m
                               p is NaN                             the score is unusable
                               smallest_p > level                   no score whatever could have been flagged

    "No evidence" is not evidence of absence. Conformal p-values that share held-out images depend positively on each
    other (PRDS), under which Benjamini-Hochberg still holds its level (Bates et al. 2023). A NaN counts as
    a test with p = 1: the level then holds whatever made the score fail.

    k candidates are rejected together when all have p <= k level/m. So a lone member is found only if
    smallest_p <= level/m; otherwise at least ⌈m smallest_p / level⌉ candidates must reach the smallest p, and a
    warning says so. `n_heldout` is the number of held-out scores behind the p-values, or of their groups.
    """
    p_values = _checks.numbers(p_values, "p_values")
    validate.check_unit(level, "level")
    least = smallest_p(n_heldout)
    usable = ~np.isnan(p_values)
    outside = usable & ((p_values < least * (1 - _ROUNDING)) | (p_values > 1))
    if np.any(outside):
        raise ValueError(
            f"p_values must be in [1/(n_heldout + 1), 1] = [{least:.3g}, 1], got {p_values[outside][0]:.3g}"
        )
    m = p_values.size
    q_values = stats.false_discovery_control(np.where(usable, p_values, 1.0))
    rejected = usable & (q_values <= level * (1 + _ROUNDING))
    can_decide = least <= level * (1 + _ROUNDING)
    unclear = ~rejected & (p_values <= level * (1 + _ROUNDING)) | ~usable | (not can_decide)
    needed = max(1, math.ceil(m * least / level * (1 - _ROUNDING)))
    heldout_needed = math.ceil(m / level * (1 - _ROUNDING)) - 1

    warnings = []
    if not can_decide:
        warnings.append(
            f"{n_heldout} independent held-out images give no p-value below {least:.3g}, so nothing can be decided at "
            f"level {level}: use {heldout_needed}"
        )
    elif needed > 1:
        warnings.append(
            f"a lone member among {m} candidates cannot be found, only {needed} or more together: the smallest p that "
            f"{n_heldout} held-out images can give is {least:.3g}, above {level / m:.3g}; {heldout_needed} would do"
        )
    if not np.all(usable):
        warnings.append(f"{int(np.sum(~usable))} of {m} candidates have no usable score")
    words = np.select([rejected, unclear], [Verdict.EVIDENCE, Verdict.CANNOT_TELL], Verdict.NO_EVIDENCE)
    return Verdicts(
        verdict=[Verdict(word) for word in words.tolist()],
        q_values=np.where(usable, q_values, np.nan),
        rejected=rejected,
        smallest_p=least,
        can_decide=can_decide,
        candidates_needed=needed,
        heldout_needed=heldout_needed,
        warnings=warnings,
    )
