"""The model calls that attacks are made of, as data: what is asked, and what is read off the answer.

A call is a frozen record of numbers such as t, γ and a draw's index. Its class says how the query is built, and how the
answer is reduced to numbers per image. The numbers may be tracers, so a program compiled for a class serves the whole
(t, γ, index) grid. Equal records are the same query.

A call may start from what another, its `source`, left behind: a probe's difference needs the base response, a DDIM hop
the place where the last one ended. Every call has one source at most, so the calls of a plan form trees.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dime_jax import _validate
from dime_jax.attacks import base
from dime_jax.attacks.dime import probe_response, trace_term
from dime_jax.attacks.pia import proximal_noise
from dime_jax.attacks.secmi import ddim_step
from dime_jax.denoiser import EpsFn
from dime_jax.draws import Draws
from dime_jax.schedule import NoiseSchedule

STATE = "state"


class Answer(NamedTuple):
    """What a call leaves: a state for the calls that start from it, and named numbers per image, each [B]."""

    state: Any
    numbers: dict[str, Any]


class Place(NamedTuple):
    """An image on its DDIM trajectory, and the model's answer there."""

    x: jax.Array
    eps: jax.Array


@dataclasses.dataclass(frozen=True, order=True)
class Call:
    """One batched model call.

    Attributes:
      needs_source: names of the numbers (or "state") that cannot be had without the source's state.
    """

    needs_source: ClassVar[frozenset[str]] = frozenset()

    @property
    def source(self) -> "Call | None":
        """The call whose state this one starts from."""
        return None

    @property
    def queries(self) -> int:
        """What it costs per image."""
        return 1

    def check(self, schedule: NoiseSchedule) -> None:
        """Require parameters that the schedule has."""
        raise NotImplementedError

    def start(self, x: jax.Array) -> Any:
        """The state to start from where there is no source."""
        del x

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, given: Any) -> Answer:
        """Build the query, call the model, reduce the answer. `given` is the source's state, None without one."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, order=True)
class Raw(Call):
    """ε(x, t) on the unscaled image. State: the Place (x, ε)."""

    t: int

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range."""
        _validate.check_timestep(self.t, schedule.num_steps)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, given: Any) -> Answer:
        """Number l4: ‖ε‖₄."""
        del schedule, draws, given
        eps = base.query(eps_fn, x, self.t)
        return Answer(Place(x, eps), {"l4": base.norm(eps, 4)})


@dataclasses.dataclass(frozen=True, order=True)
class Scaled(Call):
    """ε(g, t) at g = √ᾱ x: the base response of DIME's forward differences. State: ε."""

    t: int

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range."""
        _validate.check_timestep(self.t, schedule.num_steps)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, given: Any) -> Answer:
        """No numbers."""
        del draws, given
        return Answer(base.query(eps_fn, base.scaled(schedule, x, self.t), self.t), {})


@dataclasses.dataclass(frozen=True, order=True)
class Probe(Call):
    """ε(g + γσ z_index, t) at sign probe z. State: ε."""

    t: int
    gamma: float
    index: int

    needs_source: ClassVar[frozenset[str]] = frozenset({"trace"})

    @property
    def source(self) -> Call:
        """The base response, needed by forward differences only."""
        return Scaled(self.t)

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range and γ > 0."""
        _validate.check_timestep(self.t, schedule.num_steps)
        _validate.check_positive(self.gamma, "gamma")

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, given: Any) -> Answer:
        """Numbers norm: ‖ε‖; trace: zᵀ(ε - ε_base)/γσ, if the base response is given."""
        probe = draws.rademacher(self.index, x)
        eps = probe_response(eps_fn, schedule, x, probe, self.t, self.gamma)
        numbers = {"norm": base.norm(eps)}
        if given is not None:
            numbers["trace"] = trace_term(probe, eps - given, self.gamma * schedule.sigma(self.t).astype(x.dtype))
        return Answer(eps, numbers)


