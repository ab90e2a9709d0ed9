"""What an audit found: results.json and candidates.csv from its record, without a model.

results.json (`schema_version` 1), besides what `pipeline.evaluation` puts there:

  headline                {answer, detail, candidates, alarms}: the first screen in words
  decided_by              {attack, queries_per_image, setting, calibration_auc, chosen}: the attack behind the verdicts
  comparisons             DIME against the best baseline at no more queries, paired on the test half
  model_check             null, or `DenoiserCheck`: does the model predict noise at all, as it was asked?
  direction               {judgement, may_learn, aucs, error_rate}: what a witness of fixed direction says about which
                          set is which ("above", "below": the wrong way round, "unsure", "not checked")
  candidates              null, or {count, evidence, no_evidence, cannot_tell, level, heldout, smallest_p,
                          candidates_needed, heldout_needed, can_decide, withheld, set_test, likeness, truth,
                          warnings}; one line for each in candidates.csv. `withheld` says why no verdict is given on
                          any of them: their p-values and `set_test` are then null; `set_withheld` why the set is not
                          judged
  blind_baseline          null, or {auc, gap, p_value, fires, explained, images}: a classifier that never saw
                          the model, and what the attack has over it
  epsilon_lower_bound     null, or `evidence.EpsilonBound`
  duplicates              pairs and clusters found, and where; `candidates` lists those of which there are copies, as
                          {candidate, role, other, kind}
  images, grid_size       how many, by role and half, and by role how many could not be used and for how many the model
                          gave no finite answer; how many settings calibration chose from
  model, settings, environment, warnings

Numbers that are not finite are null. The same record gives the same files.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dime_jax import digests, evidence, metrics, model_check, pipeline, score_table
from dime_jax._csv import write_csv
from dime_jax.auditing.images import CandidateCopy
from dime_jax.auditing.record import Record, Sides, best_calibrated, label
from dime_jax.data.batches import MAX_UNUSABLE_FRACTION
from dime_jax.evidence import Judgement
from dime_jax.report import wording
from dime_jax.score_table import NOT_FINITE, OK, UNREADABLE, ScoreTable

DIME = ("dime", "dime_central", "dime_theory", "level_only", "crowding_only")
_VERDICTS = {
    "evidence": evidence.EVIDENCE,
    "no_evidence": evidence.NO_EVIDENCE,
    "cannot_tell": evidence.CANNOT_TELL,
}
_SURELY = 0.01
NO_FINITE_ANSWER = "the model gave no finite answer"
UNLIKE = "as a picture it is unlike the held-out images"
UNLIKE_SET = "as pictures they are unlike the held-out images"
_DEPENDENT_SHARE = 0.1  # of the test images in groups, from which on it is said that intervals are too narrow


class Findings(NamedTuple):
    """results.json, and one dictionary for each line of candidates.csv."""

    results: dict[str, Any]
    candidates: list[dict[str, Any]]


def find(record: Record) -> Findings:
    """Everything that the record shows."""
    facts, settings = record.facts, record.facts["settings"]
    results = pipeline.evaluation(record.directory) if record.members_known else _without_members(record)
    unanswered = _unanswered(record)
    results["warnings"] += digests.warn_of_unsealed(record.directory, ["audit.json"])
    results["warnings"] += facts["warnings"] + (_dependence(record) if record.members_known else [])
    results["warnings"] += _unanswered_warning(unanswered)
    decider = record.decider
    scores = record.scores(decider).finite()
    results["decided_by"] = {
        "attack": decider.attack,
        "queries_per_image": pipeline.frozen_job(decider).queries,
        "label": label(decider),
        "setting": decider.setting,
        "calibration_auc": decider.auc,
        "chosen": facts["chosen"],
    }
    results["comparisons"] = _comparisons(record)
    results["blind_baseline"] = _blind_baseline(record)
    results["epsilon_lower_bound"] = None
    if record.members_known and _withheld(results) is None:
        bound = evidence.epsilon_lower_bound(
            scores.member, scores.heldout, delta=settings["delta"], randomised=settings["randomised"]
        )
        results["epsilon_lower_bound"] = bound._asdict()
    rows, results["candidates"] = _candidates(record, _withheld(results))
    results["queries_made"] += record.candidates.queries_made if record.candidates else 0
    for name in ("duplicates", "images", "grid_size", "model", "settings", "environment"):
        results[name] = facts[name]
    results["images"] = {**facts["images"], "no_finite_answer": unanswered}
    results = plain(results)
    results["headline"] = wording.headline(results)
    return Findings(results, plain(rows))


def write(record: Record, findings: Findings) -> None:
    """Write results.json and, if there are candidates, candidates.csv."""
    if findings.candidates:
        write_csv(record.directory / "candidates.csv", findings.candidates)
    pipeline.write_json(record.directory / "results.json", findings.results)


def plain(value: Any) -> Any:
    """Records as objects, arrays as lists, NumPy numbers as numbers; null for NaN and infinities."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _without_members(record: Record) -> dict[str, Any]:
    """The part of results.json that needs no known members."""
    identity = record.reference.manifest["identity"]
    check = model_check.read_check(record.directory, identity["model"])
    return {
        "schema_version": pipeline.SCHEMA_VERSION,
        "results": [],
        "fingerprints": {"model": identity["model"], "heldout_data": identity["data"]},
        "precision": identity["precision"],
        "seed": identity["seed"],
        "queries_made": check.queries if check else 0,
        "model_check": None if check is None else check.to_json(),
        "direction": evidence.NOT_CHECKED.to_json(),
        "warnings": [],
    }


