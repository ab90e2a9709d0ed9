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
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax._util import validate
from dime_jax.attacks.base import (
    Answer,
    Attack,
    Call,
    Reading,
    Recipe,
    Setting,
    asking,
    check_draws,
    draw_numbers,
    grid,
    images,
    kept_part,
    norm,
    query,
)
from dime_jax.attacks.rules import Angles, TermStats, weighted
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.draws import Given, Randomness
from dime_jax.core.schedule import NoiseSchedule, per_image

FAMILY = "DIME"
NUM_ANGLES = 16


class DimeTerms(NamedTuple):
    """Per-probe terms [q, B]; probes nest, so the first rows are a smaller budget's terms."""

    norm: jax.Array
    trace: jax.Array


class DimeStats(NamedTuple):
    """Mean and standard deviation of B̂² and V̂ over calibration images."""

    mean_sq: float
    std_sq: float
    mean_trace: float
    std_trace: float

    def of_terms(self) -> TermStats:
        """The same, term by term."""
        return TermStats((self.mean_sq, self.mean_trace), (self.std_sq, self.std_trace))


# --------------------------------------------------------------------------------------------------------------- calls


@dataclasses.dataclass(frozen=True, order=True)
class Scaled(Call):
    """ε(g, t) at g = √ᾱ x: the base response of forward differences. State: ε."""

    t: int

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range."""
        validate.check_timestep(self.t, schedule.num_steps)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Randomness, given: Any) -> Answer:
        """No numbers."""
        del draws, given
        return Answer(query(eps_fn, schedule.scaled(x, self.t), self.t), {})


@dataclasses.dataclass(frozen=True, order=True)
class _AtProbe(Call):
    """A query at distance γσ from the scaled image, along sign probe z_index."""

    t: int
    gamma: float
    index: int

    needs_source: ClassVar[frozenset[str]] = frozenset({"trace"})

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range and γ > 0."""
        validate.check_timestep(self.t, schedule.num_steps)
        validate.check_positive(self.gamma, "gamma")


@dataclasses.dataclass(frozen=True, order=True)
class Probe(_AtProbe):
    """ε(g + γσ z_index, t) at sign probe z. State: ε."""

    @property
    def source(self) -> Call:
        """The base response, needed by forward differences only."""
        return Scaled(self.t)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Randomness, given: Any) -> Answer:
        """Numbers norm: ‖ε‖; trace: zᵀ(ε - ε_base)/γσ, if the base response is given."""
        probe = draws.rademacher(self.index, x)
        eps = probe_response(eps_fn, schedule, x, probe, self.t, self.gamma)
        numbers = {"norm": norm(eps)}
        if given is not None:
            numbers["trace"] = trace_term(probe, eps - given, self.gamma * schedule.sigma(self.t).astype(x.dtype))
        return Answer(eps, numbers)


@dataclasses.dataclass(frozen=True, order=True)
class Mirror(_AtProbe):
    """ε(g - γσ z_index, t): the other side of a probe, for central differences."""

    @property
    def source(self) -> Call:
        """The probe whose other side this is."""
        return Probe(self.t, self.gamma, self.index)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Randomness, given: Any) -> Answer:
        """Numbers norm: ‖ε₋‖; trace: zᵀ(ε₊ - ε₋)/2γσ."""
        probe = draws.rademacher(self.index, x)
        eps = probe_response(eps_fn, schedule, x, -probe, self.t, self.gamma)
        step = 2 * self.gamma * schedule.sigma(self.t).astype(x.dtype)
        return Answer(None, {"norm": norm(eps), "trace": trace_term(probe, given - eps, step)})


def probe_response(
    eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, probe: jax.Array, t: Any, gamma: Any
) -> jax.Array:
    """ε(g + γσ z): one model call."""
    return query(eps_fn, schedule.scaled(x, t) + gamma * per_image(schedule.sigma(t), x) * probe, t)


def trace_term(probe: jax.Array, difference: jax.Array, step: Any) -> jax.Array:
    """zᵀΔ/h per image [B]: one probe's estimate of tr ∇ε from the difference Δ of two responses that lie h apart.

    Over the coordinates that are kept, as the norm is, it estimates their part of the trace.
    """
    return jnp.sum(kept_part(probe * difference).reshape(len(probe), -1), axis=1) / step


# ------------------------------------------------------------------------------------------------------ as functions


def dime_terms(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, probes: Any, t: Any, gamma: Any) -> DimeTerms:
    """Terms of B̂ and V̂ by forward differences: q + 1 queries per image for probes [q, B, ...] of ±1."""
    x = images(x)
    probes = check_draws(probes, x, "probes")
    ask = asking(eps_fn, schedule, x, Given(probes))
    calls = [Probe(t, gamma, index) for index in range(len(probes))]
    calls[0].check(schedule)
    center = ask(calls[0].source).state
    return _stacked([ask(call, center).numbers for call in calls])


