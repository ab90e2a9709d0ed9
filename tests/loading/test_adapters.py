"""Adapters of our own: written, opened with --lora, and refused in one line where they are hostile or do not fit."""

import json
import pathlib
import struct

import jax
import numpy as np
import pytest
import safetensors.numpy
import threadpoolctl
from safetensors import safe_open

import dime_jax as dj
from dime_jax import cli
from dime_jax.loading import conversion, model_directory
from dime_jax.models import low_rank

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "latent"
FOLDER = GOLDEN / "stable_diffusion"
DIGITS = model_directory.read_model(model_directory.find_model("digits"))
KERNEL = "params/conv_in/kernel"


def some_adapter(variables, rank=3):
    """Factors for every kernel, none of them zero."""
    rng = np.random.default_rng(0)
    fresh = low_rank.init(variables, rank, rng)
    return {p: f._replace(up=0.1 * rng.standard_normal(f.up.shape, np.float32)) for p, f in fresh.items()}


ADAPTER = some_adapter(DIGITS.variables)


@pytest.fixture
def file(tmp_path):
    return conversion.save_adapter(tmp_path / "adapter.safetensors", DIGITS.spec, ADAPTER, DIGITS.fingerprint)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A model directory of a latent model."""
    return conversion.convert(FOLDER, tmp_path_factory.mktemp("pipeline") / "model")


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)


def settings_of(file):
    with safe_open(file, framework="numpy") as opened:
        return json.loads(opened.metadata()["adapter"])


def rewrite(file, tensors=(), removed=(), metadata=None, **settings):
    """The file with some tensors and settings replaced."""
    stored, said = safetensors.numpy.load_file(file), settings_of(file) | settings
    kept = {name: tensor for name, tensor in (stored | dict(tensors)).items() if name not in removed}
    safetensors.numpy.save_file(kept, file, {"adapter": json.dumps(said)} if metadata is None else metadata)


def test_an_adapter_for_images_there_and_back(file):
    opened = dj.open_model("digits", lora=[file])
    assert_close(opened.denoiser.params, low_rank.merge(DIGITS.variables, ADAPTER))
    assert opened.denoiser.name == "digits + adapter.safetensors"
    assert opened.facts[-1] == "LoRA: adapter.safetensors at scale 1"
    assert opened.denoiser.fingerprint == model_directory.fingerprint(opened.denoiser.params, DIGITS.spec)
    halved = dj.open_model("digits", lora=[file], lora_scale=[-0.5]).denoiser
    assert_close(halved.params, low_rank.merge(DIGITS.variables, ADAPTER, -0.5))
    assert len({halved.fingerprint, opened.denoiser.fingerprint, DIGITS.fingerprint}) == 3
    rewrite(file, alpha=1.5)
    assert dj.open_model("digits", lora=[file], lora_scale=[-1.0]).denoiser.fingerprint == halved.fingerprint


def test_the_file_names_its_paths_and_its_base(file):
    assert settings_of(file) == {
        "base": DIGITS.fingerprint, "rank": 3, "alpha": 3, "format": "dime_jax adapter", "version": 1,
    }  # fmt: skip
    names = safetensors.numpy.load_file(file).keys()
    assert names == {f"{path}/{role}" for path in low_rank.kernels(DIGITS.variables) for role in ("down", "up")}
    before = file.stat().st_mtime_ns
    conversion.save_adapter(file, DIGITS.spec, ADAPTER, DIGITS.fingerprint)
    assert file.stat().st_mtime_ns == before, "the same adapter gives the same bytes"


def test_an_adapter_for_latents_there_and_back(pipeline, tmp_path):
    """In peft's names, of U-Net and text encoder."""
    model = model_directory.read_model(pipeline)
    variables = {name: part for name, part in model.variables.items() if name != "autoencoder"}
    adapter = some_adapter(variables)
    file = conversion.save_adapter(tmp_path / "x.safetensors", model.spec, adapter, model.fingerprint)
    names = safetensors.numpy.load_file(file)
    assert len(names) == 2 * len(adapter)
    assert names["unet.conv_in.lora_A.weight"].shape == (3, 4, 3, 3)
    assert names["text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_B.weight"].ndim == 2
    opened = dj.open_model(pipeline, lora=[file], lora_scale=[0.5]).denoiser
    assert_close(opened.params, low_rank.merge(model.variables, adapter, 0.5))
    with pytest.raises(ValueError, match=r"autoencoder/params/.* has no name in LoRA files"):
        conversion.save_adapter(file, model.spec, low_rank.init(model.variables, 2, np.random.default_rng(0)), "x")


