"""The reader on hostile and broken files: each refused in one line, fast, in little memory, with nothing executed."""

import contextlib
import gc
import io
import itertools
import os
import pathlib
import random
import re
import resource
import struct
import tarfile
import time
import tracemalloc
import warnings
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from checkpoints_convert.torch_file import CheckpointError, load
from tests.checkpoints_convert.test_torch_file import assert_same
from tests.checkpoints_convert.torch_writer import (
    UNTYPED,
    Global,
    Streamed,
    legacy_blocks,
    pickle_tree,
    write_legacy,
    write_records,
    write_zip,
)
from tests.checkpoints_convert.torch_writer import PickledCall as Call
from tests.checkpoints_convert.torch_writer import PickledStorage as Storage

FLOAT = Global("torch", "FloatStorage")
REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
ORDERED_DICT = Global("collections", "OrderedDict")


@pytest.fixture(autouse=True)
def nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "canary").exists()


def refusal(path, traced: bool = True) -> str:
    """The one-line error for a file, which must come within a second and cheaply."""
    with pytest.raises(CheckpointError) as error:
        load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    assert len(message) < 1000
    assert any(seconds_to_refuse(path) < 1 for _ in range(3))
    if traced:  # in a second run, as tracing slows everything down
        assert peak_memory(path) < 50e6
    return message.removeprefix(f"{path}: ")


def seconds_to_refuse(path) -> float:
    """CPU time, as machines are busy, without that of collecting other tests' garbage."""
    gc.freeze()
    start = time.process_time()
    with pytest.raises(CheckpointError):
        load(path)
    seconds = time.process_time() - start
    gc.unfreeze()
    return seconds


def peak_memory(path) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Names that a pickle may not mention. Running a payload would create the file `canary`.
FORBIDDEN_CALLS = {
    "os.system": ("touch canary",),
    "posix.system": ("touch canary",),
    "nt.system": ("touch canary",),
    "subprocess.Popen": (["touch", "canary"],),
    "subprocess.check_output": (["touch", "canary"],),
    "builtins.eval": ("open('canary', 'w')",),
    "builtins.exec": ("open('canary', 'w')",),
    "__builtin__.eval": ("open('canary', 'w')",),
    "builtins.open": ("canary", "w"),
    "builtins.getattr": ("", "join"),
    "builtins.__import__": ("os",),
    "importlib.import_module": ("os",),
    "runpy.run_path": ("canary",),
    "pathlib.Path.touch": ("canary",),
    "functools.partial": (Global("os", "system"), "touch canary"),
    "operator.methodcaller": ("system", "touch canary"),
    "pickle.loads": (b"cos\nsystem\n(S'touch canary'\ntR.",),
    "torch.load": ("canary",),
    "torch.storage._load_from_bytes": (b"cos\nsystem\n(S'touch canary'\ntR.",),
    "torch.storage.TypedStorage": (),
    "torch.storage._LegacyStorage": (),
    "torch._utils._rebuild_qtensor": (),
    "torch._utils._rebuild_wrapper_subclass": (),
    "torch._tensor._rebuild_from_type_v2": (Global("os", "system"), int, ("touch canary",), {}),
    "torch.jit._pickle.build_intlist": ([1],),
    "torch.nn.modules.linear.Linear": (3, 3),
    "torch.serialization.load": ("canary",),
    "numpy.load": ("canary",),
    "numpy.core.multiarray._reconstruct": (),
    "numpy.testing._private.utils.runstring": ("open('canary', 'w')", {}),
    "collections.defaultdict": (),
    "types.FunctionType": (),
    "argparse.Namespace": (),
    "torch._utils._rebuild_tensor_v2.__globals__": (),
    "collections.OrderedDict.fromkeys": ([1],),
    "torch.FloatStorage.__class__": (),
    "torch.float32.__reduce__": (),
}


@pytest.mark.parametrize("write", [write_zip, write_legacy])
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", FORBIDDEN_CALLS)
def test_forbidden_names_are_refused_before_a_call(tmp_path, name, protocol, write):
    module, _, attribute = name.rpartition(".")
    call = Call(Global(module, attribute), FORBIDDEN_CALLS[name])
    write(tmp_path / "file.pt", {"weight": np.ones(2), "payload": call}, protocol=protocol)
    assert f"{name} is not allowed in a checkpoint" in refusal(tmp_path / "file.pt")


SYSTEM = Global("os", "system")
TOUCH = Call(SYSTEM, ("touch canary",))


