"""Turn images into what the model was trained on, float32 [H, W, C] in [-1, 1]: deterministic, never flipped.

The named pipelines are the published ones. Resizing is Pillow's (antialiased, rounded to 8 bits), as in the loaders
that made the published models, so pixels agree with theirs to the bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from dime_jax._util import validate
from dime_jax.data import decoding
from dime_jax.data.sources import BadImage, Source

RANGES = ("uint8", "[0, 1]", "[-1, 1]")


class Transform(NamedTuple):
    """A pipeline: `transform(image)` -> float32 of `shape`, in [-1, 1]. Its name goes into score tables."""

    name: str
    shape: tuple[int, int, int]
    resize: Callable[[np.ndarray], np.ndarray]

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Transform one `Item.image`; raises BadImage if this image cannot take the pipeline's shape."""
        resized = decoding.in_turn(image.size // image.shape[-1], lambda: self.resize(image))
        resized = _to_channels(resized, self.shape[-1])
        if resized.shape != self.shape:
            raise ValueError(f"images must have shape {list(self.shape)} after {self.name}, got {list(resized.shape)}")
        return to_model_range(resized)


def get_transform(name: str, image_shape: tuple[int, ...] | None = None) -> Transform:
    """Return a pipeline by its name.

    | name | pipeline |
    |---|---|
    | cifar | 32x32x3 as it is |
    | stl10u | bilinear to 32x32 |
    | celeba | centre crop 140, bilinear to 32x32 |
    | imagenet256 | shorter side to 256 by bicubic, centre crop: what the published attacks used |
    | imagenet256_guided | Guided Diffusion's training: halved by box filter while both sides >= 512, then as above |
    | digits | 8x8x1 as it is |
    | fit | bicubic until it covers `image_shape`, centre crop; nothing if it has that size already |
    """
    if name == "fit":
        if image_shape is None or len(image_shape) != 3:
            raise ValueError(f"transform fit needs image_shape (height, width, channels), got {image_shape}")
        height, width, channels = image_shape
        return Transform(f"fit-{height}x{width}x{channels}", (height, width, channels), _cover(height, width))
    validate.check_choice(name, (*_PIPELINES, "fit"), "transform")
    transform = _PIPELINES[name]
    if image_shape is not None and tuple(image_shape) != transform.shape:
        raise ValueError(f"transform {name} gives {list(transform.shape)}, but the model takes {list(image_shape)}")
    return transform


def transform_for(source: Source, image_shape: tuple[int, ...]) -> Transform:
    """Return the source's own pipeline if it gives the model's image shape, else `fit`."""
    usual = _PIPELINES.get(source.transform)
    return usual if usual is not None and usual.shape == tuple(image_shape) else get_transform("fit", image_shape)


def to_model_range(image: np.ndarray) -> np.ndarray:
    """Map uint8 v to v / 127.5 - 1 in float32, as loaders' 2 (v / 255) - 1 to the bit; float32 in [-1, 1] stays."""
    if image.dtype == np.uint8:
        return image.astype(np.float32) / np.float32(127.5) - np.float32(1)
    return image.astype(np.float32, copy=False)


def to_uint8(image: np.ndarray) -> np.ndarray:
    """Return an image of floats in [-1, 1], or some of them, as uint8; uint8 stays."""
    return image if image.dtype == np.uint8 else np.round((np.clip(image, -1, 1) + 1) * 127.5).astype(np.uint8)


def recognise_range(images: np.ndarray) -> str:
    """Tell which of "uint8", "[0, 1]" and "[-1, 1]" a whole set's pixel values are in; anything unclear is refused.

    A float set must fill its range to within 5 % at both ends. Values in [0.2, 0.9] could be bright images on [-1, 1],
    values in [-0.4, 0.5] images with the mean taken off: those are a ValueError, as are values beyond [-1, 1], NaN,
    and integers other than uint8.
    """
    if images.dtype == np.uint8:
        return "uint8"
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"images must be uint8 or floats, got {images.dtype}: convert 0..255 to uint8")
    validate.check_finite(images, "images")
    low, high = float(images.min()), float(images.max())
    if 0 <= low <= 0.05 and 0.95 <= high <= 1:
        return "[0, 1]"
    if -1 <= low <= -0.9 and 0.9 <= high <= 1:
        return "[-1, 1]"
    raise ValueError(f"images must fill [0, 1] or [-1, 1], got values from {low:g} to {high:g}: give value_range")


