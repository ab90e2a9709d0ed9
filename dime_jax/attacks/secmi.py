"""SecMI: the error of one deterministic step there and back on the image's own DDIM trajectory (Duan et al. 2023)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dime_jax._util import validate
from dime_jax.attacks.base import (
    BASELINE_TIMES,
    STATE,
    Answer,
    Attack,
    Call,
    Recipe,
    Setting,
    asking,
    grid,
    images,
    norm,
    one_number,
    query,
)
from dime_jax.attacks.calls import Place, Raw
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.draws import Given, Randomness
from dime_jax.core.schedule import NoiseSchedule, per_image


def ddim_step(schedule: NoiseSchedule, x: jax.Array, eps: jax.Array, t_from: Any, t_to: Any) -> jax.Array:
    """One deterministic DDIM step, either way: the clean image that eps = ε_θ(x, t_from) implies, noised to t_to."""
    clean = (x - per_image(schedule.sigma(t_from), x) * eps) / per_image(schedule.sqrt_abar(t_from), x)
    return schedule.noised(clean, eps, t_to)


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
        validate.check_at_least(self.k, 1, "k")
        validate.check_timestep(self.k * self.n, schedule.num_steps, "the step after t_sec's last")

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Randomness, given: Any) -> Answer:
        """Number error: squared distance between the place before and where a hop back from here ends."""
        del x, draws
        t_from, t_to = self.k * (self.n - 1), self.k * self.n
        there = ddim_step(schedule, given.x, given.eps, t_from, t_to)
        eps = query(eps_fn, there, t_to)
        back = ddim_step(schedule, there, eps, t_to, t_from)
        return Answer(Place(there, eps), {"error": norm(back - given.x) ** 2})


@dataclasses.dataclass(frozen=True, order=True)
class Next(Call):
    """ε(√ᾱ x + σ ξ_0, t + 1) at Gaussian noise ξ, against ε(x, t): SecMI as the DIME paper prints it."""

    t: int

    needs_source: ClassVar[frozenset[str]] = frozenset({"error"})

    @property
    def source(self) -> Call:
        """The response at t."""
        return Raw(self.t)

    def check(self, schedule: NoiseSchedule) -> None:
        """Require a step after t."""
        validate.check_timestep(self.t + 1, schedule.num_steps, "t_sec + 1")

    def ask(self, eps_fn: EpsFn, schedule: NoiseSchedule, x: jax.Array, draws: Randomness, given: Any) -> Answer:
        """Number error: σ_t times the distance of the two responses."""
        noisy = query(eps_fn, schedule.noised(x, draws.gaussian(0, x), self.t + 1), self.t + 1)
        return Answer(None, {"error": norm(per_image(schedule.sigma(self.t), x) * (given.eps - noisy))})


def places(t_sec: int, k: int) -> list[Walk]:
    """The trajectory: places k, 2k, … below t_sec, and the one after, from which SecMI hops back."""
    validate.check_at_least(k, 1, "k")
    return [Walk(k, n) for n in range(1, max(1, -(-t_sec // k)) + 1)]


def secmi(
    eps_fn: EpsFn,
    schedule: NoiseSchedule,
    x: Any,
    t_sec: int = 100,
    k: int = 10,
    variant: str = "official",
    noise: Any = None,
) -> jax.Array:
    """SecMI_stat.

    "official": walk the DDIM trajectory from the clean image in hops of k to the last step below t_sec, hop once more
    and back; the squared l2 distance to where it started. ⌈t_sec/k⌉ + 1 queries: 11 at the defaults. With t_sec <= k
    the walk is empty and the hop starts at the image itself.

    "paper": the one-step formula that the DIME paper prints, ‖σ_t (ε(x, t) - ε(√ᾱ_{t+1} x + σ_{t+1} ε, t + 1))‖ at
    t = t_sec, with given `noise` [B, ...]: 2 queries.
    """
    x = images(x)
    validate.check_choice(variant, ("official", "paper"), "variant")
    walk = places(t_sec, k)
    validate.check_timestep(t_sec, schedule.num_steps, "t_sec")
    if variant == "paper":
        if noise is None:
            raise ValueError("secmi variant='paper' needs noise of the images' shape, got noise=None")
        validate.check_shape(noise, x.shape, "noise")
        ask = asking(eps_fn, schedule, x, Given(jnp.asarray(noise, x.dtype)[None]))
        return ask(Next(t_sec), ask(Raw(t_sec)).state).numbers["error"]
    walk[-1].check(schedule)
    ask = asking(eps_fn, schedule, x)
    answer = ask(Raw(0))
    for place in walk:
        answer = ask(place, answer.state)
    return answer.numbers["error"]


def recipe(setting: Setting) -> Recipe:
    """The error of the hop back from the last place."""
    return one_number(places(int(setting["t"]), int(setting["k"]))[-1], "error")


_CITATION = "Duan et al.: Are diffusion models vulnerable to membership inference attacks?, 2023"
_GRIDS = {profile: grid(t=times, k=[10]) for profile, times in BASELINE_TIMES.items()}

ATTACKS = (Attack("secmi", "SecMI_stat", _CITATION, recipe=recipe, grids=_GRIDS, family="SecMI"),)