def tensor(shape=(2,), strides=(1,), offset=0, storage=None, rest=(False, OrderedDict())):
    """A tensor on storage 7 of `STORED`, described in any way."""
    return Call(REBUILD, (storage or Storage(FLOAT, "7", 4), offset, shape, strides, *rest))


def nested(wrap, levels, value=None):
    for _ in range(levels):
        value = wrap(value)
    return value


def self_containing(container):
    container.append(container) if isinstance(container, list) else container.update(me=container)
    return container


STORED = {"7": np.arange(4, dtype=np.float32)}
HOSTILE_TREES = {
    "call in a call in a call": (Call(Call(Call(SYSTEM, ("id",)), ()), ()), "os.system is not allowed"),
    "call in an attribute": (Call(ORDERED_DICT, (), {"_metadata": TOUCH}), "os.system is not allowed"),
    "call in tensor hooks": (tensor(rest=(False, TOUCH)), "os.system is not allowed"),
    "call in a persistent id": (Storage(TOUCH, "7", 4), "os.system is not allowed"),
    "call as an optimizer state": ({"optim": {"state": {0: TOUCH}}}, "os.system is not allowed"),
    "mention without a call": ([SYSTEM], "os.system is not allowed"),
    "harmless function as a value": ([REBUILD], "unexpected torch._utils._rebuild_tensor_v2"),
    "storage type as a value": ([FLOAT], "unexpected StorageType"),
    "storage as a value": ([Storage(FLOAT, "7", 4)], "unexpected Storage"),
    "storage type called": (Call(FLOAT, (10**12,)), "calls StorageType"),
    "dtype called": (Call(Global("torch", "float32"), ()), "calls .*DType"),
    "result called": (Call(Call(ORDERED_DICT), ()), "calls OrderedDict"),
    "state of a tensor": (
        tensor()._replace(state={"data": 1}),
        "the pickle needs OrderedDict on the stack, got Tensor",
    ),
    "state of a device": (Call(Global("torch", "device"), ("cpu",), {"a": 1}), "on the stack, got str"),
    "attributes that are no dict": (Call(ORDERED_DICT, (), [1]), "the attributes of an OrderedDict must be a dict"),
    "ordered dict of pairs": (Call(ORDERED_DICT, ([("a", 1)],)), "unexpected arguments of collections.OrderedDict"),
    "parameter of nothing": (Call(Global("torch._utils", "_rebuild_parameter"), (3, True, {})), "unexpected arguments"),
    "device of a list": (Call(Global("torch", "device"), ([],)), "unexpected arguments of torch.device"),
    "long encoded bytes": (Call(Global("_codecs", "encode"), ("a" * 10_000, "latin1")), "unexpected arguments"),
    "another codec": (Call(Global("_codecs", "encode"), ("a", "rot13")), "unexpected arguments of _codecs.encode"),
    "object dtype": (Call(Global("numpy", "dtype"), ("O", False, True)), "unexpected arguments of numpy.dtype"),
    "structured dtype": (Call(Global("numpy", "dtype"), ("f8,O", False, True)), "unexpected arguments of numpy.dtype"),
    "numpy array": (Call(Global("numpy.core.multiarray", "scalar"), (np.ones(1), b"ab")), "unexpected arguments"),
    "10^12 elements": (tensor(shape=(10**6, 10**6), strides=(10**6, 1)), "more elements than the 4 stored"),
    "10^12 elements by expansion": (tensor(shape=(10**12,), strides=(0,)), "more elements than the 4 stored"),
    "small expansion": (tensor(shape=(5,), strides=(0,)), "expanded"),
    "10^30 elements": (tensor(shape=(10**10,) * 3, strides=(0,) * 3), "more elements than the 4 stored"),
    "a size beyond 64 bits": (tensor(shape=(2**70,)), "unexpected arguments"),
    "large empty shape": (tensor(shape=(0, 10**12, 10**12), strides=(1, 1, 1)), "sizes too large"),
    "negative size": (tensor(shape=(-1,)), "unexpected arguments"),
    "negative stride": (tensor(strides=(-1,)), "unexpected arguments"),
    "negative offset": (tensor(offset=-1), "unexpected arguments"),
    "bool as a size": (tensor(shape=(True,)), "unexpected arguments"),
    "float as a size": (tensor(shape=(2.0,)), "unexpected arguments"),
    "list as a shape": (tensor(shape=[2]), "unexpected arguments"),
    "nested sizes": (tensor(shape=(nested(lambda x: (x, x), 40),)), "unexpected arguments"),
    "offset behind the end": (tensor(offset=3), "reaches element 4 of 4"),
    "stride behind the end": (tensor(strides=(4,)), "reaches element 4 of 4"),
    "more sizes than strides": (tensor(shape=(2, 1)), "unexpected arguments"),
    "100 dimensions": (tensor(shape=(1,) * 100, strides=(1,) * 100), "unexpected arguments"),
    "conjugate bit": (tensor(rest=(False, OrderedDict(), {"conj": True})), "unexpected arguments"),
    "tensor on a tensor": (tensor(storage=tensor()), "unexpected arguments"),
    "storage too long": (tensor(storage=Storage(FLOAT, "7", 5)), "storage 7|data/7: must hold 5 elements"),
    "storage too short": (tensor(storage=Storage(FLOAT, "7", 3)), "storage 7|data/7: must hold 3 elements"),
    "storage of another type": (
        tensor(storage=Storage(Global("torch", "DoubleStorage"), "7", 4)),
        "storage 7|data/7: must hold 4 elements of float64",
    ),
    "storage of 10^12 elements": (tensor(storage=Storage(FLOAT, "7", 10**12)), "storage 7|data/7"),
    "storage of 2^70 elements": (tensor(storage=Storage(FLOAT, "7", 2**70)), "a persistent id must be"),
    "storage of -1 elements": (tensor(storage=Storage(FLOAT, "7", -1)), "a persistent id must be"),
    "storage of many elements": (tensor(storage=Storage(FLOAT, "7", "4")), "a persistent id must be"),
    "storage in two ways": ([tensor(), tensor(storage=Storage(UNTYPED, "7", 16))], "storage 7 is described in two"),
    "storage that is missing": (
        tensor(storage=Storage(FLOAT, "8", 4)),
        "data/8: a tensor's storage is missing|storage keys must be the 1",
    ),
    "path as a key": (tensor(storage=Storage(FLOAT, "../../etc/passwd", 4)), "a persistent id must be"),
    "absolute path as a key": (tensor(storage=Storage(FLOAT, "/etc/passwd", 4)), "a persistent id must be"),
    "other digits as a key": (tensor(storage=Storage(FLOAT, "٧", 4)), "a persistent id must be"),
    "line break in a key": (tensor(storage=Storage(FLOAT, "7\n", 4)), "a persistent id must be"),
    "number as a key": (tensor(storage=Storage(FLOAT, 7, 4)), "a persistent id must be"),
    "function as a storage type": (tensor(storage=Storage(REBUILD, "7", 4)), "a persistent id must be"),
    "number as a location": (tensor(storage=Storage(FLOAT, "7", 4, 0)), "a persistent id must be"),
    "list that contains itself": (self_containing([]), "list contains itself"),
    "dict that contains itself": (self_containing({}), "dict contains itself"),
    "deep lists": (nested(lambda x: [x], 100), "nested more than 64 deep"),
    "deep tuples": (nested(lambda x: (x,), 100), "nested more than 64 deep"),
    "deep dicts": (nested(lambda x: {"a": x}, 100), "nested more than 64 deep"),
    "doubled lists": (nested(lambda x: [x, x], 50), "more than 1000000 nodes"),
    "doubled dicts": (nested(lambda x: {"a": x, "b": x}, 50), "more than 1000000 nodes"),
    "tuple as a key": ({(1, 2): 3}, "keys of a dict must be str or 64-bit int, got tuple"),
    "float as a key": ({1.5: 3}, "keys of a dict must be str or 64-bit int, got float"),
    "long int as a key": ({2**61 - 1 << 20: 3}, "keys of a dict must be str or 64-bit int, got int"),
    "set": ({1, 2}, "is not allowed|EMPTY_SET"),
    "complex": (1j, "is not allowed"),
}