def _comparisons(record: Record) -> list[dict[str, Any]]:
    """At each of DIME's budgets: DIME against the baseline that calibration found best at no more queries."""
    found = []
    for dime in (one for one in record.calibrations if one.attack == "dime"):
        budget = pipeline.frozen_job(dime).queries
        rivals = [
            one for one in record.calibrations if one.attack not in DIME and pipeline.frozen_job(one).queries <= budget
        ]
        if not rivals:
            continue
        rival = best_calibrated(rivals)
        ours, theirs = _paired(record.scores(dime), record.scores(rival))
        result = metrics.compare(ours, theirs, seed=record.facts["settings"]["seed"])
        found.append(
            {
                "budget": budget,
                "dime": label(dime),
                "baseline": label(rival),
                "auc_difference": result.auc_difference,
                "p_value": result.p_value,
                "tpr_difference_at_1pct_fpr": result.tpr_difference_at_fpr[0.01],
            }
        )
    return found


def _paired(*attacks: Sides) -> list[Sides]:
    """The images that every attack has a score for."""
    usable = Sides(*(np.all(np.isfinite(side), axis=0) for side in zip(*attacks)))
    return [Sides(*(side[keep] for side, keep in zip(attack, usable))) for attack in attacks]


def _dependence(record: Record) -> list[str]:
    """A warning if many images of the test half come in groups, which only the tests of sets allow for."""
    groups = record.arrays["groups"][np.concatenate([record.split.member, record.split.heldout])]
    _, counts = np.unique(groups[groups >= 0], return_counts=True)
    share = counts[counts > 1].sum() / max(1, groups.size)
    if share < _DEPENDENT_SHARE:
        return []
    return [
        f"{share:.0%} of the test images belong to {np.sum(counts > 1)} groups of several: intervals of AUC, ASR and "
        "TPR, comparisons of attacks and the bound on ε take images as independent, and are too narrow here"
    ]


def _blind_baseline(record: Record) -> dict[str, Any] | None:
    arrays = record.arrays
    if "blind_member_scores" not in arrays:
        return None
    blind = Sides(arrays["blind_member_scores"], arrays["blind_heldout_scores"])
    attack = Sides(
        *(pipeline.frozen_scores(record.reference, record.decider, arrays[f"blind_{side}"]) for side in Sides._fields)
    )
    (attack, blind) = _paired(attack, blind)
    gap = evidence.gap_over_blind(*attack, *blind)
    return {
        "auc": record.facts["blind_auc"],
        "gap": gap.difference,
        "p_value": gap.p_value,
        "fires": gap.blind_fires,
        "explained": gap.explained and gap.blind_fires,
        "images": [len(blind.member), len(blind.heldout)],
    }


