"""DIME: membership from the two parts of the ideal denoiser's estimation error (paper, Algorithm 1).

With g = √ᾱ_t x and sign probes z_k,

    B̂ = mean_k ‖ε(g + γσ z_k)‖                              how far the model's reconstruction lies (Eq. hat_B)
    V̂ = mean_k z_kᵀ(ε(g + γσ z_k) - ε(g)) / γσ              tr ∇ε, by Hutchinson (Eq. hat_V)
    score = cos φ · B̂² + sin φ · V̂                          (Eq. DIME)

V̂ estimates d/σ - V/σ³ (Lemma V-error-bias): it *falls* as the crowding V rises, so members have large V̂, and the
population-exact weights M/σ² = B² - σV̂ + d lie at φ = -atan σ. Averaged over all probes the error of V̂ is O(γ²).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax._util.typing import PyTree
from dime_jax.attacks.base import Attack, Reading, Recipe, Setting, draw_numbers, grid
from dime_jax.attacks.calls import Answer, Arrays, Call, Mask, Query, check_draws, images, masked, norm
from dime_jax.attacks.rules import Angles, Terms, TermStats, weighted
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.draws import Draw, Given
from dime_jax.core.schedule import NoiseSchedule, per_image

FAMILY = "DIME"
NUM_ANGLES = 16


class DimeTerms(NamedTuple):
    """Per-probe terms [q, B]; probes nest, so the first rows are a smaller budget's terms."""

    norm: Terms
    trace: Terms


class DimeStats(NamedTuple):
    """Mean and standard deviation of B̂² and V̂ over calibration images."""

    mean_sq: float
    std_sq: float
    mean_trace: float
    std_trace: float

    def of_terms(self) -> TermStats:
        """The same numbers, term by term."""
        return TermStats((self.mean_sq, self.mean_trace), (self.std_sq, self.std_trace))


# --------------------------------------------------------------------------------------------------------------- calls


@dataclasses.dataclass(frozen=True, order=True)
class Scaled(Call):
    """ε(g, t) at g = √ᾱ x: the base response of forward differences. State: ε."""

    t: ArrayLike

    def query(self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree) -> Query:
        """g."""
        return Query(schedule.scaled(x, self.t), self.t)

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree, asked: Query, eps: Array, mask: Mask
    ) -> Answer:
        """Return no numbers."""
        return Answer(eps, {})


