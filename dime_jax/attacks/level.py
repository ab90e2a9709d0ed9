"""The level alone, in other norms: the answer to one DIME query, in the l4 norm or with more weight on low frequencies.

Everything here reads answers that DIME asks for, so it costs nothing when DIME runs too.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dime_jax.attacks.base import Attack, Recipe, Setting, one_number
from dime_jax.attacks.calls import Answer, Arrays, Call, Mask, images, masked, norm
from dime_jax.attacks.dime import CITATION, FAMILY, GRIDS, Probe
from dime_jax.core.schedule import NoiseSchedule

_LOW_HALF_WIDTH, _HIGH_WEIGHT = 5, 0.2  # FreMIA's


@jax.jit
def low_pass_norm(v: ArrayLike) -> Array:
    """FreMIA's weighted l2 norm [B]: Fourier coefficients in the centre square of half-width 5 count 1, others 0.2."""
    flat = planes(images(v))
    low = np.outer(_is_low(flat.shape[1]), _is_low(flat.shape[2])).astype(np.float32)
    weights = (_HIGH_WEIGHT + (1 - _HIGH_WEIGHT) * low)[None, :, :, None]
    spectrum = weights * jnp.abs(jnp.fft.fft2(flat, axes=(1, 2), norm="ortho"))
    return jnp.sqrt(jnp.sum(spectrum**2, axis=(1, 2, 3)))


def planes(v: Array) -> Array:
    """Return v as [B, H, W, C]; vectors [B, d] are d by 1."""
    return v.reshape(*v.shape, 1, 1) if v.ndim == 2 else v.reshape(*v.shape[:3], -1)


def _is_low(side: int) -> np.ndarray:
    return np.abs(np.fft.fftfreq(side, 1 / side)) <= _LOW_HALF_WIDTH


@dataclasses.dataclass(frozen=True, order=True)
class OfProbe(Call):
    """Reads the answer to a probe in other norms; asks nothing."""

    t: int
    gamma: float
    index: int
    needs_source: ClassVar[frozenset[str]] = frozenset({"l4", "low_pass"})

    @property
    def source(self) -> Call:
        """The probe."""
        return Probe(self.t, self.gamma, self.index)

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Array, asked: None, eps: None, mask: Mask
    ) -> Answer:
        """Numbers l4: ‖ε‖₄; low_pass: FreMIA's norm."""
        answer = masked(given, mask)
        return Answer(None, {"l4": norm(answer, 4), "low_pass": low_pass_norm(answer)})


def level_l4(setting: Setting) -> Recipe:
    """‖ε‖₄ of one probe."""
    return _of_probe(setting, "l4")


def level_low(setting: Setting) -> Recipe:
    """FreMIA's norm of one probe's answer."""
    return _of_probe(setting, "low_pass")


def _of_probe(setting: Setting, name: str) -> Recipe:
    return one_number(OfProbe(int(setting["t"]), float(setting["gamma"]), 0), name)


_FREMIA = f"{CITATION}, ablation; weighted as in FreMIA, 2026"
_entry = functools.partial(Attack, grids=GRIDS, family=FAMILY, positive=True)

ATTACKS = (
    _entry("level_l4", "Level only (l4)", f"{CITATION}, ablation; the l4 norm is ours", recipe=level_l4),
    _entry("level_low", "Level only (low frequencies)", _FREMIA, recipe=level_low),
)
