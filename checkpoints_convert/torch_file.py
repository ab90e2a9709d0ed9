"""Reads PyTorch checkpoint files without PyTorch, and without running anything that they hold.

    checkpoint = load("ckpt.pt")      # nested dict / list / tuple / scalars with read-only NumPy arrays as leaves

1. The file is taken apart into its pickle and the raw bytes of its storages: `_read_zip` for the zip format
   (PyTorch >= 1.6), `_read_legacy` for the one before.
2. `torch_pickle.unpickle` runs the pickle, which describes tensors but holds none of their bytes.
3. `_Assembly` copies the resulting tree, with every description turned into a view on the memory-mapped file after its
   extent was checked against the bytes that are there.

Guarantees, for any file whatever:
- it is loaded, or refused with one `CheckpointError` of one line; nothing of it is imported, called or written;
- no tensor is copied: a 2.2 GB file takes the memory of its pickle (at most `MAX_PICKLE_BYTES`) until its arrays are
  used. A zip archive is read through once, in blocks, to verify its checksums;
- work and memory are bounded by the limits below, and so is walking the result: no cycles, at most `MAX_DEPTH` levels
  and `MAX_NODES` nodes.

Not checked: the values of the weights, and damage that leaves a legacy file well-formed (it has no checksums). The file
must not be changed while its arrays are in use.

The formats are those of `torch/serialization.py` and `torch/_utils.py`; tests/parity compares with PyTorch 2.13.
"""

import io
import math
import os
import re
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from checkpoints_convert.torch_pickle import MAX_COUNT, CheckpointError, Storage, Tensor, kind, unpickle
from dime_jax._util.text import printable, shorten

MAX_PICKLE_BYTES = 16 * 2**20
MAX_DIRECTORY_BYTES = 2 * 2**20  # of a zip archive; an entry takes about 80
MAX_OBJECTS = 50_000  # containers and tensors
MAX_NODES = 1_000_000  # the same and scalars, counting what is shared each time it occurs
MAX_DEPTH = 64

T = TypeVar("T")

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_ARCHIVE_VERSIONS = tuple(b"%d" % version for version in range(1, 11))
_METADATA = {"data.pkl", "version", "byteorder"}
_BLOCK_BYTES = 2**20
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})
_ZIP_SIGNATURE = b"PK\x03\x04"
_ZIP_HEADER = struct.Struct("<4s5H3I2H")
_ZIP_ENCRYPTED_FLAGS = 0x2061  # encrypted, patched, strongly encrypted, masked
_ZIP_UTF8_FLAG = 0x800


def load(path: str | os.PathLike[str]) -> object:
    """Return what `torch.save` wrote to `path`, with read-only NumPy arrays in place of tensors.

    Arrays are views on the memory-mapped file; tensors that share a storage share memory. bfloat16 and float8 have
    the `ml_dtypes` type of that name. Parameters are their tensors; an OrderedDict is a dict, without attributes such
    as `_metadata`; `torch.Size` is a tuple, `torch.device` a string, `torch.dtype` a NumPy dtype.

    Raises:
      CheckpointError: the file is missing, broken, not a PyTorch file, or holds anything but tensors and plain data.
    """
    try:
        if not os.path.isfile(path):
            raise CheckpointError("no such regular file")
        with _BoundedFile(path) as file:
            return _load(file)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except CheckpointError as error:
        problem = str(error)
    raise CheckpointError(printable(f"{os.fspath(path)}: {problem}"))


