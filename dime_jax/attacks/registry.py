"""The registry: each attack's name, hyper-parameter grid, query cost and citation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dime_jax import _validate
from dime_jax.attacks.base import Attack, Setting, grid
from dime_jax.attacks.calls import Call, Mirror, Noisy, Probe, Proximal, Raw, Walk
from dime_jax.attacks.dime import DimeTerms, summarize, theory_phi
from dime_jax.attacks.recipes import Reading, Recipe, count_queries, run_recipe
from dime_jax.attacks.secmi import trajectory_steps
from dime_jax.denoiser import EpsFn
from dime_jax.draws import Draws
from dime_jax.schedule import NoiseSchedule

_REGISTRY: dict[str, Attack] = {}

# The authors' grids for 32x32 DDPM checkpoints, one that a laptop gets through, and one for slow models.
_BASELINE_TIMES = {"paper": [*range(10, 300, 20), 300], "quick": [30, 70, 120], "light": [70, 120]}
_DIME_TIMES = {"paper": [*range(50, 231, 20)], "quick": [30, 70, 120], "light": [70, 120]}
_GAMMAS = {"paper": [0.05, 0.1, 0.2, 0.4, 0.6], "quick": [0.1, 0.4], "light": [0.1]}
_TIERS = (1, 10, 30)
NUM_ANGLES = 16


def register_attack(attack: Attack, *, replace: bool = False) -> Attack:
    """Add an attack, yours or ours, to the registry under its name."""
    if attack.name in _REGISTRY and not replace:
        raise ValueError(f"an attack named {attack.name!r} is registered already; pass replace=True to replace it")
    _REGISTRY[attack.name] = attack
    return attack


def get_attack(name: str) -> Attack:
    """The registered attack of that name."""
    _validate.check_choice(name, attack_names(), "attack")
    return _REGISTRY[name]


def attack_names() -> tuple[str, ...]:
    """All registered names, baselines first."""
    return tuple(_REGISTRY)


def search_angles(schedule: NoiseSchedule, setting: Setting) -> Sequence[float]:
    """Equally spaced angles on the full circle: members may lie on either side in each term."""
    del schedule, setting
    return [2 * np.pi * i / NUM_ANGLES for i in range(NUM_ANGLES)]


def _register(
    name: str,
    title: str,
    citation: str,
    recipe: Callable[[Setting], Recipe],
    grids: Mapping[str, Sequence[Setting]],
    tiers: tuple[int, ...] = (),
    angles: Callable[[NoiseSchedule, Setting], Sequence[float]] | None = None,
    standardize: bool = True,
) -> None:
    """Register an attack that is known by its recipe."""

    def run(eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, setting: Setting) -> jax.Array:
        return run_recipe(recipe(setting), eps_fn, schedule, x, draws)

    def queries(setting: Setting) -> int:
        return count_queries(recipe(setting))

    register_attack(Attack(name, title, citation, run, queries, grids, tiers, angles, standardize, recipe))


def _one(call: Call, name: str) -> Recipe:
    """One number of one call is the score."""
    return Recipe((Reading(call, name),), lambda readings: readings)


def _count(setting: Setting) -> range:
    _validate.check_at_least(setting["q"], 1, "q")
    return range(int(setting["q"]))


def _mean_of_norms(setting: Setting) -> Recipe:
    calls = [Noisy(int(setting["t"]), index) for index in _count(setting)]
    return Recipe(tuple(Reading(call, "l4") for call in calls), lambda readings: readings.mean(axis=0)[None])


def _norm_of_mean(setting: Setting) -> Recipe:
    return _one(Noisy(int(setting["t"]), _count(setting)[-1]), "mean_l4")


def _secmi(setting: Setting) -> Recipe:
    _validate.check_at_least(setting["k"], 1, "k")
    hops = len(trajectory_steps(int(setting["t"]), int(setting["k"])))
    return _one(Walk(int(setting["k"]), hops + 1), "error")


def _probes(setting: Setting) -> list[Probe]:
    return [Probe(int(setting["t"]), float(setting["gamma"]), index) for index in _count(setting)]


def _forward(setting: Setting) -> Recipe:
    probes = _probes(setting)
    readings = [Reading(probe, name) for name in DimeTerms._fields for probe in probes]
    return Recipe(tuple(readings), lambda r: summarize(DimeTerms(r[: len(probes)], r[len(probes) :])))


def _central(setting: Setting) -> Recipe:
    probes = _probes(setting)
    mirrors = [Mirror(probe.t, probe.gamma, probe.index) for probe in probes]
    readings = [
        *(Reading(call, "norm") for call in (*probes, *mirrors)),
        *(Reading(mirror, "trace") for mirror in mirrors),
    ]

    def assemble(r: Any) -> Any:
        plus, minus, trace = r.reshape(3, len(probes), -1)
        return summarize(DimeTerms((plus + minus) / 2, trace))

    return Recipe(tuple(readings), assemble)


def _level(setting: Setting) -> Recipe:
    probes = _probes(setting)
    return Recipe(tuple(Reading(probe, "norm") for probe in probes), lambda r: r.mean(axis=0)[None] ** 2)


_LOSS = "Matsumoto, Miura, Yanai: Membership inference attacks against diffusion models, 2023"
_PIA = "Kong et al.: An efficient membership inference attack for the diffusion model by proximal initialization, 2024"
_SECMI = "Duan et al.: Are diffusion models vulnerable to membership inference attacks?, 2023"
_SIMA = "Rao et al.: Score-based membership inference on diffusion models, 2026"
_DIME = "Do, Alabi: DIME: Query-efficient framework for membership inference on diffusion models"

_BASELINE_GRIDS = {profile: grid(t=times) for profile, times in _BASELINE_TIMES.items()}
_SECMI_GRIDS = {profile: grid(t=times, k=[10]) for profile, times in _BASELINE_TIMES.items()}
_DIME_GRIDS = {profile: grid(t=times, gamma=_GAMMAS[profile]) for profile, times in _DIME_TIMES.items()}

_register("loss", "Loss", _LOSS, lambda c: _one(Noisy(int(c["t"]), 0), "loss"), _BASELINE_GRIDS)
_register("pia_l2", "PIA (l2)", _PIA, lambda c: _one(Proximal(int(c["t"]), False), "l2"), _BASELINE_GRIDS)
_register("pia_l4", "PIA (l4)", _PIA, lambda c: _one(Proximal(int(c["t"]), False), "l4"), _BASELINE_GRIDS)
_register("pian", "PIAN (l4)", _PIA, lambda c: _one(Proximal(int(c["t"]), True), "l4"), _BASELINE_GRIDS)
_register("secmi", "SecMI_stat", _SECMI, _secmi, _SECMI_GRIDS)
_register("sima_l4", "SimA (l4)", _SIMA, lambda c: _one(Raw(int(c["t"])), "l4"), _BASELINE_GRIDS)
_register("sima_mc_norms", "SimA-MC (l4, norms)", _SIMA, _mean_of_norms, _BASELINE_GRIDS, tiers=(10, 30))
_register("sima_mc_vector", "SimA-MC (l4, vector)", _SIMA, _norm_of_mean, _BASELINE_GRIDS, tiers=(10, 30))
_register("dime", "DIME", _DIME, _forward, _DIME_GRIDS, _TIERS, search_angles)
# Tiers of 1, 5, 15 central pairs cost 2, 10 and 30 queries: the budgets of the other attacks.
_register(
    "dime_central",
    "DIME central",
    f"{_DIME}; central differences added here",
    _central,
    _DIME_GRIDS,
    (1, 5, 15),
    search_angles,
)
_register(
    "dime_theory",
    "DIME theory weights",
    f"{_DIME}, Eq. M_decomposition",
    _forward,
    _DIME_GRIDS,
    _TIERS,
    lambda s, c: [theory_phi(s.sigma(int(c["t"]))).item()],
    standardize=False,
)
_register("level_only", "Level only (B²)", f"{_DIME}, ablation", _level, _DIME_GRIDS, _TIERS)
_register(
    "crowding_only",
    "Crowding only (V)",
    f"{_DIME}, ablation",
    _forward,
    _DIME_GRIDS,
    _TIERS,
    lambda s, c: [-np.pi / 2],
)
