"""The reader on good files: golden ones from PyTorch, and every dtype and layout from our own writer."""

import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.torch_file import CheckpointError, load
from tests.checkpoints_convert.torch_writer import Global, Parameter, Streamed, write_legacy, write_zip
from tests.checkpoints_convert.torch_writer import PickledCall as Call
from tests.checkpoints_convert.torch_writer import PickledStorage as Storage

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = [
    *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.complex64, np.complex128, np.bool_),
    *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
FORMATS = pytest.mark.parametrize("write", [write_zip, write_legacy])


def round_trip(tmp_path, write, tree, **options):
    path = tmp_path / "file.pt"
    write(path, tree, **options)
    return load(path)


def assert_same(got, expected):
    if isinstance(expected, np.ndarray):
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
        assert not got.flags.writeable
    elif isinstance(expected, dict):
        assert type(got) is dict
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected)
        assert len(got) == len(expected)
        for item, expected_item in zip(got, expected):
            assert_same(item, expected_item)
    else:
        assert (type(got), got) == (type(expected), expected)


def test_golden_zip_file():
    checkpoint = load(GOLDEN / "ddpm_secmi.pt")
    assert list(checkpoint) == ["net_model", "ema_model", "sched", "optim", "step", "x_T"]
    assert type(checkpoint["step"]) is int
    table = checkpoint["ema_model"]["time_embedding.timembedding.0.weight"]
    assert (table.shape, table.dtype) == ((1000, 32), np.float32)
    tensors = [*checkpoint["net_model"].values(), *checkpoint["ema_model"].values(), checkpoint["x_T"]]
    assert all(isinstance(tensor, np.ndarray) and np.isfinite(tensor).all() for tensor in tensors)
    weight = checkpoint["ema_model"]["head.weight"]
    np.testing.assert_array_equal(weight * 64, np.round(weight * 64))  # the golden weights are multiples of 1/64
    assert weight.any()


def test_golden_storages_are_used_once_each():
    # In this file the k-th tensor is the whole of storage k: an oracle that knows nothing of pickles.
    with zipfile.ZipFile(GOLDEN / "ddpm_ddim.pt") as archive:
        expected = [archive.read(f"ddpm_ddim/data/{key}") for key in range(144)]
    assert [tensor.tobytes() for tensor in load(GOLDEN / "ddpm_ddim.pt").values()] == expected


def test_golden_legacy_file_holds_the_same_weights():
    assert_same(load(GOLDEN / "ddpm_secmi_bare_legacy.pt"), load(GOLDEN / "ddpm_secmi.pt")["ema_model"])


def test_golden_training_list():
    model, _, epoch, step, ema = load(GOLDEN / "ddpm_ddim_train_list.pt")
    assert type(epoch) is type(step) is int
    assert not any(tensor.any() for tensor in model.values())
    assert all(key.startswith("module.") for key in model)
    assert_same(ema, load(GOLDEN / "ddpm_ddim.pt"))


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype(tmp_path, write, protocol, dtype):
    values = np.random.default_rng(0).integers(0, 2, [3, 4, 5]).astype(dtype)
    assert_same(round_trip(tmp_path, write, {"x": values}, protocol=protocol), {"x": values})


@FORMATS
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.complex128, np.uint16])
def test_every_layout(tmp_path, write, dtype):
    base = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(dtype)
    tree = {
        "scalar": np.array(3, dtype),
        "empty": np.zeros([0, 7], dtype),
        "empty inside": np.zeros([3, 0, 2], dtype),
        "transposed": base.transpose(3, 1, 0, 2),
        "fortran": np.asfortranarray(base),
        "sliced": base[1:, ::2, 1:3, ::3],
        "element": base[1, 2, 3, 4:5].reshape(()),
        "overlapping": np.lib.stride_tricks.as_strided(base, [4, 3], [2 * base.itemsize, base.itemsize]),
        "one row": base[:1, :, :1],
    }
    assert_same(round_trip(tmp_path, write, tree), tree)


@FORMATS
def test_shared_storages_share_memory(tmp_path, write):
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = round_trip(tmp_path, write, {"all": base, "row": base[1], "column": base[:, 1], "other": base.copy()})
    assert np.shares_memory(got["all"], got["row"])
    assert np.shares_memory(got["row"], got["column"])
    assert not np.shares_memory(got["all"], got["other"])
    np.testing.assert_array_equal(got["column"], [1, 5, 9])


