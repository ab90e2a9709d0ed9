"""Variations of a picture that a model may have been trained on in its place: mirrored, cropped, encoded again."""

import dataclasses
import io
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image

from dime_jax.data.sources import Source
from dime_jax.data.transforms import to_uint8


def _mirrored(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _cropped(image: Image.Image, share: float) -> Image.Image:
    """Crop the middle of a picture, a share of its width and height, and enlarge it to the size of the whole."""
    width, height = image.size
    edge = (1 - share) / 2
    box = (edge * width, edge * height, (1 - edge) * width, (1 - edge) * height)
    return image.resize(image.size, Image.Resampling.BICUBIC, box=box)


def encoded(image: Image.Image, quality: int) -> Image.Image:
    """Return what is left of an image after it was saved as JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def _halved(image: Image.Image) -> Image.Image:
    """Halve a picture, and enlarge it again."""
    width, height = image.size
    return image.resize((max(1, width // 2), max(1, height // 2)), Image.Resampling.LANCZOS).resize(
        image.size, Image.Resampling.BICUBIC
    )


Change = Callable[[Image.Image], Image.Image]

ORIGINAL = "as it is"
VARIATIONS: dict[str, Change] = {
    "mirrored": _mirrored,
    "cropped to 90 %": lambda image: _cropped(image, 0.9),
    "cropped to 80 %": lambda image: _cropped(image, 0.8),
    "mirrored and cropped to 90 %": lambda image: _mirrored(_cropped(image, 0.9)),
    "JPEG of quality 75": lambda image: encoded(image, 75),
    "JPEG of quality 50": lambda image: encoded(image, 50),
    "at half its size": _halved,
}


def varied(source: Source, indices: np.ndarray, changes: Mapping[str, Change] = VARIATIONS) -> Source:
    """Vary some images: all variations of the first image, in the order of `changes`, then all of the second, ...

    Pictures keep their size, labels and captions. They are varied as 8-bit images, even those that were not.
    """
    names = list(changes)
    ids = [f"{source.ids[index]} ({name})" for index in indices for name in names]
    originals = source.take(np.repeat(indices, len(names)), ids)

    def read(place: int) -> np.ndarray:
        return vary(originals.read(place), changes[names[place % len(names)]])

    return dataclasses.replace(originals, name=f"variations of {source.name}", read=read)


def vary(pixels: np.ndarray, change: Change) -> np.ndarray:
    """Make one variation of an image, uint8 [H, W, C] or float32 in [-1, 1], as uint8 [H, W, C]."""
    pixels = to_uint8(pixels)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    return np.asarray(change(image)).reshape(pixels.shape)
