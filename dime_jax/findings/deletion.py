"""What a deletion check found, from its directory and without a model: compare.json and the lines of candidates.csv.

COMPARE/compare.json, compare.npz    what was compared, and what came out
COMPARE/run.json ... calibration/    with known members: how the attack was calibrated, on the model before
COMPARE/before/, COMPARE/after/      score tables of held-out images and candidates under each model
COMPARE/candidates.csv, report.html, figures/

compare.json holds the digests of the others, those of score tables by their manifests (see `digests`).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import evidence
from dime_jax.evidence import DeletionCheck
from dime_jax.findings import withholding, wording
from dime_jax.findings.candidates import copy_notes
from dime_jax.findings.ranking import rank
from dime_jax.findings.results import DecidedBy, DeletionFindings, DeletionRow, Headline, LikenessFound
from dime_jax.protocol import stages
from dime_jax.protocol.facts import BeforeAfter
from dime_jax.protocol.record import CompareRecord
from dime_jax.scoring import score_table

_NO_HEADLINE_YET = Headline("", "", "", ())


class Deletion(NamedTuple):
    """compare.json, and the lines of candidates.csv."""

    results: DeletionFindings
    candidates: list[DeletionRow]


def find_deletion(record: CompareRecord, warnings: Sequence[str] = ()) -> Deletion:
    """Everything that the comparison shows; `warnings` are added to its own."""
    facts, likeness = record.facts, record.likeness
    scores, heldout = _scores(record, record.arrays.candidates), _scores(record, record.arrays.heldout)
    answered, usable = (np.all(np.isfinite(pair), axis=0) for pair in (scores, heldout))
    like = ~likeness.unlike
    withheld = (
        withholding.no_denoiser_or_swapped(record.checks, record.direction)
        or withholding.too_few_answers(answered, len(facts.unusable_candidates))
        or withholding.unlike_set(likeness)
    )
    if withheld is None:
        scores = np.where(like, scores, np.nan)
    check = _check(record, scores, heldout, usable)
    problems = ["" if known else withholding.NO_FINITE_ANSWER for known in answered.tolist()]
    rows = _rows(record, None if withheld else check, withholding.reasons(withheld, problems, like))
    dropped = int(np.sum(~usable))
    left_out = [f"{withholding.NO_FINITE_ANSWER} for {dropped} held-out images: they were left out"] if dropped else []
    found = DeletionFindings(
        facts=facts,
        verdict=None if withheld else check.verdict,
        withheld=withheld,
        direction=record.direction,
        likeness=LikenessFound(likeness.set_p, likeness.set_unlike),
        set_before=None if withheld else check.set_before,
        set_after=None if withheld else check.set_after,
        change=None if withheld else check.change,
        p_cutoff=check.p_cutoff,
        rule=check.rule,
        flagged=BeforeAfter(sum(row.flagged_before for row in rows), sum(row.flagged_after for row in rows)),
        decided_by=DecidedBy(
            attack=record.decider.attack,
            queries_per_image=record.decider.queries,
            setting=record.decider.setting,
            chosen=facts.chosen,
        ),
        fingerprints=BeforeAfter(*(table.manifest["identity"]["model"] for table in record.tables)),
        precision=record.tables[0].manifest["identity"]["precision"],
        seed=facts.settings.seed,
        queries_made=_queries(record),
        model_check=BeforeAfter(*record.checks),
        warnings=(*warnings, *facts.image_warnings, *left_out, *(() if withheld else check.warnings)),
        headline=_NO_HEADLINE_YET,
    )
    return Deletion(dataclasses.replace(found, headline=wording.deletion_headline(found)), rows)


def _scores(record: CompareRecord, images: np.ndarray) -> np.ndarray:
    """Plain scores [2, n] of some images under both models; NaN without a finite answer."""
    plain = record.decider._replace(adjustment=None)
    return np.stack([stages.frozen_scores(table, plain, images) for table in record.tables])


def _check(record: CompareRecord, scores: np.ndarray, heldout: np.ndarray, usable: np.ndarray) -> DeletionCheck:
    """The statistics, by the held-out images that both models gave an answer about."""
    arrays, settings, groups, of_heldout = record.arrays, record.facts.settings, None, None
    if record.groups(np.concatenate([arrays.heldout, arrays.candidates])) is not None:
        groups, of_heldout = arrays.groups[arrays.candidates], arrays.groups[arrays.heldout[usable]]
    (before, after), known, ranks = scores, heldout[:, usable], None
    if not record.decider.plain:
        one, two = (rank(record, record.decider, table, usable) for table in record.tables)
        ranks = one, two
    return evidence.deletion_check(
        before, after, known[0], known[1], groups, settings.level, settings.seed, heldout_groups=of_heldout, ranks=ranks
    )


def _rows(record: CompareRecord, check: DeletionCheck | None, reasons: list[str]) -> list[DeletionRow]:
    """A line for each candidate, without p-values and flags where the verdict is withheld; unreadable ones follow."""
    notes, table = copy_notes(record.facts), record.tables[0]
    ids = dict(zip(table.index.tolist(), table.ids))
    rows = []
    for place, (index, reason) in enumerate(zip(record.arrays.candidates.tolist(), reasons)):
        row = DeletionRow(id=ids[index], reason=reason, note=notes.get(ids[index], ""))
        if check is not None:
            row = dataclasses.replace(
                row,
                p_before=withholding.number(check.p_before[place]),
                p_after=withholding.number(check.p_after[place]),
                flagged_before=bool(check.flagged_before[place]),
                flagged_after=bool(check.flagged_after[place]),
            )
        rows.append(row)
    unread = record.facts.unusable_candidates
    return rows + [DeletionRow(id=one.id, reason=f"could not be used: {one.reason}") for one in unread]


def _queries(record: CompareRecord) -> int:
    """All that were made: under both models, for their checks, and to calibrate."""
    scored = sum(table.queries_made for table in record.tables)
    checked = sum(check.queries for check in record.checks if check is not None)
    calibrated = score_table.read_table(record.directory / "calibration").queries_made if record.members_known else 0
    return scored + checked + calibrated