class _BoundedFile(io.FileIO):
    """A file that refuses long reads, so that a length field in it cannot make a library allocate that much."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > MAX_DIRECTORY_BYTES:
            raise CheckpointError(f"the zip directory must have at most {MAX_DIRECTORY_BYTES} bytes, got {size}")
        return super().read(size)


class _Entry(NamedTuple):
    """Bytes [start, start + len(data)) of the file, and their checksum (0: not computed, as PyTorch can be told to)."""

    name: str
    data: np.ndarray
    start: int
    crc32: int


class _Contents(NamedTuple):
    """A file taken apart: the tree that its pickle builds, and the bytes of each storage by its key."""

    tree: object
    storages: Mapping[str, _Entry]


def _load(file: _BoundedFile) -> object:
    if os.fstat(file.fileno()).st_size == 0:
        raise CheckpointError("the file is empty")
    data = np.asarray(np.memmap(file, mode="r", dtype=np.uint8))
    contents = _read_zip(file, data) if data[:4].tobytes() == _ZIP_SIGNATURE else _read_legacy(data)
    value = _Assembly({key: entry.data for key, entry in contents.storages.items()}).node(contents.tree, depth=0).value
    for entry in contents.storages.values():
        _verify(entry, file)
    return value


def _verify(entry: _Entry, file: _BoundedFile) -> None:
    """Compare an entry with its checksum, reading blocks: reading the mapping would bring all of it into memory."""
    if entry.crc32 == 0:
        return
    checksum = 0
    for position in range(entry.start, entry.start + entry.data.size, _BLOCK_BYTES):
        file.seek(position)
        checksum = zlib.crc32(file.read(min(_BLOCK_BYTES, entry.start + entry.data.size - position)), checksum)
    if checksum != entry.crc32:
        raise CheckpointError(f"{entry.name}: damaged (its checksum differs)")


# The zip format: ROOT/data.pkl, ROOT/version, ROOT/byteorder and ROOT/data/KEY for each storage, stored uncompressed.


def _read_zip(file: _BoundedFile, data: np.ndarray) -> _Contents:
    records = _zip_records(file, data)
    for name in sorted(_METADATA & records.keys()):
        if records[name].data.size > MAX_PICKLE_BYTES:
            raise CheckpointError(f"{name} must have at most {MAX_PICKLE_BYTES} bytes, got {records[name].data.size}")
        _verify(records[name], file)
    version = records["version"].data.tobytes().strip()
    if version not in _ARCHIVE_VERSIONS:
        raise CheckpointError(f"version must be 1 to 10, got {version[:20]!r}")
    byteorder = records["byteorder"].data.tobytes() if "byteorder" in records else b"little"  # none before PyTorch 2.1
    if byteorder != b"little":
        raise CheckpointError(f"byteorder must be little, got {byteorder[:20]!r}")
    tree, storages = unpickle(io.BytesIO(records["data.pkl"].data.data), "data.pkl")
    return _Contents(tree, {key: _zip_storage(storage, records) for key, storage in storages.items()})


def _zip_storage(storage: Storage, records: Mapping[str, _Entry]) -> _Entry:
    name = f"data/{storage.key}"
    if name not in records:
        raise CheckpointError(f"{name}: a tensor's storage is missing in the archive")
    size = records[name].data.size
    if size // storage.dtype.itemsize != storage.numel:
        raise CheckpointError(f"{name}: must hold {storage.numel} elements of {storage.dtype}, got {size} bytes")
    return records[name]


def _zip_records(file: _BoundedFile, data: np.ndarray) -> dict[str, _Entry]:
    """Return the entries by their name below ROOT. They do not overlap, and nothing is decompressed."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos, directory_start = archive.infolist(), archive.start_dir
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises many types for broken archives
        raise CheckpointError(f"broken zip archive: {shorten(str(error))}") from None
    root = _check_names([info.orig_filename for info in infos])
    records: dict[str, _Entry] = {}
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        where = f"entry {shorten(info.orig_filename)!r} in the archive"
        if info.flag_bits & _ZIP_ENCRYPTED_FLAGS:
            raise CheckpointError(f"{where} is encrypted")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CheckpointError(f"{where} is compressed; torch.save stores entries as they are")
        start = _zip_data_start(info, data, where)
        if info.header_offset < end or start + info.file_size > directory_start:
            raise CheckpointError(f"{where} overlaps another entry or the directory")
        end = start + info.file_size
        name = info.orig_filename.removeprefix(root)
        records[name] = _Entry(name, data[start:end], start, info.CRC)
    return records


