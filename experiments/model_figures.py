"""Figures that ask a model with known members: what the norm does to PIA and SimA, and how far it is from the ideal.

The ideal denoiser of a training set is known in closed form (`dime_jax.IdealDenoiser`), so for a network whose members
are known, its distance from the object that the theory is about can be measured: the paper's open problem.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from matplotlib.figure import Figure

import dime_jax as dj
from dime_jax import data
from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import PRECISION, ApplyFn, Denoiser, EpsFn
from dime_jax.evidence import metrics
from dime_jax.report import figures
from experiments.runs import Scores
from experiments.study_data import Study
from experiments.synthetic import rank_correlation

_BATCH = 64


SidePair = data.Pair[np.ndarray]  # images [n, H, W, C] as the model sees them


def read_images(study: Study, index: np.ndarray, image_shape: tuple[int, ...]) -> np.ndarray:
    """Read some images of the study [n, H, W, C]."""
    transform = data.transform_for(study.source, image_shape)
    return np.stack([transform(study.source[i].image) for i in index])


def read_half(study: Study, half: data.Split, image_shape: tuple[int, ...]) -> SidePair:
    """Read both sides of a half."""
    return SidePair(half.member, half.heldout).map(lambda index: read_images(study, index, image_shape))


# ------------------------------------------------------------------------------------------------------- the norm's p


class NormEffect(NamedTuple):
    """AUC on the test half over p ("1", "2", …, "∞"), by attack, and the timestep that calibration chose for each p."""

    p: list[str]
    auc: dict[str, list[metrics.Estimate]]
    t: dict[str, list[int]]


ATTACKS: dict[str, Callable[..., jax.Array]] = {"SimA": dj.sima, "PIA": dj.pia}


def norm_effect(
    denoiser: Denoiser, calibration: SidePair, test: SidePair, p: Sequence[float], timesteps: Sequence[int]
) -> NormEffect:
    """Measure PIA and SimA with norms other than the published: timestep by calibration AUC, then the test half.

    Args:
      denoiser: the model, whose members are known.
      calibration: images that choose the timestep.
      test: images that are measured.
      p: the norms to compare; may hold infinity.
      timesteps: those to choose from.
    """
    labels = ["∞" if np.isinf(order) else f"{order:g}" for order in p]
    numbers = NormEffect(labels, {attack: [] for attack in ATTACKS}, {attack: [] for attack in ATTACKS})
    for attack in ATTACKS:
        chooses = norm_scores(denoiser, attack, calibration, p, timesteps)
        tests = norm_scores(denoiser, attack, test, p, timesteps)
        for order in range(len(p)):
            aucs = [metrics.auc(chooses.member[order, t], chooses.heldout[order, t]) for t in range(len(timesteps))]
            best = int(np.argmax(aucs))
            outcome = metrics.evaluate(tests.member[order, best], tests.heldout[order, best], fprs=())
            numbers.auc[attack].append(outcome.auc)
            numbers.t[attack].append(timesteps[best])
    return numbers


def norm_scores(
    denoiser: Denoiser, attack: str, images: SidePair, p: Sequence[float], timesteps: Sequence[int]
) -> Scores:
    """Score both sides by one attack.

    Args:
      denoiser: asked once for each image and timestep: other norms of one response cost no queries.
      attack: a key of `ATTACKS`.
      images: of both sides.
      p: norms.
      timesteps: where the model is asked.

    Returns:
      Scores [p, timesteps, n] of each side.
    """
    ask = _cached(denoiser.eps_fn())

    def scores(side: np.ndarray) -> np.ndarray:
        batches = np.split(side, range(_BATCH, len(side), _BATCH))
        return np.array([[score(batches, t, order) for t in timesteps] for order in p])

    def score(batches: Sequence[np.ndarray], t: int, order: float) -> np.ndarray:
        return np.concatenate([ATTACKS[attack](ask, denoiser.schedule, x, t, p=order) for x in batches])

    return images.map(scores)


def _cached(eps_fn: EpsFn) -> EpsFn:
    """Return the same function with a cache: other norms of one response cost no queries."""
    known: dict[tuple[int, bytes], jax.Array] = {}

    def eps(x: jax.Array, t: ArrayLike) -> jax.Array:
        key = (int(np.asarray(t)), np.asarray(x).tobytes())
        if key not in known:
            known[key] = eps_fn(x, t)
        return known[key]

    return eps


def draw_norm_effect(numbers: NormEffect) -> Figure:
    """Draw AUC against p, evenly spaced, a line per attack with its interval."""
    figure, axes = figures.new_figure(1, 1, height=2.6, width=figures.DOUBLE_COLUMN / 2)
    panel, places = axes[0, 0], np.arange(len(numbers.p))
    for (attack, estimates), series in zip(numbers.auc.items(), figures.SERIES):
        values = np.array(estimates)
        panel.plot(places, values[:, 0], **series._asdict(), label=attack)
        panel.fill_between(places, values[:, 1], values[:, 2], color=series.color, alpha=0.15, linewidth=0)
    panel.set_xticks(places, numbers.p)
    panel.set(xlabel=r"$p$ of the norm $\Vert\cdot\Vert_p$", ylabel="AUC, test half")
    figures.legend_below(figure, panel)
    return figure


# ------------------------------------------------------------------------------------------------ distance from ideal


class IdealGap(NamedTuple):
    """A trained network against the ideal denoiser of its own members, over t; "member" and "heldout" images.

    With d values per image, ε_θ the network and ε* the ideal:
      model: fingerprint of the network.
      images: how many of each side.
      train: how many training images the ideal knows.
      noised_error: RMS of (ε_θ - ε*) per value at x_t = √ᾱ x + σ·noise, members: the root of the loss in excess of the
        least that is possible.
      image_error: the same at g = √ᾱ x, where DIME asks, by side.
      crowding: V/(d σ²) = 1 - σ tr J/d, median over images, by (who, side).
      rank_correlation: Spearman's, between network and ideal over all images, of the level B² and of the crowding V;
        None where the ideal's value is the same for all.
    """

    model: str
    images: int
    train: int
    t: list[int]
    noised_error: list[float]
    image_error: dict[str, list[float]]
    crowding: dict[str, dict[str, list[float]]]
    rank_correlation: dict[str, list[float | None]]

    def ranks(self, name: str, last: int) -> list[float]:
        """Return the rank correlations of "level" or "crowding" that are known, up to a timestep."""
        known = zip(self.t, self.rank_correlation[name])
        return [rank for t, rank in known if t <= last and rank is not None and np.isfinite(rank)]


def ideal_gap(denoiser: Denoiser, train: np.ndarray, images: SidePair, timesteps: Sequence[int], seed: int) -> IdealGap:
    """Compare ε and crowding of the network and of the ideal denoiser of `train`, on members and held-out images.

    Args:
      denoiser: a network that JAX can differentiate.
      train: everything that it was trained on [n, H, W, C].
      images: what both are asked about.
      timesteps: where they are asked.
      seed: for the noise.
    """
    schedule, ideal = denoiser.schedule, dj.IdealDenoiser(train, denoiser.schedule)
    x = np.concatenate(images)
    is_member = np.arange(len(x)) < len(images.member)
    sides = {"member": is_member, "heldout": ~is_member}
    rng = np.random.default_rng(seed)
    model, counts = denoiser.fingerprint, (len(images.member), len(train))
    image_error: dict[str, list[float]] = {side: [] for side in sides}
    crowdings: dict[str, dict[str, list[float]]] = {who: {side: [] for side in sides} for who in ("network", "ideal")}
    gap = IdealGap(model, *counts, list(timesteps), [], image_error, crowdings, {"level": [], "crowding": []})
    for t in timesteps:
        scale, sigma = schedule.sqrt_abar(t).item(), schedule.sigma(t).item()
        noised = (scale * images.member + sigma * rng.normal(size=images.member.shape)).astype(np.float32)
        gap.noised_error.append(_rms(_eps(denoiser, noised, t) - np.asarray(ideal.eps(noised, t))))
        g = (scale * x).astype(np.float32)
        ours, best = _eps(denoiser, g, t), np.asarray(ideal.eps(g, t))
        dimension = g[0].size
        crowding = {
            "network": 1 - sigma * network_trace(denoiser, g, t) / dimension,
            # V itself, not by its trace: at low noise it is far below what float32 keeps of 1 - σ tr J/d.
            "ideal": np.asarray(ideal.decompose(x, t).crowding) / (dimension * sigma**2),
        }
        for side, rows in sides.items():
            gap.image_error[side].append(_rms((ours - best)[rows]))
            for who, values in crowding.items():
                gap.crowding[who][side].append(float(np.median(values[rows])))
        levels = [np.sum(eps.reshape(len(x), -1) ** 2, axis=1) for eps in (ours, best)]
        gap.rank_correlation["level"].append(rank_correlation(*levels))
        gap.rank_correlation["crowding"].append(rank_correlation(crowding["network"], crowding["ideal"]))
    return gap


def network_trace(denoiser: Denoiser, g: np.ndarray, t: int) -> np.ndarray:
    """Compute tr ∇ε(g, t) [B] exactly: the Jacobian's diagonal, one forward-mode derivative per value of an image."""

    if not denoiser.traceable or denoiser.num_classes is not None:
        raise ValueError(
            f"the network must be unconditional, and JAX must be able to differentiate it, got {denoiser.name}"
        )
    with jax.default_matmul_precision(PRECISION):
        diagonal = [_diagonal(denoiser.apply, denoiser.params, g, jnp.int32(t), place) for place in range(g[0].size)]
        return np.sum(diagonal, axis=0)


