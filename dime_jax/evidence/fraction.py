"""What fraction of a set of images was used in training: an estimate with an interval, from a mixture of scores."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special
from sklearn.linear_model import LogisticRegression

from dime_jax._util import validate
from dime_jax.data.pairs import Pair
from dime_jax.evidence import _checks
from dime_jax.evidence._resampling import portions

RESAMPLES = 1_999
LEAST_KNOWN = 50  # members, and held-out images, for an interval that covers about as often as it says
_MAX_FRACTIONS = 200


class FractionUsed(NamedTuple):
    """The fraction of a set that was used in training, with the interval that its scores allow.

    `low` and `high` are fractions that a test of level 1 - `confidence` does not refuse; [0, 1] says that the scores
    tell nothing. `n`, `n_members` and `n_heldout` are how many images of each kind were compared.
    """

    value: float
    low: float
    high: float
    confidence: float
    n: int
    n_members: int
    n_heldout: int


KnownScores = Pair[npt.ArrayLike]


def fraction_used(
    scores: npt.ArrayLike,
    known: KnownScores,
    calibration: KnownScores,
    *,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> FractionUsed:
    """Estimate which fraction π of a set were members, if its members score like the known ones and its other images
    like the held-out ones.

    Every score s is turned into a weight h(s) in (0, 1), the probability of membership by a logistic regression on the
    calibration scores. So h knows neither the set nor the images it is compared with, and any such h would do: the mean
    weight of the set is (1 - π) a0 + π a1 on average, a0 and a1 being the mean weights of held-out images and members.
    The estimate is (c - a0) / (a1 - a0), cut to [0, 1], with c the mean weight of the set.

    The interval holds every π that is not refused by a test of q(π) = z²(π) - min z², where z(π) is
    c - (1 - π) a0 - π a1 over its standard error: how much worse π fits than the best fraction in [0, 1] (the ordering
    of Feldman and Cousins). Critical values are those of resampled sets with exactly that fraction of members, of known
    members and of held-out images. So the interval is never empty, needs no cutting at 0 and 1, holds the truth with
    `confidence` there as well, and is [0, 1] where members and held-out images cannot be told apart.

    π is the fraction of these images, not of a population that they were drawn from. Images count as independent: those
    of one owner or shoot resemble each other, and make the interval too narrow. So do few known images, whose resamples
    vary less than they would: below LEAST_KNOWN on a side, audits give no estimate.

    Args:
      scores: of the set; lower for members. Those that are not finite are left out.
      known: scores of members and held-out images that took no part in any choice.
      calibration: the same of others, to choose h.
      confidence: of the interval.
      seed: of the resampling.
      resamples: for the critical values.
    """
    validate.check_unit(confidence, "confidence")
    scores = _checks.numbers(scores, "scores")
    weigh = _Weight.fitted(calibration).of
    weights = weigh(_checks.finite_scores(scores[np.isfinite(scores)], "scores"))
    member, heldout = (
        weigh(_checks.finite_scores(side, name)) for side, name in zip(known, ("members", "held-out images"))
    )
    fit = _Fit.of(weights.size, member, heldout)
    means = _Means(np.mean(weights), np.mean(member), np.mean(heldout))
    fractions = np.unique(np.round(np.linspace(0, 1, _MAX_FRACTIONS + 1) * weights.size)) / weights.size
    critical = _critical_values(fit, fractions, member, heldout, confidence, resamples, np.random.default_rng(seed))
    accepted = fractions[fit.misfit(means, fractions) <= critical]
    value = _estimate(means)
    low, high = (float(np.min(accepted)), float(np.max(accepted))) if accepted.size else (value, value)
    return FractionUsed(value, min(low, value), max(high, value), confidence, weights.size, member.size, heldout.size)


class _Means(NamedTuple):
    """Mean weights, numbers or arrays of them: of the set, of members, of held-out images."""

    set: npt.ArrayLike
    member: npt.ArrayLike
    heldout: npt.ArrayLike


class _Fit(NamedTuple):
    """How many images there are, and the variances of one weight."""

    n: int
    n_members: int
    n_heldout: int
    member_variance: float
    heldout_variance: float

    @classmethod
    def of(cls, n: int, member: np.ndarray, heldout: np.ndarray) -> "_Fit":
        tiny = np.finfo(float).tiny
        return cls(n, member.size, heldout.size, float(np.var(member)) + tiny, float(np.var(heldout)) + tiny)

    def squared_z(self, means: _Means, fraction: npt.ArrayLike) -> np.ndarray:
        """Return how far the set's mean weight is from what the fraction gives, in squared standard errors."""
        own, member, heldout = map(np.asarray, means)
        fraction = np.asarray(fraction)
        variance = (fraction * self.member_variance + (1 - fraction) * self.heldout_variance) / self.n
        variance = variance + fraction**2 * self.member_variance / self.n_members
        variance = variance + (1 - fraction) ** 2 * self.heldout_variance / self.n_heldout
        return (own - (1 - fraction) * heldout - fraction * member) ** 2 / variance

    def misfit(self, means: _Means, fraction: npt.ArrayLike) -> np.ndarray:
        """Return q: how much worse the fraction fits than the best one does."""
        own, member, heldout = map(np.asarray, means)
        inside = (own - member) * (own - heldout) <= 0  # some fraction fits perfectly
        ends = np.minimum(self.squared_z(means, 0.0), self.squared_z(means, 1.0))
        return self.squared_z(means, fraction) - np.where(inside, 0.0, ends)