def _unanswered(record: Record) -> dict[str, int]:
    """How many images of each role the model gave no finite answer for, in any table of the audit."""
    halves = [score_table.read_table(record.directory / half) for half in pipeline.HALVES if record.members_known]
    tables = halves if record.candidates is None else [*halves, record.candidates]
    flagged = np.unique(np.concatenate([table.index[table.status == NOT_FINITE] for table in tables]))
    candidates = np.isin(flagged, record.arrays["candidates"])
    splits = pipeline.read_halves(record.directory) if record.members_known else [record.split]
    members = np.isin(flagged, np.concatenate([split.member for split in splits]))
    counts = {"members": members, "heldout": ~members & ~candidates, "candidates": candidates}
    return {role: int(these.sum()) for role, these in counts.items()}


def _unanswered_warning(unanswered: Mapping[str, int]) -> list[str]:
    words = {"members": "members", "heldout": "held-out images", "candidates": "candidates"}
    counts = ", ".join(f"{count} {words[role]}" for role, count in unanswered.items() if count)
    return [f"the model gave no finite answer for {counts}: they were left out"] if counts else []


def explained_rows(
    rows: Sequence[dict[str, Any]], reasons: Sequence[str], facts: Mapping[str, Any], unread: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of candidates with the columns `reason` and `note`; those that could not be read follow.

    Args:
      rows: one for each candidate that was scored, at least one.
      reasons: why nothing can be told about it, "" where that needs no word.
      facts: of the record; they name the candidates that could not be read, and those of which there are copies.
      unread: what stands in the columns of one that could not be read; nothing in the others.
    """
    copies = [CandidateCopy(**copy) for copy in facts["duplicates"].get("candidates", ())]
    notes = {copy.candidate: copy.note for copy in copies}
    scored = [{**row, "reason": reason, "note": notes.get(row["id"], "")} for row, reason in zip(rows, reasons)]
    return scored + [
        {**dict.fromkeys(scored[0]), **unread, "id": one["id"], "reason": f"could not be read: {one['reason']}"}
        for one in facts.get("unusable_candidates", ())
    ]


def _withheld(results: Mapping[str, Any]) -> str | None:
    """Why no verdict can be given on any candidate, whatever its score, if there is a reason."""
    if model_check.failures(results):
        return "the model does not predict noise the way it was asked to"
    if results["direction"]["judgement"] == Judgement.BELOW:
        return "members and held-out images look swapped"
    row = next(
        (
            row
            for row in results["results"]
            if f"{row['attack']}@{row['queries_per_image']}" == results["decided_by"]["label"]
        ),
        None,
    )
    if row is not None and row["auc"]["high"] < 0.5:
        return "the attack that decides does worse than chance on the test half"
    return None


def _candidates(record: Record, withheld: str | None) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Lines of candidates.csv, and their summary.

    Where verdicts are withheld from all, or one candidate is unlike the held-out images as a picture, there is neither
    p-value nor verdict: it would compare unlike things.
    """
    table, level = record.candidates, record.facts["settings"]["level"]
    if table is None:
        return [], None
    indices = record.arrays["candidates"]
    scores, heldout = record.candidate_scores()
    groups, truth = record.groups(indices), record.arrays["truth"]
    likeness = _likeness(record)
    like = np.ones(len(indices), bool) if likeness is None else ~likeness.unlike
    if likeness is not None and (likeness.set_unlike or np.sum(likeness.unlike) > len(indices) / 2):
        withheld = withheld or UNLIKE_SET
    set_withheld = withheld or too_few_answers(np.isfinite(scores))
    comparable = like & (withheld is None)
    counted = comparable & np.isfinite(scores) if withheld is None else np.isfinite(scores)
    p_values = np.where(comparable, evidence.conformal_p_values(scores, heldout), np.nan)
    verdicts = evidence.candidate_verdicts(p_values, len(heldout), level)
    reasons = _reasons(table, indices, comparable, withheld)
    ids = dict(zip(table.index.tolist(), table.ids))
    columns: dict[str, Sequence[Any] | np.ndarray] = {
        "id": [ids[index] for index in indices.tolist()],
        "score": scores,
        "p_value": p_values,
        "q_value": verdicts.q_values,
        "verdict": verdicts.verdict,
    }
    if groups is not None:
        columns["group"] = groups
    if len(truth):
        columns["member"] = truth
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    rows = explained_rows(rows, reasons, record.facts, {"verdict": evidence.CANNOT_TELL})
    all_words = [row["verdict"] for row in rows]
    heldout_groups, seed = _heldout_groups(record, table), record.facts["settings"]["seed"]
    of_counted = None if groups is None else groups[counted]
    set_test = reverse = None
    if counted.any():
        set_test, reverse = (
            evidence.set_test(
                sign * scores[counted], sign * heldout, of_counted, seed, heldout_groups=heldout_groups, level=level
            )
            for sign in (1, -1)
        )
    warnings = [] if withheld else list(verdicts.warnings)
    warnings += [] if set_withheld or set_test is None else set_test.warnings
    warnings += [f"the set is not judged: {set_withheld}"] if set_withheld and not withheld else []
    if groups is not None and "groups" not in record.facts["settings"]:
        warnings.append("only near duplicates and known identities are grouped: other images count as independent")
    summary = {
        "count": len(rows),
        **{name: all_words.count(word) for name, word in _VERDICTS.items()},
        "level": level,
        "heldout": len(heldout),
        "smallest_p": verdicts.smallest_p,
        "candidates_needed": verdicts.candidates_needed,
        "heldout_needed": verdicts.heldout_needed,
        "can_decide": verdicts.can_decide and withheld is None,
        "withheld": withheld,
        "set_withheld": set_withheld,
        "set_test": None if set_withheld else set_test,
        # p-value of looking *less* like training images than held-out images do, where that is sure.
        "less_like_members": reverse.p_value if reverse and reverse.p_value <= _SURELY else None,
        "likeness": None
        if likeness is None
        else {"set_p": likeness.set_p, "set_unlike": likeness.set_unlike, "unlike": int(np.sum(likeness.unlike))},
        "truth": _against_truth(verdicts.verdict, truth) if len(truth) else None,
        "warnings": warnings,
    }
    return rows, summary


def too_few_answers(answered: np.ndarray) -> str | None:
    """Why a set of candidates is not judged, if too many of them got no answer: those left may have been chosen."""
    missing = int(np.sum(~answered))
    if missing <= MAX_UNUSABLE_FRACTION * len(answered):
        return None
    return f"the model gave no finite answer for {missing} of {len(answered)} candidates"


def _likeness(record: Record) -> evidence.Likeness | None:
    """The candidates beside the held-out images, as pictures; None for audits from before that was looked at."""
    arrays = record.arrays
    if "candidate_statistics" not in arrays:
        return None
    return evidence.likeness(
        arrays["candidate_statistics"],
        arrays["compared_statistics"],
        record.groups(arrays["candidates"]),
        record.groups(arrays["compared"]),
        record.facts["settings"]["seed"],
    )


def _reasons(table: ScoreTable, indices: np.ndarray, comparable: np.ndarray, withheld: str | None) -> list[str]:
    """Why a candidate got no p-value; "" where it got one."""
    if withheld is not None:
        return [withheld] * len(indices)
    words = {OK: "", NOT_FINITE: NO_FINITE_ANSWER, UNREADABLE: "could no longer be read when it was scored"}
    status = dict(zip(table.index.tolist(), table.status.tolist()))
    return [words[status[index]] or ("" if like else UNLIKE) for index, like in zip(indices.tolist(), comparable)]


def _heldout_groups(record: Record, table: ScoreTable) -> np.ndarray | None:
    """Groups of the held-out images that have a score."""
    heldout = record.arrays["heldout"]
    usable = np.isfinite(pipeline.frozen_scores(table, record.decider, heldout))
    return record.groups(heldout[usable])


def _against_truth(words: Iterable[str], truth: np.ndarray) -> dict[str, int]:
    """How many members and others there are among the candidates, and how many of each show evidence."""
    flagged = np.array([word == evidence.EVIDENCE for word in words])
    return {
        "members": int(truth.sum()),
        "members_found": int(np.sum(flagged & truth)),
        "others": int(np.sum(~truth)),
        "false_alarms": int(np.sum(flagged & ~truth)),
    }
