"""Writes files in PyTorch's formats without PyTorch: all that `experiments.torch_writer` does not need to write.

    write_zip(path, {"weight": array, "step": 3})       # as torch.save does
    write_legacy(path, ...)                             # as before PyTorch 1.6

Arrays become tensors the way PyTorch's views do: arrays with a common base share a storage, and keep their offset and
strides in it. `Streamed` stands for a large tensor that is made block by block while it is written. `Global`,
`PickledCall` and `PickledStorage` put anything else into the pickle, for files that PyTorch would not write.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from experiments.torch_writer import Global, PickledStorage, TorchPickler

BLOCK = 2**20  # elements

STORAGE_NAMES = {
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "bfloat16": "BFloat16Storage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


UNTYPED = Global("torch.storage", "UntypedStorage")


class PickledCall(NamedTuple):
    """A function call in the pickle, with the state that BUILD sets on its result."""

    function: object
    arguments: object = ()
    state: object = None

    def __call__(self) -> None:
        """Only there because the pickler asks whether it is callable."""
        raise AssertionError("only written, never called")


class Streamed(NamedTuple):
    """A tensor whose elements [start, stop), in row-major order, are `block(start, stop)`."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    block: Callable[[int, int], np.ndarray]


Elements = np.ndarray | Streamed
Stored = dict[str, Elements]  # the elements of each storage, by its key


class Parameter(NamedTuple):
    """A tensor that PyTorch pickles as torch.nn.Parameter."""

    data: object


def write_zip(
    path: str | Path, tree: object, protocol: int = 2, root: str = "archive", extra: Stored | None = None
) -> None:
    """Write `tree`; `extra` holds the elements of the storages that it mentions by `PickledStorage`.

    Args:
      path: of the file.
      tree: containers, scalars and arrays, and what this module has for anything else.
      protocol: of the pickle.
      root: the folder inside the archive.
      extra: the elements of the storages that the tree mentions by `PickledStorage`.
    """
    pickled, stored = pickle_tree(tree, protocol, extra=extra)
    records = {f"data/{key}": storage for key, storage in stored.items()}
    write_records(path, {"data.pkl": pickled, "byteorder": b"little", **records, "version": b"3\n"}, root)


