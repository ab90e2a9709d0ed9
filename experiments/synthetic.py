"""Every synthetic study of the paper, with the closed-form denoiser: figures, and the numbers behind them.

Each study is a function from the config to a NamedTuple of numbers; a drawing function turns that into a figure.
`run` writes NAME.png, NAME.svg and NAME.json for each figure. The same config gives the same files.

    python -m experiments.synthetic --config=experiments/configs/synthetic.py --workdir=out/synthetic
"""

import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ml_collections.config_dict import ConfigDict
from scipy import stats

import dime_jax as dj
from dime_jax._util import records, validate
from dime_jax.attacks import dime_norms, get_attack
from dime_jax.core.draws import Draws
from dime_jax.data import Pair
from dime_jax.protocol import calibration
from dime_jax.report import figures
from experiments.launch import launch

T = TypeVar("T")

# ------------------------------------------------------------------------------------ bias and crowding, three cases

CASES = ("isolated member", "biased non-member", "crowded non-member")


class BiasCrowding(NamedTuple):
    """M = σ²B² + V over time for each of `CASES` [3, steps]; `rise_t` is the first t with crowding above `rise`."""

    cases: tuple[str, ...]
    t: np.ndarray
    bias: np.ndarray
    crowding: np.ndarray
    error: np.ndarray
    rise: float
    rise_t: list[int | None]


class ThreeCases(NamedTuple):
    """The responsibility-weighted neighbourhood of each of `CASES` at one t, on the scale of the clean points.

    m_local = E[Y]/√ᾱ [3, 2], covariance = Cov[Y]/ᾱ [3, 2, 2]; bias and crowding as in `BiasCrowding`, at this t.
    """

    cases: tuple[str, ...]
    t: int
    abar: float
    sigma: float
    train: np.ndarray
    candidates: np.ndarray
    responsibilities: np.ndarray
    m_local: np.ndarray
    covariance: np.ndarray
    bias: np.ndarray
    crowding: np.ndarray


def scene(config: ConfigDict) -> tuple[np.ndarray, np.ndarray]:
    """Return the training points [n, 2] and the candidates of `CASES` [3, 2]."""
    place = config.scene
    angles = 2 * np.pi * np.arange(place.ring_points) / place.ring_points
    ring = place.ring_center + place.ring_radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    train = np.concatenate([[place.member, place.neighbour], ring])
    return train.astype(np.float32), np.array([place.member, place.biased, place.crowded], np.float32)


def bias_crowding(config: ConfigDict) -> BiasCrowding:
    """Compute bias and crowding of three candidates over time (paper, Figure bias-variance)."""
    train, candidates = scene(config)
    t = np.arange(config.scene.last_t + 1)
    denoiser = dj.IdealDenoiser(train, dj.linear_schedule())
    parts = denoiser.decompose(np.repeat(candidates, len(t), axis=0), np.tile(t, len(CASES)))
    bias, crowding, error = np.reshape([parts.bias, parts.crowding, parts.error], (3, len(CASES), len(t)))
    rise = config.scene.rise
    return BiasCrowding(CASES, t, bias, crowding, error, rise, first_above(crowding, rise))


def first_above(rows: np.ndarray, bound: float) -> list[int | None]:
    """Return the index of the first value above `bound` in each row, or None."""
    return [int(np.argmax(row > bound)) if np.any(row > bound) else None for row in rows]


def three_cases(config: ConfigDict) -> ThreeCases:
    """Compute what the denoiser sees around each candidate (paper, Figure dime-overview)."""
    train, candidates = scene(config)
    t, schedule = config.scene.three_cases_t, dj.linear_schedule()
    denoiser = dj.IdealDenoiser(train, schedule)
    responsibilities = np.asarray(denoiser.responsibilities(schedule.sqrt_abar(t) * candidates, t))
    m_local = responsibilities @ train
    centered = train[None] - m_local[:, None]
    covariance = np.einsum("bn,bni,bnj->bij", responsibilities, centered, centered)
    abar, sigma = schedule.abar(t).item(), schedule.sigma(t).item()
    bias = abar * np.sum((m_local - candidates) ** 2, axis=1)
    crowding = abar * np.trace(covariance, axis1=1, axis2=2)
    neighbourhoods = (responsibilities, m_local, covariance)
    return ThreeCases(CASES, t, abar, sigma, train, candidates, *neighbourhoods, bias, crowding)