@dataclasses.dataclass(frozen=True, order=True)
class _AtProbe(Call):
    """A query at distance γσ from the scaled image g, along sign probe z_index, or against it."""

    t: ArrayLike
    gamma: ArrayLike
    index: int

    needs_source: ClassVar[frozenset[str]] = frozenset({"trace"})
    side: ClassVar[int] = 1

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range and γ > 0."""
        super().check(schedule)
        validate.check_positive(self.gamma, "gamma")

    def draws(self) -> Mapping[str, Draw]:
        """z_index."""
        return {"probe": Draw("rademacher", self.index)}

    def query(self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree) -> Query:
        """g + γσ z, or g - γσ z."""
        step = self.gamma * per_image(schedule.sigma(self.t), x) * (self.side * drawn["probe"])
        return Query(schedule.scaled(x, self.t) + step, self.t)


@dataclasses.dataclass(frozen=True, order=True)
class Probe(_AtProbe):
    """ε(g + γσ z_index, t) at sign probe z. State: ε."""

    @property
    def source(self) -> Call:
        """The base response, needed by forward differences only."""
        return Scaled(self.t)

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree, asked: Query, eps: Array, mask: Mask
    ) -> Answer:
        """Numbers norm: ‖ε‖; trace: zᵀ(ε - ε_base)/γσ, if the base response is given."""
        numbers = {"norm": norm(eps, 2, mask)}
        if given is not None:
            step = self.gamma * schedule.sigma(self.t).astype(x.dtype)
            numbers["trace"] = trace_term(drawn["probe"], eps - given, step, mask)
        return Answer(eps, numbers)


@dataclasses.dataclass(frozen=True, order=True)
class Mirror(_AtProbe):
    """ε(g - γσ z_index, t): the other side of a probe, for central differences."""

    side: ClassVar[int] = -1

    @property
    def source(self) -> Call:
        """The probe whose other side this is."""
        return Probe(self.t, self.gamma, self.index)

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Array, asked: Query, eps: Array, mask: Mask
    ) -> Answer:
        """Numbers norm: ‖ε₋‖; trace: zᵀ(ε₊ - ε₋)/2γσ."""
        step = 2 * self.gamma * schedule.sigma(self.t).astype(x.dtype)
        return Answer(None, {"norm": norm(eps, 2, mask), "trace": trace_term(drawn["probe"], given - eps, step, mask)})


def trace_term(probe: Array, difference: Array, step: Terms, mask: Mask = None) -> Array:
    """Return zᵀΔ/h per image [B], an estimate of tr ∇ε; over the coordinates inside a mask, of their part of it.

    Args:
      probe: z [B, ...].
      difference: Δ, of two responses.
      step: h, how far these lie apart.
      mask: as in `Call.reduce`.
    """
    return jnp.sum(masked(probe * difference, mask).reshape(len(probe), -1), axis=1) / step


# ------------------------------------------------------------------------------------------------------ as functions


def dime_terms(
    eps_fn: EpsFn, schedule: NoiseSchedule, x: ArrayLike, probes: ArrayLike, t: ArrayLike, gamma: ArrayLike
) -> DimeTerms:
    """Return the terms of B̂ and V̂ by forward differences: q + 1 queries per image.

    Args:
      eps_fn: the model.
      schedule: its noise schedule.
      x: images [B, ...].
      probes: signs [q, B, ...] of ±1.
      t: the timestep.
      gamma: length of the step along a probe, in units of σ.
    """
    x = images(x)
    probes = check_draws(probes, x, "probes")
    calls = [Probe(t, gamma, index) for index in range(len(probes))]
    calls[0].check(schedule)
    base = calls[0].source.ask(eps_fn, schedule, x).state
    numbers = [call.ask(eps_fn, schedule, x, Given(probes), base).numbers for call in calls]
    return DimeTerms(*(jnp.stack([one[name] for one in numbers]) for name in DimeTerms._fields))


def dime_central_terms(
    eps_fn: EpsFn, schedule: NoiseSchedule, x: ArrayLike, probes: ArrayLike, t: ArrayLike, gamma: ArrayLike
) -> DimeTerms:
    """Return the terms by central differences, 2q queries: the mean of both norms, and zᵀ(ε₊ - ε₋)/2γσ.

    Per probe, the trace's error is O(γ²) where the forward difference's is O(γ); no base query is needed.

    Args:
      eps_fn, schedule, x, probes, t, gamma: as in `dime_terms`.
    """
    x = images(x)
    draws = Given(check_draws(probes, x, "probes"))
    norms, traces = [], []
    for index in range(len(draws.rows)):
        plus = Probe(t, gamma, index).ask(eps_fn, schedule, x, draws)
        minus = Mirror(t, gamma, index).ask(eps_fn, schedule, x, draws, plus.state)
        norms.append((plus.numbers["norm"] + minus.numbers["norm"]) / 2)
        traces.append(minus.numbers["trace"])
    return DimeTerms(jnp.stack(norms), jnp.stack(traces))


def dime_norms(
    eps_fn: EpsFn, schedule: NoiseSchedule, x: ArrayLike, probes: ArrayLike, t: ArrayLike, gamma: ArrayLike
) -> Array:
    """Return the norms of `dime_terms` alone [q, B]: q queries, no base query.

    Args:
      eps_fn, schedule, x, probes, t, gamma: as in `dime_terms`.
    """
    x = images(x)
    draws = Given(check_draws(probes, x, "probes"))
    calls = [Probe(t, gamma, index) for index in range(len(draws.rows))]
    return jnp.stack([call.ask(eps_fn, schedule, x, draws).numbers["norm"] for call in calls])


def summarize(terms: DimeTerms) -> Terms:
    """Return B̂² and V̂ [2, B]: means over probes (the norm is averaged before it is squared). NumPy in, NumPy out."""
    xp = jnp if isinstance(terms.norm, Array) else np
    return xp.stack([terms.norm.mean(axis=0) ** 2, terms.trace.mean(axis=0)])


def dime_score(terms: DimeTerms, phi: ArrayLike, stats: DimeStats | None = None) -> Terms:
    """Return the DIME score per image [B], lower for members. NumPy in, NumPy out."""
    xp = jnp if isinstance(terms.norm, Array) else np
    weights = xp.cos(phi), xp.sin(phi)
    return weighted(summarize(terms), weights, None if stats is None else stats.of_terms())


def theory_phi(sigma: ArrayLike) -> Array:
    """Return the population-exact angle -atan σ_t, for raw (not standardised) terms: φ needs no calibration."""
    return -jnp.arctan(jnp.asarray(sigma))


def decide(scores: Terms, tau: float) -> Terms:
    """Decide membership: score <= τ (the last line of Algorithm 1)."""
    return scores <= tau


# ------------------------------------------------------------------------------------------------------------- recipes


def _probes(setting: Setting) -> list[Probe]:
    return [Probe(int(setting["t"]), float(setting["gamma"]), index) for index in draw_numbers(setting)]


def forward(setting: Setting) -> Recipe:
    """B̂² and V̂ by forward differences."""
    probes = _probes(setting)
    readings = [Reading(probe, name) for name in DimeTerms._fields for probe in probes]
    return Recipe(tuple(readings), lambda r: summarize(DimeTerms(r[: len(probes)], r[len(probes) :])))


def central(setting: Setting) -> Recipe:
    """B̂² and V̂ by central differences."""
    probes = _probes(setting)
    mirrors = [Mirror(probe.t, probe.gamma, probe.index) for probe in probes]
    norms = [Reading(call, "norm") for call in (*probes, *mirrors)]
    readings = [*norms, *(Reading(mirror, "trace") for mirror in mirrors)]

    def assemble(r: Terms) -> Terms:
        plus, minus, trace = r.reshape(3, len(probes), -1)
        return summarize(DimeTerms((plus + minus) / 2, trace))

    return Recipe(tuple(readings), assemble)


def level(setting: Setting) -> Recipe:
    """B̂² alone."""
    return Recipe(tuple(Reading(probe, "norm") for probe in _probes(setting)), lambda r: r.mean(axis=0)[None] ** 2)


def search_angles(schedule: NoiseSchedule, setting: Setting) -> Sequence[float]:
    """Equally spaced angles on the full circle: members may lie on either side in each term."""
    del schedule, setting
    return [2 * np.pi * i / NUM_ANGLES for i in range(NUM_ANGLES)]


CITATION = "Do, Alabi: DIME: Query-efficient framework for membership inference on diffusion models"
# The authors' grid for 32x32 DDPM checkpoints, one that a laptop gets through, and one for slow models.
TIMES = {"paper": [*range(50, 231, 20)], "quick": [30, 70, 120], "light": [70, 120]}
GAMMAS = {"paper": [0.05, 0.1, 0.2, 0.4, 0.6], "quick": [0.1, 0.4], "light": [0.1]}
GRIDS = {profile: grid(t=times, gamma=GAMMAS[profile]) for profile, times in TIMES.items()}
TIERS = (1, 10, 30)
_SIGNS = (1, -1)  # B̂² is lower and V̂ higher for members
_SEARCHED = Angles(search_angles)
_THEORY = Angles(lambda schedule, setting: [theory_phi(schedule.sigma(int(setting["t"]))).item()], standardize=False)
_CROWDING = Angles(lambda schedule, setting: [-np.pi / 2])
_entry = functools.partial(Attack, grids=GRIDS, family=FAMILY)
_forward = functools.partial(_entry, recipe=forward, tiers=TIERS, signs=_SIGNS)

ATTACKS = (
    _forward("dime", "DIME", CITATION, rule=_SEARCHED),
    # Tiers of 1, 5, 15 central pairs cost 2, 10 and 30 queries: the budgets of the other attacks.
    _entry(
        "dime_central",
        "DIME central",
        f"{CITATION}; central differences added here",
        recipe=central,
        tiers=(1, 5, 15),
        signs=_SIGNS,
        rule=_SEARCHED,
    ),
    _forward("dime_theory", "DIME theory weights", f"{CITATION}, Eq. M_decomposition", rule=_THEORY),
    _entry("level_only", "Level only (B²)", f"{CITATION}, ablation", recipe=level, tiers=TIERS, positive=True),
    _forward("crowding_only", "Crowding only (V)", f"{CITATION}, ablation", rule=_CROWDING),
)
