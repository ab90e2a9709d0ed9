"""Figures of finished attack runs, from their score tables: numbers first, then a drawing of them.

`distributions` and `stability` are the paper's; `frontier` and `roc` it does not have.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dime_jax.attacks import get_attack
from dime_jax.evidence import metrics
from dime_jax.report import figures
from experiments import cross_fit
from experiments.questions import jobs_by_value
from experiments.runs import Row, Run

T = TypeVar("T")
# One look per attack in every figure, so that a reader learns it once.
SHOWN = {
    "dime": figures.SERIES[0],
    "sima_l4": figures.SERIES[1],
    "pia_l4": figures.SERIES[2],
    "sima_mc_vector": figures.SERIES[3],
    "secmi": figures.Series(figures.OKABE_ITO["orange"], (0, (3, 1, 1, 1)), "v"),
    "dime_central": figures.Series(figures.OKABE_ITO["sky"], (0, (5, 1)), "P"),
    "loss": figures.Series(figures.OKABE_ITO["black"], (0, (1, 1)), "x"),
}


def panel_per_run(numbers: Sequence[T], height: float, ylabel: str, draw: Callable[[Axes, T], None]) -> Figure:
    """Draw a row of panels, one per run, with one legend; a single panel is wide enough for it.

    Args:
      numbers: of each run.
      height: of the figure, in inches.
      ylabel: of the first panel.
      draw: draws the numbers of one run.
    """
    width = 4.7 if len(numbers) == 1 else len(numbers) * figures.DOUBLE_COLUMN / 2
    figure, axes = figures.new_figure(1, len(numbers), height, width=width)
    for panel, run in zip(axes[0], numbers):
        draw(panel, run)
    axes[0, 0].set_ylabel(ylabel)
    figures.legend_below(figure, axes[0, 0])
    return figure


def _look(attack: str) -> figures.Look:
    color, linestyle, marker = SHOWN[attack]
    return {"color": color, "linestyle": linestyle, "marker": marker, "label": get_attack(attack).title}


def best_dime(run: Run) -> Row:
    """Return DIME at its largest query tier."""
    row = run.largest_tier("dime")
    if row is None:
        raise ValueError(f"{run.directory} must have the attack dime, got {sorted({row.attack for row in run.rows})}")
    return row


# ------------------------------------------------------------------------------------------------ score distributions


class Distribution(NamedTuple):
    """DIME's scores on a run's test half, and the threshold that calibration froze (None: call nobody a member)."""

    run: str
    title: str
    member: np.ndarray
    heldout: np.ndarray
    tau: float | None


def distributions(runs: Sequence[Run]) -> list[Distribution]:
    """Collect the scores of members and held-out images (paper, Figure split-distributions)."""
    found = []
    for run in runs:
        row = best_dime(run)
        member, heldout = run.scores(row)
        tau = row.calibration.tau if np.isfinite(row.calibration.tau) else None
        found.append(Distribution(run.name, row.title, member, heldout, tau))
    return found


def draw_distributions(numbers: Sequence[Distribution]) -> Figure:
    """Draw a panel per run: two histograms on shared bins, and the threshold."""

    def draw(panel: Axes, run: Distribution) -> None:
        figures.histogram(panel, run.member, run.heldout)
        if run.tau is not None:
            figures.threshold(panel, run.tau, color="0.2")
        panel.set(title=f"{run.run}, {run.title}", xlabel="score (lower: member)")

    return panel_per_run(numbers, 2.4, "share of images, %", draw)


# ------------------------------------------------------------------------------------------------ timestep stability


class Stability(NamedTuple):
    """AUC over t by attack, cross-fitted on a run's calibration half."""

    run: str
    curves: dict[str, dict[int, float]]


def stability(runs: Sequence[Run], attacks: Sequence[str] = ("dime", "sima_l4", "pia_l4", "loss")) -> list[Stability]:
    """Measure how an attack's AUC depends on the timestep (paper, Figure stability), DIME at its largest tier.

    The test half was only asked at the frozen timestep, so at each t everything but t is chosen and measured on parts
    of the calibration half (see `cross_fit`).

    Args:
      runs: a panel each.
      attacks: in the order of the legend; those that a run does not have are left out.
    """
    return [
        Stability(run.name, {name: _curve(run, name) for name in attacks if run.largest_tier(name)}) for run in runs
    ]


def _curve(run: Run, name: str) -> dict[int, float]:
    parts = cross_fit.cut(run)
    by_time = jobs_by_value(parts.jobs, name, "t")
    return {int(t): cross_fit.auc(parts, cross_fit.scores(parts, by_time[t])) for t in sorted(by_time)}


