"""Calls that several attacks read: responses to the image itself (PIA, SecMI, SimA) and to noised ones (Loss, SimA)."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dime_jax._util import validate
from dime_jax._util.typing import Array
from dime_jax.attacks.base import STATE, Answer, Call, norm, query
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.draws import Randomness
from dime_jax.core.schedule import NoiseSchedule


class Place(NamedTuple):
    """An image on its DDIM trajectory, and the model's answer there."""

    x: Array
    eps: Array


@dataclasses.dataclass(frozen=True, order=True)
class Raw(Call):
    """ε(x, t) on the unscaled image. State: the Place (x, ε)."""

    t: int

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range."""
        validate.check_timestep(self.t, schedule.num_steps)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Randomness, given: Any) -> Answer:
        """Number l4: ‖ε‖₄."""
        del schedule, draws, given
        eps = query(eps_fn, x, self.t)
        return Answer(Place(x, eps), {"l4": norm(eps, 4)})


@dataclasses.dataclass(frozen=True, order=True)
class Noisy(Call):
    """ε(√ᾱ x + σ ξ_index, t) at Gaussian noise ξ. State: the sum of the responses to noises 0 … index."""

    t: int
    index: int

    needs_source: ClassVar[frozenset[str]] = frozenset({"mean_l4", STATE})

    @property
    def source(self) -> Call | None:
        """The noise before this one."""
        return Noisy(self.t, self.index - 1) if self.index else None

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range."""
        validate.check_timestep(self.t, schedule.num_steps)

    def start(self, x: jax.Array) -> jax.Array:
        """An empty sum, so that the first noise runs through the same program as the others."""
        return jnp.zeros_like(x)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Randomness, given: Any) -> Answer:
        """Numbers loss: ‖ξ - ε‖; l4: ‖ε‖₄; mean_l4: ‖mean of the responses up to this one‖₄."""
        noise = draws.gaussian(self.index, x)
        eps = query(eps_fn, schedule.noised(x, noise, self.t), self.t)
        total = given + eps
        numbers = {
            "loss": norm(noise - eps),
            "l4": norm(eps, 4),
            "mean_l4": norm(total / (self.index + 1), 4),
        }
        return Answer(total, numbers)
