"""Loss and level: the three queries by which an audit without known members decides.

With ξ₀, ξ₁ two noises, z one sign probe, and y = √ᾱ x + σξ,

    ℓ_k = log ‖ξ_k - ε(√ᾱ x + σ ξ_k)‖      σ ≈ 0.463, k = 0, 1: the loss, where networks betray natural images
    b   = log ‖ε(√ᾱ x + γσ z)‖             σ ≈ 0.173, γ = 0.1: the level, where they betray small ones

From each, what a pile of images explains without labels is taken out (`evidence.difficulty`): by statistics of the
picture, and from ℓ_k also by how far two classical denoisers of the *same* noisy image are from the truth, which have
the same luck of the draw. The residuals, in standard deviations over the pile, are combined by how well the two losses
agree,

    score = ρ³ (ℓ₀ + ℓ₁)/2 + (1 - ρ)³ b,     ρ = correlation of ℓ₀ and ℓ₁ over the pile, clipped to [0, 1]

(`rules.Agreement`). Where the luck of the draw drowns the loss, ρ is small and the level takes over: ρ was 0.27 to 0.42
for models of 8 x 8 digits and 0.67 to 0.75 for models of CIFAR-10.

Beside a reference (a second model, whose answer to the same query with the same noise is taken out, too) one draw of
the loss is enough, since the reference has the luck of it out already, and the loss decides where it is known sharply,

    score = u r₀/s₀ + (1 - u) b/s_b,     u = 1/(1 + (s₀/0.06)²),     s: standard deviations over the pile

(`rules.FirstIfSharp`): s₀ was 0.02 to 0.06 for models of CIFAR-10 beside others of their kind, 0.005 to 0.02 for
fine-tunes beside their base, and 0.12 on digits, where the level takes over. Its constant was found on one model of
CIFAR-10 that was trained for that, on the shipped model of the digits and on fine-tunes of one more model (seed 22 of
docs/results), and is frozen.

The form, its powers, the noise levels and the denoisers' constants were found on the kept models of CIFAR-10 and of the
digits (docs/results) and on public SecMI scores of CIFAR-10, and are frozen: what they achieve on those says less than
what they achieve on models that were trained later.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dime_jax._util.typing import PyTree
from dime_jax.attacks.base import Attack, Reading, Recipe, Setting, row_label, run_recipe
from dime_jax.attacks.calls import Answer, Arrays, Call, Mask, Noisy, check_draws, images, norm
from dime_jax.attacks.dime import FAMILY, Probe
from dime_jax.attacks.level import planes
from dime_jax.attacks.rules import Agreement, FirstIfSharp, Terms
from dime_jax.core.denoiser import BESIDE, OWN, PRECISION, EpsFn
from dime_jax.core.draws import Draw
from dime_jax.core.schedule import NoiseSchedule, per_image

NAME, BESIDE_NAME = "loss_level", "loss_level_beside"
RULE_LABEL, BESIDE_LABEL = row_label(NAME, 3), row_label(BESIDE_NAME, 2)
LOSS_SIGMA, LEVEL_SIGMA = 0.463, 0.173  # t = 150 and 50 of DDPM's schedule
GAMMA = 0.1

_BLOCK, _STRIDE = 8, 2  # pixels
_THRESHOLD = 2.7  # standard deviations of the noise
_POWER, _COLOUR_POWER = 0.015, 0.001  # of images in [-1, 1], times squared frequency in cycles per pixel
_LEAST = 1e-12  # of a norm, before its logarithm


# ------------------------------------------------------------------------------------------------- classical denoisers


@jax.jit
def threshold_blocks(y: ArrayLike, sigma: ArrayLike) -> Array:
    """Denoise images y [B, H, W, C] with noise σ by a hard threshold of 2.7 σ in the cosine transform of blocks.

    Blocks are of 8 x 8 pixels (or the image, where that is smaller) and all channels. They begin at every second pixel
    and end with the image; where they overlap, their results are averaged.
    """
    y = jnp.asarray(y)
    coloured = _over_channels(y)
    rows, columns = _blocks(y.shape[1]), _blocks(y.shape[2]).reshape(-1, y.shape[2])
    limit = _THRESHOLD * per_image(sigma, y)

    def add(total: Array, row: Array) -> tuple[Array, None]:  # one row of blocks at a time, to save memory
        found = jnp.einsum("ui,bijc,vj->buvc", row, coloured, columns, precision=PRECISION)
        kept = jnp.where(jnp.abs(found) > limit, found, 0)
        return total + jnp.einsum("ui,buvc,vj->bijc", row, kept, columns, precision=PRECISION), None

    total, _ = jax.lax.scan(add, jnp.zeros_like(coloured), jnp.asarray(rows, y.dtype))
    overlaps = np.outer((rows**2).sum(axis=(0, 1)), (columns**2).sum(axis=0))
    return _over_channels(total / overlaps[None, :, :, None].astype(y.dtype), inverse=True)


@jax.jit
def wiener(y: ArrayLike, sqrt_abar: ArrayLike, sigma: ArrayLike) -> Array:
    """Denoise y = √ᾱ x + σ ξ [B, H, W, C] by the Wiener filter for images whose power falls with squared frequency.

    That is, power 0.015/f² in the mean of the channels (as their cosine transform has it) and 0.001/f² in the others.
    """
    y = jnp.asarray(y)
    height, width, channels = y.shape[1:]
    down, across = _cosines(height), _cosines(width)
    squares = np.add.outer((np.arange(height) / (2 * height)) ** 2, (np.arange(width) / (2 * width)) ** 2)
    noise = np.maximum(squares, 1e-9)[:, :, None] / np.where(np.arange(channels) == 0, _POWER, _COLOUR_POWER)
    signal = per_image(sqrt_abar, y) ** 2
    gain = signal / (signal + per_image(sigma, y) ** 2 * noise[None].astype(y.dtype))
    spectrum = gain * jnp.einsum("ui,bijc,vj->buvc", down, _over_channels(y), across, precision=PRECISION)
    return _over_channels(jnp.einsum("ui,buvc,vj->bijc", down, spectrum, across, precision=PRECISION), inverse=True)


def _over_channels(v: Array, inverse: bool = False) -> Array:
    transform = _cosines(v.shape[-1])
    return jnp.einsum("bijc,dc->bijd", v, transform.T if inverse else transform, precision=PRECISION)


def _cosines(size: int) -> np.ndarray:
    """The orthonormal cosine transform of a side [size, size]."""
    frequency, place = np.arange(size)[:, None], np.arange(size) + 0.5
    scale = np.sqrt((1.0 + (frequency > 0)) / size)
    return (scale * np.cos(np.pi * frequency * place / size)).astype(np.float32)


def _blocks(size: int) -> np.ndarray:
    """The cosine transforms of all blocks along a side [blocks, block, size]."""
    block = min(_BLOCK, size)
    starts = sorted({*range(0, size - block, _STRIDE), size - block})
    transforms = np.zeros((len(starts), block, size), np.float32)
    for transform, start in zip(transforms, starts):
        transform[:, start : start + block] = _cosines(block)
    return transforms


@dataclasses.dataclass(frozen=True, order=True)
class Classical(Call):
    """What classical denoisers make of √ᾱ x + σ ξ_index, the image that `Noisy` asks the model about; asks nothing."""

    t: ArrayLike
    index: int

    def draws(self) -> Mapping[str, Draw]:
        """ξ_index."""
        return {"noise": Draw("gaussian", self.index)}

    def reduce(
        self, schedule: NoiseSchedule, x: Array, drawn: Arrays, given: PyTree, asked: None, eps: None, mask: Mask
    ) -> Answer:
        """Numbers dct, wiener: ‖ξ - ε̂‖ = ‖ĝ - √ᾱ x‖/σ, where a denoiser makes ĝ of the noisy image."""
        noisy, sigma = planes(schedule.noised(x, drawn["noise"], self.t)), schedule.sigma(self.t)
        denoised = {
            "dct": threshold_blocks(noisy, sigma),
            "wiener": wiener(noisy, schedule.sqrt_abar(self.t), sigma),
        }
        scaled = schedule.scaled(x, self.t)
        errors = {name: (v.reshape(x.shape) - scaled) / per_image(sigma, x) for name, v in denoised.items()}
        return Answer(None, {name: norm(error, 2, mask) for name, error in errors.items()})


# ------------------------------------------------------------------------------------------------------ as functions


@dataclasses.dataclass(frozen=True, eq=False)
class _Both:
    """Draws of both kinds that someone made."""

    noise: Array
    probes: Array

    def gaussian(self, index: int, like: Array) -> Array:
        del like
        return self.noise[index]

    def rademacher(self, index: int, like: Array) -> Array:
        del like
        return self.probes[index]


def loss_level(
    eps_fn: EpsFn,
    schedule: NoiseSchedule,
    x: ArrayLike,
    noise: ArrayLike,
    probes: ArrayLike,
    t: int,
    t_level: int,
    gamma: float = GAMMA,
) -> Array:
    """Return ℓ₀, ℓ₁, b, and the logs of both denoisers' errors at ξ₀ and at ξ₁ [7, B]: 3 queries.

    Args:
      eps_fn: the model.
      schedule: its noise schedule.
      x: images [B, ...].
      noise: ξ₀ and ξ₁ [2, B, ...].
      probes: z [1, B, ...], signs ±1.
      t: the timestep of the loss; `setting_for` has it for any schedule.
      t_level: the timestep of the level.
      gamma: length of the step along the probe, in units of σ.
    """
    x = images(x)
    both = _Both(check_draws(noise, x, "noise"), check_draws(probes, x, "probes"))
    return run_recipe(recipe(_setting(t, t_level, gamma)), eps_fn, schedule, x, both)


# ------------------------------------------------------------------------------------------------------------- recipes


def setting_for(schedule: NoiseSchedule) -> Setting:
    """Return the setting whose noise levels are nearest to those of the frozen rule."""
    return _setting(schedule.timestep_at(LOSS_SIGMA), schedule.timestep_at(LEVEL_SIGMA))


def beside_recipe(setting: Setting) -> Recipe:
    """The logs of one loss and of one probe's level."""
    first, _, level, *_ = recipe(setting).readings
    return Recipe((first, level), _log)


