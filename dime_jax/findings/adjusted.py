"""Adjusted p-values of candidates, and how many known members they find beside the plain ones.

The calibration half's held-out images say how a score follows from the picture alone, the held-out images behind the
plain p-values are the reference, and the model is asked nothing. They are for the reader: verdicts are those of the
plain p-values, since whoever may take the smaller of two p-values doubles the error.
"""

from typing import NamedTuple

import numpy as np

from dime_jax import evidence
from dime_jax.evidence import ScoredPictures
from dime_jax.findings.results import AdjustedFound, PowerAt
from dime_jax.protocol.arrays import KnownStatistics, PictureStatistics
from dime_jax.protocol.record import Record

LEVELS = (0.05, 0.01)
NO_MEMBERS = "without known members there is no calibration half to learn from what a picture explains"
WITHHELD = "no p-value is given on any candidate"


class Adjusted(NamedTuple):
    """p-values of the candidates [m], NaN where there are none, and how they came about."""

    p_values: np.ndarray
    found: AdjustedFound


def adjust(record: Record, plain: np.ndarray, withheld: str | None) -> Adjusted:
    """The adjusted p-values of all candidates that have plain ones.

    Args:
      record: of the audit.
      plain: the plain p-values [m], NaN where there are none.
      withheld: why no candidate has any, if that is so.
    """
    known, of_candidates = record.arrays.known_statistics, record.arrays.statistics
    if withheld:
        return _none(plain, WITHHELD)
    if not record.members_known:
        return _none(plain, NO_MEMBERS)
    assert known is not None  # there are candidates
    assert of_candidates is not None
    fitted_to = ScoredPictures(record.calibration_scores().heldout, known.calibration).known()
    count, least = len(fitted_to.scores), evidence.least_to_fit(known.calibration)
    if count < least:
        return _none(plain, f"they take {least} held-out images in the calibration half, and it has {count}")
    return _adjust(record, plain, fitted_to, known, of_candidates)


def _adjust(
    record: Record,
    plain: np.ndarray,
    fitted_to: ScoredPictures,
    known: KnownStatistics,
    of_candidates: PictureStatistics,
) -> Adjusted:
    scores, heldout = record.varied()
    compared, heldout_groups = ScoredPictures(heldout.best, known.heldout), record.groups(record.arrays.heldout)
    candidates = ScoredPictures(scores.best, of_candidates.candidates)
    p_values = evidence.adjusted_p_values(candidates, compared, fitted_to, heldout_groups)
    members = ScoredPictures(record.scores(record.decider).member, known.members)
    power: tuple[PowerAt, ...] = ()
    # With variations, a candidate has the best score of several, and a member that of one.
    if record.variations is None and np.any(members.complete):
        groups = record.groups(record.split.member[members.complete])
        power = _power(members.known(), compared, fitted_to, groups, heldout_groups)
    found = AdjustedFound(
        missing="",
        fitted_to=len(fitted_to.scores),
        heldout=int(np.sum(compared.complete)),
        members=int(np.sum(members.complete)) if power else 0,
        power=power,
    )
    return Adjusted(np.where(np.isfinite(plain), p_values, np.nan), found)


def _power(
    members: ScoredPictures,
    compared: ScoredPictures,
    fitted_to: ScoredPictures,
    groups: np.ndarray | None,
    heldout_groups: np.ndarray | None,
) -> tuple[PowerAt, ...]:
    """The members with p <= level, by both p-values, at each level that can be reached."""
    scored = np.isfinite(compared.scores)
    of_scored, of_complete = (
        None if heldout_groups is None else heldout_groups[which] for which in (scored, compared.complete)
    )
    plain = evidence.conformal_p_values(members.scores, compared.scores[scored], of_scored)
    adjusted = evidence.adjusted_p_values(members, compared, fitted_to, heldout_groups)
    independent = evidence.count_groups(of_complete, int(np.sum(compared.complete)))
    reached = [level for level in LEVELS if evidence.smallest_p(independent) <= level]
    return tuple(
        PowerAt(level, evidence.power(plain, level, groups), evidence.power(adjusted, level, groups))
        for level in reached
    )


def _none(plain: np.ndarray, why: str) -> Adjusted:
    return Adjusted(np.full(len(plain), np.nan), AdjustedFound(missing=why))
