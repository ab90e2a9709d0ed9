"""Sources over folders of image files: any folder, CelebA, ImageNet and ImageNetV2."""

import importlib.resources
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from dime_jax._util import validate
from dime_jax.data import captions as caption_files
from dime_jax.data import decoding
from dime_jax.data.sources import BadImage, Source

_WNID = re.compile(r"n\d{8}")
_CELEBA_PARTITIONS = ("train", "valid", "test")


def folder(
    path: str | os.PathLike[str],
    decode: decoding.Decode = "strict",
    captions: str | None = None,
    caption_column: str | None = None,
    missing_captions: str = "error",
) -> Source:
    """All images under a folder; the id of one is its path inside the folder.

    If every image lies in a subfolder, the first-level subfolders are the classes: numbered by name if the names are
    all numbers ("10" is class 10), by sorted position otherwise. Links to folders are not followed, links to files only
    inside the folder. What is named like an image but is not one (a folder, a named pipe, a circular link) is listed,
    and is a BadImage when it is read.

    Captions come from metadata.jsonl or metadata.csv (columns file_name, and text or caption; paths are relative to the
    file, as in Hugging Face's image folders) or from a .txt file beside each image. See `captions.CaptionOptions`.
    """
    root = _existing_folder(path)
    ids, others = _list_files(root)
    options = caption_files.CaptionOptions(captions, caption_column, missing_captions)
    chosen = caption_files.choose(options, len(ids), lambda: caption_files.read_folder(root, ids, others, options))
    _log_skipped(root, others if chosen.captions is None else caption_files.without_captions(ids, others))
    columns = chosen._asdict()
    classes = {i.partition("/")[0] for i in ids}
    if not all("/" in i for i in ids):
        return _image_files("folder", root, ids, decode, **columns)
    if all(name.isdecimal() for name in classes):
        return _image_files("folder", root, ids, decode, labels=_class_labels(ids, int), **columns)
    names = tuple(sorted(classes))
    labels = _class_labels(ids, names.index)
    return _image_files("folder", root, ids, decode, labels=labels, class_names=names, **columns)


def imagenet(path: str | os.PathLike[str], decode: decoding.Decode = "torchvision") -> Source:
    """ImageNet-1k as folders named by wnid (n01440764/...), directly in `path` or in its "train".

    A label is the wnid's place among the 1000 sorted ones, whichever folders are there.
    """
    root = _existing_folder(path)
    if (root / "train").is_dir() and not any(_WNID.fullmatch(name) for name in os.listdir(root)):
        root = root / "train"
    wnids = importlib.resources.files("dime_jax.data").joinpath("imagenet_wnids.txt").read_text("utf-8").split()
    number = {wnid: label for label, wnid in enumerate(wnids)}

    def label_of(name: str) -> int:
        if name not in number:
            raise ValueError(f"folders in {root} must be named by the 1000 wnids of ImageNet-1k, got {name!r}")
        return number[name]

    ids = _list_images(root)
    return _image_files("imagenet", root, ids, decode, labels=_class_labels(ids, label_of), transform="imagenet256")


def imagenetv2(
    path: str | os.PathLike[str], labels: str = "by_number", decode: decoding.Decode = "torchvision"
) -> Source:
    """ImageNetV2, whose folders are named 0 ... 999: the label is that number, even if some of them are missing.

    labels="as_published" is the mapping of published attacks, which read the folders in string order ("0", "1", "10",
    "100", ...): of 1000 classes it labels 12 right, so held-out images meet a wrong class condition and members do not.
    It is for reproducing those figures and warns.
    """
    validate.check_choice(labels, ("by_number", "as_published"), "labels")
    root = _existing_folder(path)
    ids = _list_images(root)

    def by_number(name: str) -> int:
        if not (name.isdecimal() and int(name) < 1000):
            raise ValueError(f"folders in {root} must be named 0 to 999, got {name!r}")
        return int(name)

    label_of: Callable[[str], int] = by_number
    if labels == "as_published":
        warnings.warn(
            "labels='as_published' gives ImageNetV2 folders wrong class labels (string order, 12 of 1000 right): "
            "only for reproducing published figures",
            stacklevel=2,
        )
        names = sorted({i.partition("/")[0] for i in ids})
        label_of = {name: position for position, name in enumerate(names)}.__getitem__
    return _image_files("imagenetv2", root, ids, decode, labels=_class_labels(ids, label_of), transform="imagenet256")