def _check_names(names: list[str]) -> str:
    """Require the entries that `torch.save` writes, and return their common folder."""
    roots = {name.partition("/")[0] for name in names}
    if len(roots) != 1:
        found = ", ".join(sorted(roots)[:5])
        raise CheckpointError(f"the archive must have one top folder, got {len(roots)}: {shorten(found)}")
    root = roots.pop() + "/"
    for full_name, count in Counter(names).items():
        where = f"entry {shorten(full_name)!r} in the archive"
        name = full_name.removeprefix(root)
        if count > 1:
            raise CheckpointError(f"{where} occurs {count} times")
        if any(part in ("", ".", "..") for part in full_name.split("/")) or re.search(r"[\\:\0]", full_name):
            raise CheckpointError(f"{where} has a path for a name")
        if name.startswith(("code/", "constants.pkl", "attributes.pkl", "model.json")):
            raise CheckpointError(f"{where} belongs to TorchScript (torch.jit); save the model's state_dict instead")
        if name not in _METADATA and not name.startswith(".") and not re.fullmatch(r"data/[0-9]{1,20}", name):
            raise CheckpointError(f"{where} is unexpected: not a checkpoint of torch.save")
    for name in ("data.pkl", "version"):
        if root + name not in names:
            raise CheckpointError(f"no entry {name} in the archive: not a checkpoint of torch.save")
    return root


def _zip_data_start(info: zipfile.ZipInfo, data: np.ndarray, where: str) -> int:
    """Return where an entry's bytes begin: after its own header, which must agree with the archive's directory."""
    header_end = info.header_offset + _ZIP_HEADER.size
    if not 0 <= info.header_offset < header_end <= data.size:
        raise CheckpointError(f"{where} begins outside the file")
    header = _ZIP_HEADER.unpack(data[info.header_offset : header_end].data)
    signature, method, name_size, extra_size = header[0], header[3], header[-2], header[-1]
    name = data[header_end : header_end + name_size].tobytes()
    expected_name = info.orig_filename.encode("utf-8" if info.flag_bits & _ZIP_UTF8_FLAG else "cp437")
    if (signature, method, name) != (_ZIP_SIGNATURE, zipfile.ZIP_STORED, expected_name):
        raise CheckpointError(f"{where} differs between the directory and the entry's own header")
    return header_end + name_size + extra_size


# The legacy format: five pickles (magic number, protocol, machine, tree, list of keys), then for each key its
# count (int64) and their bytes.


def _read_legacy(data: np.ndarray) -> _Contents:
    if data[257:262].tobytes() == b"ustar":
        raise CheckpointError("PyTorch's tar format (before 0.1.10); save it again with a newer PyTorch")
    stream = io.BytesIO(data[:MAX_PICKLE_BYTES].data)
    try:
        magic = unpickle(stream, "magic number").value
    except CheckpointError:
        magic = None
    if magic != _LEGACY_MAGIC:
        raise CheckpointError("not a PyTorch file: neither a zip archive nor the legacy format")
    protocol = unpickle(stream, "protocol version").value
    if protocol != _LEGACY_PROTOCOL:
        raise CheckpointError(f"protocol version must be {_LEGACY_PROTOCOL}")
    machine = unpickle(stream, "machine").value
    if type(machine) is not dict or machine.get("little_endian") is not True:
        raise CheckpointError("written on a big-endian machine, which is not supported")
    tree, storages = unpickle(stream, "pickle")
    keys = unpickle(stream, "storage keys").value
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise CheckpointError("storage keys must be a list of strings")
    if sorted(keys) != sorted(storages):
        raise CheckpointError(f"storage keys must be the {len(storages)} of the pickle, each once, got {len(keys)}")
    return _Contents(tree, _legacy_storages([storages[key] for key in keys], data, stream.tell()))


def _legacy_storages(storages: list[Storage], data: np.ndarray, position: int) -> dict[str, _Entry]:
    entries = {}
    for storage in storages:
        start = position + 8
        count = int.from_bytes(data[position:start].tobytes(), "little")
        if start > data.size or count != storage.numel:
            raise CheckpointError(f"storage {storage.key}, byte {position}: the count must be {storage.numel}")
        position = start + storage.numel * storage.dtype.itemsize
        if position > data.size:
            raise CheckpointError(f"storage {storage.key}: ends at byte {position}, beyond the file's {data.size}")
        entries[storage.key] = _Entry(storage.key, data[start:position], start, crc32=0)
    if position != data.size:
        raise CheckpointError(f"{data.size - position} extra bytes after the last storage")
    return entries