@dataclasses.dataclass(frozen=True, order=True)
class Mirror(Call):
    """ε(g - γσ z_index, t): the other side of a probe, for central differences."""

    t: int
    gamma: float
    index: int

    needs_source: ClassVar[frozenset[str]] = frozenset({"trace"})

    @property
    def source(self) -> Call:
        """The probe whose other side this is."""
        return Probe(self.t, self.gamma, self.index)

    def check(self, schedule: NoiseSchedule) -> None:
        """Require what the probe requires."""
        self.source.check(schedule)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, given: Any) -> Answer:
        """Numbers norm: ‖ε₋‖; trace: zᵀ(ε₊ - ε₋)/2γσ."""
        probe = draws.rademacher(self.index, x)
        eps = probe_response(eps_fn, schedule, x, -probe, self.t, self.gamma)
        step = 2 * self.gamma * schedule.sigma(self.t).astype(x.dtype)
        return Answer(None, {"norm": base.norm(eps), "trace": trace_term(probe, given - eps, step)})


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
        _validate.check_timestep(self.t, schedule.num_steps)

    def start(self, x: jax.Array) -> jax.Array:
        """An empty sum, so that the first noise runs through the same program as the others."""
        return jnp.zeros_like(x)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, given: Any) -> Answer:
        """Numbers loss: ‖ξ - ε‖; l4: ‖ε‖₄; mean_l4: ‖mean of the responses up to this one‖₄."""
        noise = draws.gaussian(self.index, x)
        eps = base.query(eps_fn, base.noised(schedule, x, noise, self.t), self.t)
        total = given + eps
        numbers = {
            "loss": base.norm(noise - eps),
            "l4": base.norm(eps, 4),
            "mean_l4": base.norm(total / (self.index + 1), 4),
        }
        return Answer(total, numbers)


@dataclasses.dataclass(frozen=True, order=True)
class Proximal(Call):
    """PIA's second call, ε(√ᾱ x + σ ε₀, t), or PIAN's with ε₀ normalised."""

    t: int
    normalize: bool

    needs_source: ClassVar[frozenset[str]] = frozenset({"l2", "l4"})

    @property
    def source(self) -> Call:
        """The call that gives ε₀."""
        return Raw(0)

    def check(self, schedule: NoiseSchedule) -> None:
        """Require t in range."""
        _validate.check_timestep(self.t, schedule.num_steps)

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, given: Any) -> Answer:
        """Numbers l2 and l4: the norms of ε₀ - ε."""
        del draws
        eps0 = proximal_noise(given.eps, self.normalize)
        error = eps0 - base.query(eps_fn, base.noised(schedule, x, eps0, self.t), self.t)
        return Answer(None, {"l2": base.norm(error), "l4": base.norm(error, 4)})


@dataclasses.dataclass(frozen=True, order=True)
class Walk(Call):
    """Place number n ≥ 1 of the DDIM trajectory in hops of k, and the model's answer there. State: the Place.

    SecMI's hop back from here and its next hop onwards both follow from this one answer, so the trajectory to the
    highest t_sec serves every other one.
    """

    k: int
    n: int

    needs_source: ClassVar[frozenset[str]] = frozenset({"error", STATE})

    @property
    def source(self) -> Call:
        """The place before."""
        return Walk(self.k, self.n - 1) if self.n > 1 else Raw(0)

    def check(self, schedule: NoiseSchedule) -> None:
        """Require hops forward, to a place that the schedule has."""
        _validate.check_at_least(self.k, 1, "k")
        _validate.check_timestep(self.k * self.n, schedule.num_steps, "the step after t_sec's last")

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Draws, given: Any) -> Answer:
        """Number error: squared distance between the place before and where a hop back from here ends."""
        del draws
        t_from, t_to = self.k * (self.n - 1), self.k * self.n
        there = ddim_step(schedule, given.x, given.eps, t_from, t_to)
        eps = base.query(eps_fn, there, t_to)
        back = ddim_step(schedule, there, eps, t_to, t_from)
        return Answer(Place(there, eps), {"error": base.norm(back - given.x) ** 2})