def draw_stability(numbers: Sequence[Stability]) -> Figure:
    """Draw a panel per run, a line per attack."""

    def draw(panel: Axes, run: Stability) -> None:
        lines = [figures.Line(list(curve), list(curve.values()), _look(name)) for name, curve in run.curves.items()]
        figures.by_timestep(panel, lines)
        panel.set(title=run.run)

    return panel_per_run(numbers, 2.6, "AUC (cross-fitted), %", draw)


# ---------------------------------------------------------------------------------------------- efficiency frontier


class Point(NamedTuple):
    """What an attack gets for its queries."""

    attack: str
    queries: int
    auc: metrics.Estimate
    tpr_at_1pct_fpr: metrics.Estimate


class Frontier(NamedTuple):
    """All attacks and tiers of a run."""

    run: str
    points: list[Point]


def frontier(runs: Sequence[Run]) -> list[Frontier]:
    """Collect AUC and TPR@1%FPR on the test half against queries per image."""

    def point(row: Row) -> Point:
        return Point(row.attack, row.queries, row.estimate("auc"), row.estimate("tpr_at_1pct_fpr"))

    return [Frontier(run.name, [point(row) for row in run.rows if row.attack in SHOWN]) for run in runs]


def draw_frontier(numbers: Sequence[Frontier]) -> Figure:
    """Draw a row per run: AUC and TPR against queries on a log axis, with intervals; tiers of an attack are joined."""
    figure, axes = figures.new_figure(len(numbers), 2, height=2.4 * len(numbers) + 0.5)
    for row, run in zip(axes, numbers):
        for panel, metric, label in zip(row, ("auc", "tpr_at_1pct_fpr"), ("AUC", "TPR @ 1% FPR")):
            for offset, name in enumerate(SHOWN):
                points = sorted((point for point in run.points if point.attack == name), key=lambda p: p.queries)
                if points:
                    _draw_tiers(panel, points, metric, name, 1.04 ** (offset - len(SHOWN) / 2))
            ticks = sorted({point.queries for point in run.points})
            panel.set_xscale("log")
            panel.set_xticks(_spread(ticks), _spread(ticks))
            panel.set_xticks([], minor=True)
            panel.set(title=run.run, xlabel="queries per image", ylabel=label)
    figures.legend_below(figure, axes[0, 0])
    return figure


def _draw_tiers(panel: Axes, points: Sequence[Point], metric: str, name: str, shift: float) -> None:
    """Draw one attack; `shift` moves it aside a little, so that intervals at equal cost do not cover each other."""
    values = np.array([getattr(point, metric) for point in points])
    queries = shift * np.array([point.queries for point in points])
    errors = np.abs(values[:, 1:] - values[:, :1]).T
    panel.errorbar(queries, values[:, 0], errors, **_look(name), elinewidth=0.6)


def _spread(ticks: Sequence[int]) -> list[int]:
    """Choose ticks that are far enough apart on a logarithmic axis to be read."""
    kept: list[int] = []
    for tick in ticks:
        if not kept or tick >= 1.4 * kept[-1]:
            kept.append(tick)
    return kept


# ---------------------------------------------------------------------------------------------------------------- ROC


class RocRun(NamedTuple):
    """ROC curves [2, points] (FPR, TPR) by title; the least FPR that the test half can show."""

    run: str
    least_fpr: float
    curves: dict[str, np.ndarray]


def roc(runs: Sequence[Run], attacks: Sequence[str] = ("dime", "sima_l4", "pia_l4", "loss")) -> list[RocRun]:
    """Collect ROC curves on the test half, each attack at its largest tier.

    Args:
      runs: a panel each.
      attacks: in the order of the legend; those that a run does not have are left out.
    """
    found = []
    for run in runs:
        curves = {}
        for name in attacks:
            row = run.largest_tier(name)
            if row is not None:
                curve = metrics.roc_curve(*run.scores(row))
                curves[name] = np.stack([curve.fpr, curve.tpr])
        found.append(RocRun(run.name, 1 / int(np.sum(~run.member)), curves))
    return found


def draw_roc(numbers: Sequence[RocRun]) -> Figure:
    """Draw both axes logarithmic, from the least FPR that can be seen; 1 % is marked."""

    def draw(panel: Axes, run: RocRun) -> None:
        lines = [figures.Line(fpr, tpr, {**_look(name), "marker": ""}) for name, (fpr, tpr) in run.curves.items()]
        figures.roc(panel, lines, run.least_fpr)
        panel.set(title=run.run, xlabel="FPR")

    return panel_per_run(numbers, 3.6, "TPR", draw)
