"""What all attacks share: how they ask the model, and how they are described to the rest of the package.

An attack is a pure function of (eps_fn, schedule, x, randomness, setting). Its unit of work is one batched model call,
and it loops over calls in Python, so it runs over any callable: a jitted network, a NumPy function, a hosted model.
Scores are **lower for members**, always.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax import _validate
from dime_jax.denoiser import EpsFn
from dime_jax.draws import Draws
from dime_jax.schedule import NoiseSchedule, per_image

if TYPE_CHECKING:
    from dime_jax.attacks.recipes import Recipe

Setting = Mapping[str, int | float]


def images(x: Any) -> jax.Array:
    """A non-empty batch of images [B, ...] in floating point."""
    x = jnp.asarray(x)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"expected images of shape [B, ...] in floating point, got {x.dtype} {list(x.shape)}")
    _validate.check_not_empty(x, "images")
    return x


def query(eps_fn: EpsFn, x: jax.Array, t: Any) -> jax.Array:
    """One model call: B queries."""
    eps = jnp.asarray(eps_fn(x, t))
    if eps.shape != x.shape:
        raise ValueError(f"expected eps_fn to return shape {list(x.shape)}, got {list(eps.shape)}")
    return eps.astype(x.dtype)


def scaled(schedule: NoiseSchedule, x: jax.Array, t: Any) -> jax.Array:
    """g = √ᾱ_t x: the image where its noised versions are centred."""
    return per_image(schedule.sqrt_abar(t), x) * x


def noised(schedule: NoiseSchedule, x: jax.Array, noise: jax.Array, t: Any) -> jax.Array:
    """x_t = √ᾱ_t x + σ_t · noise."""
    return scaled(schedule, x, t) + per_image(schedule.sigma(t), x) * noise


def norm(v: jax.Array, p: float = 2) -> jax.Array:
    """‖v‖_p per image [B], with the root."""
    _validate.check_at_least(p, 1, "p")
    return jnp.linalg.norm(v.reshape(len(v), -1), ord=p, axis=1)


def check_draws(draws: Any, x: jax.Array, name: str) -> jax.Array:
    """Require draws [q, B, ...] for the batch x [B, ...], q > 0."""
    draws = jnp.asarray(draws, x.dtype)
    _validate.check_shape(draws, (None, *x.shape), name)
    _validate.check_not_empty(draws, name)
    return draws


@dataclasses.dataclass(frozen=True)
class Attack:
    """An attack as the registry, the calibration and the tables see it.

    Attributes:
      name: as in results.json.
      title: as in tables.
      citation: where it comes from.
      run: (eps_fn, schedule, x, draws, setting) -> terms [columns, B]: one column, the score; or two, B̂² and V̂.
      queries: model calls per image at a setting.
      grids: the settings that calibration chooses from, by profile ("paper", "quick", "light").
      tiers: query tiers; each is reported on its own, as the setting's "q". Empty for attacks of fixed cost.
      angles: for two-column attacks, the candidate angles φ at a setting; None for one column.
      standardize: whether the two columns are standardised with calibration statistics before they are combined.
      recipe: the model calls of a setting and how terms follow from them, by which attacks share queries; None for
        attacks that are only known as `run`.
    """

    name: str
    title: str
    citation: str
    run: Callable[[EpsFn, NoiseSchedule, jax.Array, Draws, Setting], jax.Array]
    queries: Callable[[Setting], int]
    grids: Mapping[str, Sequence[Setting]]
    tiers: tuple[int, ...] = ()
    angles: Callable[[NoiseSchedule, Setting], Sequence[float]] | None = None
    standardize: bool = True
    recipe: "Callable[[Setting], Recipe] | None" = None

    def settings(self, profile: str, tier: int | None = None) -> list[Setting]:
        """The grid of a profile, at one query tier."""
        _validate.check_choice(profile, tuple(self.grids), "profile")
        if not self.tiers:
            return list(self.grids[profile])
        if tier is None or tier < 1:
            raise ValueError(f"expected a query tier >= 1 for {self.name}, got {tier}")
        return [{**setting, "q": tier} for setting in self.grids[profile]]


def grid(**axes: Sequence[int | float]) -> list[Setting]:
    """All combinations of the given values, the last axis running fastest."""
    mesh = np.meshgrid(*axes.values(), indexing="ij")
    columns = [[value.item() for value in np.asarray(axis).ravel()] for axis in mesh]
    return [dict(zip(axes, row)) for row in zip(*columns)]