def draw_bias_crowding(numbers: BiasCrowding) -> Figure:
    """Draw three panels against t: bias, crowding and their sum, a line per case."""
    figure, axes = figures.new_figure(1, 3, height=2.3)
    panels = (
        (r"bias$^2$  $\sigma_t^2 B^2$", numbers.bias),
        (r"crowding  $V$", numbers.crowding),
        (r"error  $M = \sigma_t^2 B^2 + V$", numbers.error),
    )
    for panel, (title, rows) in zip(axes[0], panels):
        for case, row, series in zip(numbers.cases, rows, figures.SERIES):
            panel.plot(numbers.t, row, color=series.color, linestyle=series.linestyle, label=case)
        panel.set(title=title, xlabel="timestep $t$", xlim=(numbers.t[0], numbers.t[-1]))
        panel.set_ylim(bottom=min(0.0, -0.02 * panel.get_ylim()[1]))
    axes[0, 0].set_ylabel("squared distance")
    figures.letter_panels(axes)
    figures.legend_below(figure, axes[0, 0])
    return figure


def draw_three_cases(numbers: ThreeCases) -> Figure:
    """Draw three panels of equal scale: candidate, training points, m_local and the spread around it."""
    figure, axes = figures.new_figure(1, 3, height=3.3)
    sky, blue, vermillion = figures.OKABE_ITO["sky"], figures.OKABE_ITO["blue"], figures.OKABE_ITO["vermillion"]
    reach = 1.15  # half the width of a panel
    verdicts = ("low bias, low crowding", "high bias, low crowding", "low bias, high crowding")
    spread = {"color": sky, "alpha": 0.3, "linewidth": 0, "label": r"2 s.d. around $m_\mathrm{local}$"}
    for i, panel in enumerate(axes[0]):
        center, mean = numbers.candidates[i], numbers.m_local[i]
        figures.add_covariance_ellipse(panel, mean, numbers.covariance[i], 2, **spread)
        panel.plot(*numbers.train.T, "o", color="0.35", markersize=5, label="training point")
        panel.plot(*np.stack([center, mean]).T, color=blue, linewidth=1)
        panel.plot(*mean, "D", color=blue, markersize=9, markerfacecolor="none", label=r"$m_\mathrm{local}$")
        panel.plot(*center, "*", color=vermillion, markersize=7, label="candidate $x^*$")
        panel.set_title(f"{numbers.cases[i]}\n{verdicts[i]}")
        panel.set_xlabel(f"bias$^2$ = {numbers.bias[i]:.3f},  $V$ = {numbers.crowding[i]:.3f}")
        low, high = center - reach, center + reach
        panel.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xticks=[], yticks=[], aspect="equal")
        panel.spines[:].set_visible(True)
    figures.letter_panels(axes)
    figures.legend_below(figure, axes[0, 0])
    return figure


# ------------------------------------------------------------------------------------------- eps* in one dimension


class LinePanel(NamedTuple):
    """ε*(√ᾱ x, t) [levels, points] of one training set on a line."""

    n: int
    train: np.ndarray
    x: np.ndarray
    eps: np.ndarray


class LineNumbers(NamedTuple):
    """One panel per training set, at the same noise levels."""

    t: list[int]
    abar: list[float]
    sigma: list[float]
    panels: list[LinePanel]


