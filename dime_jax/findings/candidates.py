"""The candidates of an audit: p-values, verdicts, and the set they make."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from dime_jax import evidence
from dime_jax.data.variations import ORIGINAL, VARIATIONS
from dime_jax.evidence import FractionUsed, Judgement, KnownScores, Likeness, Ranks, SetTest, Verdict
from dime_jax.findings import withholding
from dime_jax.findings.ranking import find_power, rank, told_apart_by_reference, unused_p_values
from dime_jax.findings.results import AuditFindings, CandidateRow, CandidatesFound, LikenessFound, Power, Truth
from dime_jax.protocol.facts import RunFacts
from dime_jax.protocol.record import Record, finite
from dime_jax.scoring.score_table import NOT_FINITE, OK, UNREADABLE, ScoreTable

SURELY = 0.01
_PROBLEMS = {OK: "", NOT_FINITE: withholding.NO_FINITE_ANSWER, UNREADABLE: "could no longer be read when it was scored"}


@dataclasses.dataclass(frozen=True, eq=False)
class _Judged:
    """The candidates that were scored, in their order, and what may be said about them."""

    ids: Sequence[str]
    scores: np.ndarray
    variations: Sequence[str | None]
    ranks: Ranks
    independent: int  # groups of held-out images
    groups: np.ndarray | None
    likeness: Likeness
    reference_p: float | None
    withheld: str | None
    set_withheld: str | None
    p_values: np.ndarray
    not_used: np.ndarray
    power: tuple[Power, ...]
    verdicts: evidence.Verdicts
    reasons: Sequence[str]
    counted: np.ndarray  # in the test of the set


def find_candidates(record: Record, withheld: str | None) -> tuple[list[CandidateRow], CandidatesFound | None]:
    """Lines of candidates.csv, and their summary.

    Where verdicts are withheld from all, or one candidate is unlike the held-out images as a picture, there is neither
    p-value nor verdict: it would compare unlike things. So it would where the reference, which never saw the model,
    tells candidates from held-out images.
    """
    if record.candidates is None:
        return [], None
    judged = _judge(record, record.candidates, withheld)
    rows = _rows(judged, record) + [
        CandidateRow(id=one.id, reason=f"could not be used: {one.reason}") for one in record.facts.unusable_candidates
    ]
    return rows, _summary(judged, record, [row.verdict for row in rows])


def copy_notes(facts: RunFacts) -> dict[str, str]:
    """Of each candidate that has a copy, by its id, what that is."""
    return {copy.candidate: copy.note for copy in facts.duplicates.candidates}


def _judge(record: Record, table: ScoreTable, withheld: str | None) -> _Judged:
    indices, settings = record.arrays.candidates, record.facts.settings
    scores, ranks = record.varied()[0].best, rank(record, record.decider, table)
    names = [ORIGINAL, *VARIATIONS] if record.variations is not None else [None]
    groups, likeness = record.groups(indices), record.likeness
    reference_p = told_apart_by_reference(record, table)
    withheld = withheld or withholding.unlike_set(likeness) or withholding.told_apart(reference_p)
    comparable = ~likeness.unlike & (withheld is None)
    independent = evidence.count_groups(_heldout_groups(record, ranks), int(np.sum(np.isfinite(ranks.heldout))))
    p_values, not_used = (
        np.where(comparable, p_values, np.nan) for p_values in (ranks.p_values, unused_p_values(record, table))
    )
    ids, status = (dict(zip(table.index.tolist(), column)) for column in (table.ids, table.status.tolist()))
    problems = [_PROBLEMS[status[index]] for index in indices.tolist()]
    silent = withholding.REFERENCE_SILENT if record.decider.way.reference else ""
    problems = [own or ("" if np.isfinite(score) else silent) for own, score in zip(problems, scores.tolist())]
    return _Judged(
        [ids[index] for index in indices.tolist()],
        scores,
        [names[which] for which in record.varied()[0].which.tolist()],
        ranks,
        independent,
        groups,
        likeness,
        reference_p,
        withheld,
        withheld or withholding.too_few_answers(np.isfinite(scores), len(record.facts.unusable_candidates)),
        p_values,
        not_used,
        () if withheld else find_power(record, table),
        evidence.candidate_verdicts(p_values, independent, settings.level),
        withholding.reasons(withheld, problems, comparable),
        np.isfinite(scores) & (comparable | (withheld is not None)),
    )


def find_fraction(record: Record, rows: Sequence[CandidateRow], results: AuditFindings) -> FractionUsed | None:
    """Which fraction of the candidates was used, of those that may be judged.

    None where the set is not judged, where nobody looked whether the sets are swapped or of a kind, where pictures or
    captions alone explain how members differ, for the best of variations, which are not known of members, and where few
    images are known.
    """
    found = results.candidates
    if found is None or not record.members_known or found.set_withheld:
        return None
    if results.direction.judgement is Judgement.NOT_CHECKED or record.variations is not None:
        return None
    if any(blind is not None and blind.explained for blind in (results.blind_baseline, results.caption_baseline)):
        return None
    chose, frozen = record.calibration_images, record.decider
    if not frozen.plain:  # fitted to no image whose fraction is estimated, and to no member
        frozen = record.refit(frozen, chose.table, chose.split.heldout, frozen.way)
    scores, heldout = (varied.best for varied in record.varied(frozen))
    judged = [row.p_value is not None for row in rows[: len(scores)]]
    known = KnownScores(finite(record.scores(frozen).member), finite(heldout))
    if not any(judged) or min(map(np.size, known)) < evidence.LEAST_KNOWN:
        return None
    seed = record.facts.settings.seed
    return evidence.fraction_used(scores[judged], known, chose.scores(frozen).map(finite), seed=seed)


def _rows(judged: _Judged, record: Record) -> list[CandidateRow]:
    notes, truth = copy_notes(record.facts), record.arrays.truth
    return [
        CandidateRow(
            id=id,
            score=withholding.number(judged.scores[place]),
            p_value=withholding.number(judged.p_values[place]),
            q_value=withholding.number(judged.verdicts.q_values[place]),
            verdict=judged.verdicts.verdict[place],
            group=None if judged.groups is None else int(judged.groups[place]),
            variation=judged.variations[place],
            member=bool(truth[place]) if len(truth) else None,
            reason=judged.reasons[place],
            note=notes.get(id, ""),
            p_not_used=withholding.number(judged.not_used[place]),
        )
        for place, id in enumerate(judged.ids)
    ]


def _summary(judged: _Judged, record: Record, words: Sequence[Verdict]) -> CandidatesFound:
    """All of them together; `words` are the verdicts, also on those that could not be used."""
    verdicts, likeness, truth = judged.verdicts, judged.likeness, record.arrays.truth
    set_test, reverse = _set_tests(judged, record)
    return CandidatesFound(
        count=len(words),
        evidence=words.count(Verdict.EVIDENCE),
        no_evidence=words.count(Verdict.NO_EVIDENCE),
        cannot_tell=words.count(Verdict.CANNOT_TELL),
        level=record.facts.settings.level,
        heldout=judged.independent,
        smallest_p=verdicts.smallest_p,
        candidates_needed=verdicts.candidates_needed,
        heldout_needed=verdicts.heldout_needed,
        can_decide=verdicts.can_decide and judged.withheld is None,
        withheld=judged.withheld,
        set_withheld=judged.set_withheld,
        set_test=None if judged.set_withheld else set_test,
        less_like_members=reverse.p_value if reverse and reverse.p_value <= SURELY else None,
        likeness=LikenessFound(
            likeness.set_p, likeness.set_unlike, unlike=int(np.sum(likeness.unlike)), reference_p=judged.reference_p
        ),
        truth=_against_truth(verdicts.rejected, truth) if len(truth) else None,
        warnings=tuple(_warnings(judged, set_test, grouped_by_user=record.facts.settings.groups is not None)),
        adjusted=record.facts.adjusted,
        power=judged.power,
    )


def _set_tests(judged: _Judged, record: Record) -> tuple[SetTest | None, SetTest | None]:
    """Do the candidates look more like training images than held-out images do, and do they look less like them?"""
    counted, settings, ranks = judged.counted, record.facts.settings, judged.ranks
    if not counted.any():
        return None, None
    test = functools.partial(
        evidence.set_test,
        groups=None if judged.groups is None else judged.groups[counted],
        seed=settings.seed,
        heldout_groups=_heldout_groups(record, ranks),
        level=settings.level,
    )
    scores, heldout = ranks.scores[counted], finite(ranks.heldout)
    return test(scores, heldout), test(-scores, -heldout)


def _warnings(judged: _Judged, set_test: SetTest | None, grouped_by_user: bool) -> list[str]:
    warnings = [] if judged.withheld else list(judged.verdicts.warnings)
    if judged.set_withheld is None and set_test is not None:
        warnings += set_test.warnings
    if judged.set_withheld and not judged.withheld:
        warnings.append(f"the set is not judged: {judged.set_withheld}")
    if judged.groups is not None and not grouped_by_user:
        warnings.append("only near duplicates and known identities are grouped: other images count as independent")
    return warnings


def _heldout_groups(record: Record, ranks: Ranks) -> np.ndarray | None:
    """Groups of the held-out images that have a score."""
    return record.groups(record.arrays.heldout[np.isfinite(ranks.heldout)])


def _against_truth(flagged: np.ndarray, truth: np.ndarray) -> Truth:
    return Truth(
        members=int(truth.sum()),
        members_found=int(np.sum(flagged & truth)),
        others=int(np.sum(~truth)),
        false_alarms=int(np.sum(flagged & ~truth)),
    )
