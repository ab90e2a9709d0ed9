"""Conditions on results, for release pipelines: "dime@11.tpr_at_1pct_fpr.low > 0.05"."""

import operator
import re
from collections.abc import Mapping
from typing import Any

from dime_jax import model_check
from dime_jax.evidence import Judgement

_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_CONDITION = re.compile(r"\s*(?P<path>[\w@.]+)\s*(?P<operator>[<>]=?)\s*(?P<bound>\S+)\s*")


def check(condition: str, results: Mapping[str, Any]) -> bool:
    """Whether a condition holds in results.json.

    A condition is PATH OPERATOR NUMBER, with one of > >= < <=. A path is keys joined by dots; it starts with a key of
    results.json, or with attack@queries for one row of its `results`.

    Raises:
      ValueError: if it is not of this form, or its path leads to no number.
    """
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ValueError(f"expected a condition such as 'dime@11.auc.low > 0.6', got {condition!r}")
    try:
        bound = float(match["bound"])
    except ValueError:
        raise ValueError(f"expected a number on the right of {condition!r}, got {match['bound']!r}") from None
    return _OPERATORS[match["operator"]](_look_up(match["path"], results), bound)


def refuse_unjudged(results: Mapping[str, Any]) -> None:
    """Refuse to judge any condition where the results cannot be relied on: a gate that passed would say nothing.

    Raises:
      ValueError: if the model is no denoiser as it was asked, or members and held-out images look swapped.
    """
    wrong = model_check.failures(results)
    if results["direction"]["judgement"] == Judgement.BELOW:
        wrong.append("members and held-out images look swapped, or differ in kind (see the headline)")
    if wrong:
        raise ValueError(f"no condition can be judged: {' '.join(wrong)}")


def _look_up(path: str, results: Mapping[str, Any]) -> float:
    rows = {f"{row['attack']}@{row['queries_per_image']}": row for row in results.get("results", ())}
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