@pytest.mark.parametrize("write", [write_zip, write_legacy])
@pytest.mark.parametrize("case", HOSTILE_TREES)
def test_hostile_trees(tmp_path, case, write):
    tree, expected = HOSTILE_TREES[case]
    write(tmp_path / "file.pt", tree, extra=STORED)
    assert re.search(expected, refusal(tmp_path / "file.pt"))


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


# Pickles that no pickler writes, as opcodes (see pickletools), without the first two bytes and the last one.
HOSTILE_PICKLES = {
    "INST": (b"(" + text("touch canary") + b"ios\nsystem\n", "opcode INST is not allowed"),
    "OBJ": (b"(cos\nsystem\n" + text("touch canary") + b"o", "os.system is not allowed"),
    "OBJ of an allowed class": (b"(ccollections\nOrderedDict\no", "opcode OBJ is not allowed"),
    "NEWOBJ": (b"ccollections\nOrderedDict\n)\x81", "opcode NEWOBJ is not allowed"),
    "NEWOBJ_EX": (b"ccollections\nOrderedDict\n)}\x92", "opcode NEWOBJ_EX is not allowed"),
    "extension registry 1": (b"\x82\x01", "opcode EXT1 is not allowed"),
    "extension registry 2": (b"\x83\x01\x00", "opcode EXT2 is not allowed"),
    "extension registry 4": (b"\x84\x01\x00\x00\x00", "opcode EXT4 is not allowed"),
    "text persistent id": (b"Pstorage\n", "opcode PERSID is not allowed"),
    "text int": (b"I1" + b"0" * 10_000 + b"\n", "broken pickle|opcode INT is not allowed"),
    "text long": (b"L1" + b"0" * 10_000_000 + b"L\n", "broken pickle"),
    "text string": (b"S'\\q'\n", "broken pickle|opcode STRING is not allowed"),
    "protocol 0 dict": (b"(d", "opcode DICT is not allowed"),
    "giant long": (b"\x8b" + struct.pack("<i", 10**7) + b"\xff" * 10**7, "opcode LONG4 is not allowed"),
    "long of 2 GB that is not there": (b"\x8b" + struct.pack("<i", 2**31 - 1), "broken pickle"),
    "string of 4 GB that is not there": (b"X\xff\xff\xff\xff", "broken pickle"),
    "string of 2^62 bytes that is not there": (b"\x8d" + struct.pack("<Q", 2**62), "broken pickle"),
    "bytearray of 2^62 bytes": (b"\x96" + struct.pack("<Q", 2**62), "broken pickle"),
    "out-of-band buffer": (b"\x97", "opcode NEXT_BUFFER is not allowed"),
    "not UTF-8": (b"X\x01\x00\x00\x00\xff", "broken pickle"),
    "duplicated value": (b"]2", "opcode DUP is not allowed"),
    "unknown opcode": (b"\xff", "broken pickle"),
    "zero byte": (b"\x00", "broken pickle"),
    "nothing": (b"", "the pickle must leave one value on the stack"),
    "two values": (b"NN", "the pickle must leave one value on the stack"),
    "open mark": (b"(N", "the pickle must leave one value on the stack"),
    "no mark": (b"t", "a mark that it has not set"),
    "call of nothing": (b"R", "from an empty stack"),
    "call below a mark": (b"ccollections\nOrderedDict\n()R", "from an empty stack"),
    "append to nothing": (b"Na", "from an empty stack"),
    "append to a tuple": (b")Na", "the pickle needs list on the stack, got tuple"),
    "items of a list": (b"]NNs", "the pickle needs dict on the stack, got list"),
    "half an item": (b"}(Nu", "without a value"),
    "key twice": (b"}(" + text("w") + b"K\x01" + text("w") + b"K\x02u", "key 'w' occurs twice in a dict"),
    "key twice, later": (b"}" + (text("w") + b"Ns") * 2, "key 'w' occurs twice in a dict"),
    "list as a key": (b"}]Ns", "keys of a dict must be str or 64-bit int, got list"),
    "memo that is empty": (b"h\x05", "recalls value 5"),
    "memo of nothing": (b"q\x05", "from an empty stack"),
    "name of numbers": (b"K\x01K\x02\x93", "a global must be named by two strings"),
    "name that would erase the screen": (text("os\n\u2028") + text("\x1b[2J") + b"\x93", r"os\\n\\u2028\.\\x1b\[2J is"),
    "name in a name": (text("os") + text("path.os.system") + b"\x93", "os.path.os.system is not allowed"),
    "long name": (text("o" * 10**6) + text("s" * 10**6) + b"\x93", r"oo\.\.\.\.ss.* is not allowed"),
    "name with a space": (b"cos system\nx\n", "os.system x is not allowed"),
    "persistent id of a string": (text("storage") + b"Q", "a persistent id must be .*, got str"),
    "persistent id of a module": (
        b"(" + text("module") + b"ctorch\nFloatStorage\n" + text("7") + text("cpu") + b"K\x04tQ",
        r"a persistent id must be .*, got \(str, StorageType, str, str, int\)",
    ),
    "view on a storage": (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("7") + text("cpu") + b"K\x04"
        b"(" + text("8") + b"K\x00K\x02ttQ",
        "a persistent id must be",
    ),
    "list in its own tuple": (b"]q\x00h\x00\x85a", "list contains itself"),
    "hash of nested tuples": (b")" + b"q\x00h\x00\x86" * 100 + b"q\x01}h\x01Ns", "."),
    "levels by sharing": (b"(Nq\x00" + b"h\x00\x85q\x00" * 100 + b"l", "opcode LIST is not allowed"),
    "levels by sharing in a tuple": (b"(Nq\x00" + b"h\x00\x85q\x00" * 100 + b"t", "or 64 levels"),
    "2,000 levels": (b"]" * 2_000 + b"a" * 1_999, "nested more than 64 deep"),
    "dtype with another byte order": (
        b"cnumpy\ndtype\n" + text("f8") + b"\x89\x88\x87R(K\x03" + text(">") + b"NNNJ\xff\xff\xff\xfftb",
        "a numpy.dtype must be little-endian",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_PICKLES)
def test_hostile_pickles(tmp_path, case):
    opcodes, expected = HOSTILE_PICKLES[case]
    pickled = b"\x80\x02" + opcodes + b"."
    write_records(tmp_path / "zip.pt", {"data.pkl": pickled, "version": b"3"})
    (tmp_path / "legacy.pt").write_bytes(b"".join(legacy_blocks(pickled, {})))
    for name in ("zip.pt", "legacy.pt"):
        assert re.search(expected, refusal(tmp_path / name))


@pytest.mark.parametrize(
    ("opcodes", "expected"),
    [
        (b"(" * (15 * 2**20), "more than 200000 pickle opcodes"),
        (b"(" + b"]" * 10**6 + b"t", "more than 200000 pickle opcodes"),
        (b"]" * 95_000 + b"a" * 94_999, "nested more than 64 deep"),
        (b"](" + b"}" * 190_000 + b"e", "more than 50000 containers and tensors"),
    ],
    ids=["15 million marks", "a million lists", "95,000 levels", "190,000 dicts"],
)
def test_floods_of_opcodes(tmp_path, opcodes, expected):
    write_records(tmp_path / "file.pt", {"data.pkl": b"\x80\x02" + opcodes + b".", "version": b"3"})
    assert expected in refusal(tmp_path / "file.pt", traced=False)


def test_as_much_as_allowed(tmp_path):
    opcodes = b"](" + b"}" * 49_999 + b"N" * 140_000 + b"e"
    write_records(tmp_path / "file.pt", {"data.pkl": b"\x80\x02" + opcodes + b".", "version": b"3"})
    assert load(tmp_path / "file.pt") == [{}] * 49_999 + [None] * 140_000


PICKLED, _ = pickle_tree(tensor(shape=(4,)))
GOOD = {"data.pkl": PICKLED, "byteorder": b"little", "data/7": STORED["7"], "version": b"3\n"}


def zip_bytes(records=None, **options) -> bytes:
    stream = io.BytesIO()
    write_records(stream, GOOD if records is None else records, **options)
    return stream.getvalue()


def without(*names):
    return {name: record for name, record in GOOD.items() if name not in names}


def standard_zip(entries, compression=zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about names that occur twice
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name) if compression == zipfile.ZIP_STORED else name, content)
    return stream.getvalue()