def to_stored_range(images: np.ndarray, value_range: str | None = None) -> np.ndarray:
    """Convert images to what a Source holds: uint8, or float32 in [-1, 1] where 8 bits would lose something.

    Args:
      images: a whole set.
      value_range: one of RANGES; recognised if None, checked if given.
    """
    if value_range is None:
        value_range = recognise_range(images)
    validate.check_choice(value_range, RANGES, "value_range")
    if (images.dtype == np.uint8) != (value_range == "uint8"):
        raise ValueError(f"images must be of value_range {value_range}, got {images.dtype}")
    if images.dtype == np.uint8:
        return images
    validate.check_finite(images, "images")
    low, high = (0.0, 1.0) if value_range == "[0, 1]" else (-1.0, 1.0)
    if images.min() < low or images.max() > high:
        raise ValueError(f"images must be in {value_range}, got values from {images.min():g} to {images.max():g}")
    levels = (images.astype(np.float32) - low) * np.float32(255 / (high - low))
    rounded = np.round(levels)
    if np.abs(levels - rounded).max() < 1e-3:
        return rounded.astype(np.uint8)
    return (images.astype(np.float32) - low) * np.float32(2 / (high - low)) - 1


def _as_it_is(image: np.ndarray) -> np.ndarray:
    return image


def _resized(image: np.ndarray, height: int, width: int, filter: Image.Resampling) -> np.ndarray:
    if image.dtype != np.uint8:
        raise ValueError(f"float images are not resized: they must be {height}x{width}, got {list(image.shape)}")
    pixels = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    return np.asarray(pixels.resize((width, height), filter)).reshape(height, width, image.shape[-1])


def _centre_crop(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Crop the middle height x width; an odd margin is split as torchvision does (round half to even)."""
    if image.shape[0] < height or image.shape[1] < width:
        raise BadImage(f"is {image.shape[0]}x{image.shape[1]}, smaller than the crop of {height}x{width}")
    top, left = round((image.shape[0] - height) / 2), round((image.shape[1] - width) / 2)
    return image[top : top + height, left : left + width]


def _stl10u(image: np.ndarray) -> np.ndarray:
    return _resized(image, 32, 32, Image.Resampling.BILINEAR)


def _celeba(image: np.ndarray) -> np.ndarray:
    return _resized(_centre_crop(image, 140, 140), 32, 32, Image.Resampling.BILINEAR)


def _imagenet256(image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    short = min(height, width)
    height, width = 256 * height // short, 256 * width // short
    return _centre_crop(_resized(image, height, width, Image.Resampling.BICUBIC), 256, 256)


def _imagenet256_guided(image: np.ndarray) -> np.ndarray:
    while min(image.shape[:2]) >= 512:
        image = _resized(image, image.shape[0] // 2, image.shape[1] // 2, Image.Resampling.BOX)
    scale = 256 / min(image.shape[:2])
    height, width = round(image.shape[0] * scale), round(image.shape[1] * scale)
    image = _resized(image, height, width, Image.Resampling.BICUBIC)
    top, left = (height - 256) // 2, (width - 256) // 2  # rounded down here, unlike in torchvision
    return image[top : top + 256, left : left + 256]


def _cover(height: int, width: int) -> Callable[[np.ndarray], np.ndarray]:
    def resize(image: np.ndarray) -> np.ndarray:
        if image.shape[:2] == (height, width):
            return image
        scale = max(height / image.shape[0], width / image.shape[1])
        sides = max(height, round(image.shape[0] * scale)), max(width, round(image.shape[1] * scale))
        return _centre_crop(_resized(image, *sides, Image.Resampling.BICUBIC), height, width)

    return resize


def _to_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """Convert between greyscale and RGB where that is exact."""
    if image.shape[-1] == 1 and channels == 3:
        return np.repeat(image, 3, axis=-1)
    if image.shape[-1] == 3 and channels == 1:
        if np.any(image != image[..., :1]):
            raise BadImage("is coloured, and the model takes greyscale images")
        return image[..., :1]
    return image


_PIPELINES = {
    transform.name: transform
    for transform in (
        Transform("cifar", (32, 32, 3), _as_it_is),
        Transform("stl10u", (32, 32, 3), _stl10u),
        Transform("celeba", (32, 32, 3), _celeba),
        Transform("imagenet256", (256, 256, 3), _imagenet256),
        Transform("imagenet256_guided", (256, 256, 3), _imagenet256_guided),
        Transform("digits", (8, 8, 1), _as_it_is),
    )
}