@functools.partial(jax.jit, static_argnums=0)
def _diagonal(apply: ApplyFn, params: PyTree, g: jax.Array, t: jax.Array, place: jax.Array) -> jax.Array:
    """∂ε_i/∂g_i [B] for the value at `place` of the flattened images."""
    direction = jnp.zeros(g[0].size, g.dtype).at[place].set(1).reshape(g.shape[1:])
    tangent = jnp.broadcast_to(direction, g.shape)
    moved = jax.jvp(lambda y: apply(params, y, t, None), (g,), (tangent,))[1]
    return jnp.sum(moved * tangent, axis=tuple(range(1, g.ndim)))


def _eps(denoiser: Denoiser, x: np.ndarray, t: int) -> np.ndarray:
    return np.concatenate([denoiser.eps(x[start : start + _BATCH], t) for start in range(0, len(x), _BATCH)])


def _rms(difference: np.ndarray) -> float:
    return float(np.sqrt(np.mean(difference**2)))


def draw_ideal_gap(numbers: IdealGap) -> Figure:
    """Draw three panels against t: error of ε, crowding, rank correlation."""
    figure, axes = figures.new_figure(1, 3, height=2.9)
    error, crowding, ranks = axes[0]
    blue, vermillion, green = figures.SERIES[:3]
    error.plot(numbers.t, numbers.noised_error, **green._asdict(), label="noised members")
    for side, name, series in (("member", "members", blue), ("heldout", "held-out images", vermillion)):
        error.plot(numbers.t, numbers.image_error[side], **series._asdict(), label=name)
        for who, alpha in (("network", 1.0), ("ideal", 0.45)):
            crowding.plot(
                numbers.t, numbers.crowding[who][side], **series._asdict(), alpha=alpha, label=f"{name}, {who}"
            )
    for name, label, series in (("level", "level $B^2$", blue), ("crowding", "crowding $V$", vermillion)):
        values = [np.nan if value is None else value for value in numbers.rank_correlation[name]]
        ranks.plot(numbers.t, values, **series._asdict(), label=label)
    error.set(title=r"RMS of $\varepsilon_\theta - \varepsilon^*$ per pixel", yscale="log")
    crowding.set(title=r"crowding $V/(d\,\sigma_t^2)$, median")
    ranks.set(title="rank correlation with the ideal", ylim=(-0.35, 1.05))
    ranks.axhline(0, color="0.4", linewidth=0.8, zorder=1)
    for panel in axes[0]:
        panel.set_xlabel("timestep $t$")
        panel.legend(loc="best", fontsize=6)
    figures.letter_panels(axes)
    return figure