class _Weight(NamedTuple):
    """h(s) = 1 / (1 + exp(-(offset + slope (s - center) / scale)))."""

    center: float
    scale: float
    slope: float
    offset: float

    @classmethod
    def fitted(cls, calibration: KnownScores) -> "_Weight":
        member, heldout = (_checks.finite_scores(side, "calibration scores") for side in calibration)
        pool = np.concatenate([member, heldout])
        center, scale = float(np.mean(pool)), float(np.std(pool)) or 1.0
        labels = np.repeat([1, 0], [member.size, heldout.size])
        model = LogisticRegression(class_weight="balanced").fit(((pool - center) / scale)[:, None], labels)
        return cls(center, scale, float(model.coef_[0, 0]), float(model.intercept_[0]))

    def of(self, scores: np.ndarray) -> np.ndarray:
        return special.expit(self.offset + self.slope * (scores - self.center) / self.scale)


def _estimate(means: _Means) -> float:
    """(c - a0) / (a1 - a0) in [0, 1]; 1/2 where members and held-out images weigh the same."""
    own, member, heldout = (float(np.asarray(mean)) for mean in means)
    return float(np.clip((own - heldout) / (member - heldout), 0, 1)) if member != heldout else 0.5


def _critical_values(
    fit: _Fit,
    fractions: np.ndarray,
    member: np.ndarray,
    heldout: np.ndarray,
    confidence: float,
    resamples: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return, for each fraction, the quantile of q over resampled sets with exactly that fraction of members."""
    members = np.round(fractions * fit.n).astype(int)
    found = []
    for count in portions(resamples, max(fit.n, member.size, heldout.size)):
        own = _prefix_sums(member, fit.n, count, rng)[:, members]
        own += _prefix_sums(heldout, fit.n, count, rng)[:, fit.n - members]
        references = (np.mean(rng.choice(side, (count, side.size)), axis=1)[:, None] for side in (member, heldout))
        found.append(fit.misfit(_Means(own / fit.n, *references), fractions))
    return np.quantile(np.concatenate(found), confidence, axis=0)


def _prefix_sums(weights: np.ndarray, n: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the sums of the first 0, 1, ..., n of n resampled weights, [count, n + 1]."""
    sums = np.cumsum(rng.choice(weights, (count, n)), axis=1)
    return np.concatenate([np.zeros((count, 1)), sums], axis=1)
