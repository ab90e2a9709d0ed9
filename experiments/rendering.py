"""Turn records into the text of pages: the prose is in `experiments/templates`, the number formats are here."""

import pathlib
from collections.abc import Sequence

import jinja2
import numpy as np

from dime_jax.attacks import describe_attack
from dime_jax.evidence.metrics import Estimate
from experiments.cross_fit import AucTpr
from experiments.questions import MODELS_FOR_A_CLAIM, Difference, over_models
from experiments.runs import METRICS, Row
from experiments.without_model import describe


def percent(estimate: Estimate, sign: str = "") -> str:
    """Return a fraction and its interval in per cent; "+" as `sign` shows the sign of positive numbers too."""
    return f"{100 * estimate.value:{sign}.1f} [{100 * estimate.low:{sign}.1f}, {100 * estimate.high:{sign}.1f}]"


def p_value(p: float) -> str:
    """Return a p-value with three digits, or its magnitude where these would be zeros."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def mean_rate(rows: Sequence[Row], metric: str) -> str:
    """Return the mean of a metric over rows, in per cent."""
    return f"{100 * np.mean([row.estimate(metric).value for row in rows]):.1f}"


def auc_tpr(pairs: Sequence[AucTpr | tuple[float, float]]) -> str:
    """Return the mean AUC and the mean TPR@1%FPR over models, in per cent."""
    return " / ".join(f"{100 * mean:.1f}" for mean in np.mean(pairs, axis=0))


def mean_over_models(values: Sequence[float]) -> str:
    """Return the mean of a rate over models with its t-interval, in per cent; nothing for a single model."""
    mean = over_models(values, least=0.0)
    return percent(mean) if mean else ""


def difference_cells(difference: Difference) -> list[str]:
    """Return every model's difference, and their mean if there are several, marked where it is a claim."""
    mean = [percent(difference.overall, "+") + (" *" if difference.is_claim else "")]
    return [*(percent(one, "+") for one in difference.models), *(mean if len(difference.models) > 1 else [])]


def latex(text: str) -> str:
    """Escape what means something else in LaTeX."""
    for character, escaped in (("_", r"\_"), ("%", r"\%"), ("²", "$^2$"), ("ε", r"$\varepsilon$")):
        text = text.replace(character, escaped)
    return text


def score_tables(directory: pathlib.Path, page: pathlib.Path | None) -> str:
    """Return links to a run's score tables if the run lies near the page, else where the commands put them."""
    beside = page.resolve().parent if page else None
    if beside and directory.resolve().is_relative_to(beside):
        path = directory.resolve().relative_to(beside).as_posix()
        return f"[calibration]({path}/calibration), [test]({path}/test)"
    return "`W/attack/calibration`, `W/attack/test`"


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.globals |= {"metrics": METRICS, "score_tables": score_tables, "models_for_a_claim": MODELS_FOR_A_CLAIM}
_TEMPLATES.filters |= {
    "attack": lambda name: describe_attack(name).title,
    "auc_tpr": auc_tpr,
    "cells": difference_cells,
    "fmt": format,
    "latex": latex,
    "mean_over_models": mean_over_models,
    "mean_rate": mean_rate,
    "p_value": p_value,
    "percent": percent,
    "reached": lambda counted: auc_tpr([(counted.auc.value, counted.tpr_at_1pct_fpr.value)]),
    "signed": lambda estimate: percent(estimate, "+"),
    "without_model": describe,
}


def render(template: str, **values: object) -> str:
    """Fill in a template; a name that it uses and is not given is an error.

    Args:
      template: a file of `experiments/templates`.
      **values: records and numbers, by the names that the template uses.
    """
    return _TEMPLATES.get_template(template).render(**values)
