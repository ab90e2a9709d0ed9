"""Decode images to uint8 [H, W, 3], and refuse what cannot be decoded safely and exactly.

Pillow by itself decodes a 136 KB PNG of 12000x12000 with no more than a warning, drops the low byte of 16-bit RGB and
the alpha channel, and shows the first frame of an animation. Each of these is a BadImage here.
"""

import concurrent.futures
import io
import os
import pathlib
import stat
from collections.abc import Callable
from typing import BinaryIO, Literal, TypeVar, get_args

import numpy as np
from PIL import Image, ImageOps

from dime_jax._util.text import one_line
from dime_jax.data.sources import BadImage

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})

MAX_PIXELS = 2**25
_LARGE_PIXELS = 2**22
_large_images = concurrent.futures.ThreadPoolExecutor(1, "large-images")

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

T = TypeVar("T")

Decode = Literal["strict", "torchvision"]
DECODES = get_args(Decode)


def decode_image(encoded: pathlib.Path | bytes, decode: Decode = "strict") -> np.ndarray:
    """Decode one image file, or its bytes, to uint8 [H, W, 3].

    Always refused, as a BadImage: what is not a regular file, formats not in FORMATS, more than MAX_PIXELS pixels
    (before decoding), truncated or damaged files, more than 8 bits per channel, animations and multi-page files.

    decode="strict" applies the EXIF orientation, makes RGB of greyscale, palettes and opaque alpha channels (all exact)
    and refuses transparency and other colour spaces. decode="torchvision" does what the usual training loaders do:
    `Image.convert("RGB")` and no rotation.
    """
    try:
        with (
            io.BytesIO(encoded) if isinstance(encoded, bytes) else open_regular(encoded) as file,
            Image.open(file, formats=FORMATS) as image,
        ):
            _check_header(image)
            to_rgb = as_rgb if decode == "torchvision" else _exactly_rgb
            return in_turn(image.width * image.height, lambda: np.asarray(to_rgb(image)))
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(f"more than {MAX_PIXELS} pixels") from error
    # Damaged files raise nearly anything inside Pillow's plugins; whatever it is, it concerns this file only.
    except Exception as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = one_line(text, None)
        if isinstance(error, Image.UnidentifiedImageError):
            reason = f"not one of {', '.join(FORMATS)}"
        raise BadImage(f"cannot be decoded: {reason}") from error


def open_regular(path: pathlib.Path, what: str = "an image file") -> BinaryIO:
    """Open a regular file for reading, which should be `what`; anything else at that path is a BadImage.

    It never waits, as opening a FIFO would, and checks the file that was opened, so that nobody can swap it in between.
    """
    try:
        descriptor = os.open(path, _reading())
    except OSError as error:
        raise BadImage(f"cannot be opened: {error.strerror}") from error
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise BadImage(f"is {_KINDS.get(stat.S_IFMT(kind), 'a special file')}, not {what}")


def _reading() -> int:
    """Return the flags that open a file without blocking, and as bytes where text is the default."""
    return os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def in_turn(pixels: int, function: Callable[[], T]) -> T:
    """Return function(), run for large images in one thread that all callers share.

    A pixel costs up to 14 bytes while Pillow and NumPy copy it, and malloc keeps freed blocks for the thread that used
    them: four threads decoding images of MAX_PIXELS took 1.8 GB.
    """
    return function() if pixels <= _LARGE_PIXELS else _large_images.submit(function).result()


def as_rgb(image: Image.Image) -> Image.Image:
    """Return `image.convert("RGB")`, without a copy if it is RGB already or a warning about transparent palettes."""
    image.load()
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _check_header(image: Image.Image) -> None:
    """Refuse an image by what is known before any pixel is decoded."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width}x{height} is more than {MAX_PIXELS} pixels")
    # For 16-bit RGB Pillow says mode "RGB", and only the raw mode of its decoder tells ("RGB;16B").
    if image.mode.startswith(("I", "F")) or ";16" in str(getattr(image, "tile", "")):
        raise BadImage("has more than 8 bits per channel")
    # An MPO is a camera's JPEG with previews behind the photo: its first frame is the photo.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise BadImage("has more than one frame")


def _exactly_rgb(image: Image.Image) -> Image.Image:
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            raise BadImage("has transparency, and its background is unknown")
    elif image.mode not in ("1", "L", "P", "RGB"):
        raise BadImage(f"is {image.mode}, which has no exact conversion to RGB")
    return as_rgb(image)
