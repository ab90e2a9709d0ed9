"""Conditions on results, for release pipelines: "dime@2.tpr_at_1pct_fpr.low > 0.05"."""

import math
import operator
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from dime_jax._util.records import Json, field_names, plain, plain_object
from dime_jax.evidence import Judgement, Way
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings.results import AuditFindings, DeletionFindings
from dime_jax.findings.withholding import failures, partial
from dime_jax.findings.wording import deletion_failures
from dime_jax.protocol.evaluation import AdjustedRow, AtThreshold, Evaluation, ResultRow

_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_CONDITION = re.compile(r"\s*(?P<path>[\w@.-]+)\s*(?P<operator>[<>]=?)\s*(?P<bound>\S+)\s*")

# What lies between 0 and 1, whatever the results are; tables print it in per cent.
_SHARES = re.compile(
    r"(.*\.)?(auc|asr|tpr_at_1pct_fpr|fraction_used)\.(value|low|high)|(.*\.)?(attained_fpr|tpr|fpr|p_value)"
)
# What says nothing of candidates, or of a deletion, that could not be decided.
_VERDICTS = frozenset({"evidence", "no_evidence", "truth"})
_DELETION = frozenset({"flagged", "set_before", "set_after", "change"})
# What there is with a reference only, at the top and in a row.
_OF_REFERENCE = frozenset({"reference", "reference_queries_made", "reference_direction"})
_BESIDE = {way.value for way in Way if way.reference}

# What results.json of an audit and compare.json have at their top, and what every row has.
AUDIT_KEYS = frozenset(field_names(AuditFindings))
COMPARE_KEYS = frozenset(field_names(DeletionFindings))
_SOME = Estimate(0.0, 0.0, 0.0)
_RATES = AtThreshold(0.0, 0.0, 0.0)
_ADJUSTED = AdjustedRow({}, _SOME, _SOME, _SOME, _RATES)
ROW = plain_object(ResultRow("", {}, _SOME, _SOME, _SOME, 0.0, 0, _RATES, 0, 0.0, *[_ADJUSTED] * 3))


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
      ValueError: if it is not of this form, or can never change: no number, or one that a share cannot pass.
    """
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ValueError(f"expected a condition such as 'dime@2.auc.low > 0.6', got {condition!r}")
    try:
        bound = float(match["bound"])
    except ValueError:
        raise ValueError(f"expected a number on the right of {condition!r}, got {match['bound']!r}") from None
    if not math.isfinite(bound):
        raise ValueError(f"expected a finite number on the right of {condition!r}, got {match['bound']!r}")
    if _SHARES.fullmatch(match["path"]) and not 0 <= bound <= 1:
        raise ValueError(f"expected a number between 0 and 1 on the right of {condition!r}, got {match['bound']!r}")
    return Condition(match["path"], match["operator"], bound)


def check(condition: str, results: Evaluation | DeletionFindings) -> bool:
    """Whether a condition holds in results.json or compare.json.

    Raises:
      ValueError: if it is not of the form of `parse`, its path leads to no number, or it is about candidates on whom
        no verdict was given.
    """
    path, comparison, bound = parse(condition)
    found = results.candidates if isinstance(results, AuditFindings) and path.startswith("candidates.") else None
    if found is not None and found.set_withheld:
        raise ValueError(
            f"{condition!r} cannot be judged: no verdict was given on the candidates, since {found.set_withheld}"
        )
    if found is not None and not found.can_decide and _VERDICTS & set(path.split(".")):
        raise ValueError(
            f"{condition!r} cannot be judged: with so few held-out images no candidate could have been evidence"
        )
    if isinstance(results, DeletionFindings) and path.split(".")[0] in _DELETION and results.undecided:
        raise ValueError(f"{condition!r} cannot be judged: the verdict on the deletion is {results.verdict_in_words!r}")
    rows = {} if isinstance(results, DeletionFindings) else {row.label: plain(row) for row in results.results}
    return _OPERATORS[comparison](_look_up(path, {**plain_object(results), **rows}), bound)


def check_possible(condition: str, keys: Collection[str], rows: Collection[str], reference: bool = True) -> None:
    """Refuse a condition on what results will not have, before anything is computed.

    Args:
      condition: as for `parse`.
      keys: at the top of the results; what is below them is not checked.
      rows: the names attack@queries that rows may have.
      reference: whether a second model is asked.
    """
    path = parse(condition).path
    first, *rest = path.split(".")
    if not reference and (first in _OF_REFERENCE or (rest and rest[0] in _BESIDE)):
        raise ValueError(f"the results will have nothing for the condition {condition!r}: there is no reference")
    if first in rows and rest[:1] != ["setting"]:
        _look_up(path, {first: ROW})
    elif first not in rows and first not in keys:
        there = f"the rows that there will be are {', '.join(rows)}" if rows else "there will be no rows of attacks"
        raise ValueError(f"the results will have no {first!r} for the condition {condition!r}: {there}")


def refuse_unjudged(results: Evaluation | DeletionFindings) -> None:
    """Refuse to judge any condition where the results cannot be relied on: a gate that passed would say nothing.

    Raises:
      ValueError: if the model is no denoiser as it was asked, or members and held-out images look swapped.
    """
    wrong = _doubts(results)
    if wrong:
        raise ValueError(f"no condition can be judged: {' '.join(wrong)}")


def _doubts(results: Evaluation | DeletionFindings) -> list[str]:
    """What makes every condition meaningless."""
    if isinstance(results, DeletionFindings):
        return deletion_failures(results) or ([f"{results.withheld} (see the headline)"] if results.withheld else [])
    wrong = failures({"The model": results.model_check})
    if results.direction.judgement is Judgement.BELOW:
        wrong.append("members and held-out images look swapped, or differ in kind (see the headline)")
    if isinstance(results, AuditFindings):
        partial_reference = partial(results.reference_direction, results.decided_by.taken_out)
        wrong += [] if partial_reference is None else [f"{partial_reference} (see the headline)"]
    row = results.deciding_row if isinstance(results, AuditFindings) else None
    if not wrong and isinstance(results, AuditFindings) and row is not None and row.auc.high < 0.5:
        wrong.append(f"{results.decided_by.label} does worse than chance on the test half, so the sets may be swapped")
    return wrong


def _look_up(path: str, results: Mapping[str, Json]) -> float:
    """The number that a path of keys leads to."""
    value: Json = dict(results)
    for depth, key in enumerate(path.split(".")):
        if not isinstance(value, dict) or key not in value:
            where = ".".join(path.split(".")[:depth]) or "results.json"
            keys = ", ".join(sorted(value)) if isinstance(value, dict) else "no keys"
            raise ValueError(f"unknown {key!r} in {path!r}; {where} has {keys}")
        value = value[key]
    if not isinstance(value, int | float):
        raise ValueError(f"expected {path!r} to lead to a number, got {type(value).__name__}")
    return value