def celeba(path: str | os.PathLike[str], split: str = "train", decode: decoding.Decode = "torchvision") -> Source:
    """CelebA as distributed: img_align_celeba/, identity_CelebA.txt, list_eval_partition.txt, or folders with them.

    The images of one official partition ("train", "valid", "test", or "all") in the order of list_eval_partition.txt,
    with the identity of the person as a number. The id is the file name.
    """
    validate.check_choice(split, (*_CELEBA_PARTITIONS, "all"), "split")
    root = _existing_folder(path)
    partition = _two_columns(_find(root, "list_eval_partition.txt"))
    identity = _two_columns(_find(root, "identity_CelebA.txt"))
    ids = [name for name, part in partition.items() if split == "all" or part == _CELEBA_PARTITIONS.index(split)]
    unknown = [name for name in ids if name not in identity]
    if unknown:
        raise ValueError(f"image {unknown[0]!r} of {root} has no identity")
    images = _find(root, "img_align_celeba")
    if (images / "img_align_celeba").is_dir():  # as some mirrors pack it
        images = images / "img_align_celeba"
    identities = np.array([identity[name] for name in ids], np.int64)
    return _image_files("celeba", images, ids, decode, identities=identities, transform="celeba")


def _image_files(name: str, root: pathlib.Path, ids: Sequence[str], decode: decoding.Decode, **columns: Any) -> Source:
    validate.check_choice(decode, decoding.DECODES, "decode")
    if not ids:
        raise ValueError(f"no images ({' '.join(sorted(decoding.SUFFIXES))}) in {root}")
    real_root = os.path.realpath(root)

    def read(index: int) -> np.ndarray:
        file = root / ids[index]
        # pathlib's resolve() raises for a circular link before Python 3.13; realpath leaves that to opening it.
        if not pathlib.Path(os.path.realpath(file)).is_relative_to(real_root):
            raise BadImage("is a link that leaves the folder")
        if file.is_symlink() and os.path.isdir(file):
            raise BadImage("is a link to a folder, which is not followed")
        return decoding.decode_image(file, decode)

    return Source(name=name, ids=[_printable(i) for i in ids], read=read, **columns)


def _list_images(root: pathlib.Path) -> list[str]:
    images, others = _list_files(root)
    _log_skipped(root, others)
    return images


def _list_files(root: pathlib.Path) -> tuple[list[str], list[str]]:
    """Return the paths inside root of what is named like an image, with links to folders, and of the other files.

    Both are sorted folder by folder.
    """
    found: list[str] = []
    others: list[str] = []
    for parent, folders, files in os.walk(root, onerror=_raise):
        inside = pathlib.Path(parent).relative_to(root)
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        images = {name for name in folders + files if os.path.splitext(name)[1].lower() in decoding.SUFFIXES}
        found += ((inside / name).as_posix() for name in images.union(links))
        others += ((inside / name).as_posix() for name in files if name not in images)
    return _by_folder(found), _by_folder(others)


def _by_folder(paths: list[str]) -> list[str]:
    return sorted(paths, key=lambda path: path.split("/"))


def _log_skipped(root: pathlib.Path, skipped: Sequence[str]) -> None:
    if skipped:
        logging.warning("skipped %d files of %s that are not images, such as %r", len(skipped), root, skipped[0])


def _class_labels(ids: Sequence[str], label_of: Callable[[str], int]) -> np.ndarray:
    return np.array([label_of(i.partition("/")[0]) for i in ids], np.int32)


def _printable(name: str) -> str:
    """Return the name with bytes that are not UTF-8 written as \\xNN, so that tables and reports can hold it.

    A backslash is doubled, so that no two files get one name.
    """
    return name.replace("\\", r"\\").encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _existing_folder(path: str | os.PathLike[str]) -> pathlib.Path:
    root = pathlib.Path(path).expanduser()
    if not root.is_dir():
        raise ValueError(f"no folder {str(path)!r}")
    return root


def _find(root: pathlib.Path, name: str) -> pathlib.Path:
    found = [*root.glob(name), *sorted(root.glob(f"*/{name}"))]
    if not found:
        raise ValueError(f"no {name} in {root} or one level below")
    return found[0]


def _two_columns(file: pathlib.Path) -> dict[str, int]:
    """Read a text file of lines "name number"."""
    pairs: dict[str, int] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdecimal() or fields[0] in pairs:
            raise ValueError(f"{file} line {number} must be a new file name and a number, got {line!r}")
        pairs[fields[0]] = int(fields[1])
    return pairs


def _raise(error: OSError) -> None:
    raise error
