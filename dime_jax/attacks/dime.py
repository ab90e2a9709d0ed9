"""DIME: membership from the two parts of the ideal denoiser's estimation error (paper, Algorithm 1).

With g = √ᾱ_t x and sign probes z_k,

    B̂ = mean_k ‖ε(g + γσ z_k)‖                              how far the model's reconstruction lies (Eq. hat_B)
    V̂ = mean_k z_kᵀ(ε(g + γσ z_k) - ε(g)) / γσ              tr ∇ε, by Hutchinson (Eq. hat_V)
    score = cos φ · B̂² + sin φ · V̂                          (Eq. DIME)

V̂ estimates d/σ - V/σ³ (Lemma V-error-bias): it *falls* as the crowding V rises, so members have large V̂, and the
population-exact weights M/σ² = B² - σV̂ + d lie at φ = -atan σ. Averaged over all probes the error of V̂ is O(γ²).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax import _validate
from dime_jax.attacks import base
from dime_jax.denoiser import EpsFn
from dime_jax.schedule import NoiseSchedule, per_image


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


def probe_response(
    eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, probe: jax.Array, t: Any, gamma: Any
) -> jax.Array:
    """ε(g + γσ z): one model call."""
    g = base.scaled(schedule, x, t)
    return base.query(eps_fn, g + gamma * per_image(schedule.sigma(t), x) * probe, t)


def trace_term(probe: jax.Array, difference: jax.Array, step: Any) -> jax.Array:
    """zᵀΔ/h per image [B]: one probe's estimate of tr ∇ε from the difference Δ of two responses that lie h apart."""
    return jnp.sum((probe * difference).reshape(len(probe), -1), axis=1) / step


def _check(schedule: NoiseSchedule, x: Any, probes: Any, t: Any, gamma: Any) -> tuple[jax.Array, jax.Array]:
    x = base.images(x)
    _validate.check_timestep(t, schedule.num_steps)
    _validate.check_positive(gamma, "gamma")
    return x, base.check_draws(probes, x, "probes")


def dime_terms(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, probes: Any, t: Any, gamma: Any) -> DimeTerms:
    """Terms of B̂ and V̂ by forward differences: q + 1 queries per image for probes [q, B, ...] of ±1."""
    x, probes = _check(schedule, x, probes, t, gamma)
    step = gamma * schedule.sigma(t).astype(x.dtype)
    center = base.query(eps_fn, base.scaled(schedule, x, t), t)
    norms, traces = [], []
    for probe in probes:
        eps = probe_response(eps_fn, schedule, x, probe, t, gamma)
        norms.append(base.norm(eps))
        traces.append(trace_term(probe, eps - center, step))
    return DimeTerms(jnp.stack(norms), jnp.stack(traces))


def dime_central_terms(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, probes: Any, t: Any, gamma: Any) -> DimeTerms:
    """Terms by central differences, 2q queries: norm is the mean of both norms, trace = zᵀ(ε₊ - ε₋)/2γσ.

    Per probe, the trace's error is O(γ²) where the forward difference's is O(γ); no base query is needed.
    """
    x, probes = _check(schedule, x, probes, t, gamma)
    step = gamma * schedule.sigma(t).astype(x.dtype)
    norms, traces = [], []
    for probe in probes:
        plus = probe_response(eps_fn, schedule, x, probe, t, gamma)
        minus = probe_response(eps_fn, schedule, x, -probe, t, gamma)
        norms.append((base.norm(plus) + base.norm(minus)) / 2)
        traces.append(trace_term(probe, plus - minus, 2 * step))
    return DimeTerms(jnp.stack(norms), jnp.stack(traces))


def dime_norms(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, probes: Any, t: Any, gamma: Any) -> jax.Array:
    """The norms of `dime_terms` alone [q, B]: q queries, no base query."""
    x, probes = _check(schedule, x, probes, t, gamma)
    return jnp.stack([base.norm(probe_response(eps_fn, schedule, x, probe, t, gamma)) for probe in probes])


def summarize(terms: DimeTerms) -> Any:
    """B̂² and V̂ [2, B]: means over probes (the norm is averaged before it is squared). NumPy in, NumPy out."""
    xp = jnp if isinstance(terms.norm, jax.Array) else np
    return xp.stack([terms.norm.mean(axis=0) ** 2, terms.trace.mean(axis=0)])


def combine(level: Any, trace: Any, phi: Any, stats: DimeStats | None = None) -> Any:
    """cos φ · B̂² + sin φ · V̂, both standardised first if `stats` are given. NumPy in, NumPy out."""
    xp = jnp if isinstance(level, jax.Array) else np
    if stats is not None:
        level = (level - stats.mean_sq) / stats.std_sq
        trace = (trace - stats.mean_trace) / stats.std_trace
    return xp.cos(phi) * level + xp.sin(phi) * trace


def dime_score(terms: DimeTerms, phi: float, stats: DimeStats | None = None) -> jax.Array:
    """DIME score per image [B], lower for members."""
    level, trace = summarize(terms)
    return combine(level, trace, phi, stats)


def theory_phi(sigma: Any) -> jax.Array:
    """The population-exact angle -atan σ_t, for raw (not standardised) terms: no calibration of φ at all."""
    return -jnp.arctan(jnp.asarray(sigma))


def decide(scores: Any, tau: float) -> Any:
    """Membership decisions: score <= τ (the last line of Algorithm 1)."""
    return scores <= tau