def patched(data: bytes, entry: str, offset: int, code: str, value: int) -> bytes:
    """Set a field of an entry in the archive's directory: method 10, sizes 20 and 24, header's offset 42, ..."""
    name = entry.encode()
    start = data.rindex(name) - 46
    assert data[start : start + 4] == b"PK\x01\x02"
    position = start + offset
    return data[:position] + struct.pack(code, value) + data[position + struct.calcsize(code) :]


def patched_end(data: bytes, offset: int, code: str, value: int) -> bytes:
    """Set a field of the record that ends the archive: entries 10, directory size 12 and offset 16, comment 20."""
    position = data.rindex(b"PK\x05\x06") + offset
    return data[:position] + struct.pack(code, value) + data[position + struct.calcsize(code) :]


def legacy_bytes(pickled=None, stored=None, **options) -> bytes:
    pickled = pickle_tree(tensor(shape=(4,)), legacy=True)[0] if pickled is None else pickled
    return b"".join(legacy_blocks(pickled, STORED if stored is None else stored, **options))


def tar_bytes() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    return stream.getvalue()


def sparse_zip_directory(path) -> None:
    """An archive whose directory claims 3 GB that are there, as a hole in the file."""
    data = patched_end(patched_end(zip_bytes(), 12, "<I", 3 * 10**9), 16, "<I", 100)
    with open(path, "wb") as file:
        file.write(data[:100])
        file.truncate(100 + 3 * 10**9)
        file.seek(0, io.SEEK_END)
        file.write(data[-22:])


