"""DIME's own answers, read in bands of spatial frequency: the same queries, more of what they say.

The squared level B̂² is the energy of one answer, summed over all frequencies. A network that is far from the ideal
denoiser betrays its members in some frequencies and not in others, and what is left of the image itself differs from
picture to picture. So the answer is cut into bands of spatial frequency, by the larger index of its cosine transform,

    e_b = log Σ_{(u, v) in band b} |DCT ε(√ᾱ x + γσ z)|²(u, v)             b = 1 … 6

each is compared with what it should be for an image that has the energies of this one, z_b = log Σ |DCT x|², and a
linear discriminant weighs what remains (`rules.Discriminant`). γ = 0 is the answer to the scaled image, without probe.

Everything here reads answers that DIME asks for, so it costs nothing beside DIME.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dime_jax.attacks.base import Attack, Reading, Recipe, Setting, draw_numbers, grid, one_number, run_recipe
from dime_jax.attacks.calls import Answer, Arrays, Call, Mask, check_draws, images, masked, norm
from dime_jax.attacks.dime import CITATION, FAMILY, GAMMAS, GRIDS, TIERS, TIMES, Probe, Scaled
from dime_jax.attacks.rules import Discriminant, Terms
from dime_jax.core.denoiser import PRECISION, EpsFn
from dime_jax.core.draws import Given
from dime_jax.core.schedule import NoiseSchedule

BANDS = 6
_FLOOR = 1e-12  # of an energy, before its logarithm
_LOW_HALF_WIDTH, _HIGH_WEIGHT = 5, 0.2  # FreMIA's


# ----------------------------------------------------------------------------------------------------------- spectra


@jax.jit
def band_energies(v: ArrayLike) -> Array:
    """Log energy [6, B] of images v [B, H, W, C] or vectors [B, d] in bands of spatial frequency, over all channels.

    A coefficient (i, j) of the cosine transform lies in the band of its larger relative frequency, max(i/H, j/W). The
    energies of the bands add up to ‖v‖². Sides below 6 do not reach every band: an empty one is log 1e-12 for every
    image, and a constant weighs nothing.
    """
    flat = planes(images(v))
    height, width = flat.shape[1:3]
    spectrum = jnp.einsum("ui,bijc,vj->buvc", cosines(height), flat, cosines(width), precision=PRECISION)
    energy = jnp.sum(spectrum**2, axis=-1).reshape(len(flat), -1)
    return jnp.log(jnp.matmul(energy, _bands(height, width), precision=PRECISION) + _FLOOR).T


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


def cosines(size: int) -> np.ndarray:
    """Return the orthonormal cosine transform of a side [size, size]."""
    frequency, place = np.arange(size)[:, None], np.arange(size) + 0.5
    scale = np.sqrt((1.0 + (frequency > 0)) / size)
    return (scale * np.cos(np.pi * frequency * place / size)).astype(np.float32)


def _bands(height: int, width: int) -> np.ndarray:
    """1 where a coefficient lies in a band [H W, bands]."""
    frequency = np.maximum.outer(np.arange(height) / height, np.arange(width) / width)
    return ((frequency * BANDS).astype(int).reshape(-1, 1) == np.arange(BANDS)).astype(np.float32)


def _is_low(side: int) -> np.ndarray:
    return np.abs(np.fft.fftfreq(side, 1 / side)) <= _LOW_HALF_WIDTH


# --------------------------------------------------------------------------------------------------------------- calls

_BAND_NAMES = tuple(f"band_{number}" for number in range(BANDS))


class Spectral(Call):
    """Reads an answer that another call got, or the image itself; asks nothing."""

    needs_source: ClassVar[frozenset[str]] = frozenset({*_BAND_NAMES, "l4", "low_pass"})

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: Array, asked: None, eps: None, mask: Mask
    ) -> Answer:
        """Numbers band_0 … band_5: log energies; l4: ‖ε‖₄; low_pass: FreMIA's norm."""
        answer = masked(given, mask)
        energies = dict(zip(_BAND_NAMES, band_energies(answer)))
        return Answer(None, {**energies, "l4": norm(answer, 4), "low_pass": low_pass_norm(answer)})


@dataclasses.dataclass(frozen=True, order=True)
class OfProbe(Spectral):
    """Of the answer to a probe."""

    t: int
    gamma: float
    index: int

    @property
    def source(self) -> Call:
        """The probe."""
        return Probe(self.t, self.gamma, self.index)


