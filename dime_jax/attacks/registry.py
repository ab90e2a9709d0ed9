"""The registry: each attack's name, hyper-parameter grid, query cost and citation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax import _validate
from dime_jax.attacks.base import Attack, Setting, grid
from dime_jax.attacks.dime import DimeTerms, dime_central_terms, dime_norms, dime_terms, summarize, theory_phi
from dime_jax.attacks.loss import loss
from dime_jax.attacks.pia import pia
from dime_jax.attacks.secmi import secmi, trajectory_steps
from dime_jax.attacks.sima import sima, sima_mc
from dime_jax.denoiser import EpsFn
from dime_jax.draws import Draws
from dime_jax.schedule import NoiseSchedule

_REGISTRY: dict[str, Attack] = {}

# The authors' grids for 32x32 DDPM checkpoints, and one that a laptop gets through.
_BASELINE_TIMES = {"paper": [*range(10, 300, 20), 300], "quick": [30, 70, 120]}
_DIME_TIMES = {"paper": [*range(50, 231, 20)], "quick": [30, 70, 120]}
_GAMMAS = {"paper": [0.05, 0.1, 0.2, 0.4, 0.6], "quick": [0.1, 0.4]}
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


def _stack(draw: Callable[[int, jax.Array], jax.Array], x: jax.Array, count: Any) -> jax.Array:
    return jnp.stack([draw(i, x) for i in range(int(count))])


def _baseline(
    name: str,
    title: str,
    citation: str,
    statistic: Callable[..., jax.Array],
    queries: Callable[[Setting], int],
    grids: Mapping[str, Sequence[Setting]] | None = None,
    tiers: tuple[int, ...] = (),
) -> None:
    """Register a one-column attack: statistic(eps_fn, schedule, x, draws, setting) -> scores [B]."""

    def run(eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, setting: Setting) -> jax.Array:
        return statistic(eps_fn, schedule, x, draws, setting)[None]

    grids = grids or {profile: grid(t=times) for profile, times in _BASELINE_TIMES.items()}
    register_attack(Attack(name, title, citation, run, queries, grids, tiers))


def _dime_family(
    name: str,
    title: str,
    citation: str,
    terms: Callable[..., DimeTerms],
    queries: Callable[[Setting], int],
    angles: Callable[[NoiseSchedule, Setting], Sequence[float]],
    standardize: bool = True,
    tiers: tuple[int, ...] = _TIERS,
) -> None:
    """Register a two-column attack: terms(eps_fn, schedule, x, probes, t, gamma) -> DimeTerms."""

    def run(eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, setting: Setting) -> jax.Array:
        probes = _stack(draws.rademacher, x, setting["q"])
        return summarize(terms(eps_fn, schedule, x, probes, setting["t"], setting["gamma"]))

    grids = {profile: grid(t=_DIME_TIMES[profile], gamma=_GAMMAS[profile]) for profile in _DIME_TIMES}
    register_attack(Attack(name, title, citation, run, queries, grids, tiers, angles, standardize))


def _level(eps_fn: EpsFn, s: NoiseSchedule, x: jax.Array, draws: Draws, setting: Setting) -> jax.Array:
    probes = _stack(draws.rademacher, x, setting["q"])
    return jnp.mean(dime_norms(eps_fn, s, x, probes, setting["t"], setting["gamma"]), axis=0) ** 2


def _secmi_queries(setting: Setting) -> int:
    return len(trajectory_steps(int(setting["t"]), int(setting["k"]))) + 2


_LOSS = "Matsumoto, Miura, Yanai: Membership inference attacks against diffusion models, 2023"
_PIA = "Kong et al.: An efficient membership inference attack for the diffusion model by proximal initialization, 2024"
_SECMI = "Duan et al.: Are diffusion models vulnerable to membership inference attacks?, 2023"
_SIMA = "Rao et al.: Score-based membership inference on diffusion models, 2026"
_DIME = "Do, Alabi: DIME: Query-efficient framework for membership inference on diffusion models"

_baseline("loss", "Loss", _LOSS, lambda e, s, x, z, c: loss(e, s, x, z.gaussian(0, x), c["t"]), lambda c: 1)
_baseline("pia_l2", "PIA (l2)", _PIA, lambda e, s, x, z, c: pia(e, s, x, c["t"], p=2), lambda c: 2)
_baseline("pia_l4", "PIA (l4)", _PIA, lambda e, s, x, z, c: pia(e, s, x, c["t"], p=4), lambda c: 2)
_baseline("pian", "PIAN (l4)", _PIA, lambda e, s, x, z, c: pia(e, s, x, c["t"], p=4, normalize=True), lambda c: 2)
_baseline(
    "secmi",
    "SecMI_stat",
    _SECMI,
    lambda e, s, x, z, c: secmi(e, s, x, int(c["t"]), int(c["k"])),
    _secmi_queries,
    {profile: grid(t=times, k=[10]) for profile, times in _BASELINE_TIMES.items()},
)
_baseline("sima_l4", "SimA (l4)", _SIMA, lambda e, s, x, z, c: sima(e, s, x, c["t"], p=4), lambda c: 1)
for _average in ("norms", "vector"):
    _baseline(
        f"sima_mc_{_average}",
        f"SimA-MC (l4, {_average})",
        _SIMA,
        lambda e, s, x, z, c, average=_average: sima_mc(
            e, s, x, _stack(z.gaussian, x, c["q"]), c["t"], average=average
        ),
        lambda c: int(c["q"]),
        tiers=(10, 30),
    )
_dime_family("dime", "DIME", _DIME, dime_terms, lambda c: int(c["q"]) + 1, search_angles)
# Tiers of 1, 5, 15 central pairs cost 2, 10 and 30 queries: the budgets of the other attacks.
_dime_family(
    "dime_central",
    "DIME central",
    f"{_DIME}; central differences added here",
    dime_central_terms,
    lambda c: 2 * int(c["q"]),
    search_angles,
    tiers=(1, 5, 15),
)
_dime_family(
    "dime_theory",
    "DIME theory weights",
    f"{_DIME}, Eq. M_decomposition",
    dime_terms,
    lambda c: int(c["q"]) + 1,
    lambda s, c: [theory_phi(s.sigma(int(c["t"]))).item()],
    standardize=False,
)
_baseline(
    "level_only",
    "Level only (B²)",
    f"{_DIME}, ablation",
    _level,
    lambda c: int(c["q"]),
    _REGISTRY["dime"].grids,
    _TIERS,
)
_dime_family(
    "crowding_only",
    "Crowding only (V)",
    f"{_DIME}, ablation",
    dime_terms,
    lambda c: int(c["q"]) + 1,
    lambda s, c: [-np.pi / 2],
)
