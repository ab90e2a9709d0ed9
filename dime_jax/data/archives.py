"""Sources over the files in which CIFAR-10, CIFAR-100 and STL-10 are published, in their order, and over .npy/.npz."""

import io
import os
import pathlib
import pickle
import tarfile
import zipfile
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dime_jax._util import validate
from dime_jax.data import transforms
from dime_jax.data.sources import Source, from_images, numbered_ids

_PUBLISHED_BATCH = 10_000  # images in each CIFAR-10 file
_LARGEST_PICKLE = 2**28


class _CifarLayout(NamedTuple):
    """Where a CIFAR set keeps its images: binary records are `label_bytes` (the last is the label) and 3072 pixels."""

    name: str
    files: dict[str, tuple[str, ...]]
    label_bytes: int
    label_key: bytes


_CIFAR10 = _CifarLayout(
    "cifar10", {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}, 1, b"labels"
)
_CIFAR100 = _CifarLayout("cifar100", {"train": ("train",), "test": ("test",)}, 2, b"fine_labels")


def cifar10(path: str | os.PathLike[str], split: str = "train") -> Source:
    """CIFAR-10 as published, binary or python version: `path` is its folder, the one above, or the .tar.gz itself.

    The 50,000 training images in the order of data_batch_1 ... 5, to which SecMI's indices refer, or the 10,000 test
    images. Ids are "train_00000" ..., as in TFDS.
    """
    return _cifar(_CIFAR10, path, split)


def cifar100(path: str | os.PathLike[str], split: str = "train") -> Source:
    """CIFAR-100 as published (see `cifar10`), with its 100 fine labels."""
    return _cifar(_CIFAR100, path, split)


def _cifar(layout: _CifarLayout, path: str | os.PathLike[str], split: str) -> Source:
    validate.check_choice(split, tuple(layout.files), "split")
    images, labels = [], []
    for name, file, binary in _cifar_files(layout, pathlib.Path(path).expanduser(), split):
        batch = _read_cifar_binary(layout, name, file) if binary else _read_cifar_pickle(layout, name, file)
        images.append(batch.images)
        labels.append(batch.labels)
    sizes = [len(batch) for batch in labels]
    if _PUBLISHED_BATCH in sizes and set(sizes) != {_PUBLISHED_BATCH} and layout is _CIFAR10:
        raise ValueError(f"each file of {path} must hold {_PUBLISHED_BATCH} images, got {sizes}: one is truncated")
    starts = np.cumsum([0, *sizes])

    def read(index: int) -> np.ndarray:
        batch = int(np.searchsorted(starts, index, side="right")) - 1
        return np.ascontiguousarray(images[batch][index - starts[batch]].reshape(3, 32, 32).transpose(1, 2, 0))

    return Source(
        name=layout.name,
        ids=numbered_ids(f"{split}_", int(starts[-1])),
        read=read,
        labels=np.concatenate(labels).astype(np.int32),
        transform="cifar",
    )


class _CifarBatch(NamedTuple):
    images: np.ndarray  # uint8 [n, 3072], memory-mapped where possible
    labels: np.ndarray


def _cifar_files(layout: _CifarLayout, path: pathlib.Path, split: str) -> list[tuple[str, pathlib.Path | bytes, bool]]:
    """Return (name, path or bytes, is binary) of the split's files, all of one version."""
    wanted = layout.files[split]
    contents: Mapping[str, pathlib.Path | bytes]
    if path.is_file():
        contents = _read_tar(path, {name + suffix for name in wanted for suffix in ("", ".bin")})
    elif path.is_dir():
        folder = next((d for d in (path, *sorted(path.glob("cifar-10*"))) if _has_any(d, wanted)), path)
        contents = {file.name: file for file in folder.iterdir()}
    else:
        raise ValueError(f"{str(path)!r} is not a folder or .tar.gz of {layout.name}")
    for suffix in (".bin", ""):
        if all(name + suffix in contents for name in wanted):
            return [(name + suffix, contents[name + suffix], suffix == ".bin") for name in wanted]
    raise ValueError(
        f"{path} must hold {', '.join(wanted)} of {layout.name}, all with .bin or all without; "
        f"got {', '.join(sorted(contents)[:8]) or 'nothing'}"
    )


def _has_any(folder: pathlib.Path, wanted: tuple[str, ...]) -> bool:
    return any((folder / (name + suffix)).is_file() for name in wanted for suffix in ("", ".bin"))


def _read_tar(path: pathlib.Path, wanted: set[str]) -> dict[str, bytes]:
    contents = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = pathlib.PurePosixPath(member.name).name
            if member.isfile() and name in wanted:
                if member.size > _LARGEST_PICKLE:
                    raise ValueError(f"{name} in {path} must have at most {_LARGEST_PICKLE} bytes, got {member.size}")
                contents[name] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return contents


