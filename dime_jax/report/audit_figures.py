"""The figures of an audit, each from its record and results; one attack is told from the rest by the accent colour."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dime_jax import evidence
from dime_jax.attacks import describe_attack
from dime_jax.attacks.dime import FAMILY as DIME
from dime_jax.evidence import Verdict, Way, metrics
from dime_jax.findings import wording
from dime_jax.findings.results import AuditFindings, CandidateRow, DeletionRow
from dime_jax.protocol import stages
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.frozen import best_calibrated
from dime_jax.protocol.record import Record, finite
from dime_jax.report import figures

INK, MUTED, RULE = "#1f2328", figures.MUTED, "#e3e6ea"
ACCENT, SECOND = figures.OKABE_ITO["blue"], figures.OKABE_ITO["vermillion"]

_WIDTH, _HEIGHT = 3.9, 2.8
_MOST_POINTS = 1500  # of a side in a scatter plot
_REFERENCE_EPSILONS = (1.0, 4.0)
_LISTED_FPRS = (0.001, 0.01, 0.05, 0.1)
_LISTED_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MOST_LISTED = 50  # rows of a table of numbers
_VERDICT_LOOKS = {Verdict.NO_EVIDENCE: (INK, "x"), Verdict.CANNOT_TELL: (SECOND, "^"), Verdict.EVIDENCE: (ACCENT, "o")}


class Numbers(NamedTuple):
    """The numbers behind a figure, as a table of texts; the first column says what a row is about."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class AuditFigure(NamedTuple):
    """A figure, what it shows in one line, how to read it, and what someone who cannot see it should know."""

    name: str
    figure: Figure
    title: str
    caption: str
    alt: str
    numbers: Numbers


def draw_all(record: Record, results: AuditFindings, candidates: Sequence[CandidateRow]) -> list[AuditFigure]:
    """Every figure that the record allows, drawn in the package's style; the first stands beside the headline.

    Args:
      record: of the audit.
      results: what was found.
      candidates: the lines of candidates.csv.
    """
    drawings: Sequence[Callable[[Record, AuditFindings], AuditFigure | None]] = (
        (draw_scores, draw_roc, draw_budget, draw_timesteps, draw_terms) if record.members_known else (draw_scores,)
    )
    with audit_style():
        of_candidates = [_draw_difficulty(record, candidates), draw_p_values(record, results, candidates)]
        found = [*of_candidates, *(draw(record, results) for draw in drawings)]
    return [figure for figure in found if figure is not None]


