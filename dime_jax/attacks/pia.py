"""PIA: the proximal initialisation attack (Kong et al. 2024), and its normalised form PIAN."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dime_jax.attacks.base import BASELINE_GRIDS, Attack, Recipe, Setting, one_number
from dime_jax.attacks.calls import Answer, Arrays, Call, Mask, Place, Query, Raw, images, norm
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.schedule import NoiseSchedule, per_image


@jax.jit
def proximal_noise(eps0: Array, normalize: ArrayLike) -> Array:
    """Return ε₀ = ε_θ(x, 0), for PIAN rescaled per image to the mean magnitude √(2/π) of a standard Gaussian."""
    magnitude = jnp.mean(jnp.abs(eps0).reshape(len(eps0), -1), axis=1)
    return eps0 * per_image(jnp.where(normalize, np.sqrt(2 / np.pi) / magnitude, 1), eps0)


@dataclasses.dataclass(frozen=True, order=True)
class Proximal(Call):
    """PIA's second call, ε(√ᾱ x + σ ε₀, t), or PIAN's with ε₀ normalised. State: the error ε₀ - ε."""

    t: ArrayLike
    normalize: bool

    needs_source: ClassVar[frozenset[str]] = frozenset({"l2", "l4"})

    @property
    def source(self) -> Call:
        """The call that gives ε₀."""
        return Raw(0)

    def query(self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Place) -> Query:
        """The image noised with ε₀."""
        return Query(schedule.noised(x, proximal_noise(given.eps, self.normalize), self.t), self.t)

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Place, asked: Query, eps: Array, mask: Mask
    ) -> Answer:
        """Numbers l2 and l4: the norms of the error."""
        error = proximal_noise(given.eps, self.normalize) - eps
        return Answer(error, {"l2": norm(error, 2, mask), "l4": norm(error, 4, mask)})


def pia(
    eps_fn: EpsFn, schedule: NoiseSchedule, x: ArrayLike, t: ArrayLike, p: float = 4, normalize: bool = False
) -> Array:
    """Return ‖ε₀ - ε_θ(√ᾱ x + σ ε₀, t)‖_p per image [B], with ε₀ = ε_θ(x, 0) on the unscaled image: 2 queries.

    Args:
      eps_fn: the model ε_θ.
      schedule: its noise schedule.
      x: images [B, ...].
      t: the timestep.
      p: of the norm: 4 is what the official code computes, 2 what the DIME paper prints.
      normalize: makes it PIAN (see `proximal_noise`).
    """
    call, x = Proximal(t, normalize), images(x)
    call.check(schedule)
    start = call.source.ask(eps_fn, schedule, x).state
    return norm(call.ask(eps_fn, schedule, x, given=start).state, p)


def recipe(setting: Setting, name: str, normalize: bool = False) -> Recipe:
    """One norm of the error, "l2" or "l4"."""
    return one_number(Proximal(int(setting["t"]), normalize), name)


_CITATION = (
    "Kong et al.: An efficient membership inference attack for the diffusion model by proximal initialization, 2024"
)
_entry = functools.partial(Attack, citation=_CITATION, grids=BASELINE_GRIDS, family="PIA", positive=True)

ATTACKS = (
    _entry("pia_l2", "PIA (l2)", recipe=functools.partial(recipe, name="l2")),
    _entry("pia_l4", "PIA (l4)", recipe=functools.partial(recipe, name="l4")),
    _entry("pian", "PIAN (l4)", recipe=functools.partial(recipe, name="l4", normalize=True)),
)