@FORMATS
@pytest.mark.parametrize("protocol", [2, 4])
def test_containers_and_harmless_objects(tmp_path, write, protocol):
    state_dict = OrderedDict(weight=Parameter(np.ones(2, np.float32)))
    state_dict._metadata = OrderedDict([("", {"version": 1})])
    betas = (0.9, 0.999)
    tree = {
        "model": state_dict,
        "optim": {"state": {0: {"step": 5}, 1: {}}, "param_groups": [{"betas": betas}, {"betas": betas}]},
        "plain": [None, True, False, 0, -1, 255, 65536, 2**40, -(2**70), 1.5, float("inf"), "ü\n", ""],
        "empty": ((), [], {}, OrderedDict()),
        "size": Call(Global("torch", "Size"), ((2, 3),)),
        "device": Call(Global("torch", "device"), ("cuda", 0)),
        "dtype": Global("torch", "bfloat16"),
        "numpy": [np.float64(0.1), np.float32(2), np.int64(-3), np.bool_(True), np.uint8(7)],
        "bytes": b"ab\xff",
    }
    expected = {
        **tree,
        "model": {"weight": np.ones(2, np.float32)},
        "empty": ((), [], {}, {}),
        "size": (2, 3),
        "device": "cuda:0",
        "dtype": np.dtype(ml_dtypes.bfloat16),
    }
    assert_same(round_trip(tmp_path, write, tree, protocol=protocol), expected)


@FORMATS
def test_the_first_tensor_constructor(tmp_path, write):
    storage = Storage(Global("torch", "FloatStorage"), "12", 6)
    call = Call(Global("torch._utils", "_rebuild_tensor"), (storage, 1, (2, 2), (1, 2)))
    got = round_trip(tmp_path, write, call, extra={"12": np.arange(6, dtype=np.float32)})
    assert_same(got, np.array([[1, 3], [2, 4]], np.float32))


def test_top_level_tensor_and_odd_file_name(tmp_path):
    write_zip(tmp_path / "über.pt", np.arange(3), root="über")
    assert_same(load(str(tmp_path / "über.pt")), np.arange(3))


def test_arrays_are_aligned_views_on_the_file(tmp_path):
    got = round_trip(tmp_path, write_zip, [np.zeros(3, np.uint8), np.ones([4, 4])])
    assert got[1].flags.aligned
    assert not got[1].flags.owndata


def test_streamed_tensors(tmp_path):
    def block(start, stop):
        return np.arange(start, stop, dtype=np.float32) % 1000

    shape = (3, 1000, 1001)  # three blocks
    expected = block(0, 3 * 1000 * 1001).reshape(shape)
    for write in (write_zip, write_legacy):
        got = round_trip(tmp_path, write, {"w": Streamed(shape, np.float32, block)})
        np.testing.assert_array_equal(got["w"], expected)


@pytest.mark.slow
@FORMATS
def test_a_large_file_is_not_read(tmp_path, write):
    """A 2.2 GB file, one storage beyond the 2 GiB of zip's first version, is opened without its bytes in memory."""
    rows = 560_000

    def block(start, stop):
        return np.full(stop - start, start // 2**20, np.float32)

    path = tmp_path / "large.pt"
    write(path, {"w": Streamed((rows, 1000), np.float32, block), "last": np.ones(3)})
    assert path.stat().st_size > 2.2e9
    program = f"""
from checkpoints_convert.torch_file import load
def peak():  # not ru_maxrss, which starts with what the process that started this one had
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
checkpoint = load({str(path)!r})
assert checkpoint["w"].shape == ({rows}, 1000) and checkpoint["last"].sum() == 3
assert checkpoint["w"][-1, -1] == {(rows * 1000 - 1) // 2**20}
print(peak() - before)
"""
    try:
        result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    finally:
        path.unlink()  # pytest keeps the folders of several runs
    assert int(result.stdout) < 100_000, "KiB more than before"


def test_errors_name_the_file_once(tmp_path):
    with pytest.raises(CheckpointError, match=r"^[^:]*missing\.pt: no such regular file$"):
        load(tmp_path / "missing.pt")
    with pytest.raises(ValueError, match="no such regular file"):
        load(tmp_path)