@dataclasses.dataclass(frozen=True, order=True)
class OfScaled(Spectral):
    """Of the answer to the scaled image."""

    t: int

    @property
    def source(self) -> Call:
        """The scaled image's answer."""
        return Scaled(self.t)


@dataclasses.dataclass(frozen=True, order=True)
class OfImage(Spectral):
    """Of the image."""

    def start(self, x: Array) -> Array:
        """The image."""
        return x


# ------------------------------------------------------------------------------------------------------ as functions


def dime_bands(eps_fn: EpsFn, schedule: NoiseSchedule, x: ArrayLike, probe: ArrayLike, t: int, gamma: float) -> Array:
    """Return the log energies of one answer in 6 bands, then those of the image [12, B]: 1 query.

    Args:
      eps_fn: the model.
      schedule: its noise schedule.
      x: images [B, ...].
      probe: signs [B, ...] of ±1; without effect if γ = 0.
      t: the timestep.
      gamma: length of the step along the probe, in units of σ; 0 asks about the scaled image itself.
    """
    x = images(x)
    probes = check_draws(jnp.asarray(probe)[None], x, "probe")
    return run_recipe(one_answer({"t": int(t), "gamma": gamma}), eps_fn, schedule, x, Given(probes))


# ------------------------------------------------------------------------------------------------------------- recipes


def _answer(t: int, gamma: float) -> Spectral:
    return OfProbe(t, gamma, 0) if gamma else OfScaled(t)


def _bands_of(call: Spectral) -> tuple[Reading, ...]:
    return tuple(Reading(call, name) for name in _BAND_NAMES)


def one_answer(setting: Setting) -> Recipe:
    """The bands of one answer, and of the image."""
    answer = _answer(int(setting["t"]), float(setting["gamma"]))
    return Recipe((*_bands_of(answer), *_bands_of(OfImage())), lambda readings: readings)


def all_answers(setting: Setting) -> Recipe:
    """All that DIME's q + 1 answers say: bands of the base, mean bands of the probes, the trace, bands of the image."""
    t, gamma = int(setting["t"]), float(setting["gamma"])
    indices = draw_numbers(setting)
    readings = (
        *_bands_of(OfScaled(t)),
        *_bands_of(OfImage()),
        *(Reading(Probe(t, gamma, index), "trace") for index in indices),
        *(reading for index in indices for reading in _bands_of(OfProbe(t, gamma, index))),
    )

    def assemble(r: Terms) -> Terms:
        base, image, trace, probes = np.split(r, np.cumsum([BANDS, BANDS, len(indices)]))
        bands = probes.reshape(len(indices), BANDS, -1).mean(axis=0)
        return np.concatenate([base, bands, trace.mean(axis=0)[None], image])

    return Recipe(readings, assemble)


def level_l4(setting: Setting) -> Recipe:
    """‖ε‖₄ of one probe."""
    return one_number(OfProbe(int(setting["t"]), float(setting["gamma"]), 0), "l4")


def level_low(setting: Setting) -> Recipe:
    """FreMIA's norm of one probe's answer."""
    return one_number(OfProbe(int(setting["t"]), float(setting["gamma"]), 0), "low_pass")


_ONE_ANSWER_GRIDS = {profile: grid(t=times, gamma=[0.0, *GAMMAS[profile]]) for profile, times in TIMES.items()}
_FREMIA = f"{CITATION}, ablation; weighted as in FreMIA, 2026"
_entry = functools.partial(Attack, grids=GRIDS, family=FAMILY)

ATTACKS = (
    _entry(
        "dime_bands",
        "DIME bands",
        f"{CITATION}; read in bands of frequency here",
        grids=_ONE_ANSWER_GRIDS,
        recipe=one_answer,
        signs=(1,) * BANDS + (0,) * BANDS,
        rule=Discriminant(asked=BANDS),
    ),
    _entry(
        "dime_bands_all",
        "DIME bands, all answers",
        f"{CITATION}; read in bands of frequency here",
        recipe=all_answers,
        tiers=TIERS,
        signs=(1,) * (2 * BANDS) + (-1,) + (0,) * BANDS,
        rule=Discriminant(asked=2 * BANDS + 1),
    ),
    _entry("level_l4", "Level only (l4)", f"{CITATION}, ablation; the l4 norm is ours", recipe=level_l4, positive=True),
    _entry("level_low", "Level only (low frequencies)", _FREMIA, recipe=level_low, positive=True),
)
