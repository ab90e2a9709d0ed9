"""Calls that several attacks read: responses to the image itself (PIA, SecMI, SimA) and to noised ones (Loss, SimA)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from dime_jax._util.typing import PyTree
from dime_jax.attacks.base import STATE, Answer, Arrays, Call, Mask, Query, norm
from dime_jax.core.draws import Draw
from dime_jax.core.schedule import NoiseSchedule


class Place(NamedTuple):
    """An image on its DDIM trajectory, and the model's answer there."""

    x: Array
    eps: Array


@dataclasses.dataclass(frozen=True, order=True)
class Raw(Call):
    """ε(x, t) on the unscaled image. State: the Place (x, ε)."""

    t: ArrayLike

    def query(self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree) -> Query:
        """The image itself."""
        return Query(x, self.t)

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree, asked: Query, eps: Array, mask: Mask
    ) -> Answer:
        """Number l4: ‖ε‖₄."""
        return Answer(Place(x, eps), {"l4": norm(eps, 4, mask)})


@dataclasses.dataclass(frozen=True, order=True)
class AtNoise(Call):
    """ε(√ᾱ x + σ ξ_index, t) at Gaussian noise ξ."""

    t: ArrayLike
    index: int

    def draws(self) -> Mapping[str, Draw]:
        """ξ_index."""
        return {"noise": Draw("gaussian", self.index)}

    def query(self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree) -> Query:
        """The noised image √ᾱ x + σ ξ."""
        return Query(schedule.noised(x, drawn["noise"], self.t), self.t)


@dataclasses.dataclass(frozen=True, order=True)
class Noisy(AtNoise):
    """ε(√ᾱ x + σ ξ_index, t) at Gaussian noise ξ. State: the sum of the responses to noises 0 … index."""

    needs_source: ClassVar[frozenset[str]] = frozenset({"mean_l4", STATE})

    @property
    def source(self) -> Call | None:
        """The noise before this one."""
        return Noisy(self.t, self.index - 1) if self.index else None

    def start(self, x: Array) -> Array:
        """Return an empty sum, so that the first noise runs through the same program as the others."""
        return jnp.zeros_like(x)

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Array, asked: Query, eps: Array, mask: Mask
    ) -> Answer:
        """Numbers loss: ‖ξ - ε‖; l4: ‖ε‖₄; mean_l4: ‖mean of the responses up to this one‖₄."""
        total = given + eps
        numbers = {
            "loss": norm(drawn["noise"] - eps, 2, mask),
            "l4": norm(eps, 4, mask),
            "mean_l4": norm(total / (self.index + 1), 4, mask),
        }
        return Answer(total, numbers)
