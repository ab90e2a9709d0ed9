"""Does a converted model work? Noise-prediction error over t on a few images, and a small sheet of DDIM samples."""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from PIL import Image

from dime_jax._util import validate
from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import Denoiser
from dime_jax.data.transforms import to_uint8
from dime_jax.guards.wiring import DenoiserCheck, check_denoiser


class ModelCheck(NamedTuple):
    """What `check_model` found.

    Attributes:
      timesteps: where the error was measured.
      errors: mean of (eps - noise)² over images and pixels at each; 1 is a model that predicts nothing.
      samples: DDIM samples [N, H, W, C] in the model's own space; pixels are about in [-1, 1].
      figure: the PNG sheet of the samples.
      check: whether it predicts noise at all, and whether it is asked in its own terms.
    """

    timesteps: np.ndarray
    errors: np.ndarray
    samples: np.ndarray
    figure: Path
    check: DenoiserCheck


def check_model(
    denoiser: Denoiser,
    images: ArrayLike,
    output_dir: Path | str,
    *,
    condition: PyTree = None,
    seed: int = 0,
    num_timesteps: int = 10,
    num_samples: int = 16,
    ddim_steps: int = 20,
) -> ModelCheck:
    """Measure a model and write `samples.png` and `check.json` to `output_dir`.

    A working model has errors well below 1 at all but the smallest t, falling as t grows, and samples that look like
    its training images. A failed conversion shows at once: errors near or above 1, and noise for samples.

    Args:
      denoiser: the model.
      images: a few images [B, *image_shape] on the [-1, 1] scale.
      output_dir: made if needed.
      condition: of the images, for conditional models: their classes [B], or what `embed` gives for their captions.
      seed: of the noise.
      num_timesteps: at how many t to measure.
      num_samples: how many samples to draw.
      ddim_steps: network evaluations per sample.
    """
    validate.check_at_least(num_timesteps, 1, "num_timesteps")
    validate.check_at_least(num_samples, 1, "num_samples")
    validate.check_at_least(ddim_steps, 1, "ddim_steps")
    noise_key, sample_key = jax.random.split(jax.random.key(seed))
    timesteps = np.unique(np.linspace(0, denoiser.schedule.num_steps - 1, num_timesteps).round().astype(int))
    x = denoiser.encode(jnp.asarray(images, jnp.float32), seed=seed)
    errors = noise_errors(denoiser, x, timesteps, noise_key, condition)
    start = jax.random.normal(sample_key, (num_samples, *denoiser.shape))
    samples = ddim_sample(denoiser, start, ddim_steps, _condition_of_samples(denoiser, condition, num_samples))

    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    figure = output_dir / "samples.png"
    sample_sheet(_pictures(denoiser, samples)).save(figure)
    rows = [{"t": int(t), "error": float(error)} for t, error in zip(timesteps, errors)]
    check = check_denoiser(denoiser, images, condition, seed=seed)
    contents = {"errors": rows, "seed": seed, "model_check": check.to_json()}
    (output_dir / "check.json").write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return ModelCheck(timesteps, errors, samples, figure, check)


def _pictures(denoiser: Denoiser, samples: np.ndarray) -> np.ndarray:
    """Turn samples into pictures, where a model with latents says how (`LatentDenoiser.decode`)."""
    decode = getattr(denoiser, "decode", None)
    return samples if decode is None else np.asarray(decode(jnp.asarray(samples)))


def _condition_of_samples(denoiser: Denoiser, condition: PyTree, count: int) -> PyTree:
    """Return every class in turn; for other models, the conditions of the images in turn."""
    if denoiser.num_classes is not None:
        return np.arange(count) % denoiser.num_classes
    return jax.tree.map(lambda rows: rows[np.arange(count) % len(rows)], condition)


def noise_errors(
    denoiser: Denoiser, images: jax.Array, timesteps: ArrayLike, key: jax.Array, condition: PyTree
) -> np.ndarray:
    """Measure the mean of (eps(√ᾱ x + σ ε, t) - ε)² at each t, for x in the model's own space, with the same noise.

    Args:
      denoiser: the model.
      images: x [B, *shape].
      timesteps: where it is asked.
      key: of the noise.
      condition: of the images, for conditional models.
    """
    eps_fn, schedule = denoiser.eps_fn(condition), denoiser.schedule
    noise, times = jax.random.normal(key, images.shape), map(int, np.asarray(timesteps))
    return np.array([float(jnp.mean((eps_fn(schedule.noised(images, noise, t), t) - noise) ** 2)) for t in times])


def ddim_sample(denoiser: Denoiser, start: jax.Array, steps: int, condition: PyTree = None) -> np.ndarray:
    """Run deterministic DDIM from noise: x₀ = (x - σ ε)/√ᾱ clipped to [-1, 1], then x = √ᾱ' x₀ + σ' ε at the next t'.

    Where ᾱ = 0 (zero terminal SNR), x₀ cannot be had from ε and starts at 0. Latents have no bounds to clip them to.

    Args:
      denoiser: the model.
      start: x at the last timestep [B, *shape], standard Gaussian noise.
      steps: how many timesteps are visited, evenly spaced.
      condition: of the samples, for conditional models.
    """
    eps_fn, schedule = denoiser.eps_fn(condition), denoiser.schedule
    bound = 1.0 if denoiser.encode_fn is None else np.inf
    timesteps = np.unique(np.linspace(schedule.num_steps - 1, 0, steps).round().astype(int))[::-1]
    x = x0 = start
    for t, following in zip(timesteps, [*timesteps[1:], None]):
        sqrt_abar, sigma = float(schedule.sqrt_abar(int(t))), float(schedule.sigma(int(t)))
        eps = eps_fn(x, int(t))
        x0 = jnp.clip((x - sigma * eps) / sqrt_abar, -bound, bound) if sqrt_abar > 0 else jnp.zeros_like(x)
        if following is not None:
            x = schedule.noised(x0, eps, int(following))
    return np.asarray(x0)


def sample_sheet(images: np.ndarray) -> Image.Image:
    """Lay out images [N, H, W, C] in [-1, 1] in rows as long as there are rows; C is 1 or 3 (else the first)."""
    pixels = to_uint8(images)
    pixels = pixels if pixels.shape[-1] == 3 else pixels[..., :1].repeat(3, axis=-1)
    count, height, width, _ = pixels.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    sheet = np.zeros((rows * columns, height, width, 3), np.uint8)
    sheet[:count] = pixels
    sheet = sheet.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)
    return Image.fromarray(sheet)
