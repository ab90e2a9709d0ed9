"""Calls of the model: what a call is, and those that several attacks read.

A call is a frozen record of numbers such as t, γ and a draw's index. Its class says what is drawn (`draws`), what the
model is asked (`query`), and how the answer becomes numbers per image (`reduce`). The numbers may be tracers, so a
program compiled for a class serves the whole (t, γ, index) grid. Equal records are the same query, which is asked once
for all attacks that read it.

A call may start from what another, its `source`, left behind: a probe's difference needs the base response, a DDIM hop
the place where the last one ended. Every call has one source at most, so the calls of a plan form trees.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import OWN, EpsFn, at_least_float32
from dime_jax.core.draws import NO_DRAWS, Draw, Randomness
from dime_jax.core.schedule import NoiseSchedule

STATE = "state"
Arrays: TypeAlias = Mapping[str, Array]
# Which coordinates of the images count in norms and sums: bool, of their shape [B, ...]; None if all do.
Mask: TypeAlias = Array | None


def images(x: ArrayLike) -> Array:
    """Return a non-empty batch of images [B, ...] in floating point of 32 bits or more."""
    x = jnp.asarray(x)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"images must have shape [B, ...] and a floating type, got {x.dtype} {list(x.shape)}")
    validate.check_not_empty(x, "images")
    return at_least_float32(x)


def masked(v: Array, mask: Mask) -> Array:
    """Return v [B, ...] with zeros outside the mask."""
    return v if mask is None else jnp.where(mask, v, jnp.zeros_like(v))


def norm(v: ArrayLike, p: float = 2, mask: Mask = None) -> Array:
    """Return ‖v‖_p per image [B], with the root, over the coordinates inside the mask."""
    validate.check_at_least(p, 1, "p")
    v = masked(jnp.asarray(v), mask)
    return jnp.linalg.norm(v.reshape(len(v), -1), ord=p, axis=1)


def check_draws(draws: ArrayLike, x: Array, name: str) -> Array:
    """Require draws [q, B, ...] for the batch x [B, ...], q > 0."""
    draws = jnp.asarray(draws, x.dtype)
    validate.check_shape(draws, (None, *x.shape), name)
    validate.check_not_empty(draws, name)
    return draws


# ------------------------------------------------------------------------------------------------------- what a call is


class Query(NamedTuple):
    """What a call asks the model: images x [B, ...] at t, one for all or one for each."""

    x: Array
    t: ArrayLike


class Answer(NamedTuple):
    """What a call leaves: a state for the calls that start from it, and named numbers per image, each [B]."""

    state: PyTree
    numbers: Arrays


@dataclasses.dataclass(frozen=True, order=True)
class Call:
    """One batched model call.

    Attributes:
      needs_source: names of the numbers (or "state") that cannot be computed without the source's state.
      condition: name of the condition under which the model is asked, of those it offers (`Denoiser.conditions`).
    """

    needs_source: ClassVar[frozenset[str]] = frozenset()
    condition: ClassVar[str] = OWN

    @property
    def source(self) -> "Call | None":
        """The call whose state this one starts from."""
        return None

    @property
    def queries(self) -> int:
        """What the call costs per image: 1, or 0 if it has no `query` of its own."""
        return int(type(self).query is not Call.query)

    @property
    def traceable(self) -> bool:
        """Whether it may be compiled: it then sees tracers for its parameters and the images."""
        return True

    @property
    def template(self) -> "Callable[..., Call]":
        """What makes the call from its arguments; one program is compiled per template."""
        return type(self)

    @property
    def arguments(self) -> tuple[ArrayLike, ...]:
        """The numbers that the program takes."""
        return dataclasses.astuple(self)

    def check(self, schedule: NoiseSchedule) -> None:
        """Require parameters that fit the schedule: here t, if the call has one."""
        validate.check_timestep(getattr(self, "t", 0), schedule.num_steps)

    def start(self, x: Array) -> PyTree:
        """Return the state to start from where there is no source."""

    def draws(self) -> Mapping[str, Draw]:
        """Return the random draws that the call needs, by name."""
        return {}

    def query(self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree) -> Query | None:
        """Return what to ask the model; None, as here, asks nothing.

        Args:
          schedule: of the model.
          x: the images [B, ...].
          drawn: the arrays that `draws` names, each of x's shape.
          given: the state of the source, or what `start` returns without one.
        """

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree, asked: PyTree, eps: PyTree, mask: Mask
    ) -> Answer:
        """Return the numbers per image and the state that follow from the model's answer.

        Args:
          schedule, x, drawn, given: as in `query`.
          asked: the Query; None if nothing was asked.
          eps: the model's answer to it, of its shape; None if nothing was asked.
          mask: which coordinates count in norms and sums over an image; None if all do.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reduce")

    def ask(
        self,
        eps_fn: EpsFn,
        schedule: NoiseSchedule,
        x: Array,
        draws: Randomness = NO_DRAWS,
        given: PyTree = None,
        mask: Mask = None,
    ) -> Answer:
        """Draw, ask the model, and reduce its answer.

        Args:
          eps_fn: the model.
          schedule: its noise schedule.
          x: the images [B, ...].
          draws: where the call's draws come from.
          given: the state of the source; None without one.
          mask: as in `reduce`.
        """
        self.check(schedule)
        given = self.start(x) if given is None else given
        drawn = {name: draw.take(draws, x) for name, draw in self.draws().items()}
        asked = query_of(self, schedule, x, drawn, given) if self.queries else None
        eps = None if asked is None else evaluate(eps_fn, asked)
        return self.reduce(schedule, x, drawn, given, asked, eps, mask)


def query_of(call: Call, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree) -> Query:
    """Return the query of a call that declares to make one; arguments as in `Call.query`."""
    asked = call.query(schedule, x, drawn, given)
    if asked is None:
        raise ValueError(f"{type(call).__name__} must make {call.queries} query per image, as it declares, got none")
    return asked


def evaluate(eps_fn: EpsFn, asked: Query) -> Array:
    """Ask the model once: B queries."""
    eps = jnp.asarray(eps_fn(asked.x, asked.t))
    if eps.shape != asked.x.shape:
        raise ValueError(f"eps_fn must return shape {list(asked.x.shape)}, got {list(eps.shape)}")
    return eps.astype(asked.x.dtype)


# ------------------------------------------------------------------------------- on the image itself (PIA, SecMI, SimA)


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


# ---------------------------------------------------------------------------------- on noised images (Loss, SimA, CLiD)


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
        total, loss = given + eps, norm(drawn["noise"] - eps, 2, mask)
        mean_l4 = norm(total / (self.index + 1), 4, mask)
        return Answer(total, {"loss": loss, "l4": norm(eps, 4, mask), "mean_l4": mean_l4})
