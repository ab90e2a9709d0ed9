"""What an audit found, from its record and without a model: `find` gives results.json and the lines of candidates.csv.

`results.AuditFindings` says what each part means.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import evidence
from dime_jax.evidence import EpsilonBound
from dime_jax.findings import withholding, wording
from dime_jax.findings.candidates import find_candidates, find_fraction
from dime_jax.findings.known_images import (
    count_unanswered,
    dependence_warning,
    find_blind_baseline,
    find_caption_baseline,
    find_comparisons,
    find_crowding,
    unanswered_warnings,
)
from dime_jax.findings.results import AuditDecidedBy, AuditFindings, CandidateRow, Headline
from dime_jax.guards import model_check
from dime_jax.protocol import beside, stages
from dime_jax.protocol.evaluation import Evaluation
from dime_jax.protocol.record import Record, finite

_NO_HEADLINE_YET = Headline("", "", "", ())


class Findings(NamedTuple):
    """results.json, and the lines of candidates.csv."""

    results: AuditFindings
    candidates: list[CandidateRow]


def find(record: Record, warnings: Sequence[str] = ()) -> Findings:
    """Everything that the record shows; `warnings` are added to its own."""
    facts = record.facts
    if record.members_known:
        evaluation = stages.evaluation(record.directory, groups=record.arrays.groups)
    else:
        evaluation = _without_members(record)
    unanswered = count_unanswered(record)
    withheld = _withheld(record, evaluation)
    rows, candidates = find_candidates(record, withheld)
    warnings = (
        *warnings,
        *evaluation.warnings,
        *facts.warnings,
        *(dependence_warning(record) if record.members_known else ()),
        *unanswered_warnings(unanswered, count_unanswered(record, of_reference=True)),
    )
    tables = [table for table in (record.candidates, record.variations) if table]
    halves = [record.calibration_images.table, record.known.table] if record.members_known else []
    evaluation = dataclasses.replace(
        evaluation,
        queries_made=evaluation.queries_made + sum(table.queries_made for table in tables),
        reference_queries_made=beside.queries_made(record.directory, [*halves, *tables]),
        warnings=warnings,
    )
    found = AuditFindings(
        **vars(evaluation),
        decided_by=_decided_by(record),
        comparisons=find_comparisons(record),
        blind_baseline=find_blind_baseline(record),
        epsilon_lower_bound=_epsilon(record) if record.members_known and withheld is None else None,
        candidates=candidates,
        duplicates=facts.duplicates,
        images=dataclasses.replace(facts.images, no_finite_answer=unanswered),
        grid_size=facts.grid_size,
        model=facts.model,
        settings=facts.settings,
        environment=facts.environment,
        headline=_NO_HEADLINE_YET,
        captions=facts.captions,
        reference=facts.reference,
        caption_baseline=find_caption_baseline(record),
        crowding=find_crowding(record),
    )
    found = dataclasses.replace(found, fraction_used=find_fraction(record, rows, found))
    return Findings(dataclasses.replace(found, headline=wording.headline(found)), rows)


def _without_members(record: Record) -> Evaluation:
    """The part of the results that needs no known members."""
    table, reference = record.known.table, record.known.table.reference
    identity = table.manifest["identity"]
    check = model_check.read_check(record.directory, identity["model"])
    of_reference = {} if reference is None else {"reference": reference.manifest["identity"]["model"]}
    return Evaluation(
        results=(),
        fingerprints={"model": identity["model"], **of_reference, "heldout_data": identity["data"]},
        precision=identity["precision"],
        seed=identity["seed"],
        queries_made=check.queries if check else 0,
        model_check=check,
        warnings=tuple(beside.noise_warnings(table, [stages.frozen_job(record.decider)])),
    )


def _decided_by(record: Record) -> AuditDecidedBy:
    decider = record.decider
    return AuditDecidedBy(
        attack=decider.attack,
        queries_per_image=decider.queries,
        label=decider.label,
        setting=decider.setting,
        calibration_auc=decider.auc,
        chosen=record.facts.chosen,
        adjusted=record.facts.adjusted,
        way=record.facts.way,
    )


def _epsilon(record: Record) -> EpsilonBound:
    scores, split, settings = record.scores(record.decider), record.known.split, record.facts.settings
    member, heldout = (
        record.arrays.groups[side[np.isfinite(of)]] for side, of in zip((split.member, split.heldout), scores)
    )
    return evidence.epsilon_lower_bound(
        *scores.map(finite), delta=settings.delta, randomised=settings.randomised, groups=(member, heldout)
    )


def _withheld(record: Record, evaluation: Evaluation) -> str | None:
    """Why no verdict can be given on any candidate, whatever its score, if there is a reason."""
    row = evaluation.row(record.facts.decided_by)
    decides = None if row is None else row.read(record.facts.taken_out)
    worse = "the attack that decides does worse than chance on the test half"
    return (
        withholding.no_denoiser_or_swapped([evaluation.model_check], evaluation.direction)
        or withholding.partial(evaluation.reference_direction, record.facts.taken_out)
        or (worse if decides is not None and decides.auc.high < 0.5 else None)
    )
