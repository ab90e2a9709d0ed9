"""Writes a checkpoint as torch.save does, without PyTorch: `write_zip(path, {"weight": array, "step": 3})`.

Arrays become tensors with a storage each, of float32 or int64.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

STORAGE_NAMES = {"float32": "FloatStorage", "int64": "LongStorage"}


class Global(NamedTuple):
    """A name in the pickle, whether or not such a thing exists here."""

    module: str
    name: str

    def __call__(self) -> None:
        """Only there because the pickler asks whether it is callable."""
        raise AssertionError("only written, never called")


class PickledStorage(NamedTuple):
    """A storage as the pickle describes it."""

    kind: Global
    key: str
    numel: object
    location: str = "cpu"


class TorchPickler(pickle._Pickler):
    """Pickles arrays as PyTorch pickles tensors. The pure Python pickler lets us write names that do not exist."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(pickle._Pickler.dispatch)
    write: Callable[[bytes], object]
    memoize: Callable[[object], None]

    def __init__(self, stream: io.BytesIO, protocol: int = 2):
        super().__init__(stream, protocol)
        self.stored: dict[str, Any] = {}  # the elements of each storage, by its key

    def save_name(self, name: Global) -> None:
        """Write a name without looking it up."""
        self.write(pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode())
        self.memoize(name)

    dispatch[Global] = save_name

    def reducer_override(self, obj: object) -> Any:
        """Return the call that makes a tensor of an array."""
        if not isinstance(obj, np.ndarray):
            return NotImplemented
        key, array = str(len(self.stored)), np.ascontiguousarray(obj)
        self.stored[key] = array
        storage = PickledStorage(Global("torch", STORAGE_NAMES[array.dtype.name]), key, array.size)
        strides = tuple(stride // array.itemsize for stride in array.strides)
        arguments: tuple[object, ...] = (storage, 0, array.shape, strides, False, OrderedDict())
        return Global("torch._utils", "_rebuild_tensor_v2"), arguments

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        """Return how the pickle refers to a storage."""
        if isinstance(obj, PickledStorage):
            return ("storage", obj.kind, obj.key, obj.location, obj.numel)
        return None


def write_zip(path: str | Path, tree: object) -> None:
    """Write containers, scalars and arrays."""
    stream = io.BytesIO()
    pickler = TorchPickler(stream)
    pickler.dump(tree)
    storages = {f"data/{key}": array.tobytes() for key, array in pickler.stored.items()}
    records = {"data.pkl": stream.getvalue(), "byteorder": b"little", **storages, "version": b"3\n"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, record in records.items():
            archive.writestr(f"archive/{name}", record)