def audit_style() -> AbstractContextManager[None]:
    """Use the package's style, with text kept as text in SVG files and the colours that the page knows."""
    colors = {"axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK, "grid.color": RULE}
    ticks = {"xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK}
    legend = {"legend.columnspacing": 1.2, "legend.handlelength": 1.6}
    return figures.style(**colors, **ticks, **legend, **{"svg.fonttype": "none"})


def draw_roc(record: Record, results: AuditFindings) -> AuditFigure:
    """Draw the log-log ROC of every attack, and what differential privacy would allow."""
    figure, axes = _new()
    highlighted = _highlighted(record)
    size = len(record.split.heldout)
    left = 0.5 / size
    curves, numbers = [], []
    for frozen in _largest_tiers(record):
        curve = metrics.roc_curve(*record.scores(frozen).map(finite))
        found = [np.max(curve.tpr[curve.fpr <= fpr]) for fpr in _LISTED_FPRS]
        numbers.append([_title(frozen), *(f"{100 * tpr:.1f}" for tpr in found)])
        curves.append(figures.Line(curve.fpr, curve.tpr, _line_style(frozen, highlighted)))
    figures.roc(axes, curves, 1 / size)
    grid = np.geomspace(left, 1, 200)
    delta = results.settings.delta
    for epsilon in _REFERENCE_EPSILONS:
        axes.plot(grid, evidence.dp_tpr_bound(grid, epsilon, delta), color=MUTED, lw=0.7, ls=(0, (1, 2)))
        height = evidence.dp_tpr_bound(np.array([left]), epsilon, delta)[0]
        _note(axes, f"ε = {epsilon:g} allows", (left, height), right=2)
    _note(axes, "chance", (left, left), right=2)
    axes.set(xlabel="false alarms (FPR)", ylabel="members found (TPR)")
    axes.legend(loc="lower right")
    row = results.deciding_row
    assert row is not None
    return AuditFigure(
        "roc",
        figure,
        "How many members are found, at how many false alarms",
        f"Both axes are logarithmic. Dotted: the most that a training run with (ε, δ = {delta:g})-"
        "differential privacy would allow, TPR ≤ e^ε FPR + δ. The vertical line marks 1 % false alarms.",
        f"ROC curves. {_title(record.decider)} finds {100 * row.tpr_at_1pct_fpr.value:.1f} per cent of members "
        "at 1 per cent false alarms.",
        Numbers(["Members found, %, by", *(f"at {100 * fpr:g} % FPR" for fpr in _LISTED_FPRS)], numbers),
    )


def draw_scores(record: Record, results: AuditFindings) -> AuditFigure:
    """Draw histograms of the deciding attack's scores, its threshold, and the candidates as ticks."""
    figure, axes = _new()
    scores = record.scores(record.decider).map(finite)
    candidates = record.own_scores(record.arrays.candidates)
    candidates = candidates[np.isfinite(candidates)]
    low, high = figures.histogram(axes, scores.member, scores.heldout, candidates)
    if candidates.size:
        x, y, below = np.clip(candidates, low, high), np.full(candidates.size, -0.035), axes.get_xaxis_transform()
        axes.plot(x, y, "|", color=INK, ms=6, mew=0.7, clip_on=False, transform=below, label="candidates")
        axes.tick_params(axis="x", pad=9)
    figures.threshold(axes, record.decider.tau, INK)
    axes.set(xlabel="score (lower = more like a training image)", ylabel="share of images, %")
    axes.legend(loc="upper right")
    samples = {"members": scores.member, "held-out images": scores.heldout, "candidates": candidates}
    return AuditFigure(
        "scores",
        figure,
        "The scores behind the verdicts",
        f"{_title(record.decider)}. The threshold was frozen on the calibration half; verdicts on candidates do not "
        "use it, they use the rank among the held-out scores."
        if record.members_known
        else f"{_title(record.decider)}. Verdicts use the rank among the held-out images.",
        "Histograms of scores. Members lie to the left of held-out images where the attack works.",
        _quantiles("Scores of", samples),
    )


def draw_budget(record: Record, results: AuditFindings) -> AuditFigure:
    """Draw AUC against queries per image, tiers of one attack joined, with intervals."""
    figure, axes = _new()
    highlighted = _highlighted(record)
    for name in dict.fromkeys(row.attack for row in results.results):
        rows = sorted((row for row in results.results if row.attack == name), key=lambda row: row.queries_per_image)
        frozen = next(one for one in record.calibrations if one.attack == name)
        drawn = _line_style(frozen, highlighted, by_attack=True)
        x = np.array([row.queries_per_image for row in rows], float)
        value, low, high = 100 * np.array([row.auc for row in rows]).T
        axes.errorbar(
            x * _nudge(name), value, [value - low, high - value], elinewidth=0.7, capsize=0, marker="o", **drawn
        )
    axes.set(xscale="log", xlabel="queries per image", ylabel="AUC on the test half, %")
    most = max(row.queries_per_image for row in results.results)
    ticks = [tick for tick in (*range(1, 4), 5, 10, 20, 30, 50, 100) if tick <= most]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.axhline(50, color=MUTED, lw=0.7)
    figures.legend_below(figure, axes)
    per_cent = [[f"{100 * number:.1f}" for number in row.auc] for row in results.results]
    names = [[describe_attack(row.attack).title, str(row.queries_per_image)] for row in results.results]
    numbers = [[*name, value, f"{low} to {high}"] for name, (value, low, high) in zip(names, per_cent)]
    return AuditFigure(
        "budget",
        figure,
        "What more queries buy",
        "Every attack at every tier with its 95 % interval; points at the same budget are moved apart a little. "
        "The line at 50 % is chance.",
        "AUC against the number of queries per image, one line for each attack.",
        Numbers(["Attack", "Queries", "AUC, %", "95 % interval"], numbers),
    )


def draw_timesteps(record: Record, results: AuditFindings) -> AuditFigure | None:
    """Draw calibration AUC over timesteps, each at its best step size and angle."""
    found: dict[str, list[Calibration]] = {}
    tier = {one.attack: one.setting.get("q") for one in _largest_tiers(record)}
    for one in stages.calibrations_by_timestep(record.directory):
        if "t" in one.setting and one.setting.get("q") == tier[one.attack]:
            found.setdefault(one.attack, []).append(one)
    if max(map(len, found.values()), default=0) < 2:
        return None
    figure, axes = _new()
    highlighted = _highlighted(record)
    curves = []
    for attack in found.values():
        look: figures.Look = {"marker": "o", **_line_style(attack[0], highlighted, by_attack=True)}
        curves.append(figures.Line([one.setting["t"] for one in attack], [one.auc for one in attack], look))
    figures.by_timestep(axes, curves)
    axes.set_ylabel("AUC on the calibration half, %")
    figures.legend_below(figure, axes)
    points = [one for attack in found.values() for one in attack]
    numbers = [[_title(one), f"{one.setting['t']:g}", f"{100 * one.auc:.1f}"] for one in points]
    return AuditFigure(
        "timesteps",
        figure,
        "How much the choice of timestep matters",
        "AUC on the calibration half, which chose the timestep, at the best step size and angle for each; a little "
        "optimistic for that reason.",
        "Calibration AUC over timesteps, one line for each attack.",
        Numbers(["Attack", "Timestep", "AUC, %"], numbers),
    )


def draw_terms(record: Record, results: AuditFindings) -> AuditFigure | None:
    """Draw DIME's B̂² against V̂ at its largest tier, in calibration standard deviations; direction and threshold."""
    runs = [one for one in record.calibrations if one.attack == "dime"]
    if not runs:
        return None
    frozen = max(runs, key=lambda one: one.queries)
    assert frozen.stats is not None
    table = record.known.table
    terms = table.terms(stages.frozen_job(frozen))
    level, trace = np.asarray(frozen.stats.standardize(terms))
    figure, axes = _new()
    for side, color, name in ((record.split.heldout, MUTED, "held-out"), (record.split.member, ACCENT, "members")):
        chosen = np.isin(table.index, side[:: max(1, len(side) // _MOST_POINTS)])
        axes.plot(level[chosen], trace[chosen], "o", color=color, ms=2.2, alpha=0.55, mew=0, label=name)
    finite = np.isfinite(level) & np.isfinite(trace)
    for column, set_limits in ((level, axes.set_xlim), (trace, axes.set_ylim)):
        low, high = np.quantile(column[finite], [0.002, 0.998])
        margin = 0.15 * (high - low) or 1.0  # a constant term has no span
        set_limits(low - margin, high + margin)
    direction, angle = -np.array(frozen.weights), np.degrees(frozen.parameters["phi"])
    if np.isfinite(frozen.tau):
        _add_threshold(axes, frozen.weights, frozen.tau)
    centre = np.array([np.mean(limits) for limits in (axes.get_xlim(), axes.get_ylim())])
    length = 0.25 * min(np.diff(axes.get_xlim())[0], np.diff(axes.get_ylim())[0])
    arrow = {"arrowstyle": "-|>", "color": INK, "lw": 1.2}
    axes.annotate("", tuple(centre + length * direction), tuple(centre), arrowprops=arrow)
    axes.set(xlabel="B̂², how far the reconstruction lies (sd)", ylabel="V̂, falls with crowding (sd)")
    axes.legend(loc="best", markerscale=2)
    sides = {"members": record.split.member, "held-out images": record.split.heldout}
    samples = {
        f"{term}, {name}": column[np.isin(table.index, side) & finite]
        for term, column in (("B̂²", level), ("V̂", trace))
        for name, side in sides.items()
    }
    return AuditFigure(
        "terms",
        figure,
        "The two things DIME measures",
        f"{_title(frozen)}: bias B̂² and trace V̂ of each test image, in standard deviations of the calibration half. "
        f"The arrow is the calibrated direction towards “member” (φ = {angle:.0f}°), the dashed line "
        "the frozen threshold.",
        "Scatter plot of DIME's two terms for members and held-out images, with the calibrated direction.",
        _quantiles("Term", samples),
    )


def draw_p_values(record: Record, results: AuditFindings, candidates: Sequence[CandidateRow]) -> AuditFigure | None:
    """Draw the candidates' p-values in rising order, and the line below which they are evidence; None without any.

    Withheld p-values are not drawn either.
    """
    found = results.candidates
    p = np.sort([row.p_value for row in candidates if row.p_value is not None])
    if found is None or not p.size:
        return None
    figure, axes = _new()
    rank, tested = np.arange(1, p.size + 1), len(record.arrays.candidates)
    axes.plot(rank, found.level * rank / tested, color=INK, lw=0.8, ls=(0, (4, 2)), label="Benjamini–Hochberg")
    axes.plot(rank, rank / (p.size + 1), color=MUTED, lw=0.8, label="if none were a member")
    axes.plot(rank, p, "o", color=ACCENT, ms=3, mew=0, label="candidates")
    axes.axhline(found.smallest_p, color=MUTED, lw=0.7, ls=(0, (1, 2)))
    _note(axes, "smallest p possible", (p.size, found.smallest_p), "right")
    axes.set(yscale="log", xlabel="candidates, from the smallest p-value", ylabel="p-value")
    figures.legend_below(figure, axes)
    listed = enumerate(p[:_MOST_LISTED].tolist(), 1)
    numbers = [[str(place), f"{value:.3g}", f"{found.level * place / tested:.3g}"] for place, value in listed]
    return AuditFigure(
        "p_values",
        figure,
        "How surprising the candidates are",
        "Candidates up to the last one below the dashed line show evidence of membership. Along the grey line lie "
        "candidates that the model never saw.",
        f"{found.evidence} of {found.count} candidates show evidence of membership.",
        Numbers(["Candidate, from the smallest p-value", "p-value", "evidence up to"], numbers),
    )


def _draw_difficulty(record: Record, candidates: Sequence[CandidateRow]) -> AuditFigure | None:
    """Call `draw_difficulty` for an audit with something taken out; candidates without a p-value are left out."""
    table, pictures, adjustment = record.candidates, record.pictures, record.decider.adjustment
    if table is None or pictures is None or adjustment is None:
        return None
    sides = []
    for indices in (record.arrays.heldout, record.arrays.candidates):
        asked = stages.terms_of(table, record.decider, indices), pictures.of(indices)
        predicted = adjustment.expected(record.decider.pile(*asked).statistics[:, :, 0])
        sides.append(np.stack([predicted, predicted + record.decider.score(*asked)]))
    rows = candidates[: len(record.arrays.candidates)]  # those that could not be read come last
    judged = np.array([row.p_value is not None for row in rows], bool)
    verdicts = [row.verdict for row in rows if row.p_value is not None]
    return draw_difficulty(sides[0], sides[1][:, judged], verdicts, record.decider.way)


# What predicts scores, and why that is looked at.
_PREDICTED_BY = {
    Way.ADJUSTED: (
        "the picture alone predicts",
        "Some pictures are easy and score low whether the model saw them or not",
    ),
    Way.BESIDE: ("the reference predicts", "Some images score low with every model, whether it saw them or not"),
    Way.BESIDE_ADJUSTED: (
        "the reference and the picture predict",
        "Some images score low with every model, whether it saw them or not",
    ),
}


def draw_difficulty(
    heldout: np.ndarray, candidates: np.ndarray, verdicts: Sequence[Verdict], way: Way = Way.ADJUSTED
) -> AuditFigure | None:
    """Draw scores against what is predicted of them without the model; None without a finite held-out score.

    Args:
      heldout: of each held-out image what is predicted, and its score [2, n]; NaN where there is none.
      candidates: the same of the candidates [2, m]; none of them where p-values are withheld.
      verdicts: on each of them [m].
      way: by what it is predicted.
    """
    figure, axes = _new()
    predicts, why = _PREDICTED_BY[way]
    given, numbers = np.array(verdicts, object), []
    sides = {"held-out": ((MUTED, "."), heldout)}
    sides |= {one.split(" of ")[0]: (look, candidates[:, given == one]) for one, look in _VERDICT_LOOKS.items()}
    for name, ((color, marker), points) in sides.items():
        x, y = points[:, np.all(np.isfinite(points), axis=0)]
        if x.size:
            every = max(1, x.size // _MOST_POINTS)
            axes.plot(x[::every], y[::every], marker, color=color, ms=3.5, alpha=0.8, label=name)
            numbers.append([name, str(x.size), f"{100 * np.mean(y < x):.1f}", f"{np.median(y - x):.3g}"])
    if not numbers or numbers[0][0] != "held-out":
        return None
    start = float(np.nanmedian(heldout[0]))
    axes.axline((start, start), slope=1, color=INK, lw=0.8)
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.08 * (high - low), high)  # room for the words
    axes.text(
        0.98,
        0.03,
        "the further below the line, the more like a member",
        ha="right",
        color=MUTED,
        size=6.5,
        transform=axes.transAxes,
    )
    axes.set(xlabel=f"score that {predicts}", ylabel="score (lower = more like training)")
    figures.legend_below(figure, axes)
    return AuditFigure(
        "difficulty",
        figure,
        "Is the score low beside another model’s?" if way.reference else "Is the score low for such a picture?",
        f"{why}. The line is what {predicts}: what counts is how far below it an image lies.",
        f"Scores against what {predicts}; {numbers[0][2]} per cent of held-out images lie below it.",
        Numbers(["Images", "how many", "below the line, %", "median distance from the line"], numbers),
    )


def draw_change(candidates: Sequence[DeletionRow], p_cutoff: float) -> AuditFigure:
    """Draw every candidate's p-value before and after a deletion."""
    figure, axes = _new()
    numbers = []
    for place, row in enumerate(candidates):
        if row.p_before is not None and row.p_after is not None:
            color, order = (ACCENT, 3) if row.flagged_before else (MUTED, 2)
            axes.plot([0, 1], [row.p_before, row.p_after], "o-", color=color, lw=0.9, ms=3, alpha=0.8, zorder=order)
            if place < _MOST_LISTED:
                numbers.append([row.id, f"{row.p_before:.3g}", f"{row.p_after:.3g}"])
    if p_cutoff > 0:
        axes.axhline(p_cutoff, color=INK, lw=0.8, ls=(0, (4, 2)))
        _note(axes, "frozen cutoff", (0.5, p_cutoff), "center", INK)
    axes.set(yscale="log", xlim=(-0.15, 1.15), ylabel="p-value among held-out images")
    axes.set_xticks([0, 1], ["before", "after"])
    return AuditFigure(
        "change",
        figure,
        "Each candidate, before and after",
        "A p-value near 1 is an image that looks less like a training image than almost any held-out image; low ones "
        "look like training images. Coloured lines were flagged before.",
        "p-values of the candidates before and after the deletion, joined by lines.",
        Numbers(["Candidate", "p before", "p after"], numbers),
    )


def _quantiles(what: str, samples: Mapping[str, np.ndarray]) -> Numbers:
    """Tabulate the quantiles of each sample that is not empty."""
    rows = [
        [name, *(f"{value:.4g}" for value in np.quantile(sample, _LISTED_SHARES))]
        for name, sample in samples.items()
        if sample.size
    ]
    return Numbers([what, *(f"{100 * share:.0f} % below" for share in _LISTED_SHARES)], rows)


def _add_threshold(axes: Axes, weights: Sequence[float], tau: float) -> None:
    """Draw the line w · (x, y) = τ, for weights w of length 1."""
    direction = np.array(weights)
    point, along = tau * direction, np.array([-direction[1], direction[0]])
    axes.axline(tuple(point), tuple(point + along), color=INK, lw=0.8, ls=(0, (4, 2)))


def _note(
    axes: Axes, text: str, place: tuple[float, float], align: str = "left", color: str = MUTED, right: int = 0
) -> None:
    """Write a few small words 3 points above a place and `right` points to its right."""
    axes.annotate(text, place, (right, 3), ha=align, color=color, size=6.5, textcoords="offset points")


def _new() -> tuple[Figure, Axes]:
    figure, axes = figures.new_figure(1, 1, _HEIGHT, _WIDTH)
    return figure, axes[0, 0]


def _highlighted(record: Record) -> dict[str, str]:
    """Colour the two attacks that stand out: the one that decides, and the best baseline (DIME if one decides)."""
    ours = record.decider.family == DIME
    others = [one for one in record.calibrations if (one.family != DIME if ours else one.attack == "dime")]
    second = {best_calibrated(others).attack: SECOND} if others else {}
    return second | {record.decider.attack: ACCENT}


def _largest_tiers(record: Record) -> list[Calibration]:
    """Return each attack once, at its largest budget."""
    largest: dict[str, Calibration] = {}
    for frozen in record.calibrations:
        largest[frozen.attack] = max(frozen, largest.get(frozen.attack, frozen), key=lambda one: one.queries)
    return list(largest.values())


def _line_style(frozen: Calibration, highlighted: Mapping[str, str], by_attack: bool = False) -> figures.Look:
    if frozen.attack not in highlighted:
        return {"color": MUTED, "lw": 0.8, "alpha": 0.6, "zorder": 2}
    name = describe_attack(frozen.attack).title if by_attack else _title(frozen)
    return {"color": highlighted[frozen.attack], "lw": 1.8, "label": name, "zorder": 3}


def _nudge(name: str) -> float:
    """Return a factor near 1, fixed for each attack, that keeps points at one budget apart."""
    return 1 + 0.012 * (sum(name.encode()) % 9 - 4)


def _title(frozen: Calibration) -> str:
    return f"{describe_attack(frozen.attack).title} ({frozen.queries}){wording.minus(frozen.way)}"
