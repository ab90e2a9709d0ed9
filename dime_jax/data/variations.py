"""Variations of a picture that a model may have been trained on in its place: mirrored, cropped, encoded again."""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from dime_jax.data.sources import Source


def _mirrored(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _cropped(image: Image.Image, share: float) -> Image.Image:
    """The middle of the picture, a share of its width and height, enlarged to the size of the whole."""
    width, height = image.size
    edge = (1 - share) / 2
    box = (edge * width, edge * height, (1 - edge) * width, (1 - edge) * height)
    return image.resize(image.size, Image.Resampling.BICUBIC, box=box)


def _encoded(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def _halved(image: Image.Image) -> Image.Image:
    """At half the size, and enlarged again."""
    width, height = image.size
    return image.resize((max(1, width // 2), max(1, height // 2)), Image.Resampling.LANCZOS).resize(
        image.size, Image.Resampling.BICUBIC
    )


ORIGINAL = "as it is"
VARIATIONS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "mirrored": _mirrored,
    "cropped to 90 %": lambda image: _cropped(image, 0.9),
    "cropped to 80 %": lambda image: _cropped(image, 0.8),
    "mirrored and cropped to 90 %": lambda image: _mirrored(_cropped(image, 0.9)),
    "JPEG of quality 75": lambda image: _encoded(image, 75),
    "JPEG of quality 50": lambda image: _encoded(image, 50),
    "at half its size": _halved,
}


def varied(source: Source, indices: np.ndarray) -> Source:
    """The variations of some images: all of the first image, in the order of VARIATIONS, then all of the second, ...

    Pictures keep their size, labels and captions. They are varied as 8-bit images, also those that were not.
    """
    names, count = list(VARIATIONS), len(VARIATIONS)
    originals = [int(index) for index in indices for _ in names]

    def read(place: int) -> np.ndarray:
        return vary(source.read(originals[place]), names[place % count])

    def column(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[originals]

    return Source(
        name=f"variations of {source.name}",
        ids=[f"{source.ids[index]} ({names[place % count]})" for place, index in enumerate(originals)],
        read=read,
        labels=column(source.labels),
        identities=column(source.identities),
        transform=source.transform,
        class_names=source.class_names,
        captions=None if source.captions is None else [source.captions[index] for index in originals],
        caption_problem=source.caption_problem,
    )


def vary(pixels: np.ndarray, name: str) -> np.ndarray:
    """One variation of an image, uint8 [H, W, C] or float32 in [-1, 1], as uint8 [H, W, C]."""
    if pixels.dtype != np.uint8:
        pixels = np.round((pixels + 1) * 127.5).astype(np.uint8)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    return np.asarray(VARIATIONS[name](image)).reshape(pixels.shape)
