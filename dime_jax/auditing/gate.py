"""Conditions on results, for release pipelines: "dime@11.tpr_at_1pct_fpr.low > 0.05"."""

import operator
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from dime_jax import model_check
from dime_jax.evidence import Judgement

_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_CONDITION = re.compile(r"\s*(?P<path>[\w@.]+)\s*(?P<operator>[<>]=?)\s*(?P<bound>\S+)\s*")

# What results.json of an audit and compare.json have at their top, and what every row has.
AUDIT_KEYS = frozenset(
    (
        *("schema_version", "results", "fingerprints", "precision", "seed", "queries_made", "warnings", "headline"),
        *(
            "decided_by",
            "comparisons",
            "direction",
            "model_check",
            "candidates",
            "blind_baseline",
            "epsilon_lower_bound",
            "duplicates",
        ),
        *("images", "grid_size", "model", "settings", "environment"),
    )
)
COMPARE_KEYS = frozenset(
    (
        *("schema_version", "facts", "verdict", "set_before", "set_after", "change", "p_cutoff", "rule", "flagged"),
        *("decided_by", "fingerprints", "precision", "seed", "queries_made", "warnings", "headline"),
        *("withheld", "direction", "likeness", "model_check"),
    )
)
_INTERVAL = {"value": 0.0, "low": 0.0, "high": 0.0}
ROW = {
    "attack": "",
    "setting": {},
    **dict.fromkeys(("auc", "asr", "tpr_at_1pct_fpr"), _INTERVAL),
    **dict.fromkeys(("attained_fpr", "false_positives", "queries_per_image", "seconds_per_image"), 0.0),
    "at_threshold": {"tau": 0.0, "tpr": 0.0, "fpr": 0.0},
}


class Condition(NamedTuple):
    """PATH OPERATOR NUMBER."""

    path: str
    operator: str
    bound: float


def parse(condition: str) -> Condition:
    """A condition is PATH OPERATOR NUMBER, with one of > >= < <=.

    A path is keys joined by dots; it starts with a key of results.json, or with attack@queries for one row of its
    `results`.

    Raises:
      ValueError: if it is not of this form.
    """
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ValueError(f"expected a condition such as 'dime@11.auc.low > 0.6', got {condition!r}")
    try:
        bound = float(match["bound"])
    except ValueError:
        raise ValueError(f"expected a number on the right of {condition!r}, got {match['bound']!r}") from None
    return Condition(match["path"], match["operator"], bound)


def check(condition: str, results: Mapping[str, Any]) -> bool:
    """Whether a condition holds in results.json.

    Raises:
      ValueError: if it is not of the form of `parse`, its path leads to no number, or it is about candidates on whom
        no verdict was given.
    """
    path, comparison, bound = parse(condition)
    found = (results.get("candidates") or {}) if path.startswith("candidates.") else {}
    withheld = found.get("withheld") or found.get("set_withheld")
    verdict = str(results.get("verdict"))
    if path.startswith("flagged.") and verdict.startswith("cannot tell"):
        raise ValueError(f"{condition!r} cannot be judged: the verdict on the deletion is {verdict!r}")
    if withheld:
        raise ValueError(f"{condition!r} cannot be judged: no verdict was given on the candidates, since {withheld}")
    return _OPERATORS[comparison](_look_up(path, results), bound)


def check_possible(condition: str, keys: Collection[str], rows: Collection[str]) -> None:
    """Refuse a condition on what results will not have, before anything is computed.

    Args:
      condition: as for `parse`.
      keys: at the top of the results; what is below them is not checked.
      rows: the names attack@queries that rows may have.
    """
    path = parse(condition).path
    first, *rest = path.split(".")
    if first in rows and rest[:1] != ["setting"]:
        _look_up(path, {first: ROW})
    elif first not in rows and first not in keys:
        there = f"the rows that there will be are {', '.join(rows)}" if rows else "there will be no rows of attacks"
        raise ValueError(f"the results will have no {first!r} for the condition {condition!r}: {there}")


def refuse_unjudged(results: Mapping[str, Any]) -> None:
    """Refuse to judge any condition where the results cannot be relied on: a gate that passed would say nothing.

    Raises:
      ValueError: if the model is no denoiser as it was asked, or members and held-out images look swapped.
    """
    wrong = model_check.failures(results)
    if results.get("withheld") and not wrong:  # a comparison without a verdict
        wrong.append(f"{results['withheld']} (see the headline)")
    elif results["direction"]["judgement"] == Judgement.BELOW:
        wrong.append("members and held-out images look swapped, or differ in kind (see the headline)")
    if wrong:
        raise ValueError(f"no condition can be judged: {' '.join(wrong)}")
    decided = results.get("decided_by", {}).get("label")
    row = next((row for row in results.get("results", ()) if _label(row) == decided), None)
    if row is not None and row["auc"]["high"] < 0.5:
        raise ValueError(
            f"no condition can be judged: {decided} does worse than chance on the test half, so the sets may be swapped"
        )


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['attack']}@{row['queries_per_image']}"


def _look_up(path: str, results: Mapping[str, Any]) -> float:
    rows = {_label(row): row for row in results.get("results", ())}
    value: Any = {**results, **rows}
    for depth, key in enumerate(path.split(".")):
        if not isinstance(value, Mapping) or key not in value:
            where = ".".join(path.split(".")[:depth]) or "results.json"
            keys = ", ".join(sorted(value)) if isinstance(value, Mapping) else "no keys"
            raise ValueError(f"unknown {key!r} in {path!r}; {where} has {keys}")
        value = value[key]
    if not isinstance(value, int | float):
        raise ValueError(f"expected {path!r} to lead to a number, got {type(value).__name__}")
    return value
