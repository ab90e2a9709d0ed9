"""Runs the pickle inside a PyTorch file on a machine that knows only plain data, so that it cannot do anything else.

A pickle is a program for a small stack machine, and one of its instructions calls any Python function by name. Here

- an opcode that `_OPCODES` does not list does not exist (none that creates objects by class, no extension registry);
- a name is looked up in `_GLOBALS`, a fixed table of descriptions and pure functions of this module. Any other is
  refused by its full name where it is mentioned, so before anything could call it;
- a tensor comes out as `Tensor`: a storage, an offset, a shape and strides, with no memory behind them yet;
- each opcode takes constant time and memory, whatever values are shared, apart from the bytes it holds; there are at
  most `MAX_OPCODES` of them.

Python 3 and pickle protocols 2 to 5, as `torch.save` writes them; the older text opcodes are refused.
"""

import io
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from dime_jax._util.text import shorten

MAX_OPCODES = 200_000  # a tensor takes about 40
MAX_DIMS = 32
MAX_COUNT = 2**48  # of elements, whatever is counted

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint file was refused: one line with the file, the place in it and the reason."""


@dataclass(frozen=True)
class Storage:
    """A run of `numel` elements of one type (bytes, where only the tensors know the type), stored under `key`."""

    key: str
    dtype: np.dtype
    numel: int


@dataclass(frozen=True)
class Tensor:
    """A tensor as the file describes it: element [i, j, ...] is number offset + i s_0 + j s_1 + ... of its storage."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Unpickled(NamedTuple):
    """What a pickle builds (dict, OrderedDict, list, tuple, scalars and `Tensor`), and the storages it mentions."""

    value: object
    storages: dict[str, Storage]


def unpickle(stream: io.BytesIO, where: str) -> Unpickled:
    """Run one pickle from `stream` and stop after its end; `where` is for errors.

    The value may still contain itself, or be shared so often that walking over it never ends: see `torch_file`.
    """
    machine = _Machine()
    for count, (opcode, argument, position) in enumerate(_opcodes(stream, where)):
        try:
            if count >= MAX_OPCODES:
                raise CheckpointError(f"more than {MAX_OPCODES} pickle opcodes")
            if opcode.name == "STOP":
                return Unpickled(machine.result(), machine.storages)
            if opcode.name not in _OPCODES:
                raise CheckpointError(f"pickle opcode {opcode.name} is not allowed")
            _OPCODES[opcode.name](machine, argument)
        except CheckpointError as error:
            raise CheckpointError(f"{where}, byte {position}: {error}") from None
    raise AssertionError("genops ends with STOP or an exception")


def _opcodes(stream: io.BytesIO, where: str) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    try:
        yield from pickletools.genops(stream)
    except Exception as error:  # pickletools promises no exception types for broken pickles
        raise CheckpointError(f"{where}: broken pickle, {shorten(str(error))}") from None


def kind(value: object) -> str:
    """Say what kind of value this is, for an error (printing the value itself could take forever)."""
    return value.name if type(value) is _Function else type(value).__name__.strip("_")


class _Machine:
    """The pickle stack machine: each method is an opcode of `_OPCODES`, or a part of one."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.outer_stacks: list[list[object]] = []  # those below each MARK
        self.memo: dict[int, object] = {}
        self.storages: dict[str, Storage] = {}

    def result(self) -> object:
        if len(self.stack) != 1 or self.outer_stacks:
            raise CheckpointError("the pickle must leave one value on the stack")
        return self.stack[0]

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> object:
        if not self.stack:
            raise CheckpointError("the pickle takes a value from an empty stack")
        return self.stack.pop()

    def top(self, *types: type[T]) -> T:
        value = self.pop()
        for one in types:
            if type(value) is one:
                self.push(value)
                return value
        raise CheckpointError(f"the pickle needs {types[0].__name__.strip('_')} on the stack, got {kind(value)}")

    def mark(self, _: None) -> None:
        self.outer_stacks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[object]:
        if not self.outer_stacks:
            raise CheckpointError("the pickle returns to a mark that it has not set")
        items, self.stack = self.stack, self.outer_stacks.pop()
        return items

    def put(self, index: int | None) -> None:
        if not self.stack:
            raise CheckpointError("the pickle stores a value from an empty stack")
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise CheckpointError(f"the pickle recalls value {index}, which it has not stored")
        self.push(self.memo[index])

    def pop_items(self, size: int) -> list[object]:
        return [self.pop() for _ in range(size)][::-1]

    def append(self, items: list[object]) -> None:
        self.top(list).extend(items)

    def set_items(self, items: list[object]) -> None:
        target = self.top(dict, OrderedDict)
        if len(items) % 2:
            raise CheckpointError("a dict entry without a value")
        for key, value in zip(items[::2], items[1::2]):
            # Hashing other types can take exponential time (nested tuples), or always give the same value (long ints).
            if type(key) is not str and not (type(key) is int and abs(key) < 2**63):
                raise CheckpointError(f"keys of a dict must be str or 64-bit int, got {kind(key)}")
            if key in target:
                raise CheckpointError(f"key {shorten(str(key))!r} occurs twice in a dict")
            target[key] = value

    def push_global(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise CheckpointError(f"a global must be named by two strings, got {kind(module)} and {kind(name)}")
        full_name = f"{shorten(module)}.{shorten(name)}"
        if full_name not in _GLOBALS:
            advice = "; an object of a class: save the model's state_dict() instead" if name[:1].isupper() else ""
            raise CheckpointError(f"{full_name} is not allowed in a checkpoint (nothing was executed){advice}")
        self.push(_GLOBALS[full_name])

    def reduce(self, _: None) -> None:
        function, arguments = self.pop_items(2)
        if type(function) is not _Function or type(arguments) is not tuple:
            raise CheckpointError(f"the pickle calls {kind(function)} with {kind(arguments)}")
        result = function.call(arguments)
        if result is None:
            raise CheckpointError(f"unexpected arguments of {function.name}: {', '.join(map(kind, arguments[:10]))}")
        self.push(result)

    def build(self, _: None) -> None:
        """Set the state of the object on the stack: attributes of an OrderedDict (dropped), or a dtype's byte order."""
        state = self.pop()
        if type(self.top(OrderedDict, _ScalarType)) is OrderedDict:
            if type(state) is not dict:
                raise CheckpointError(f"the attributes of an OrderedDict must be a dict, got {kind(state)}")
        elif type(state) is not tuple or state[1:2] not in (("<",), ("|",)):
            raise CheckpointError("a numpy.dtype must be little-endian")

    def push_storage(self, _: None) -> None:
        """Turn a persistent id into a storage: ('storage', type, key, location, numel), legacy with a last None."""
        match self.pop():
            case ("storage", _StorageType(dtype), str(key), str(), int(numel), *view) if (
                re.fullmatch(r"[0-9]{1,20}", key) and 0 <= numel < MAX_COUNT and view in ([], [None])
            ):
                storage = Storage(key, dtype, numel)
                if self.storages.setdefault(key, storage) != storage:
                    raise CheckpointError(f"storage {key} is described in two ways")
                self.push(storage)
            case other:
                raise CheckpointError(
                    "a persistent id must be ('storage', type, key, location, numel), got "
                    + (f"({', '.join(map(kind, other[:10]))})" if type(other) is tuple else kind(other))
                )