def write_records(path: str | Path | BinaryIO, records: Mapping[str, bytes | Elements], root: str = "archive") -> None:
    """Write a zip of records (bytes, flat arrays or `Streamed`), each aligned to 64 bytes as PyTorch does."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, record in records.items():
            info = zipfile.ZipInfo(f"{root}/{name}")
            size = len(record) if isinstance(record, bytes) else _nbytes(record)
            large = size >= 2**31 - 2**20
            zip64_extra = 20 if large else 0
            assert archive.fp is not None
            header_end = archive.fp.tell() + 30 + len(info.filename.encode()) + zip64_extra
            padding = -(header_end + 4) % 64
            info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
            info.file_size = size
            with archive.open(info, "w", force_zip64=large) as entry:
                for block in _blocks(record):
                    entry.write(block)


def write_legacy(path: str | Path, tree: object, protocol: int = 2, extra: Stored | None = None) -> None:
    """Write `tree`; `extra` holds the elements of the storages that it mentions by `PickledStorage`.

    Args:
      path: of the file.
      tree, protocol, extra: as in `write_zip`.
    """
    pickled, stored = pickle_tree(tree, protocol, legacy=True, extra=extra)
    with open(path, "wb") as file:
        for block in legacy_blocks(pickled, stored):
            file.write(block)


def legacy_blocks(pickled: bytes, stored: Stored, little_endian: bool = True) -> Iterator[bytes]:
    """The file as PyTorch wrote it before 1.6: headers, the pickle, then each storage by the order of its key."""
    sizes = {"short": 2, "int": 4, "long": 4}
    machine = {"protocol_version": 1001, "little_endian": little_endian, "type_sizes": sizes}
    yield from (pickle.dumps(header, protocol=2) for header in (0x1950A86A20F9469CFC6C, 1001, machine))
    yield pickled
    yield pickle.dumps(sorted(stored), protocol=2)
    for key in sorted(stored):
        dtype = np.dtype(stored[key].dtype)
        yield struct.pack("<q", _nbytes(stored[key]) // (dtype.itemsize if dtype.name in STORAGE_NAMES else 1))
        yield from _blocks(stored[key])


def pickle_tree(
    tree: object, protocol: int = 2, legacy: bool = False, extra: Stored | None = None
) -> tuple[bytes, Stored]:
    """The pickle of `tree`, and the storages that it mentions.

    Args:
      tree, protocol, extra: as in `write_zip`.
      legacy: write storages as PyTorch did before 1.6.
    """
    stream = io.BytesIO()
    pickler = _AnyPickler(stream, protocol, legacy, extra or {})
    pickler.dump(tree)
    return stream.getvalue(), pickler.stored


class _AnyPickler(TorchPickler):
    """Keeps views of one array in one storage, and pickles what PyTorch would not."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(TorchPickler.dispatch)

    def __init__(self, stream: io.BytesIO, protocol: int, legacy: bool, extra: Stored):
        super().__init__(stream, protocol)
        self.extra = extra
        self.legacy = legacy
        self.keys: dict[int, str] = {}  # of each base array, which self.stored keeps alive

    def save_name(self, name: Global) -> None:
        if self.proto >= 4:
            self.save(name.module)
            self.save(name.name)
            self.write(pickle.STACK_GLOBAL)
            self.memoize(name)
        else:
            super().save_name(name)

    dispatch[Global] = save_name

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, PickledCall):
            return obj.function, obj.arguments, obj.state
        if isinstance(obj, Parameter):
            return Global("torch._utils", "_rebuild_parameter"), (obj.data, True, OrderedDict())
        if isinstance(obj, np.ndarray | Streamed):
            storage, offset, strides = self.storage_of(obj)
            arguments: tuple[object, ...] = (storage, offset, tuple(obj.shape), strides, False, OrderedDict())
            if storage.kind == UNTYPED:
                dtype = Global("torch", np.dtype(obj.dtype).name)
                return Global("torch._utils", "_rebuild_tensor_v3"), (*arguments, dtype)
            return Global("torch._utils", "_rebuild_tensor_v2"), arguments
        return NotImplemented

    def storage_of(self, array: Elements) -> tuple[PickledStorage, int, tuple[int, ...]]:
        """The storage of an array, with its offset and strides in it, in elements."""
        base: Elements
        owner: object
        if isinstance(array, Streamed):
            base, offset = array, 0
            strides = tuple(math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape)))
        else:
            base = owner = array
            while (owner := getattr(owner, "base", None)) is not None:
                base = owner if isinstance(owner, np.ndarray) and owner.dtype == array.dtype else base
            assert base.flags.forc, "a base with gaps"
            offset = (array.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // array.itemsize
            strides = tuple(stride // array.itemsize for stride in array.strides)
        if id(base) not in self.keys:
            self.keys[id(base)] = str(len(self.keys))
            self.stored[str(len(self.keys) - 1)] = base
        dtype = np.dtype(array.dtype)
        kind = Global("torch", STORAGE_NAMES[dtype.name]) if dtype.name in STORAGE_NAMES else UNTYPED
        nbytes = _nbytes(base)
        storage = PickledStorage(kind, self.keys[id(base)], nbytes if kind == UNTYPED else nbytes // dtype.itemsize)
        return storage, offset, strides

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        if isinstance(obj, PickledStorage) and obj.key in self.extra:
            self.stored[obj.key] = self.extra[obj.key]
        described = super().persistent_id(obj)
        return (*described, None) if described and self.legacy else described


def _nbytes(record: Elements) -> int:
    return math.prod(record.shape) * np.dtype(record.dtype).itemsize


def _blocks(record: bytes | Elements) -> Iterator[bytes]:
    if isinstance(record, bytes):
        yield record
    elif isinstance(record, np.ndarray):
        # A storage holds its elements in the order of memory, which for a transposed base is not the one of its axes.
        yield record.tobytes(order="A")
    else:
        size = math.prod(record.shape)
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            block = np.asarray(record.block(start, stop), record.dtype)
            assert block.shape == (stop - start,)
            yield block.tobytes()
