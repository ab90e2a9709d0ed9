"""Did deleting images from a model help? The same candidates against the model before and after, paired."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from dime_jax._util import validate
from dime_jax.evidence import _checks, candidates, metrics
from dime_jax.evidence._resampling import portions
from dime_jax.evidence.sets import RESAMPLES, SetTest, group_means, group_weights, set_test, shares_below


class Change(NamedTuple):
    """How much less member-like the candidates became: AUC before minus AUC after, both against the held-out images.

    `p_value` is one-sided, for no change or a change the wrong way.
    """

    difference: metrics.Estimate
    p_value: float


class Ranks(NamedTuple):
    """Candidates among held-out images under one model.

    Attributes:
      p_values: [m], NaN without a finite answer.
      scores: of the candidates [m], comparable with `heldout`.
      heldout: of the held-out images [n]; NaN without a finite answer.
    """

    p_values: np.ndarray
    scores: np.ndarray
    heldout: np.ndarray


class DeletionVerdict(enum.StrEnum):
    """What may be said about a deletion."""

    GONE = "no evidence of membership after"
    REMAINS = "evidence of membership remains"
    MAY_BE_CHANCE = "cannot tell: the change may be chance"
    NOTHING_BEFORE = "cannot tell: no evidence of membership before"

    @property
    def undecided(self) -> bool:
        """Whether it cannot be told."""
        return self in (DeletionVerdict.MAY_BE_CHANCE, DeletionVerdict.NOTHING_BEFORE)


class DeletionCheck(NamedTuple):
    """Candidates before and after; `p_before`, `p_after` are conformal p-values under each model, NaN where unusable.

    `flagged_before` and `flagged_after` are p <= `p_cutoff`, the cutoff that Benjamini-Hochberg chose before; `rule`
    says so in words. Of images the after-model never saw, a share p_cutoff is flagged by chance.
    """

    set_before: SetTest
    set_after: SetTest
    change: Change
    p_before: np.ndarray
    p_after: np.ndarray
    flagged_before: np.ndarray
    flagged_after: np.ndarray
    p_cutoff: float
    rule: str
    verdict: DeletionVerdict
    warnings: list[str]


def deletion_check(
    before: npt.ArrayLike,
    after: npt.ArrayLike,
    heldout_before: npt.ArrayLike,
    heldout_after: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    level: float = 0.05,
    seed: int = 0,
    *,
    heldout_groups: npt.ArrayLike | None = None,
    resamples: int = RESAMPLES,
    ranks: tuple[Ranks, Ranks] | None = None,
) -> DeletionCheck:
    """Paired deletion check: scores of the same candidates, and of the same held-out images, under two models.

    Scores of two models are not on one scale, so under each model a candidate is placed among the held-out images.
    - `set_before`, `set_after`: `set_test` under each model.
    - `change`: paired test of AUC before - AUC after, whole groups at a time (`_paired_change`).
    - flags: a candidate is flagged iff its conformal p is at most the cutoff that Benjamini-Hochberg at `level` chose
      on the model before; the cutoff is then frozen.

    verdict                                                 when
    "cannot tell: no evidence of membership before"         set_before.p_value > level
    "evidence of membership remains"                        else, if set_after.p_value <= level
    "cannot tell: the change may be chance"                 else, if change.p_value > level
    "no evidence of membership after"                       else

    The last is what deletion should look like; it does not prove deletion. Candidates whose score is NaN or infinite
    under either model are left out, with a warning, and are never flagged.

    Args:
      before: scores of the candidates under the model before [m].
      after: the same under the model after.
      heldout_before: of the held-out images [n].
      heldout_after: the same under the model after.
      groups: of the candidates, -1 for one on its own; all on their own if None.
      level: of the tests.
      seed: of the resampling.
      heldout_groups: of the held-out images.
      resamples: of the tests.
      ranks: under each model, p-values and scores that are adjusted for the difficulty of pictures, for flags and tests
        of the set. The change is that of the plain scores: pairing takes the difficulty out by itself.
    """
    before, after = _checks.numbers(before, "before"), _checks.numbers(after, "after")
    heldout_before = _checks.finite_scores(heldout_before, "heldout_before")
    heldout_after = _checks.finite_scores(heldout_after, "heldout_after")
    validate.check_shape(after, before.shape, "after")
    validate.check_shape(heldout_after, heldout_before.shape, "heldout_after")
    usable = np.isfinite(before) & np.isfinite(after)
    if not np.any(usable):
        raise ValueError(f"none of {usable.size} candidates has a finite score both before and after the deletion")
    _checks.group_index(groups, usable.size, "groups")  # checks their shape
    index = _checks.group_index(None if groups is None else np.asarray(groups)[usable], int(usable.sum()), "groups")
    heldout_index = _checks.group_index(heldout_groups, heldout_before.size, "heldout_groups")

    models, own = ((before, heldout_before), (after, heldout_after)), None if groups is None else index
    ranked = ranks or [Ranks(candidates.conformal_p_values(s, h, heldout_groups), s, h) for s, h in models]
    set_before, set_after = (
        set_test(s[usable], h, own, seed, heldout_groups=heldout_groups, level=level, resamples=resamples)
        for _, s, h in ranked
    )
    used = [(scores[usable], heldout) for scores, heldout in models]
    change = _paired_change(used, index, heldout_index, level, seed, resamples)
    p_before, p_after = (np.where(usable, p_values, np.nan) for p_values, _, _ in ranked)
    verdicts = candidates.candidate_verdicts(p_before, heldout_index.max() + 1, level)
    p_cutoff = float(np.max(p_before, where=verdicts.rejected, initial=0.0))

    n_groups = set_before.n_groups
    warnings = list(dict.fromkeys(set_before.warnings + set_after.warnings + verdicts.warnings))
    if 2.0**-n_groups > level:
        warnings.append(f"too few groups ({n_groups}) for a paired test: its p is about {2.0**-n_groups:.3g} at best")
    return DeletionCheck(
        set_before=set_before,
        set_after=set_after,
        change=change,
        p_before=p_before,
        p_after=p_after,
        flagged_before=p_before <= p_cutoff,
        flagged_after=p_after <= p_cutoff,
        p_cutoff=p_cutoff,
        rule=f"conformal p <= {p_cutoff:.3g}, set by Benjamini-Hochberg at {level} on the model before and then frozen",
        verdict=_verdict(set_before.p_value, set_after.p_value, change.p_value, level),
        warnings=warnings,
    )


def _verdict(p_before: float, p_after: float, p_change: float, level: float) -> DeletionVerdict:
    if p_before > level:
        return DeletionVerdict.NOTHING_BEFORE
    if p_after <= level:
        return DeletionVerdict.REMAINS
    if p_change > level:
        return DeletionVerdict.MAY_BE_CHANCE
    return DeletionVerdict.GONE


def _paired_change(
    models: Sequence[tuple[np.ndarray, np.ndarray]],
    index: np.ndarray,
    heldout_index: np.ndarray,
    level: float,
    seed: int,
    resamples: int,
) -> Change:
    """AUC before - AUC after, every group weighing the same, with a sign-flip test and an interval at 1 - level.

    `models` are (scores, held-out scores) before and after.

    The difference D is the mean over k groups of d_g, the fall of the group's placement among the held-out images. If
    before and after are interchangeable, every d_g is as likely to be -d_g: D* = mean ±d_g has the law of D. That takes
    the held-out images as the population; they are a sample, which adds the variance of the mean of their own K falls
    e_h (DeLong's second term), drawn from a normal law. The p-value is the larger of those without and with that noise:
    the first is exact for few groups and many held-out images, the second holds for any number of both that is large.

    The interval is D ± t_{k-1} √(Var d/k + Var e/K): DeLong's, clustered, with Student's quantile for few groups.
    """
    weights, heldout_weights = group_weights(index), group_weights(heldout_index)
    before, after = (shares_below(scores, heldout, heldout_weights) for scores, heldout in models)
    heldout_before, heldout_after = (shares_below(heldout, scores, weights) for scores, heldout in models)
    d, e = group_means(after - before, index), group_means(heldout_before - heldout_after, heldout_index)
    difference = float(np.mean(d))
    heldout_error = np.std(e, ddof=1) / np.sqrt(e.size) if e.size > 1 else 0.0

    rng = np.random.default_rng(seed)
    signs = (rng.choice((-1, 1), (count, d.size)) for count in portions(resamples, d.size))
    flipped = np.concatenate([np.mean(d[None] * portion, axis=1) for portion in signs])
    noises = heldout_error * rng.normal(size=resamples)
    as_large = [np.sum(flipped + noise >= difference - 1e-12) for noise in (0.0, noises)]
    p_value = (1 + max(as_large)) / (resamples + 1)

    spread = np.std(d, ddof=1) if d.size > 1 else 0.0
    if spread == 0:
        return Change(metrics.interval_without_spread(difference, d.size, 1 - level, least=-1.0), float(p_value))
    margin = stats.t.isf(level / 2, d.size - 1) * np.hypot(spread / np.sqrt(d.size), heldout_error)
    low, high = max(-1.0, difference - margin), min(1.0, difference + margin)
    return Change(metrics.Estimate(difference, float(low), float(high)), float(p_value))
