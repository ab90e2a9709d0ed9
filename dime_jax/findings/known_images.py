"""What the known images show besides the rows: who wins, the blind baseline, and which images are missing."""

import numpy as np

from dime_jax import evidence
from dime_jax.attacks.dime import FAMILY as DIME
from dime_jax.data import Pair
from dime_jax.data.groups import ALONE
from dime_jax.data.role_checks import ROLES, RoleCounts
from dime_jax.evidence import metrics
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings.results import BlindFinding, ComparisonRow, CrowdingEffect
from dime_jax.protocol import stages
from dime_jax.protocol.arrays import BlindScores
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.frozen import best_calibrated, level_only, without_crowding
from dime_jax.protocol.record import KnownImages, Record
from dime_jax.scoring.score_table import NOT_FINITE

_DEPENDENT_SHARE = 0.1  # of the test images in groups, from which on it is said what allows for them


def find_comparisons(record: Record) -> tuple[ComparisonRow, ...]:
    """At each of DIME's budgets: DIME against the baseline that calibration found best at no more queries."""
    found = []
    for dime in (one for one in record.calibrations if one.attack == "dime"):
        budget = dime.queries
        rivals = [one for one in record.calibrations if one.family != DIME and one.queries <= budget]
        if not rivals:
            continue
        rival = best_calibrated(rivals)
        result = _compare(record, dime, rival)
        tpr_difference = result.tpr_difference_at_fpr[0.01]
        found.append(
            ComparisonRow(budget, dime.label, rival.label, result.auc_difference, result.p_value, tpr_difference)
        )
    return tuple(found)


def find_crowding(record: Record) -> tuple[CrowdingEffect, ...]:
    """At each of DIME's budgets: with crowding against without, at the same setting and each at its own."""
    found = []
    for dime in (one for one in record.calibrations if one.attack == "dime"):
        level, alone = without_crowding(dime), level_only(record.calibrations, dime.queries)
        assert level is not None
        same = _compare(record, dime, level)
        own = None if alone is None else _compare(record, dime, alone)
        found.append(
            CrowdingEffect(
                dime=dime.label,
                weight=dime.weights[1],
                same_setting=same.auc_difference,
                same_setting_p=same.p_value,
                level=None if alone is None else alone.label,
                own_setting=None if own is None else own.auc_difference,
                own_setting_p=None if own is None else own.p_value,
            )
        )
    return tuple(found)


def find_blind_baseline(record: Record) -> BlindFinding | None:
    """The classifier that never saw the model, beside the attack that decides on the same images."""
    return _beside_decider(record, record.arrays.blind, record.facts.blind_auc)


def find_caption_baseline(record: Record) -> BlindFinding | None:
    """The classifier that saw the captions alone; None if the model was not asked with them."""
    return _beside_decider(record, record.arrays.caption_blind, record.facts.caption_auc)


def _beside_decider(record: Record, arrays: BlindScores | None, auc: Estimate | None) -> BlindFinding | None:
    if arrays is None or auc is None:
        return None
    return beside(record.known, record.decider, arrays, auc, record.arrays.groups)


def beside(
    known: KnownImages, frozen: Calibration, arrays: BlindScores, auc: Estimate, groups: np.ndarray | None
) -> BlindFinding:
    """A classifier that never saw the model, beside a frozen attack on the same images.

    Args:
      known: the test half.
      frozen: the attack.
      arrays: the classifier's scores.
      auc: of the classifier.
      groups: of all images by position, -1 for one on its own; None for no groups.
    """
    sides = Pair(arrays.member, arrays.heldout)
    scores = sides.map(lambda side: stages.frozen_scores(known.table, frozen, side, known.pictures))
    of_blind = Pair(arrays.member_scores, arrays.heldout_scores)
    own = sides.map(lambda side: np.full(len(side), ALONE) if groups is None else groups[side])
    attack, blind, own = _paired(scores, of_blind, own)
    together = np.concatenate(own)
    gap = evidence.gap_over_blind(*attack, *blind, groups=together if np.any(together != ALONE) else None)
    return BlindFinding(
        auc=auc,
        gap=gap.difference,
        p_value=gap.p_value,
        fires=gap.blind_fires,
        explained=gap.explained and gap.blind_fires,
        images=(len(blind.member), len(blind.heldout)),
    )


def dependence_warning(record: Record) -> list[str]:
    """A warning if many images of the test half come in groups, which comparisons of attacks do not allow for."""
    groups = record.arrays.groups[np.concatenate([record.split.member, record.split.heldout])]
    _, counts = np.unique(groups[groups >= 0], return_counts=True)
    share = counts[counts > 1].sum() / max(1, groups.size)
    if share < _DEPENDENT_SHARE:
        return []
    return [
        f"{share:.0%} of the test images come in groups: the intervals of AUC, ASR and TPR and the bound on ε allow "
        "for that; comparisons of attacks treat images as independent, and are too sure here"
    ]


def count_unanswered(record: Record, of_reference: bool = False) -> RoleCounts:
    """How many images of each role the model, or the reference, gave no finite answer for, in any table."""
    halves = [record.calibration_images.table, record.known.table] if record.members_known else []
    tables = halves if record.candidates is None else [*halves, record.candidates]
    if of_reference:
        tables = [table.reference for table in tables if table.reference is not None]
    if not tables:
        return RoleCounts(0, 0, 0)
    flagged = np.unique(np.concatenate([table.index[table.status == NOT_FINITE] for table in tables]))
    candidates = np.isin(flagged, record.arrays.candidates)
    splits = stages.read_halves(record.directory) if record.members_known else [record.split]
    members = np.isin(flagged, np.concatenate([split.member for split in splits]))
    return RoleCounts(*(int(these.sum()) for these in (members, ~members & ~candidates, candidates)))


def unanswered_warnings(counts: RoleCounts, of_reference: RoleCounts) -> list[str]:
    """Warn about images without a finite answer of the model, and of the reference, if there are any."""
    lines = (counts, "the model", "they were left out"), (of_reference, "the reference", "nothing is read beside it")
    named = [", ".join(f"{n} {ROLES[role]}" for role, n in vars(these).items() if n) for these, *_ in lines]
    return [f"{who} gave no finite answer for {of}: {so}" for of, (_, who, so) in zip(named, lines) if of]


def _compare(record: Record, first: Calibration, second: Calibration) -> metrics.Comparison:
    """Two frozen attacks on the test half, on the images that both have scores for."""
    ours, theirs = _paired(record.scores(first), record.scores(second))
    return metrics.compare(ours, theirs, seed=record.facts.settings.seed)


def _paired(*attacks: Pair[np.ndarray]) -> list[Pair[np.ndarray]]:
    """The images that every attack has a score for."""
    usable = Pair(*(np.all(np.isfinite(side), axis=0) for side in zip(*attacks)))
    return [Pair(*(side[keep] for side, keep in zip(attack, usable))) for attack in attacks]