BOMB = [("archive/data.pkl", PICKLED), ("archive/version", b"3"), ("archive/data/7", bytes(10**7))]
INNER = zip_bytes()
HOSTILE_FILES = {
    "empty file": (b"", "the file is empty"),
    "one byte": (b"P", "not a PyTorch file"),
    "text": (b"<html>404 Not Found</html>", "not a PyTorch file"),
    "safetensors": (struct.pack("<Q", 2) + b"{}", "not a PyTorch file"),
    "bare pickle that calls": (b"\x80\x02cos\nsystem\nX\x0c\x00\x00\x00touch canary\x85R.", "not a PyTorch file"),
    "tar format": (tar_bytes(), "tar format"),
    "zip signature alone": (b"PK\x03\x04", "broken zip archive"),
    "zip cut in the directory": (zip_bytes()[:-30], "broken zip archive"),
    "zip cut in half": (zip_bytes()[: len(zip_bytes()) // 2], "broken zip archive"),
    "zip without its first bytes": (zip_bytes()[1:], "not a PyTorch file"),
    "zip with bytes cut out": (zip_bytes()[:200] + zip_bytes()[264:], "broken zip|own header|begins outside"),
    "empty zip": (b"PK\x03\x04" + standard_zip([]), "the archive must have one top folder, got 0"),
    "spreadsheet": (
        standard_zip([("xl/workbook.xml", b""), ("mimetype", b"")]),
        "the archive must have one top folder",
    ),
    "entry twice": (
        standard_zip([("a/version", b"3"), ("a/version", b"4")]),
        "'a/version' in the archive occurs 2 times",
    ),
    "pickle twice": (standard_zip([("a/data.pkl", b"N."), ("a/data.pkl", b"N.")]), "'a/data.pkl' .* occurs 2 times"),
    "parent path": (standard_zip([("a/../../x", b"")]), "has a path for a name"),
    "absolute path": (standard_zip([("/etc/passwd", b"")]), "has a path for a name"),
    "windows path": (standard_zip([("a/C:\\x", b"")]), "has a path for a name"),
    "name with a zero": (zip_bytes().replace(b"archive/version", b"archive/vers\0on"), "has a path for a name"),
    "directory entry": (standard_zip([("a/data/", b"")]), "has a path for a name"),
    "two archives in one": (
        standard_zip([("a/data.pkl", b"N."), ("a/version", b"3"), ("b/data.pkl", b"N.")]),
        "the archive must have one top folder, got 2: a, b",
    ),
    "nested archive": (zip_bytes({**GOOD, "inner.pt": INNER}), "'archive/inner.pt' in the archive is unexpected"),
    "archive in place of the pickle": (zip_bytes({**GOOD, "data.pkl": INNER}), "data.pkl"),
    "archive in a subfolder": (zip_bytes(root="a/b"), "'a/b/data.pkl' in the archive is unexpected"),
    "TorchScript constants": (zip_bytes({**GOOD, "constants.pkl": b"N."}), "TorchScript"),
    "TorchScript code": (zip_bytes({**GOOD, "code/__torch__.py": b"import os"}), "TorchScript"),
    "old TorchScript": (standard_zip([("a/model.json", b"{}")]), "TorchScript"),
    "path as a storage entry": (
        zip_bytes({**GOOD, "data/x/y": b""}),
        "'archive/data/x/y' in the archive is unexpected",
    ),
    "no pickle": (zip_bytes(without("data.pkl")), "no entry data.pkl"),
    "no version": (zip_bytes(without("version")), "no entry version"),
    "no storage": (zip_bytes(without("data/7")), "data/7: a tensor's storage is missing in the archive"),
    "storage cut": (zip_bytes({**GOOD, "data/7": bytes(15)}), "data/7: must hold 4 elements of float32, got 15 bytes"),
    "storage longer": (zip_bytes({**GOOD, "data/7": bytes(20)}), "data/7: must hold 4 elements of float32, got 20"),
    "future version": (zip_bytes({**GOOD, "version": b"99"}), "version must be 1 to 10, got b'99'"),
    "no number as a version": (zip_bytes({**GOOD, "version": b"\xb2"}), "version must be 1 to 10, got"),
    "big endian": (zip_bytes({**GOOD, "byteorder": b"big"}), "byteorder must be little, got b'big'"),
    "damaged weights": (zip_bytes().replace(STORED["7"].tobytes(), bytes(16)), "data/7: damaged"),
    "damaged pickle": (zip_bytes().replace(b"K\x04", b"K\x03"), "data.pkl: damaged"),
    "empty pickle": (zip_bytes({**GOOD, "data.pkl": b""}), "data.pkl: broken pickle"),
    "pickle cut": (zip_bytes({**GOOD, "data.pkl": PICKLED[:-5]}), "data.pkl: broken pickle"),
    "zip bomb": (standard_zip(BOMB, zipfile.ZIP_DEFLATED), "is compressed"),
    "compressed by the directory": (patched(zip_bytes(), "archive/data/7", 10, "<H", 8), "is compressed"),
    "compressed size of its own": (patched(zip_bytes(), "archive/data/7", 20, "<I", 8), "is compressed"),
    "encrypted": (patched(zip_bytes(), "archive/data/7", 8, "<H", 1), "is encrypted"),
    "entry at another": (patched(zip_bytes(), "archive/data/7", 42, "<I", 0), "own header"),
    "entry outside the file": (patched(zip_bytes(), "archive/data/7", 42, "<I", 10**9), "begins outside"),
    "entry over the next": (
        patched(patched(zip_bytes(), "archive/data/7", 20, "<I", 60), "archive/data/7", 24, "<I", 60),
        "overlaps another entry",
    ),
    "entry over the directory": (
        patched(patched(zip_bytes(), "archive/version", 20, "<I", 10**9), "archive/version", 24, "<I", 10**9),
        "overlaps another entry or the directory",
    ),
    "entry of 4 GB": (
        patched(patched(zip_bytes(), "archive/data/7", 20, "<I", 2**32 - 1), "archive/data/7", 24, "<I", 2**32 - 1),
        "broken zip|overlaps",
    ),
    "names that differ": (zip_bytes().replace(b"archive/version", b"archive/Version", 1), "own header"),
    "directory outside the file": (patched_end(zip_bytes(), 16, "<I", 10**9), "broken zip|begins outside"),
    "directory of 4 GB": (patched_end(zip_bytes(), 12, "<I", 2**32 - 2), "broken zip|zip directory must have"),
    "zip64 without its record": (patched_end(zip_bytes(), 16, "<I", 2**32 - 1), "broken zip|begins outside"),
    "junk in front": (
        b"PK\x03\x04junk" + zip_bytes().replace(b"data/7", b"data/8"),
        "data/7: a tensor's storage is missing in the archive",
    ),
    "legacy cut in its storages": (legacy_bytes()[:-1], r"storage 7: ends at byte \d+, beyond the file's \d+"),
    "legacy cut before its storages": (legacy_bytes()[:-20], "storage 7, byte .*: the count must be 4"),
    "legacy cut in its pickle": (legacy_bytes()[:200], "pickle: broken pickle"),
    "legacy with more": (legacy_bytes() + b"x", "1 extra bytes after the last storage"),
    "legacy count": (legacy_bytes(stored={"7": np.ones(5, np.float32)}), "the count must be 4"),
    "legacy negative count": (legacy_bytes()[:-24] + b"\xff" * 8 + bytes(16), "the count must be 4"),
    "legacy without its storage": (legacy_bytes(stored={}), "storage keys must be the 1 of the pickle"),
    "legacy with another storage": (legacy_bytes(stored={**STORED, "8": np.ones(1)}), "storage keys must be the 1"),
    "legacy big endian": (legacy_bytes(little_endian=False), "written on a big-endian machine"),
    "legacy protocol": (legacy_bytes().replace(b"M\xe9\x03.", b"M\xea\x03.", 1), "protocol version must be 1001"),
    "legacy magic alone": (legacy_bytes()[:15], "protocol version: broken pickle"),
    "legacy keys twice": (
        legacy_bytes().replace(text("7") + b"q\x01a.", text("7") + b"q\x01ah\x00h\x01a."),
        "storage keys",
    ),
    "legacy keys that are lists": (
        legacy_bytes().replace(text("7") + b"q\x01a.", b"]a."),
        "storage keys must be a list of strings",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_hostile_files(tmp_path, case):
    data, expected = HOSTILE_FILES[case]
    (tmp_path / "file.pt").write_bytes(data)
    assert re.search(expected, refusal(tmp_path / "file.pt"))


def test_left_out_checksums_are_not_verified(tmp_path):
    damaged = zip_bytes().replace(STORED["7"].tobytes(), bytes(16))
    (tmp_path / "file.pt").write_bytes(patched(damaged, "archive/data/7", 16, "<I", 0))
    np.testing.assert_array_equal(load(tmp_path / "file.pt"), np.zeros(4))


def test_the_good_files_beside_the_hostile_ones_load(tmp_path):
    for data in (zip_bytes(), legacy_bytes(), zip_bytes(without("byteorder")), b"PK\x03\x04junk" + zip_bytes()):
        (tmp_path / "file.pt").write_bytes(data)
        np.testing.assert_array_equal(load(tmp_path / "file.pt"), STORED["7"])


def test_sizes_claimed_and_there(tmp_path):
    sparse_zip_directory(tmp_path / "directory.pt")
    assert "zip directory must have at most 2097152 bytes, got 3000000000" in refusal(tmp_path / "directory.pt")
    with open(tmp_path / "string.pt", "wb") as file:
        file.write(legacy_bytes(b"\x80\x02X" + struct.pack("<I", 3 * 10**9)))
        file.truncate(4 * 10**9)
    assert "broken pickle" in refusal(tmp_path / "string.pt")
    pickled = Streamed((2**24 + 1,), np.uint8, lambda start, stop: np.zeros(stop - start, np.uint8))
    write_records(tmp_path / "pickle.pt", {**GOOD, "data.pkl": pickled})
    assert "data.pkl must have at most 16777216 bytes, got 16777217" in refusal(tmp_path / "pickle.pt")
    (tmp_path / "entries.pt").write_bytes(standard_zip([(f"a/data/{key}", b"") for key in range(40_000)]))
    assert "zip directory must have" in refusal(tmp_path / "entries.pt")


def test_what_is_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "dangling.pt").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path, tmp_path / "pipe.pt", tmp_path / "dangling.pt", tmp_path / "missing\n.pt"):
        with pytest.raises(CheckpointError, match="no such regular file") as error:
            load(path)
        assert str(error.value).isprintable()


def mutated(rng: random.Random, files: list[bytes]) -> bytes:
    """One to three random damages to one of the files: flipped bytes, cuts, splices, exchanged or repeated pieces."""
    data = bytearray(rng.choice(files))
    for _ in range(rng.randint(1, 3)):
        position, other = rng.randrange(len(data)), rng.randrange(len(data))
        size = rng.choice([1, 2, 4, 8, 30, 100, 500])
        kind = rng.randrange(7)
        if kind <= 1:
            data[position] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[position : position + size] = rng.choice([b"\0", b"\xff", b".", b"(", b"R", b"PK\x05\x06"]) * size
        elif kind == 3:
            del data[position : position + size]
        elif kind == 4:
            data[position:position] = data[other : other + size]
        elif kind == 5:
            one, two = data[position : position + size], data[other : other + size]
            data[position : position + size], data[other : other + size] = two, one
        else:
            donor = rng.choice(files)
            start = rng.randrange(len(donor))
            data[position : position + size] = donor[start : start + size]
        data = data or bytearray(b"P")
    return bytes(data[: rng.randrange(1, len(data) + 1)] if rng.random() < 0.1 else data)


def test_mutation_fuzz_of_2000_files(tmp_path):
    """Damage anywhere ends in a clean error or a correct load: no other exception, no hang, no memory.

    A zip file that loads must give the very same values. A legacy file has no checksums: it must give sound arrays.
    """
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tree = {
        "model": OrderedDict(weight=base, view=base[:, 1].T, bias=np.ones(3, np.float16)),
        "optim": {"state": {0: {"step": np.float64(3)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "step": 7,
    }
    files = []
    for write, protocol in itertools.product((write_zip, write_legacy), (2, 4)):
        write(tmp_path / "file.pt", tree, protocol=protocol)
        files.append((tmp_path / "file.pt").read_bytes())
    rng = random.Random(0)
    loaded, messages = 0, []
    slowest = 0.0
    with memory_limit(2**29):
        for _ in range(2000):
            (tmp_path / "file.pt").write_bytes(mutated(rng, files))
            start = time.process_time()
            try:
                got = load(tmp_path / "file.pt")
                loaded += 1
                check_leaves(got, (tmp_path / "file.pt").stat().st_size)
                if (tmp_path / "file.pt").read_bytes()[
                    :2
                ] == b"PK":  # checksums: the damage was where nothing is stored
                    assert_same(got, tree)
            except CheckpointError as error:
                messages.append(str(error))
            slowest = max(slowest, time.process_time() - start)
    assert slowest < 1
    assert loaded > 50, "else the damage is too great to test what loads"
    assert len(messages) > 1000
    assert all(message.isprintable() for message in messages)


def check_leaves(tree, file_size: int) -> None:
    if isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            check_leaves(item, file_size)
    elif isinstance(tree, np.ndarray):
        assert not tree.flags.writeable
        assert tree.nbytes <= file_size
        assert len(tree.tobytes()) == tree.nbytes  # every byte can be read
    else:
        assert tree is None or isinstance(tree, bool | int | float | str | bytes | np.generic | np.dtype)


@contextlib.contextmanager
def memory_limit(more: int):
    """Let the process map at most `more` bytes beyond what it has, where the system can say."""
    statm = pathlib.Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
