"""How every figure of the package looks, and how it is saved.

Draw inside `style()`, on a figure from `new_figure`, with colours from `OKABE_ITO` and series from `SERIES`; save with
`save_figure`. Figures are made without pyplot, so nothing is shared between them and no display is needed. `roc`,
`histogram` and `by_timestep` draw on given axes what the report of an audit and the experiments both show.
"""

import contextlib
import pathlib
import string
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

# Okabe & Ito (2008), "Color universal design": told apart under the common kinds of colour blindness.
OKABE_ITO = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
}

MUTED = "#8b949e"  # for what others are compared with: chance, held-out images, attacks that are not in question
DOUBLE_COLUMN = 7.0  # inches, the text width of a two-column paper


class Series(NamedTuple):
    """How one line is drawn: told apart by dash and marker too, so that it survives a grey print."""

    color: str
    linestyle: str | tuple[int, tuple[int, ...]]
    marker: str


SERIES = (
    Series(OKABE_ITO["blue"], "-", "o"),
    Series(OKABE_ITO["vermillion"], "--", "s"),
    Series(OKABE_ITO["green"], "-.", "^"),
    Series(OKABE_ITO["purple"], ":", "D"),
)


class Look(TypedDict, total=False):
    """How matplotlib draws one line."""

    color: str
    linestyle: str | tuple[int, tuple[int, ...]]
    marker: str
    lw: float
    alpha: float
    label: str
    zorder: int


class Line(NamedTuple):
    """Points to join, and how they look."""

    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    look: Look


_BINS = 40
_STYLE: dict[str, object] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8,
    "font.size": 8,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.2,
    "savefig.dpi": 300,
    "svg.hashsalt": "dime_jax",  # ids in SVG files are random otherwise
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


def style(**changes: object) -> contextlib.AbstractContextManager[None]:
    """The package's look, whatever the user's own settings, for figures drawn and saved inside `with style():`.

    `changes` are matplotlib settings that differ from the house's.
    """
    return matplotlib.style.context(["default", _STYLE, changes])


def new_figure(
    rows: int, columns: int, height: float, width: float = DOUBLE_COLUMN, **subplots: Any
) -> tuple[Figure, np.ndarray]:
    """Make a figure of the given size in inches and its axes [rows, columns]; `subplots` as in `Figure.subplots`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **subplots)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Add one legend for the whole figure, from the series of one panel, in a row below, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))


def roc(axes: Axes, curves: Sequence[Line], least_fpr: float) -> None:
    """Draw ROC curves (FPR, TPR) on logarithmic axes, with chance and 1 % false alarms marked.

    Args:
      axes: where to draw; labels and legend are left to the caller.
      curves: from `metrics.roc_curve`. A logarithmic axis has no place for 0, so a curve starts at the left edge, with
        what is found without false alarms.
      least_fpr: the least FPR that can be measured, 1 / held-out images; the axes start at half of it.
    """
    left = least_fpr / 2
    for fpr, tpr, look in curves:
        fpr, tpr = np.asarray(fpr), np.asarray(tpr)
        seen = np.append(fpr[1:] > 0, True) & (tpr > 0)
        axes.plot(np.maximum(fpr[seen], left), tpr[seen], drawstyle="steps-post", **look)
    axes.plot([left, 1], [left, 1], color=MUTED, lw=0.7)
    axes.axvline(0.01, color=MUTED, lw=0.7)
    axes.set(xscale="log", yscale="log", xlim=(left, 1), ylim=(left, 1.05))


def histogram(
    axes: Axes, member: np.ndarray, heldout: np.ndarray, others: Sequence[float] | np.ndarray = ()
) -> tuple[float, float]:
    """Draw the scores of both sides on shared bins, each as shares of its images in per cent.

    Args:
      axes: where to draw; labels and legend are left to the caller.
      member: scores [n], or none, where no members are known.
      heldout: scores [m].
      others: scores that are not drawn, but must fit on the axis.

    Returns:
      The range of the bins. The highest scores, half a per cent, lie beyond it and are drawn in the last bin.
    """
    low, high = np.quantile(np.concatenate([member, heldout, others]), [0.0, 0.995])
    bins = np.linspace(low, high, _BINS + 1).tolist()
    for side, color, name in ((heldout, MUTED, "held-out"), (member, OKABE_ITO["blue"], "members")):
        if side.size:
            clipped, weights = np.clip(side, low, high), np.full(side.size, 100 / side.size)
            axes.hist(clipped, bins, weights=weights, color=color, alpha=0.25)
            axes.hist(clipped, bins, weights=weights, color=color, histtype="step", lw=1.2, label=name)
    return low, high


def threshold(axes: Axes, tau: float, color: str) -> None:
    """Draw a vertical line at a frozen threshold; nothing if it is infinite, which calls nobody a member."""
    if np.isfinite(tau):
        axes.axvline(tau, color=color, lw=0.8, ls=(0, (4, 2)), label="threshold τ")


def by_timestep(axes: Axes, curves: Sequence[Line]) -> None:
    """Draw AUC over timesteps, given as fractions and drawn in per cent, with chance marked at 50 %."""
    for t, auc, look in curves:
        axes.plot(t, 100 * np.asarray(auc), **look)
    axes.axhline(50, color=MUTED, lw=0.7)
    axes.set(xlabel="timestep t")


def ordered_colors(count: int) -> list[tuple[float, ...]]:
    """Return colours for an ordered quantity, dark to light (viridis without its palest end), safe in grey too."""
    return [tuple(color) for color in matplotlib.colormaps["viridis"](np.linspace(0, 0.85, count))]


def add_covariance_ellipse(
    axes: Axes, mean: np.ndarray, covariance: np.ndarray, deviations: float, **patch: Any
) -> Ellipse:
    """Shade where (x - mean)ᵀ C⁻¹ (x - mean) <= deviations², for a 2 x 2 covariance C; a zero C shades nothing."""
    variances, vectors = np.linalg.eigh(covariance)
    widths = 2 * deviations * np.sqrt(np.maximum(variances, 0))
    angle = np.degrees(np.arctan2(vectors[1, 0], vectors[0, 0]))
    ellipse = Ellipse(tuple(mean), *widths, angle=angle, **patch)
    axes.add_patch(ellipse)
    return ellipse


def letter_panels(axes: np.ndarray) -> None:
    """Put (a), (b), (c) … before the titles of the panels, row by row."""
    for letter, panel in zip(string.ascii_lowercase, axes.flat):
        panel.set_title(f"({letter}) {panel.get_title()}".rstrip())


def save_figure(figure: Figure, directory: str | pathlib.Path, name: str) -> list[pathlib.Path]:
    """Write `name`.png and `name`.svg; the same figure gives the same bytes (no date, fixed ids)."""
    paths = [pathlib.Path(directory) / f"{name}.{suffix}" for suffix in ("png", "svg")]
    figure.savefig(paths[0])
    figure.set_layout_engine("none")  # what the first drawing found serves the second
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
