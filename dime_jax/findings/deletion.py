"""What a deletion check found, from its directory and without a model: compare.json and the lines of candidates.csv.

COMPARE/compare.json, compare.npz    what was compared, and what came out
COMPARE/run.json ... calibration/    with known members: how the attack was calibrated, on the model before
COMPARE/before/, COMPARE/after/      score tables of held-out images and candidates under each model
COMPARE/candidates.csv, report.html, figures/

compare.json holds the digests of the others, those of score tables by their manifests (see `digests`).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import evidence
from dime_jax.evidence import DeletionCheck, Likeness
from dime_jax.findings import withholding, wording
from dime_jax.findings.candidates import copy_notes
from dime_jax.findings.results import DecidedBy, DeletionFindings, DeletionRow, Headline, LikenessFound
from dime_jax.guards import model_check
from dime_jax.guards.wiring import DenoiserCheck
from dime_jax.protocol import stages
from dime_jax.protocol.arrays import CompareArrays
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.facts import BeforeAfter, CompareFacts
from dime_jax.protocol.frozen import by_label, frozen_attacks
from dime_jax.scoring import score_table
from dime_jax.scoring.score_table import ScoreTable

MODELS = ("before", "after")
_NO_HEADLINE_YET = Headline("", "", "", ())


class Deletion(NamedTuple):
    """compare.json, and the lines of candidates.csv."""

    results: DeletionFindings
    candidates: list[DeletionRow]


@dataclasses.dataclass(frozen=True, eq=False)
class CompareRecord:
    """A comparison whose queries are made.

    Attributes:
      directory: where it is.
      facts: what was compared.
      arrays: compare.npz.
    """

    directory: pathlib.Path
    facts: CompareFacts
    arrays: CompareArrays

    @property
    def calibrated(self) -> bool:
        """Whether there were members to calibrate with."""
        return self.facts.theory_setting is None

    @functools.cached_property
    def tables(self) -> BeforeAfter[ScoreTable]:
        """The score tables of both models."""
        return BeforeAfter(*(score_table.read_table(self.directory / name) for name in MODELS))

    @functools.cached_property
    def decider(self) -> Calibration:
        """The attack that decides."""
        frozen = frozen_attacks(self.directory, self.facts.theory_setting, self.tables.before.schedule)
        return by_label(frozen, self.facts.decided_by)

    @functools.cached_property
    def checks(self) -> BeforeAfter[DenoiserCheck | None]:
        """Whether each model predicts noise."""
        prints = (table.manifest["identity"]["model"] for table in self.tables.pair())
        return BeforeAfter(*(model_check.read_check(self.directory, fingerprint) for fingerprint in prints))

    @functools.cached_property
    def direction(self) -> evidence.Direction:
        """What the witness says on the calibration half."""
        return stages.read_direction(self.directory, ["calibration"]) if self.calibrated else evidence.NOT_CHECKED

    @property
    def grouped(self) -> bool:
        """Whether any image is in a group."""
        return bool(np.any(self.arrays.groups >= 0))

    @functools.cached_property
    def likeness(self) -> Likeness:
        """The candidates beside the held-out images, as pictures."""
        groups, statistics, heldout = self.arrays.groups, self.arrays.statistics, self.arrays.heldout
        of_heldout = dict(zip(heldout.tolist(), groups[: len(heldout)].tolist()))
        compared = np.array([of_heldout[index] for index in statistics.compared.tolist()])
        of_candidates, seed = groups[len(heldout) :], self.facts.settings.seed
        return evidence.likeness(statistics.candidates, statistics.of_compared, of_candidates, compared, seed)

    def scores(self, images: np.ndarray) -> np.ndarray:
        """Scores [2, n] of some images under both models; NaN without a finite answer."""
        return np.stack([stages.frozen_scores(table, self.decider, images) for table in self.tables.pair()])


def find_deletion(record: CompareRecord, warnings: Sequence[str] = ()) -> Deletion:
    """Everything that the comparison shows; `warnings` are added to its own."""
    facts, likeness = record.facts, record.likeness
    scores, heldout = record.scores(record.arrays.candidates), record.scores(record.arrays.heldout)
    answered, usable = (np.all(np.isfinite(pair), axis=0) for pair in (scores, heldout))
    like = ~likeness.unlike
    withheld = (
        withholding.no_denoiser_or_swapped(record.checks.pair(), record.direction)
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
        fingerprints=BeforeAfter(*(table.manifest["identity"]["model"] for table in record.tables.pair())),
        precision=record.tables.before.manifest["identity"]["precision"],
        seed=facts.settings.seed,
        queries_made=_queries(record),
        model_check=record.checks,
        warnings=(*warnings, *facts.image_warnings, *left_out, *(() if withheld else check.warnings)),
        headline=_NO_HEADLINE_YET,
    )
    return Deletion(dataclasses.replace(found, headline=wording.deletion_headline(found)), rows)


def _check(record: CompareRecord, scores: np.ndarray, heldout: np.ndarray, usable: np.ndarray) -> DeletionCheck:
    """The statistics, by the held-out images that both models gave an answer about."""
    settings, groups, of_heldout = record.facts.settings, None, None
    if record.grouped:
        of_heldout, groups = np.split(record.arrays.groups, [len(record.arrays.heldout)])
        of_heldout = of_heldout[usable]
    (before, after), known = scores, heldout[:, usable]
    return evidence.deletion_check(
        before, after, known[0], known[1], groups, settings.level, settings.seed, heldout_groups=of_heldout
    )


def _rows(record: CompareRecord, check: DeletionCheck | None, reasons: list[str]) -> list[DeletionRow]:
    """A line for each candidate, without p-values and flags where the verdict is withheld; unreadable ones follow."""
    notes, table = copy_notes(record.facts), record.tables.before
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
    return rows + [DeletionRow(id=one.id, reason=f"could not be read: {one.reason}") for one in unread]


def _queries(record: CompareRecord) -> int:
    """All that were made: under both models, for their checks, and to calibrate."""
    scored = sum(table.queries_made for table in record.tables.pair())
    checked = sum(check.queries for check in record.checks.pair() if check is not None)
    calibrated = score_table.read_table(record.directory / "calibration").queries_made if record.calibrated else 0
    return scored + checked + calibrated