def _read_cifar_binary(layout: _CifarLayout, name: str, file: pathlib.Path | bytes) -> _CifarBatch:
    data = np.frombuffer(file, np.uint8) if isinstance(file, bytes) else _memory_map(file)
    record = layout.label_bytes + 3072
    if len(data) == 0 or len(data) % record:
        raise ValueError(f"the size of {name} must be a multiple of {record} bytes, got {len(data)}: truncated?")
    records = data.reshape(-1, record)
    return _CifarBatch(records[:, layout.label_bytes :], np.array(records[:, layout.label_bytes - 1]))


def _read_cifar_pickle(layout: _CifarLayout, name: str, file: pathlib.Path | bytes) -> _CifarBatch:
    contents = file if isinstance(file, bytes) else file.read_bytes()
    try:
        batch = _CifarUnpickler(io.BytesIO(contents), encoding="bytes").load()
        data, labels = batch[b"data"], np.asarray(batch[layout.label_key])
    # A damaged or hostile pickle raises nearly anything; none of it got to run (see _CifarUnpickler).
    except Exception as error:
        raise ValueError(f"{name} is not a python batch of {layout.name}: {type(error).__name__}: {error}") from error
    if data.dtype != np.uint8 or data.shape != (len(labels), 3072) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{name} must hold uint8 [n, 3072] and n labels, got {data.dtype} {list(data.shape)}")
    return _CifarBatch(data, labels)


class _CifarUnpickler(pickle.Unpickler):
    """Unpickles containers, numbers, strings and NumPy arrays; every other global is refused before it is called."""

    def find_class(self, module: str, name: str) -> object:
        # Spelled numpy.core before NumPy 2.
        if (module.replace("numpy.core", "numpy._core"), name) == ("numpy._core.multiarray", "_reconstruct"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes at pickle protocol 2
            return lambda text, _: text.encode("latin-1")
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a CIFAR batch")


def stl10u(path: str | os.PathLike[str]) -> Source:
    """STL-10's unlabelled images: unlabeled_X.bin, or the folder that holds it (or its stl10_binary).

    Each image is 3 planes of 96 columns of 96 pixels, uint8. The order is the file's, to which published indices refer.
    """
    path = pathlib.Path(path).expanduser()
    places = (path, path / "unlabeled_X.bin", path / "stl10_binary" / "unlabeled_X.bin")
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ValueError(f"{str(path)!r} is not unlabeled_X.bin or its folder")
    data = _memory_map(file)
    if len(data) == 0 or len(data) % (3 * 96 * 96):
        raise ValueError(f"the size of {file} must be a multiple of {3 * 96 * 96} bytes, got {len(data)}: truncated?")
    images = data.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)
    return from_images(images, name="stl10u", ids=numbered_ids("unlabeled_", len(images)), transform="stl10u")


def arrays(
    path: str | os.PathLike[str], images: str | None = None, labels: str | None = None, value_range: str | None = None
) -> Source:
    """A .npy file of images, or a .npz file with images and perhaps labels and ids.

    Images are [N, H, W, C] or [N, H, W], uint8 or floats whose range is recognised over the whole array (see
    `transforms.recognise_range`; `value_range` names it where that is ambiguous). Floats that are 8-bit values in
    disguise become uint8; others stay float32, moved to [-1, 1]. Floats are held in memory.

    Args:
      path: the file. A uint8 .npy is memory-mapped, a .npz read into memory.
      images: key of the images; by default "images", "x", "data" or the only key.
      labels: key of the labels; by default "labels", "label" or "y" if there.
      value_range: "uint8", "[0, 1]" or "[-1, 1]".
    """
    path = pathlib.Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a .npy or .npz file")
    columns = _load_columns(path)
    pixels = columns[_pick(columns, images, ("images", "x", "data"), path) or next(iter(columns))]
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    label_key = _pick(columns, labels, ("labels", "label", "y"), path, optional=True)
    return from_images(
        transforms.to_stored_range(pixels, value_range),
        name="npz",
        ids=[str(i) for i in columns["ids"]] if "ids" in columns else None,
        labels=None if label_key is None else columns[label_key].astype(np.int32),
    )


def _load_columns(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"images": loaded}
        with loaded:
            return dict(loaded)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a .npy or .npz file without pickled objects: {error}") from error


def _pick(
    columns: Mapping[str, np.ndarray],
    given: str | None,
    usual: tuple[str, ...],
    path: pathlib.Path,
    optional: bool = False,
) -> str | None:
    found = given if given is not None else next((key for key in usual if key in columns), None)
    if found is None and (optional or len(columns) == 1):
        return None
    if found not in columns:
        raise ValueError(f"{path} has no key {found or ' or '.join(usual)}, only {', '.join(columns)}")
    return found


def _memory_map(file: pathlib.Path) -> np.ndarray:
    """Map the file's bytes, which are read when they are touched (an empty file cannot be mapped)."""
    return np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.empty(0, np.uint8)
