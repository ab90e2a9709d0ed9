"""CLiD: how much more a caption helps to predict the noise than its parts or no caption do (Zhai et al. 2024)."""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from dime_jax._util.typing import PyTree
from dime_jax.attacks.base import Attack, Reading, Recipe, Setting, grid
from dime_jax.attacks.calls import Answer, Arrays, AtNoise, Mask, Query, masked
from dime_jax.attacks.rules import Rule, TermPair, Terms, Weights
from dime_jax.core.denoiser import TEXT_CONDITIONS
from dime_jax.core.schedule import NoiseSchedule

_OWN, *_REDUCED = range(len(TEXT_CONDITIONS))


@dataclasses.dataclass(frozen=True, order=True)
class Told(AtNoise):
    """ε(√ᾱ x + σ ξ_index, t) under condition number `place` of `TEXT_CONDITIONS`.

    The place is a number, not a name, so that all conditions share a program.
    The noise is the same under every condition: differences between conditions are the captions' alone.
    """

    place: int

    @property
    def condition(self) -> str:  # type: ignore[override]
        """The name of the condition."""
        return TEXT_CONDITIONS[self.place]

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree, asked: Query, eps: Array, mask: Mask
    ) -> Answer:
        """Number loss: the mean of (ξ - ε)² over the values of an image, of which those outside the mask are zero."""
        error = masked(drawn["noise"] - eps, mask)
        return Answer(None, {"loss": jnp.mean(error.reshape(len(x), -1) ** 2, axis=1)})


@dataclasses.dataclass(frozen=True)
class Blend(Rule):
    """1 - a and a for two standardised terms, a = 0, 0.05, …, 1.

    CLiD scales by median and quartiles; that is another unit for a, and calibration chooses a.
    """

    standardize: bool = True

    def weights(self, schedule: NoiseSchedule, setting: Mapping[str, int | float], terms: TermPair) -> list[Weights]:
        """One pair for each a."""
        del schedule, setting, terms
        return [Weights((1 - a, a), {"a": a}) for a in np.linspace(0, 1, 21).round(2).tolist()]


def recipe(setting: Setting) -> Recipe:
    """Two terms: L(own), and L(own) less the mean of L over the reduced captions; L is the mean loss at three t."""
    t, step = int(setting["t"]), int(setting["step"])
    times = (t - step, t, t + step)
    readings = tuple(
        Reading(Told(time, index, place), "loss") for place in (_OWN, *_REDUCED) for index, time in enumerate(times)
    )

    def assemble(rows: Terms) -> Terms:
        xp = np if isinstance(rows, np.ndarray) else jnp
        losses = rows.reshape(len(TEXT_CONDITIONS), len(times), -1).mean(axis=1)
        return xp.stack([losses[_OWN], losses[_OWN] - losses[1:].mean(axis=0)])

    return Recipe(readings, assemble)


_CITATION = (
    "Zhai et al.: Membership inference on text-to-image diffusion models via conditional likelihood discrepancy, 2024"
)
# The published timesteps 485, 495 and 505; the paper's profile looks around them.
_TIMES = {"paper": [195, 345, 495, 645], "quick": [495], "light": [495]}
_GRIDS = {profile: grid(t=times, step=[10]) for profile, times in _TIMES.items()}
_entry = functools.partial(Attack, family="CLiD", conditions=TEXT_CONDITIONS)

ATTACKS = (_entry("clid", "CLiD", _CITATION, recipe=recipe, grids=_GRIDS, signs=(1, 1), rule=Blend()),)
