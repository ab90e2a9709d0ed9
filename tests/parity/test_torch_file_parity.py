"""The torch-free reader against `torch.load`, and the tests' torch-free writer against PyTorch, both ways."""

import io
import pickletools
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.torch_file import CheckpointError, load
from tests.checkpoints_convert.torch_writer import STORAGE_NAMES, Parameter, write_legacy, write_zip

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parity

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = [
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
]
ZIPPED = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def as_numpy(tensor):
    """A tensor as an array, by its bytes: torch's own conversion knows neither bfloat16 nor float8."""
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))


def assert_equal(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        expected = as_numpy(theirs)
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        assert ours.tobytes() == expected.tobytes()
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_equal(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for item, expected in zip(ours, theirs):
            assert_equal(item, expected)
    else:
        assert ours == theirs


def save(path, tree, zipped, **options):
    torch.save(tree, path, _use_new_zipfile_serialization=zipped, **options)
    return path


@pytest.mark.parametrize("name", ["ddpm_secmi", "ddpm_secmi_bare_legacy", "ddpm_ddim", "ddpm_ddim_train_list"])
def test_golden_files(name):
    assert_equal(load(GOLDEN / f"{name}.pt"), torch.load(GOLDEN / f"{name}.pt", weights_only=True))


@ZIPPED
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path, name, protocol, zipped):
    tensor = torch.randint(0, 2, (3, 4, 5)).to(getattr(torch, name))
    path = save(tmp_path / "file.pt", {"x": tensor}, zipped, pickle_protocol=protocol)
    assert_equal(load(path), {"x": tensor})


@ZIPPED
@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex128", "uint16"])
def test_every_layout(tmp_path, name, zipped):
    base = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(getattr(torch, name))
    tree = {
        "base": base,
        "scalar": base.new_ones(()),
        "empty": base.new_zeros(0, 7),
        "permuted": base.permute(3, 1, 0, 2),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "sliced": base[1:, ::2, 1:3, ::3],
        "element": base[1, 2, 3, 4],
        "overlapping": base.as_strided((4, 3), (2, 1)),
        "singleton": base[:1, :, :1],
    }
    path = save(tmp_path / "file.pt", tree, zipped)
    ours = load(path)
    assert_equal(ours, tree)
    assert np.shares_memory(ours["base"], ours["permuted"])
    if zipped or name != "uint16":  # PyTorch writes legacy files of its newest dtypes, and fails to read them
        assert_equal(ours, torch.load(path, weights_only=True))


@ZIPPED
def test_a_training_checkpoint(tmp_path, zipped):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    scheduler.step()
    tree = {
        "model": model.state_dict(),
        "parameters": dict(model.named_parameters()),
        "optim": optimizer.state_dict(),
        "sched": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "ema": OrderedDict(model.state_dict()),
        "loss": np.float64(0.1),
        "shape": torch.Size([1, 2]),
        "step": 10,
    }
    path = save(tmp_path / "file.pt", tree, zipped)
    ours = load(path)
    assert_equal(ours, torch.load(path, weights_only=False))
    assert np.shares_memory(ours["model"]["0.weight"], ours["ema"]["0.weight"])


@ZIPPED
def test_left_out_objects_are_refused_by_name(tmp_path, zipped):
    cases = {
        "torch.nn.modules.linear.Linear": torch.nn.Linear(2, 2),
        "_rebuild_sparse_tensor": torch.eye(3).to_sparse(),
        "_rebuild_tensor_v2": torch.ones(2, dtype=torch.complex64).conj(),
        "expanded": torch.ones(1).expand(5),
    }
    for name, value in cases.items():
        with pytest.raises(CheckpointError, match=name):
            load(save(tmp_path / "file.pt", [value], zipped))


def test_a_script_module_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="TorchScript"):
        load(tmp_path / "file.pt")


def test_without_checksums(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path / "file.pt", torch.ones(3), zipped=True)
    finally:
        torch.serialization.set_crc32_options(before)
    assert_equal(load(path), torch.ones(3))


@pytest.mark.parametrize("write", [write_zip, write_legacy])
@pytest.mark.parametrize("name", DTYPES)
def test_our_writer_is_read_by_pytorch(tmp_path, name, write):
    if write is write_legacy and name not in STORAGE_NAMES:
        pytest.skip("PyTorch cannot read its own legacy files of this dtype")
    base = np.arange(24).reshape(2, 3, 4).astype(getattr(ml_dtypes, name, None) or name)
    state_dict = OrderedDict(base=base, view=base[:, 1:, ::2], transposed=base.T, scalar=base[0, 0, :1].reshape(()))
    tree = {"model": state_dict, "empty": np.zeros([0, 2], base.dtype), "steps": [1, 2.5, None, "x"]}
    write(tmp_path / "file.pt", tree)
    theirs = torch.load(tmp_path / "file.pt", weights_only=True)
    assert_equal({**tree, "model": dict(state_dict)}, theirs)
    assert_equal(load(tmp_path / "file.pt"), theirs)


def test_our_writer_writes_the_same_pickle(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = torch.from_numpy(array.copy())
    write_zip(tmp_path / "ours.pt", {"a": array, "b": Parameter(array[:])})
    torch.save({"a": tensor, "b": torch.nn.Parameter(tensor)}, tmp_path / "theirs.pt")
    assert pickled_opcodes(tmp_path / "ours.pt") == pickled_opcodes(tmp_path / "theirs.pt")


def pickled_opcodes(path):
    """The opcodes of a file's pickle but for its memo, which a pickler may fill and use as it likes."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        stream = io.BytesIO(archive.read(name))
    memo, opcodes = {}, []
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = opcodes[-1]
        else:
            opcodes.append(memo[argument] if "GET" in opcode.name else (opcode.name, argument))
    return opcodes
