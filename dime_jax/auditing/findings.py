"""What an audit found: results.json and candidates.csv from its record, without a model.

results.json (`schema_version` 1), besides what `pipeline.evaluation` puts there:

  headline                {answer, detail, candidates, alarms}: the first screen in words
  decided_by              {attack, queries_per_image, setting, calibration_auc, chosen}: the attack behind the verdicts
  comparisons             DIME against the best baseline at no more queries, paired on the test half
  reversed                null, or the attack that says that members look *less* like training images
  candidates              null, or {count, evidence, no_evidence, cannot_tell, level, heldout, smallest_p,
                          candidates_needed, heldout_needed, can_decide, set_test, truth, warnings}; one line for each
                          in candidates.csv
  blind_baseline          null, or {auc, gap, p_value, fires, explained, images}: a classifier that never saw
                          the model, and what the attack has over it
  epsilon_lower_bound     null, or `evidence.EpsilonBound`
  duplicates              pairs and clusters found, and where
  images, grid_size       how many, by role and half; how many settings calibration chose from
  model, settings, environment, warnings

Numbers that are not finite are null. The same record gives the same files.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dime_jax import _csv, digests, evidence, metrics, pipeline
from dime_jax.attacks import get_attack
from dime_jax.auditing.record import Record, Sides, best_calibrated, label
from dime_jax.report import wording
from dime_jax.score_table import ScoreTable

DIME = ("dime", "dime_central", "dime_theory", "level_only", "crowding_only")
_VERDICTS = {
    "evidence": evidence.EVIDENCE,
    "no_evidence": evidence.NO_EVIDENCE,
    "cannot_tell": evidence.CANNOT_TELL,
}
_DEPENDENT_SHARE = 0.1  # of the test images in groups, from which on it is said that intervals are too narrow


class Findings(NamedTuple):
    """results.json, and one dictionary for each line of candidates.csv."""

    results: dict[str, Any]
    candidates: list[dict[str, Any]]


def find(record: Record) -> Findings:
    """Everything that the record shows."""
    facts, settings = record.facts, record.facts["settings"]
    results = pipeline.evaluation(record.directory) if record.members_known else _without_members(record)
    results["warnings"] += digests.warn_of_unsealed(record.directory, ["audit.json"])
    results["warnings"] += facts["warnings"] + (_dependence(record) if record.members_known else [])
    decider = record.decider
    scores = record.scores(decider).finite()
    results["reversed"] = _reversed(record, results["results"])
    results["decided_by"] = {
        "attack": decider.attack,
        "queries_per_image": pipeline.frozen_job(decider).queries,
        "setting": decider.setting,
        "calibration_auc": decider.auc,
        "chosen": facts["chosen"],
    }
    results["comparisons"] = _comparisons(record)
    results["blind_baseline"] = _blind_baseline(record)
    results["epsilon_lower_bound"] = None
    if record.members_known:
        bound = evidence.epsilon_lower_bound(
            scores.member, scores.heldout, delta=settings["delta"], randomised=settings["randomised"]
        )
        results["epsilon_lower_bound"] = bound._asdict()
    rows, results["candidates"] = _candidates(record, trusted=results["reversed"] is None)
    results["queries_made"] += record.candidates.queries_made if record.candidates else 0
    for name in ("duplicates", "images", "grid_size", "model", "settings", "environment"):
        results[name] = facts[name]
    results = plain(results)
    results["headline"] = wording.headline(results)
    return Findings(results, plain(rows))


def write(record: Record, findings: Findings) -> None:
    """Write results.json and, if there are candidates, candidates.csv."""
    if findings.candidates:
        _csv.write_csv(record.directory / "candidates.csv", findings.candidates)
    pipeline.write_json(record.directory / "results.json", findings.results)


def plain(value: Any) -> Any:
    """Named tuples as objects, arrays as lists, NumPy numbers as numbers; null for NaN and infinities."""
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
    return {
        "schema_version": pipeline.SCHEMA_VERSION,
        "results": [],
        "fingerprints": {"model": identity["model"], "heldout_data": identity["data"]},
        "precision": identity["precision"],
        "seed": identity["seed"],
        "queries_made": 0,
        "warnings": [],
    }


def _reversed(record: Record, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The attack of fixed direction that calibration shows to be strongest, if its test AUC is surely below 1/2.

    If another one is surely above, it is that attack which is odd on this model, and not the sets that are swapped.
    DIME is no witness: its angle is searched on the full circle, so it would follow swapped sets.
    """
    fixed = [one for one in record.calibrations if get_attack(one.attack).angles is None]
    if not rows or not fixed:
        return None
    by_label = {f"{row['attack']}@{row['queries_per_image']}": row for row in rows}
    row = by_label[label(max(fixed, key=lambda one: abs(one.auc - 0.5)))]
    if row["auc"]["high"] >= 0.5 or any(by_label[label(one)]["auc"]["low"] > 0.5 for one in fixed):
        return None
    return {key: row[key] for key in ("attack", "queries_per_image", "auc")}


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


def _candidates(record: Record, trusted: bool) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Lines of candidates.csv, and their summary; all "cannot tell" where the audit itself is not to be trusted."""
    table, level = record.candidates, record.facts["settings"]["level"]
    if table is None:
        return [], None
    indices = record.arrays["candidates"]
    scores, heldout = record.candidate_scores()
    p_values = evidence.conformal_p_values(scores, heldout)
    verdicts = evidence.candidate_verdicts(p_values, len(heldout), level)
    words = verdicts.verdict if trusted else [evidence.CANNOT_TELL] * len(indices)
    groups, truth = record.groups(indices), record.arrays["truth"]
    ids = dict(zip(table.index.tolist(), table.ids))
    rows: list[dict[str, Any]] = [
        {"id": ids[index], "score": score, "p_value": p, "q_value": q, "verdict": word}
        for index, score, p, q, word in zip(indices.tolist(), scores, p_values, verdicts.q_values, words)
    ]
    for column, values in (("group", groups), ("member", truth if len(truth) else None)):
        if values is not None:
            for row, value in zip(rows, values):
                row[column] = value
    set_test = evidence.set_test(
        scores,
        heldout,
        groups,
        record.facts["settings"]["seed"],
        heldout_groups=_heldout_groups(record, table),
        level=level,
    )
    warnings = [*verdicts.warnings, *set_test.warnings]
    if groups is not None and "groups" not in record.facts["settings"]:
        warnings.append("only near duplicates and known identities are grouped: other images count as independent")
    summary = {
        "count": len(rows),
        **{name: words.count(word) for name, word in _VERDICTS.items()},
        "level": level,
        "heldout": len(heldout),
        "smallest_p": verdicts.smallest_p,
        "candidates_needed": verdicts.candidates_needed,
        "heldout_needed": verdicts.heldout_needed,
        "can_decide": bool(verdicts.can_decide and trusted),
        "set_test": set_test,
        "truth": _against_truth(words, truth) if len(truth) else None,
        "warnings": warnings,
    }
    return rows, summary


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
