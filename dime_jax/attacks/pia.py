"""PIA: the proximal initialisation attack (Kong et al. 2024), and its normalised form PIAN."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax._util import validate
from dime_jax.attacks.base import (
    BASELINE_GRIDS,
    Answer,
    Attack,
    Call,
    Recipe,
    Setting,
    asking,
    images,
    norm,
    one_number,
    query,
)
from dime_jax.attacks.calls import Raw
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.draws import Randomness
from dime_jax.core.schedule import NoiseSchedule, per_image


@jax.jit
def proximal_noise(eps0: jax.Array, normalize: Any) -> jax.Array:
    """ε₀ = ε_θ(x, 0) as it is, or for PIAN rescaled per image to the mean magnitude √(2/π) of a standard Gaussian."""
    magnitude = jnp.mean(jnp.abs(eps0).reshape(len(eps0), -1), axis=1)
    return eps0 * per_image(jnp.where(normalize, np.sqrt(2 / np.pi) / magnitude, 1), eps0)


@dataclasses.dataclass(frozen=True, order=True)
class Proximal(Call):
    """PIA's second call, ε(√ᾱ x + σ ε₀, t), or PIAN's with ε₀ normalised. State: the error ε₀ - ε."""

    t: int
    normalize: bool

    needs_source: ClassVar[frozenset[str]] = frozenset({"l2", "l4"})

    @property
    def source(self) -> Call:
        """The call that gives ε₀."""
        return Raw(0)

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range."""
        validate.check_timestep(self.t, schedule.num_steps)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Randomness, given: Any) -> Answer:
        """Numbers l2 and l4: the norms of the error."""
        del draws
        eps0 = proximal_noise(given.eps, self.normalize)
        error = eps0 - query(eps_fn, schedule.noised(x, eps0, self.t), self.t)
        return Answer(error, {"l2": norm(error), "l4": norm(error, 4)})


def pia(eps_fn: EpsFn, schedule: NoiseSchedule, x: Any, t: Any, p: float = 4, normalize: bool = False) -> jax.Array:
    """‖ε₀ - ε_θ(√ᾱ x + σ ε₀, t)‖_p with ε₀ = ε_θ(x, 0) on the unscaled image: 2 queries.

    p = 4 is what the official code computes, p = 2 what the DIME paper prints; `normalize` makes it PIAN
    (see `proximal_noise`).
    """
    validate.check_timestep(t, schedule.num_steps)
    ask = asking(eps_fn, schedule, images(x))
    return norm(ask(Proximal(t, normalize), ask(Raw(0)).state).state, p)


def recipe(setting: Setting, name: str, normalize: bool = False) -> Recipe:
    """One norm of the error, "l2" or "l4"."""
    return one_number(Proximal(int(setting["t"]), normalize), name)


_CITATION = (
    "Kong et al.: An efficient membership inference attack for the diffusion model by proximal initialization, 2024"
)
_entry = functools.partial(Attack, citation=_CITATION, grids=BASELINE_GRIDS, family="PIA")

ATTACKS = (
    _entry("pia_l2", "PIA (l2)", recipe=functools.partial(recipe, name="l2")),
    _entry("pia_l4", "PIA (l4)", recipe=functools.partial(recipe, name="l4")),
    _entry("pian", "PIAN (l4)", recipe=functools.partial(recipe, name="l4", normalize=True)),
)
