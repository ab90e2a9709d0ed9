"""Candidates among held-out images: the p-values that decide, those that do not, and scores for tests of the set.

With something taken out of the scores, the p-value of a candidate comes from a fit over the held-out images and this
candidate alone, so that it does not depend on who else was asked about; a test of the set uses one pile of all.
"""

import itertools

import numpy as np

from dime_jax import evidence
from dime_jax.attacks import describe_attack
from dime_jax.evidence import Pile, Ranks, Way
from dime_jax.findings.results import Power
from dime_jax.protocol import calibration, stages, statistics
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.record import CompareRecord, Record
from dime_jax.scoring.score_table import ScoreTable

LEVELS = (0.05, 0.01)  # at which power is stated
_MOST_MEMBERS = 300  # known members that power is counted on: each takes a fit of its own
_RESAMPLES = 4_999


def rank(
    record: Record | CompareRecord, frozen: Calibration, table: ScoreTable, beside: np.ndarray | None = None
) -> Ranks:
    """Rank the candidates of a score table among the held-out images in it.

    Args:
      record: of the audit or comparison.
      frozen: an attack, plain or adjusted.
      table: of candidates and held-out images, under one of the models.
      beside: which of the held-out images to rank among, bool [n]; all if None. `Ranks.heldout` is of these.
    """
    kept = np.ones(len(record.arrays.heldout), bool) if beside is None else beside
    groups, seed = record.arrays.groups[record.arrays.heldout[kept]], record.facts.settings.seed
    if frozen.plain:
        scores, others = (varied.best for varied in record.varied(frozen, table))
        others = others[kept]
        known = np.isfinite(others)
        return Ranks(evidence.conformal_p_values(scores, others[known], groups[known]), scores, others)
    candidates, heldout = record.piles(frozen, table)
    heldout = heldout.take(kept)
    p_values = _p_values(candidates, heldout, groups, frozen, seed)
    together = (heldout + candidates).residuals(_combine(frozen))
    return Ranks(p_values, together[len(heldout.known) :], together[: len(heldout.known)])


def unused_p_values(record: Record, table: ScoreTable) -> np.ndarray:
    """The p-values [m] of the same attack that do not decide: plain ones if adjusted ones do, and the other way round.

    NaN where nobody looked at the pictures.
    """
    decider = record.decider
    if not decider.plain:
        return rank(record, decider._replace(adjustment=None), table).p_values
    if record.pictures is None:
        return np.full(len(record.arrays.candidates), np.nan)
    return rank(record, calibration.to_adjust(decider), table).p_values


def told_apart_by_reference(record: Record, table: ScoreTable) -> float | None:
    """The p-value, for either side, of the reference's own scores telling candidates from held-out images.

    If it was trained on none of them, or on all alike, and they are of one kind, these scores can be swapped as the
    pictures can, whichever of the candidates the model was trained on. Each score is looked at as it is, and minus what
    the picture explains; the p-value allows for all looks. None if no reference is taken out of the scores.
    """
    frozen = record.decider
    if not frozen.way.reference:
        return None
    heldout, images = record.arrays.heldout, np.concatenate([record.arrays.heldout, record.arrays.candidates])
    pile = calibration.to_adjust(frozen, Way.BESIDE if record.pictures is None else Way.BESIDE_ADJUSTED).pile(
        stages.terms_of(table, frozen, images), statistics.of_images(record.pictures, images)
    )
    first = np.arange(len(images)) < len(heldout)
    sides = [pile.known & first, pile.known & ~first]
    if not all(side.any() for side in sides):
        return None
    own, pictures = pile.statistics[:, :, 0, -1], pile.statistics[:, :, 0, :-1]
    left = evidence.difficulty_residuals(own[:, pile.known], pictures[:, pile.known])
    looks, found = [*own[:, pile.known], *left], []
    groups = [record.groups(images[side]) for side in sides]
    for scores, sign in itertools.product(looks, (1, -1)):
        of_heldout, of_candidates = (sign * scores[side[pile.known]] for side in sides)
        test = evidence.set_test(
            of_candidates,
            of_heldout,
            groups[1],
            record.facts.settings.seed,
            heldout_groups=groups[0],
            resamples=_RESAMPLES,
        )
        found.append(test.p_value)
    return min(1.0, len(found) * min(found))


def find_power(record: Record, table: ScoreTable) -> tuple[Power, ...]:
    """Which share of the known members the p-values find, at each level that they can reach.

    None where members are not known, and for the best of variations, which are not known of members.
    """
    members = record.split.member
    if record.variations is not None or not len(members):
        return ()
    decider, settings = record.decider, record.facts.settings
    if len(members) > _MOST_MEMBERS:
        members = np.random.default_rng(settings.seed).choice(members, _MOST_MEMBERS, replace=False)
    groups = record.arrays.groups[record.arrays.heldout]
    if decider.plain:
        scores = stages.frozen_scores(record.known.table, decider, members)
        heldout = record.own_scores(record.arrays.heldout)
        known = np.isfinite(heldout)
        p_values = evidence.conformal_p_values(scores, heldout[known], groups[known])
    else:
        terms = stages.terms_of(record.known.table, decider, members)
        own = decider.pile(terms, statistics.of_images(record.pictures, members))
        _, beside = record.piles(decider, table)
        p_values, known = _p_values(own, beside, groups, decider, settings.seed), beside.known
    counted = np.isfinite(p_values)
    if not counted.any():
        return ()
    independent = evidence.count_groups(groups[known], int(known.sum()))
    of_members = record.arrays.groups[members[counted]]
    return tuple(
        Power(level, evidence.power(p_values[counted], level, of_members))
        for level in LEVELS
        if evidence.smallest_p(independent) <= level
    )


def _p_values(images: Pile, heldout: Pile, groups: np.ndarray, frozen: Calibration, seed: int) -> np.ndarray:
    """Adjusted p-values; held-out images without a finite answer are left out."""
    known = heldout.known
    return evidence.difficulty_p_values(
        *images[:2], *heldout.take(known)[:2], groups[known], _combine(frozen), seed, images.unpenalised
    )


def _combine(frozen: Calibration) -> evidence.Combine | None:
    return frozen.combine if describe_attack(frozen.attack).rule.covariates else None