class _Node(NamedTuple, Generic[T]):
    """A finished part of the tree, and what it takes to walk over it: nodes (shared ones each time) and levels."""

    value: T
    nodes: int
    levels: int


class _Assembly:
    """Copies a tree, with arrays on the file's bytes in place of `Tensor`s; what is shared stays shared."""

    def __init__(self, storage_bytes: Mapping[str, np.ndarray]) -> None:
        self.storage_bytes = storage_bytes
        self.nodes: dict[int, _Node[object] | None] = {}  # by the identity of the original; None: not finished

    def node(self, value: object, depth: int) -> _Node[object]:
        if id(value) in self.nodes:
            node = self.nodes[id(value)]
            if node is None:
                raise CheckpointError(f"a {kind(value)} contains itself")
            return node
        if depth >= MAX_DEPTH:
            raise CheckpointError(f"containers nested more than {MAX_DEPTH} deep")
        if len(self.nodes) >= MAX_OBJECTS:
            raise CheckpointError(f"more than {MAX_OBJECTS} containers and tensors")
        self.nodes[id(value)] = None
        node = self.nodes[id(value)] = self._copy(value, depth)
        return node

    def _copy(self, value: object, depth: int) -> _Node[object]:
        if type(value) is Tensor:
            return _Node(_view(value, self.storage_bytes[value.storage.key]), 1, 1)
        if type(value) is list or type(value) is tuple:
            items, nodes, levels = self._copy_items(value, depth)
            return _Node(items if type(value) is list else tuple(items), nodes, levels)
        if type(value) is dict or type(value) is OrderedDict:
            items, nodes, levels = self._copy_items(value.values(), depth)
            return _Node(dict(zip(value, items)), nodes, levels)
        if type(value) in _PLAIN_TYPES or isinstance(value, np.generic | np.dtype):
            return _Node(value, 1, 1)
        raise CheckpointError(f"unexpected {kind(value)} among the values")

    def _copy_items(self, values: Collection[object], depth: int) -> _Node[list[object]]:
        items: list[object] = []
        nodes, levels = 1, 1
        for value in values:
            if type(value) in _PLAIN_TYPES:
                items.append(value)
                nodes += 1
            else:
                node = self.node(value, depth + 1)
                items.append(node.value)
                nodes += node.nodes
                levels = max(levels, node.levels + 1)
        if nodes > MAX_NODES or levels > MAX_DEPTH:
            raise CheckpointError(f"more than {MAX_NODES} nodes or {MAX_DEPTH} levels, shared ones counted each time")
        return _Node(items, nodes, levels)


def _view(tensor: Tensor, storage_bytes: np.ndarray) -> np.ndarray:
    """Return the array of `tensor`, after a check that every element lies within the bytes of its storage.

    A tensor may not have more elements than its storage. So an expanded one (stride 0), which could claim any size, is
    refused. An empty tensor has no element to check.
    """
    where = f"tensor of shape {list(tensor.shape)}, strides {list(tensor.strides)} in storage {tensor.storage.key}"
    itemsize = tensor.dtype.itemsize
    stored = storage_bytes.size // itemsize
    if 0 in tensor.shape:
        if math.prod(size for size in tensor.shape if size) > MAX_COUNT:
            raise CheckpointError(f"{where}: sizes too large")
        array = np.empty(tensor.shape, tensor.dtype)
        array.flags.writeable = False
        return array
    if math.prod(tensor.shape) > stored:
        raise CheckpointError(f"{where}: more elements than the {stored} stored (expanded? save its .contiguous())")
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides))
    if last >= stored:
        raise CheckpointError(f"{where}: reaches element {last} of {stored}")
    strides = [stride * itemsize for stride in tensor.strides]
    return np.ndarray(tensor.shape, tensor.dtype, storage_bytes.data, tensor.offset * itemsize, strides)