def refused(file, match, model="digits"):
    with pytest.raises(ValueError, match=match) as error:
        dj.open_model(model, lora=[file])
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)
    assert len(str(error.value)) < 400


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tensors": {f"{KERNEL}/down": ones(3, 3, 2, 3)}}, r"down must have shape \[3, 3, 1, 3\], got \[3, 3, 2, 3\]"),
        ({"tensors": {f"{KERNEL}/up": ones(32, 3)}}, r"up must have shape \[3, 32\], got \[32, 3\]"),
        (
            {"tensors": {f"{KERNEL}/up": np.full((3, 32), np.nan, np.float32)}},
            "kernel, merged, has 288 of 288 values NaN",
        ),
        ({"tensors": {f"{KERNEL}/up": ones(3, 32) * np.float32(3e38)}}, "values NaN or infinite"),
        ({"tensors": {f"{KERNEL}/up": ones(3, 32, dtype=np.int64)}}, "up must hold floating-point numbers, got int64"),
        ({"tensors": {"params/nowhere/kernel/up": ones(3, 3)}}, "unknown tensor params/nowhere/kernel/up"),
        ({"tensors": {f"{KERNEL}/middle": ones(3, 3)}}, "unknown tensor params/conv_in/kernel/middle"),
        ({"tensors": {"params/conv_in/bias/up": ones(3, 3)}}, "unknown tensor params/conv_in/bias/up"),
        ({"tensors": {"a\nb" * 500: ones(3)}}, "unknown tensor"),
        ({"removed": [f"{KERNEL}/up"]}, "must have a down and an up factor, got params/conv_in/kernel/down alone"),
        ({"rank": 4}, "must have shape"),
        ({"rank": 10**9}, r"rank must be an integer in \[1, 8192\], got 1000000000"),
        ({"rank": 0}, "rank must be an integer"),
        ({"rank": 3.0}, "adapter.rank must be a number"),
        ({"alpha": 1e30}, "alpha must be a number"),
        ({"alpha": float("nan")}, "alpha must be a number"),
        ({"alpha": "much"}, "adapter.alpha must be a number, got 'much'"),
        ({"base": "0" * 64}, "is for a model of fingerprint 0000.*, and this one has 6d28d82e"),
        ({"base": "x" * 10**6}, "is for a model of fingerprint xxxx"),
        ({"base": None}, "adapter.base must be text"),
        ({"version": 2}, "must be dime_jax adapter, version 1, got dime_jax adapter, 2"),
        ({"format": "other"}, "must be dime_jax adapter, version 1, got other, 1"),
        ({"trust": "me"}, "bad fields in adapter: unknown 'trust'"),
        ({"metadata": {}}, "must be a dime_jax adapter"),
        ({"metadata": {"adapter": "[" * 10**5}}, "adapter must be a small JSON object"),
        ({"metadata": {"adapter": '{"base": "a", "base": "b"}'}}, "adapter must be a small JSON object"),
        ({"metadata": {"adapter": "{}"}}, "bad fields in adapter: missing 'alpha', missing 'base'"),
    ],
)
def test_hostile_adapters(file, changes, match):
    rewrite(file, **changes)
    refused(file, match)


def test_damaged_files(file, tmp_path):
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    name = f'"{KERNEL}/up"'.encode()
    twice = header.replace(f'"{KERNEL}/down"'.encode(), name)
    assert twice.count(name) == 2
    for damaged in (content[:-1], content[: 8 + length // 2], struct.pack("<Q", len(twice)) + twice + data, b"", b"PK"):
        file.write_bytes(damaged)
        refused(file, "not a safetensors file|must be a dime_jax adapter|the key .* occurs twice")
    (tmp_path / "x.pt").write_bytes(b"nothing")
    refused(tmp_path / "x.pt", "not a PyTorch file")


def test_an_adapter_of_images_on_a_latent_model_and_the_other_way_round(file, pipeline, tmp_path):
    refused(file, "unknown LoRA tensor params/conv_in/kernel/down", pipeline)
    model = model_directory.read_model(pipeline)
    adapter = some_adapter({"denoiser": model.variables["denoiser"]})
    other = conversion.save_adapter(tmp_path / "x.safetensors", model.spec, adapter, model.fingerprint)
    refused(other, "is for a model of fingerprint")


def test_from_the_command_line(file, tmp_path, capsys):
    rewrite(file, base="0" * 64)
    assert cli.main(["audit", "--lora", str(file), "--output", str(tmp_path / "out"), "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dime-jax: {file}: is for a model of fingerprint 0000")


def test_the_fingerprint_does_not_depend_on_how_many_threads_multiply():
    found = set()
    for threads in (1, 2):
        with threadpoolctl.threadpool_limits(threads, "blas"):
            found.add(dj.open_model("digits", lora=["digits_lora"], say=lambda text: None).denoiser.fingerprint)
    assert len(found) == 1
