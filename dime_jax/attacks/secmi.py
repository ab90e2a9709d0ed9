"""SecMI: the error of one deterministic step there and back on the image's own DDIM trajectory (Duan et al. 2023)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax.attacks.base import BASELINE_TIMES, Attack, Recipe, Setting, grid, one_number
from dime_jax.attacks.calls import STATE, Answer, Arrays, Call, Mask, Place, Query, Raw, images, norm
from dime_jax.core.denoiser import EpsFn
from dime_jax.core.draws import NO_DRAWS, Draw, Given
from dime_jax.core.schedule import NoiseSchedule, per_image


def ddim_step(schedule: NoiseSchedule, x: Array, eps: Array, t_from: ArrayLike, t_to: ArrayLike) -> Array:
    """Take one deterministic DDIM step, either way: the clean image that ε implies, noised to t_to.

    Args:
      schedule: of the model.
      x: images [B, ...] at t_from.
      eps: ε_θ(x, t_from).
      t_from: where the step starts.
      t_to: where it ends.
    """
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
        """Require a hop forward, to a place that the schedule has."""
        validate.check_at_least(self.k, 1, "k")
        validate.check_timestep(self.k * self.n, schedule.num_steps, "the step after t_sec's last")

    def query(self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Place) -> Query:
        """A hop on from the place before."""
        t_from, t_to = self.k * (self.n - 1), self.k * self.n
        return Query(ddim_step(schedule, given.x, given.eps, t_from, t_to), t_to)

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Place, asked: Query, eps: Array, mask: Mask
    ) -> Answer:
        """Number error: squared distance between the place before and where a hop back from here ends."""
        back = ddim_step(schedule, asked.x, eps, asked.t, self.k * (self.n - 1))
        return Answer(Place(asked.x, eps), {"error": norm(back - given.x, 2, mask) ** 2})


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

    def draws(self) -> Mapping[str, Draw]:
        """ξ_0."""
        return {"noise": Draw("gaussian", 0)}

    def query(self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Place) -> Query:
        """The image noised to t + 1."""
        return Query(schedule.noised(x, drawn["noise"], self.t + 1), self.t + 1)

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Place, asked: Query, eps: Array, mask: Mask
    ) -> Answer:
        """Number error: σ_t times the distance of the two responses."""
        return Answer(None, {"error": norm(per_image(schedule.sigma(self.t), x) * (given.eps - eps), 2, mask)})


def places(t_sec: int, k: int) -> list[Walk]:
    """Return the trajectory: places k, 2k, … below t_sec, and the one after, from which SecMI hops back."""
    validate.check_at_least(k, 1, "k")
    return [Walk(k, n) for n in range(1, max(1, -(-t_sec // k)) + 1)]


def secmi(
    eps_fn: EpsFn,
    schedule: NoiseSchedule,
    x: ArrayLike,
    t_sec: int = 100,
    k: int = 10,
    variant: str = "official",
    noise: ArrayLike | None = None,
) -> Array:
    """Return SecMI_stat per image [B].

    "official": walk the DDIM trajectory from the clean image in hops of k to the last step below t_sec, hop once more
    and back; the squared l2 distance to where it started. ⌈t_sec/k⌉ + 1 queries: 11 at the defaults. With t_sec <= k
    the walk is empty and the hop starts at the image itself.

    "paper": the one-step formula that the DIME paper prints, ‖σ_t (ε(x, t) - ε(√ᾱ_{t+1} x + σ_{t+1} ε, t + 1))‖ at
    t = t_sec, with given noise ε: 2 queries.

    Args:
      eps_fn: the model.
      schedule: its noise schedule.
      x: images [B, ...].
      t_sec: the timestep at which the error is taken.
      k: the length of a hop.
      variant: "official" or "paper".
      noise: ε [B, ...], of the variant "paper".
    """
    x = images(x)
    validate.check_choice(variant, ("official", "paper"), "variant")
    calls: list[Call] = [Raw(0), *places(t_sec, k)]
    validate.check_timestep(t_sec, schedule.num_steps, "t_sec")
    draws = NO_DRAWS
    if variant == "paper":
        if noise is None:
            raise ValueError("secmi variant='paper' needs noise of the images' shape, got noise=None")
        validate.check_shape(noise, x.shape, "noise")
        calls, draws = [Raw(t_sec), Next(t_sec)], Given(jnp.asarray(noise, x.dtype)[None])
    calls[-1].check(schedule)
    answer = Answer(None, {})
    for call in calls:
        answer = call.ask(eps_fn, schedule, x, draws, answer.state)
    return answer.numbers["error"]


def recipe(setting: Setting) -> Recipe:
    """The error of the hop back from the last place."""
    return one_number(places(int(setting["t"]), int(setting["k"]))[-1], "error")


_CITATION = "Duan et al.: Are diffusion models vulnerable to membership inference attacks?, 2023"
_GRIDS = {profile: grid(t=times, k=[10]) for profile, times in BASELINE_TIMES.items()}

ATTACKS = (Attack("secmi", "SecMI_stat", _CITATION, recipe=recipe, grids=_GRIDS, family="SecMI", positive=True),)
