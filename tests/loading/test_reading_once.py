"""A checkpoint is hashed once, read and unpickled once, and converted once, however many processes ask for it."""

import collections
import hashlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

import dime_jax as dj
from checkpoints_convert import ddim, mapping, torch_file, weights_file
from checkpoints_convert.options import ConversionOptions
from dime_jax.loading import conversion
from dime_jax.models import DdpmUnetSpec
from tests.checkpoints_convert.torch_writer import write_zip

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PIPELINE = GOLDEN / "latent" / "stable_diffusion"


class Reads:
    """What was done with each file, by name; and the bytes that were converted of memory-mapped ones."""

    def __init__(self):
        self.hashed, self.opened = collections.Counter(), collections.Counter()
        self.unpickled = self.converted_bytes = 0


@pytest.fixture
def reads(monkeypatch):
    counts = Reads()

    def file_digest(stream, *rest):
        counts.hashed[pathlib.Path(stream.name).name] += 1
        return digest(stream, *rest)

    def read_weights(file):
        counts.opened[file.name] += 1
        return read(file)

    def unpickle_one(*arguments):
        counts.unpickled += 1
        return unpickle(*arguments)

    def convert_one(tensor, layout):
        counts.converted_bytes += tensor.nbytes
        return to_ours(tensor, layout)

    digest, read, unpickle, to_ours = hashlib.file_digest, weights_file.read, torch_file.unpickle, mapping.to_ours
    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    monkeypatch.setattr(weights_file, "read", read_weights)
    monkeypatch.setattr(torch_file, "unpickle", unpickle_one)
    monkeypatch.setattr(mapping, "to_ours", convert_one)
    return counts


def bytes_read():
    """By this process so far, with read() and its like; not through memory maps."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.skipif(not pathlib.Path("/proc/self/io").exists(), reason="only Linux counts what a process reads")
def test_a_file_is_read_at_most_three_times_its_size(tmp_path, reads, monkeypatch):
    spec = DdpmUnetSpec(stem_channels=64, time_features=64, level_channels=(64, 128))
    table = mapping.name_table(spec, ddim.naming(spec))
    write_zip(tmp_path / "x.pt", {entry.tensor: np.ones(entry.tensor_shape, np.float32) for entry in table})
    size = (tmp_path / "x.pt").stat().st_size
    options = ConversionOptions(image_size=16)
    conversion.convert(GOLDEN / "ddpm_ddim.pt", tmp_path / "first", options)  # imports what a conversion needs
    monkeypatch.setattr("dime_jax.loading.model_directory.save_model", lambda output, *_: output.mkdir() or output)
    reads.__init__()

    def convert():
        before = bytes_read()
        _, was_there = conversion.convert_once(tmp_path / "x.pt", tmp_path / "cache", options, lambda spec: None)
        return was_there, bytes_read() - before + reads.converted_bytes

    was_there, read = convert()
    assert not was_there
    assert (reads.hashed, reads.opened, reads.unpickled) == ({"x.pt": 1}, {"x.pt": 1}, 1)
    assert reads.converted_bytes > 0.9 * size
    assert 2.9 * size < read <= 3.1 * size  # hashed, compared with its checksums, converted
    reads.__init__()
    was_there, read = convert()
    assert was_there
    assert (reads.hashed, reads.opened, reads.unpickled) == ({"x.pt": 1}, {}, 0)
    assert read <= 1.05 * size


def test_each_file_of_a_pipeline_and_each_lora_is_read_once(tmp_path, reads):
    weight = safetensors.numpy.load_file(PIPELINE / "unet" / "diffusion_pytorch_model.safetensors")["conv_in.weight"]
    factors = {
        "lora_A": np.zeros((1, *weight.shape[1:]), np.float32),
        "lora_B": np.zeros((len(weight), 1, 1, 1), np.float32),
    }
    tensors = {f"unet.conv_in.{name}.weight": factor for name, factor in factors.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "style.safetensors")
    dj.open_model(PIPELINE, cache=tmp_path / "cache", lora=[tmp_path / "style.safetensors"])
    two = {"diffusion_pytorch_model.safetensors": 2}  # of the U-Net and of the autoencoder
    assert reads.opened == two | {"model.safetensors": 1, "style.safetensors": 1}
    hashed = {name: count for name, count in reads.hashed.items() if name.endswith(".safetensors")}
    assert hashed == two | {"model.safetensors": 1}


OPEN = """
import sys
from dime_jax.loading import model_directory
import dime_jax as dj
save = model_directory.save_model
model_directory.save_model = lambda *arguments: print("converted", flush=True) or save(*arguments)
print("ready", flush=True)
sys.stdin.readline()
print(dj.open_model(sys.argv[1], say=lambda text: None).origin.partition(",")[0])
"""


def test_processes_that_open_the_same_checkpoint_convert_it_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DIME_JAX_CACHE", str(tmp_path))
    command = [sys.executable, "-c", OPEN, str(GOLDEN / "ddpm_secmi.pt")]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = sorted(line for process in processes for line in process.communicate(timeout=120)[0].splitlines())
    assert said == ["converted", "converted from ddpm_secmi.pt", "converted from ddpm_secmi.pt before"]
    assert len(list((tmp_path / "models").glob("model-*"))) == 1


def test_converted_models_are_kept_in_the_users_cache_and_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("DIME_JAX_CACHE", str(tmp_path))
    said = []
    dj.open_model(GOLDEN / "ddpm_secmi.pt", say=said.append)
    (directory,) = (tmp_path / "models").glob("model-*")
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    assert said == [f"the converted model is cached in {directory} ({size / 1e6:.1f} MB)"]