def denoiser_1d(config: ConfigDict) -> LineNumbers:
    """Compute ε* on the line, for a few training sets and noise levels (paper, Figure synthetic-denoiser).

    The schedule's timestep nearest to each ᾱ asked for is used, and its own ᾱ reported.
    """
    schedule = dj.linear_schedule()
    t = [int(np.argmin(np.abs(schedule.abar_table - abar))) for abar in config.line.abar]
    panels = []
    for points in config.line.train:
        train = np.array(points, np.float32)
        low, high = train.min() - config.line.margin, train.max() + config.line.margin
        x = np.linspace(low, high, config.line.resolution, dtype=np.float32)
        denoiser = dj.IdealDenoiser(train[:, None], schedule)
        scale, steps = np.repeat(schedule.sqrt_abar_table[t], len(x)), np.repeat(t, len(x))
        eps = denoiser.eps((scale * np.tile(x, len(t)))[:, None], steps)
        panels.append(LinePanel(len(train), train, x, np.asarray(eps).reshape(len(t), len(x))))
    return LineNumbers(t, schedule.abar_table[t].tolist(), schedule.sigma_table[t].tolist(), panels)


def draw_denoiser_1d(numbers: LineNumbers) -> Figure:
    """Draw a panel per training set, its points as dashed lines; the darker the curve the lower the noise."""
    figure, axes = figures.new_figure(1, len(numbers.panels), height=2.4)
    for panel, line in zip(axes[0], numbers.panels):
        for point in line.train:
            panel.axvline(point, color="0.6", linestyle="--", linewidth=0.7, zorder=1)
        panel.axhline(0, color="0.6", linewidth=0.7, zorder=1)
        for eps, abar, color in zip(line.eps, numbers.abar, figures.ordered_colors(len(numbers.abar))):
            panel.plot(line.x, eps, color=color, label=rf"$\bar\alpha_t$ = {abar:.2f}")
        panel.grid(visible=False, axis="x")  # vertical lines mean training points
        panel.set(title=f"$n$ = {line.n}", xlabel="$x$", xlim=(line.x[0], line.x[-1]))
    axes[0, 0].set_ylabel(r"$\hat\varepsilon^*(\sqrt{\bar\alpha_t}\,x,\ t)$")
    figures.letter_panels(axes)
    figures.legend_below(figure, axes[0, 0])
    return figure


# --------------------------------------------------------------------------------- DIME against SimA-MC over noise

METHODS = {
    "dime": "DIME (calibrated $\\phi$)",
    "dime_theory": "DIME (theory weights)",
    "sima_mc_shared": "SimA-MC, DIME's queries",
    "sima_mc_gaussian": "SimA-MC, Gaussian queries",
}
METRICS = {"asr": "ASR", "auc": "AUC", "tpr_at_1pct_fpr": "TPR @ 1% FPR"}


class Terms(NamedTuple):
    """What the attacks learn about a batch of points at each noise level; probes nest in q.

    norm: ‖ε*(g + γσ z_k)‖ [probes, levels, points] at sign probes z_k, seen by DIME and SimA-MC alike;
    gaussian_norm: ‖ε*(g + σ ξ_k)‖ [probes, levels, points] at SimA-MC's own Gaussian queries;
    trace: tr ∇ε*(g) [levels, points], exact.
    """

    norm: np.ndarray
    gaussian_norm: np.ndarray
    trace: np.ndarray


Half = Pair[Terms]  # of all members and of all held-out points of one half, pooled over its training sets


class Curve(NamedTuple):
    """One method over noise levels; phi is the angle it used at each, None for SimA-MC."""

    asr: list[dj.metrics.Estimate]
    auc: list[dj.metrics.Estimate]
    tpr_at_1pct_fpr: list[dj.metrics.Estimate]
    phi: list[float | None]


