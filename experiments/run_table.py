"""The table of one run: every attack with its intervals, the paper's value, and the lead over the best baseline.

The paper's value stands beside ours only where the run is its setting. Each of DIME's variants is compared with the
best baseline that makes no more queries: the best on the calibration half, so that the choice is not made on the images
of the comparison.
"""

from typing import NamedTuple

from dime_jax.evidence import metrics
from experiments import paper_values
from experiments.runs import Row, Run


class Lead(NamedTuple):
    """A row against the best baseline at no more queries: differences of fractions, the p-value for equal AUC."""

    baseline: Row
    auc: metrics.Estimate
    p_value: float
    tpr: metrics.Estimate


class TableLine(NamedTuple):
    """One row of a table."""

    row: Row
    paper: paper_values.Published | None
    lead: Lead | None


class Table(NamedTuple):
    """All rows of one run."""

    run: Run
    title: str
    lines: tuple[TableLine, ...]


def make_table(run: Run) -> Table:
    """Return the table of a run."""
    epsilon, papers_setting = run.config.get("dp", {}).get("epsilon"), is_papers_setting(run)
    paper = paper_values.published(run.study, epsilon) if papers_setting else {}
    lines = tuple(TableLine(row, paper.get((row.attack, row.q)), lead(run, row)) for row in run.rows)
    privacy = "" if epsilon is None else f", ε = {epsilon:g}"
    return Table(run, f"{paper_values.heading(run.study, papers_setting)}{privacy} ({run.name})", lines)


def is_papers_setting(run: Run) -> bool:
    """Return whether the paper's values belong beside this run's.

    Its config must be the paper's, and its checkpoint the published one where that one's fingerprint is known.
    """
    known = paper_values.FINGERPRINTS.get(run.study)
    same_model = known in (None, run.results.fingerprints["model"])
    return run.variant == paper_values.VARIANTS.get(run.study, "paper") and run.is_unchanged and same_model


def lead(run: Run, row: Row) -> Lead | None:
    """Return how far a variant of DIME is ahead of the baseline that calibration would take; None for baselines."""
    rivals = [other for other in run.rows if other.is_baseline and other.queries <= row.queries]
    if row.is_baseline or not rivals:
        return None
    best = max(rivals, key=lambda other: other.calibration.auc)
    first, second = run.paired_scores(row, best)
    comparison = metrics.compare(first, second, seed=run.results.seed)
    return Lead(best, comparison.auc_difference, comparison.p_value, comparison.tpr_difference_at_fpr[0.01])