_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"), _Machine.push),
    "MARK": _Machine.mark,
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop_items(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop_items(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop_items(3))),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_mark())),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "APPEND": lambda machine, _: machine.append(machine.pop_items(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_mark()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop_items(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": lambda machine, names: machine.push_global(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.push_global(*machine.pop_items(2)),
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.push_storage,
}


# The names that a checkpoint may mention. Each function takes the arguments found in the file, and returns None if they
# are not what PyTorch or NumPy write.


_Arguments = tuple[object, ...]


@dataclass(frozen=True)
class _StorageType:
    dtype: np.dtype


@dataclass(frozen=True)
class _ScalarType:
    """A `numpy.dtype`; its byte order follows, and can only be the one that it has."""

    dtype: np.dtype


@dataclass(frozen=True)
class _Function:
    name: str
    call: Callable[[_Arguments], object]


def _tensor(arguments: _Arguments) -> Tensor | None:
    """_rebuild_tensor(storage, offset, shape, strides), v2 also with requires_grad and hooks, v3 also with a dtype.

    A further argument sets the conjugate or negative bit, which changes the values: not taken.
    """
    match arguments[:4], arguments[4:]:
        case (Storage() as storage, int(offset), tuple(shape), tuple(strides)), () | (bool(), OrderedDict()):
            dtype = storage.dtype
        case (
            (Storage() as storage, int(offset), tuple(shape), tuple(strides)),
            (bool(), OrderedDict(), np.dtype() as dtype),
        ):
            pass
        case _:
            return None
    if not len(shape) == len(strides) <= MAX_DIMS:
        return None
    if not all(type(count) is int and 0 <= count < MAX_COUNT for count in (offset, *shape, *strides)):
        return None
    return Tensor(storage, dtype, offset, shape, strides)


def _parameter(arguments: _Arguments) -> Tensor | None:
    match arguments:
        case (Tensor() as data, bool(), OrderedDict()):
            return data
    return None


def _ordered_dict(arguments: _Arguments) -> OrderedDict[str, object] | None:
    return None if arguments else OrderedDict()


def _size(arguments: _Arguments) -> tuple[object, ...] | None:
    match arguments:
        case (tuple(sizes),):
            return sizes
    return None


def _device(arguments: _Arguments) -> str | None:
    match arguments:
        case (str(name),) if len(name) <= 20:
            return name
        case (str(name), int(index)) if len(name) <= 20:
            return f"{name}:{index}"
    return None


def _encode(arguments: _Arguments) -> bytes | None:
    """How pickle protocol 2 writes bytes; short ones only, as this is for NumPy scalars."""
    match arguments:
        case (str(text), "latin1") if len(text) <= 16 and all(ord(character) < 256 for character in text):
            return text.encode("latin1")
    return None


def _scalar_type(arguments: _Arguments) -> _ScalarType | None:
    match arguments:
        case (str(code), bool(), bool()) if re.fullmatch(r"b1|f[248]|[iu][1248]", code):
            return _ScalarType(np.dtype(code).newbyteorder("<"))
    return None


def _scalar(arguments: _Arguments) -> np.generic | None:
    match arguments:
        case (_ScalarType(dtype), bytes(data)) if len(data) == dtype.itemsize:
            return np.frombuffer(data, dtype)[0]
    return None


_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NUMPY_DTYPES = _FLOATS + _INTEGERS
_DTYPES = {
    **{name: np.dtype(name).newbyteorder("<") for name in _NUMPY_DTYPES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")},
}
_STORAGE_DTYPES = {
    "torch.HalfStorage": "float16",
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.BFloat16Storage": "bfloat16",
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16",
    "torch.IntStorage": "int32",
    "torch.LongStorage": "int64",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.storage.UntypedStorage": "uint8",
}
_FUNCTIONS: dict[str, Callable[[_Arguments], object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch.device": _device,
    "_codecs.encode": _encode,
    "numpy.dtype": _scalar_type,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
_GLOBALS: dict[str, object] = {
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
    **{name: _StorageType(_DTYPES[dtype]) for name, dtype in _STORAGE_DTYPES.items()},
    **{name: _Function(name, call) for name, call in _FUNCTIONS.items()},
}