class Panel(NamedTuple):
    """All methods for n training points and q queries.

    auc_lead: AUC of DIME minus that of SimA-MC on the same queries, per noise level, with its paired interval. Both
      take l2 norms, so the latter is DIME's own level, and the lead is what crowding adds;
    gaussian_lead: the same, minus SimA-MC on its own Gaussian queries;
    lead_noise_correlation: Spearman's, between that lead and σ; None if the lead does not vary.
    """

    n: int
    q: int
    t: list[int]
    abar: list[float]
    sigma: list[float]
    curves: dict[str, Curve]
    mean_auc: dict[str, float]
    auc_lead: list[dj.metrics.Estimate]
    gaussian_lead: list[dj.metrics.Estimate]
    lead_noise_correlation: float | None


def cluster_points(rng: np.random.Generator, config: ConfigDict, count: int) -> np.ndarray:
    """Draw fresh points [count, d] from the mixture; its centres depend on the seed alone.

    Args:
      rng: draws the points.
      config: with the number, dimension and width of the clusters.
      count: how many points.
    """
    attack = config.attack
    centers = np.random.default_rng(config.seed).normal(size=(attack.clusters, attack.dimension))
    points = centers[rng.integers(attack.clusters, size=count)]
    return (points + attack.width * rng.normal(size=points.shape)).astype(np.float32)


def attack_terms(
    denoiser: dj.IdealDenoiser, config: ConfigDict, points: np.ndarray, draws: Draws, probes: int
) -> Terms:
    """Ask the denoiser everything the attacks need about the points, all noise levels in one call per probe.

    Args:
      denoiser: the closed form.
      config: with the noise levels and γ.
      points: [n, d], members or not.
      draws: signs and noises for each point.
      probes: the most that any method may use.
    """
    schedule, levels = denoiser.schedule, len(config.attack.timesteps)
    t = np.repeat(config.attack.timesteps, len(points))
    batch = jnp.asarray(points)
    x = jnp.tile(batch, (levels, 1))
    norms, gaussian_norms = [], []
    for k in range(probes):
        signs = jnp.tile(draws.rademacher(k, batch), (levels, 1))[None]
        noise = jnp.tile(draws.gaussian(k, batch), (levels, 1))[None]
        norms.append(dime_norms(denoiser.eps_fn(), schedule, x, signs, t, config.attack.gamma)[0])
        gaussian_norms.append(dj.sima_mc(denoiser.eps_fn(), schedule, x, noise, t, p=2))
    return Terms(
        np.asarray(norms).reshape(probes, levels, -1),
        np.asarray(gaussian_norms).reshape(probes, levels, -1),
        np.asarray(denoiser.jacobian_trace(schedule.scaled(x, t), t)).reshape(levels, -1),
    )


