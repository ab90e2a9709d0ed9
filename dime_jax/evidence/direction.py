"""Which way round are members and held-out images? A witness of fixed direction tells, and nothing overrules it.

An attack whose weights were searched follows the labels, right or wrong: with members and held-out images
swapped it learns to accuse what the model never saw. The witness is a score that learned nothing, lower for members by
theory alone; if members score *above* held-out images by it, the sets are swapped or differ in kind.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy.typing as npt

from dime_jax._util.records import Absent
from dime_jax.evidence import metrics
from dime_jax.evidence.difficulty import Way

# The chance that a witness takes one side on sets that it cannot tell apart, over all timesteps and halves together.
ERROR_RATE = 0.01


class Judgement(enum.StrEnum):
    """What the witness says: members surely look more (`ABOVE`) or less (`BELOW`) like training images, or neither."""

    ABOVE = "above"
    BELOW = "below"
    UNSURE = "unsure"
    NOT_CHECKED = "not checked"


class WitnessScores(NamedTuple):
    """The witness's scores at one timestep of one half, lower for members, and which images belong together.

    Something may be taken out of them, without labels (`evidence.difficulty`).
    """

    half: str
    t: int
    member: npt.ArrayLike
    heldout: npt.ArrayLike
    groups: metrics.Groups = (None, None)
    way: Way = Way.PLAIN


@dataclasses.dataclass(frozen=True)
class WitnessAuc:
    """AUC of the witness at one timestep of one half; `low` and `high` are one-sided bounds, each for itself."""

    half: str
    t: int
    value: float
    low: float
    high: float
    adjusted: Absent[bool] = None
    beside: Absent[bool] = None


@dataclasses.dataclass(frozen=True)
class Direction:
    """What the witness said, timestep by timestep, and what follows from it.

    Attributes:
      judgement: `BELOW` if any bound lies below 1/2, whatever the others say; else `ABOVE` if any lies above.
      may_learn: whether an attack may decide by a direction that it learned from the labels: the judgement is
        `ABOVE`, and the calibration half shows it. The test half has no part in that, since it has none in any choice.
      aucs: the witness's AUCs.
      error_rate: the chance that any bound is on the wrong side of 1/2 where the sets cannot be told apart.
    """

    judgement: Judgement
    may_learn: bool
    aucs: tuple[WitnessAuc, ...]
    error_rate: float = ERROR_RATE


NOT_CHECKED = Direction(Judgement.NOT_CHECKED, may_learn=False, aucs=())


def judge_direction(scores: Sequence[WitnessScores], looks: int | None = None) -> Direction:
    """Hear the witness at every timestep of every half.

    Each bound is one-sided at `ERROR_RATE` divided by the number of looks, so that all hold together with at least
    1 - 2 `ERROR_RATE`. Without any scores the direction is `NOT_CHECKED`.

    Args:
      scores: the witness's finite scores; timesteps with an empty side are skipped.
      looks: over how many timesteps, halves and ways to look the error is shared, if more than those given here.
    """
    scores = [one for one in scores if len(one.member) and len(one.heldout)]  # type: ignore[arg-type]
    if not scores:
        return NOT_CHECKED
    confidence = 1 - 2 * ERROR_RATE / max(len(scores), looks or 0)
    aucs = []
    for half, t, member, heldout, groups, way in scores:
        bounds = metrics.auc_interval(member, heldout, confidence, groups)
        aucs.append(WitnessAuc(half, t, *bounds, way.picture or None, way.reference or None))
    if any(auc.high < 0.5 for auc in aucs):
        judgement = Judgement.BELOW
    elif any(auc.low > 0.5 for auc in aucs):
        judgement = Judgement.ABOVE
    else:
        judgement = Judgement.UNSURE
    confirmed = any(auc.low > 0.5 for auc in aucs if auc.half == "calibration")
    return Direction(judgement, judgement is Judgement.ABOVE and confirmed, tuple(aucs))