def dime_central_terms(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, probes: Any, t: Any, gamma: Any) -> DimeTerms:
    """Terms by central differences, 2q queries: norm is the mean of both norms, trace = zᵀ(ε₊ - ε₋)/2γσ.

    Per probe, the trace's error is O(γ²) where the forward difference's is O(γ); no base query is needed.
    """
    x = images(x)
    probes = check_draws(probes, x, "probes")
    ask, numbers = asking(eps_fn, schedule, x, Given(probes)), []
    for index in range(len(probes)):
        plus = ask(Probe(t, gamma, index))
        minus = ask(Mirror(t, gamma, index), plus.state)
        mean_norm = mean_of_sides(plus.numbers["norm"], minus.numbers["norm"])
        numbers.append({"norm": mean_norm, "trace": minus.numbers["trace"]})
    return _stacked(numbers)


def dime_norms(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, probes: Any, t: Any, gamma: Any) -> jax.Array:
    """The norms of `dime_terms` alone [q, B]: q queries, no base query."""
    x = images(x)
    probes = check_draws(probes, x, "probes")
    ask = asking(eps_fn, schedule, x, Given(probes))
    return jnp.stack([ask(Probe(t, gamma, index)).numbers["norm"] for index in range(len(probes))])


def mean_of_sides(plus: Any, minus: Any) -> Any:
    """The level of a pair of probes: the mean of its two norms."""
    return (plus + minus) / 2


def _stacked(numbers: Sequence[dict[str, Any]]) -> DimeTerms:
    return DimeTerms(*(jnp.stack([one[name] for one in numbers]) for name in DimeTerms._fields))


def summarize(terms: DimeTerms) -> Any:
    """B̂² and V̂ [2, B]: means over probes (the norm is averaged before it is squared). NumPy in, NumPy out."""
    xp = jnp if isinstance(terms.norm, jax.Array) else np
    return xp.stack([terms.norm.mean(axis=0) ** 2, terms.trace.mean(axis=0)])


def dime_score(terms: DimeTerms, phi: float, stats: DimeStats | None = None) -> jax.Array:
    """DIME score per image [B], lower for members."""
    xp = jnp if isinstance(terms.norm, jax.Array) else np
    weights = xp.cos(phi), xp.sin(phi)
    return weighted(summarize(terms), weights, None if stats is None else stats.of_terms())


def theory_phi(sigma: Any) -> jax.Array:
    """The population-exact angle -atan σ_t, for raw (not standardised) terms: no calibration of φ at all."""
    return -jnp.arctan(jnp.asarray(sigma))


def decide(scores: Any, tau: float) -> Any:
    """Membership decisions: score <= τ (the last line of Algorithm 1)."""
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
    readings = [
        *(Reading(call, "norm") for call in (*probes, *mirrors)),
        *(Reading(mirror, "trace") for mirror in mirrors),
    ]

    def assemble(r: Any) -> Any:
        plus, minus, trace = r.reshape(3, len(probes), -1)
        return summarize(DimeTerms(mean_of_sides(plus, minus), trace))

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
_entry = functools.partial(Attack, grids=GRIDS, family=FAMILY)
TIERS = (1, 10, 30)
_SIGNS = (1, -1)  # B̂² is lower and V̂ higher for members

ATTACKS = (
    _entry("dime", "DIME", CITATION, recipe=forward, tiers=TIERS, signs=_SIGNS, rule=Angles(search_angles)),
    # Tiers of 1, 5, 15 central pairs cost 2, 10 and 30 queries: the budgets of the other attacks.
    _entry(
        "dime_central",
        "DIME central",
        f"{CITATION}; central differences added here",
        recipe=central,
        tiers=(1, 5, 15),
        signs=_SIGNS,
        rule=Angles(search_angles),
    ),
    _entry(
        "dime_theory",
        "DIME theory weights",
        f"{CITATION}, Eq. M_decomposition",
        recipe=forward,
        tiers=TIERS,
        signs=_SIGNS,
        rule=Angles(
            lambda schedule, setting: [theory_phi(schedule.sigma(int(setting["t"]))).item()], standardize=False
        ),
    ),
    _entry("level_only", "Level only (B²)", f"{CITATION}, ablation", recipe=level, tiers=TIERS),
    _entry(
        "crowding_only",
        "Crowding only (V)",
        f"{CITATION}, ablation",
        recipe=forward,
        tiers=TIERS,
        signs=_SIGNS,
        rule=Angles(lambda schedule, setting: [-np.pi / 2]),
    ),
)