def attack_half(config: ConfigDict, n: int, probes: int, half: int) -> Half:
    """Pool terms over independent training sets of n points, each with its own fresh held-out points.

    Half 0 calibrates and half 1 tests: they share the distribution, but neither training sets nor points nor draws.

    Args:
      config: the study's.
      n: points in each training set.
      probes: the most that any method may use.
      half: 0 or 1.
    """
    validate.check_at_least(config.attack.members, 1, "attack.members")
    validate.check_at_least(config.attack.heldout, 1, "attack.heldout")
    repeats = -(-config.attack.members // n)
    fresh = -(-config.attack.heldout // repeats)
    rng, schedule = np.random.default_rng([config.seed, n, half]), dj.linear_schedule()
    key = jax.random.fold_in(jax.random.key(config.seed), half)
    found = []
    for repeat in range(repeats):
        points = cluster_points(rng, config, n + fresh)
        ids = np.arange(len(points), dtype=np.uint32) + np.uint32(repeat * len(points))
        denoiser = dj.IdealDenoiser(points[:n], schedule)
        terms = attack_terms(denoiser, config, points, Draws(key, jnp.asarray(ids)), probes)
        found.append(terms)
    return Half(slice(None, n), slice(n, None)).map(lambda side: _pooled(found, side))


def _pooled(terms: Sequence[Terms], side: slice) -> Terms:
    """Return the terms of one side of every training set."""
    return Terms(*(np.concatenate([one[..., side] for one in kind], axis=-1) for kind in zip(*terms)))


def method_terms(terms: Terms, method: str, q: int, level: int) -> np.ndarray:
    """Return the columns of a method [1 or 2, points] at a budget of q and one noise level, as for calibration.

    Args:
      terms: what all methods learn.
      method: a key of `METHODS`.
      q: its budget.
      level: the number of the noise level.
    """
    if method == "sima_mc_gaussian":
        return terms.gaussian_norm[:q, level].mean(axis=0)[None]
    norm = terms.norm[:q, level].mean(axis=0)
    return norm[None] if method == "sima_mc_shared" else np.stack([norm**2, terms.trace[level]])


def attack_panel(config: ConfigDict, n: int, q: int, calibration_half: Half, test_half: Half) -> Panel:
    """Calibrate each method at each noise level on one half, and measure it on the other.

    Args:
      config: the study's.
      n: training points of each set, for the record.
      q: queries a method may make.
      calibration_half: chooses.
      test_half: is measured.
    """
    schedule, timesteps = dj.linear_schedule(), list(config.attack.timesteps)
    outcomes: dict[str, list[calibration.Outcome]] = {method: [] for method in METHODS}
    leads: dict[str, list[dj.metrics.Estimate]] = {"sima_mc_shared": [], "sima_mc_gaussian": []}
    for level, t in enumerate(timesteps):
        setting, scores = {"t": t, "gamma": config.attack.gamma, "q": q}, {}
        for method in METHODS:
            attack = get_attack("sima_mc_norms" if method.startswith("sima_mc") else method)
            columns = functools.partial(method_terms, method=method, q=q, level=level)
            chooses, tests = calibration_half.map(columns), test_half.map(columns)
            frozen = calibration.calibrate(attack, schedule, [setting], [chooses])
            outcomes[method].append(calibration.evaluate(frozen, tests, seed=config.seed))
            scores[method] = tests.map(frozen.score)
        for rival, found in leads.items():
            found.append(dj.metrics.compare(scores["dime"], scores[rival], fprs=()).auc_difference)
    curves = {method: curve(rows) for method, rows in outcomes.items()}
    abar, sigma = schedule.abar_table[timesteps].tolist(), schedule.sigma_table[timesteps].tolist()
    means = {method: float(np.mean([auc.value for auc in one.auc])) for method, one in curves.items()}
    shared, gaussian = leads.values()
    correlation = rank_correlation([lead.value for lead in shared], sigma)
    return Panel(n, q, timesteps, abar, sigma, curves, means, shared, gaussian, correlation)


def curve(rows: Sequence[calibration.Outcome]) -> Curve:
    """Return what one method found at each noise level."""
    metrics = [row.metrics for row in rows]
    return Curve(
        [one.asr for one in metrics],
        [one.auc for one in metrics],
        [one.tpr_at_fpr[0.01] for one in metrics],
        [row.calibration.parameters.get("phi") for row in rows],
    )


def rank_correlation(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float | None:
    """Return Spearman's rank correlation; None if one of the two does not vary."""
    vary = np.ptp(first) > 0 and np.ptp(second) > 0
    return float(stats.spearmanr(first, second).statistic) if vary else None


def attack_study(config: ConfigDict) -> dict[str, list[Panel]]:
    """Compare DIME with SimA-MC over noise (paper, Figures q-fixed-grid and n-fixed-grid).

    Returns panels over dataset size n at one q, and over query budget q at one n.
    """
    panels: dict[tuple[int, int], Panel] = {}
    queries = {n: {config.attack.fixed_q} for n in config.attack.sizes}
    queries.setdefault(config.attack.fixed_n, set()).update(config.attack.budgets)
    for n, budgets in queries.items():
        print(f"DIME against SimA-MC, n = {n}", flush=True)
        halves = [attack_half(config, n, max(budgets), half) for half in (0, 1)]
        for q in budgets:
            panels[n, q] = attack_panel(config, n, q, *halves)
    return {
        "dataset_size": [panels[n, config.attack.fixed_q] for n in config.attack.sizes],
        "query_budget": [panels[config.attack.fixed_n, q] for q in config.attack.budgets],
    }


def draw_attack_panels(panels: Sequence[Panel]) -> Figure:
    """Draw a row per metric and a column per panel, against ᾱ on a logit axis, noise growing to the right.

    Shaded: the 95 % interval of DIME and of SimA-MC on the same queries.
    """
    figure, axes = figures.new_figure(len(METRICS), len(panels), height=5.2, sharex=True, sharey="row")
    for column, panel in enumerate(panels):
        for row, (metric, label) in enumerate(METRICS.items()):
            _draw_metric(axes[row, column], panel, metric)
            if column == 0:
                axes[row, column].set_ylabel(label)
        axes[0, column].set_title(f"$n$ = {panel.n}, $q$ = {panel.q}")
        axes[-1, column].set_xlabel(r"$\bar\alpha_t$   (more noise $\rightarrow$)")
    figures.legend_below(figure, axes[0, 0])
    return figure


def _draw_metric(axes: Axes, panel: Panel, metric: str) -> None:
    for (method, label), series in zip(METHODS.items(), figures.SERIES):
        estimates = np.array(getattr(panel.curves[method], metric))
        axes.plot(panel.abar, estimates[:, 0], **series._asdict(), label=label)
        if method in ("dime", "sima_mc_shared"):
            axes.fill_between(panel.abar, estimates[:, 1], estimates[:, 2], color=series.color, alpha=0.15, linewidth=0)
    chance = 0.01 if metric == "tpr_at_1pct_fpr" else 0.5
    axes.axhline(chance, color="0.4", linewidth=0.8, zorder=1)
    axes.set_ylim(chance - 0.04, 1.03)
    axes.set_xscale("logit")
    axes.set_xlim(1 - (1 - max(panel.abar)) / 1.3, min(panel.abar) / 1.3)
    ticks = [tick for tick in (0.999, 0.99, 0.9, 0.5, 0.1) if min(panel.abar) <= tick <= max(panel.abar)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


# ---------------------------------------------------------------------------------------------------------- running


def plain(numbers: object) -> records.Json:
    """Return records and arrays as JSON holds them, with the 7 digits that float32 has."""
    return json.loads(json.dumps(records.plain(numbers)), parse_float=lambda digits: float(f"{float(digits):.7g}"))


def save_study(workdir: pathlib.Path, name: str, numbers: T, draw: Callable[[T], Figure]) -> None:
    """Write a study's numbers and figures as NAME.json, NAME.png and NAME.svg.

    Args:
      workdir: where the files go.
      name: the files' name, without suffix.
      numbers: a NamedTuple, or a list of them.
      draw: makes the figure of the numbers.
    """
    (workdir / f"{name}.json").write_text(json.dumps(plain(numbers), indent=1, allow_nan=False) + "\n")
    figures.save_figure(draw(numbers), workdir, name)


def run(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, object]:
    """Compute every study; write its figures and numbers, and the config, to `workdir`. Returns the numbers by name."""
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(config.to_json(indent=1) + "\n")
    studies: dict[str, tuple[Callable[[ConfigDict], object], Callable[..., Figure]]] = {
        "bias_crowding": (bias_crowding, draw_bias_crowding),
        "three_cases": (three_cases, draw_three_cases),
        "denoiser_1d": (denoiser_1d, draw_denoiser_1d),
    }
    numbers: dict[str, object] = {}
    with figures.style():
        for name, (compute, draw) in studies.items():
            print(name.replace("_", " "), flush=True)
            numbers[name] = compute(config)
            save_study(workdir, name, numbers[name], draw)
        for name, panels in attack_study(config).items():
            numbers[name] = panels
            save_study(workdir, name, panels, draw_attack_panels)
    return numbers


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Run every study of the config."""
    del config_file
    run(config, workdir)


if __name__ == "__main__":
    launch(main, "experiments/configs/synthetic.py")