def on_schedule(setting: Setting, schedule: NoiseSchedule) -> Setting:
    """Return the grid's setting, made for the usual schedule, at the noise levels of this one; others unchanged."""
    return setting_for(schedule) if setting == _USUAL else setting


def _setting(t_loss: int, t_level: int, gamma: float = GAMMA) -> Setting:
    """Name the setting in its own way, so that no grid given for "t" or "gamma" changes a fixed rule."""
    return {"t_loss": int(t_loss), "t_level": int(t_level), "gamma_level": gamma}


_USUAL = _setting(150, 50)


def recipe(setting: Setting) -> Recipe:
    """The logs of two losses, of one probe's level, and of the classical denoisers' errors at either noise."""
    t = int(setting["t_loss"])
    losses = (Reading(Noisy(t, index), "loss") for index in range(2))
    level = Reading(Probe(int(setting["t_level"]), float(setting["gamma_level"]), 0), "norm")
    errors = (Reading(Classical(t, index), name) for index in range(2) for name in ("dct", "wiener"))
    return Recipe((*losses, level, *errors), _log)


def _log(readings: Terms) -> Terms:
    xp = jnp if isinstance(readings, Array) else np
    return xp.log(xp.maximum(readings, _LEAST))


ATTACKS = (
    Attack(
        NAME,
        "Loss and level",
        "Matsumoto et al. 2023 and Do, Alabi; combined here",
        grids={profile: [_USUAL] for profile in ("paper", "quick", "light")},
        recipe=recipe,
        signs=(1, 1, 1, 0, 0, 0, 0),
        rule=Agreement(covariates=((3, 4), (5, 6), ())),
        family=FAMILY,
    ),
    Attack(
        BESIDE_NAME,
        "Loss and level beside a reference",
        "Matsumoto et al. 2023 and Do, Alabi; combined here",
        grids={profile: [_USUAL] for profile in ("paper", "quick", "light")},
        recipe=beside_recipe,
        signs=(1, 1),
        rule=FirstIfSharp(0.06, covariates=((), ())),
        family=FAMILY,
        conditions=(OWN, BESIDE),
    ),
)
