"""open_source: every kind of source by a URI-like name, such as "cifar10:DIR"."""

import inspect
import pathlib
import re
from collections.abc import Callable

from dime_jax._util import validate
from dime_jax.data import archives, captions, folders, hub, parquet, prepared, sources
from dime_jax.data.sources import Source

_OPENERS: dict[str, Callable[..., Source]] = {
    "folder": folders.folder,
    "npz": archives.arrays,
    "tfds": prepared.tfds,
    "cifar10": archives.cifar10,
    "cifar100": archives.cifar100,
    "stl10u": archives.stl10u,
    "parquet": parquet.parquet,
    "hf": hub.hub,
    "celeba": folders.celeba,
    "imagenet": folders.imagenet,
    "imagenetv2": folders.imagenetv2,
    "digits": sources.digits,
}

_FILE_KINDS = {
    r".*\.np[yz]": "npz",
    r".*\.parquet": "parquet",
    r"cifar-100-.*": "cifar100",
    r"cifar-10-.*": "cifar10",
    r"unlabeled_X\.bin": "stl10u",
}
# ImageNetV2 is not guessed: `folder` labels numbered folders by their number as well.
_FOLDER_KINDS = {
    r"data_batch_1(\.bin)?|cifar-10-batches-(bin|py)": "cifar10",
    r"train\.bin|cifar-100-(binary|python)": "cifar100",
    r"unlabeled_X\.bin|stl10_binary": "stl10u",
    r"img_align_celeba": "celeba",
    r"n\d{8}": "imagenet",
}


def open_source(uri: str, **options: object) -> Source:
    """Open "kind:place", "kind:place?option=value&...", "digits", or a path whose kind is guessed.

    | kind | place | options |
    |---|---|---|
    | folder | folder of images | decode, captions, caption_column, missing_captions |
    | parquet | .parquet file, or folder of them | images, labels, decode, captions, caption_column, missing_captions |
    | hf | owner/dataset[@revision] on the Hugging Face Hub | split, config, and those of parquet |
    | npz | .npz or .npy file | images, labels, value_range |
    | tfds | TFDS name | split, data_dir, decode |
    | cifar10, cifar100 | folder or .tar.gz as published | split |
    | stl10u | unlabeled_X.bin or its folder | |
    | celeba | folder as published | split, decode |
    | imagenet | folder of wnid folders | decode |
    | imagenetv2 | folder of folders 0 ... 999 | labels, decode |
    | digits | none | |

    Options may be given in the URI or as keywords; keywords win. captions=none gives the images of any kind the empty
    caption; captions=own requires the source's own captions (see `captions.CaptionOptions`).
    """
    kind, place, uri_options = _parse(str(uri))
    opener = _OPENERS[kind]
    options = {**uri_options, **options}
    takes = [name for name in inspect.signature(opener).parameters if name not in ("path", "name")]
    captions_wanted = None if "captions" in takes else options.pop("captions", None)
    for option in options:
        if option not in takes:
            raise ValueError(f"unknown option {option!r} for {kind}; expected one of {', '.join(takes) or 'none'}")
    if kind != "digits" and not place:
        raise ValueError(f"{kind} must have a place, as in {kind}:PLACE, got {uri!r}")
    source = opener(**options) if kind == "digits" else opener(place, **options)
    return source if captions_wanted is None else _captioned(source, captions_wanted)


def _captioned(source: Source, wanted: object) -> Source:
    """Give a source of a kind without captions of its own those that are wanted: empty ones."""
    validate.check_choice(wanted, captions.CHOICES, "captions")
    if wanted == "own":
        sources.require_captions(source)
    return sources.empty_captions(source)


def _parse(uri: str) -> tuple[str, str, dict[str, str]]:
    """Return (kind, place, options) of a URI."""
    kind, _, rest = uri.partition(":")
    if kind in _OPENERS:
        place, _, query = rest.partition("?")
        # A "?" can be part of a file name; options always have the form name=value.
        if re.fullmatch(r"\w+=[^&]*(&\w+=[^&]*)*", query):
            return kind, place, dict(option.split("=", 1) for option in query.split("&"))
        return kind, rest, {}
    guess = _guess(pathlib.Path(uri).expanduser())
    if guess is None:
        choices = ", ".join(f"{kind}:" for kind in _OPENERS if kind != "digits")
        raise ValueError(f"images must be digits, an existing path, or a name that starts with {choices}; got {uri!r}")
    return guess, uri, {}


def _guess(path: pathlib.Path) -> str | None:
    """Guess the kind of source at a bare path from its file names."""
    if path.is_file():
        return next((kind for sign, kind in _FILE_KINDS.items() if re.fullmatch(sign, path.name)), None)
    if not path.is_dir():
        return None
    names = {entry.name for entry in path.iterdir()}
    return next((kind for sign, kind in _FOLDER_KINDS.items() if any(re.fullmatch(sign, n) for n in names)), "folder")
