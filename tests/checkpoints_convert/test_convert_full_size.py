"""Full-size conversions: random weights in the published networks' shapes, in PyTorch's format."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from checkpoints_convert import guided, mapping, secmi
from dime_jax.loading import opening
from dime_jax.models import DdpmUnetSpec
from tests.checkpoints_convert.torch_writer import Streamed, write_zip

pytestmark = pytest.mark.slow

# Runs in a process of its own, whose peak memory is the conversion's. (What `getrusage` says begins with the memory of
# the process that started it.)
CONVERT = """
import pathlib, re, sys
from dime_jax.loading.conversion import convert
convert(sys.argv[1], sys.argv[2])
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]))
"""


def write_random(path, naming, spec, wrap=lambda state: state):
    """A checkpoint of small random weights, written block by block."""

    def tensor(shape):
        scale = 1 / np.sqrt(max(1, np.prod(shape[1:])))
        return Streamed(
            shape, np.float32, lambda a, b: scale * np.random.default_rng(a).normal(size=b - a).astype(np.float32)
        )

    table = mapping.name_table(spec, naming(spec))
    write_zip(path, wrap({entry.tensor: tensor(entry.tensor_shape) for entry in table}))


def convert_apart(source, output):
    """Peak memory in bytes of a conversion."""
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(source), str(output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def parameter_bytes(denoiser):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(denoiser.params["params"]))


def test_secmi_cifar10(tmp_path):
    spec = DdpmUnetSpec(time_table_steps=1000, norm_eps=1e-5, symmetric_downsample=True)
    x_t = np.zeros((1, 3, 32, 32), np.float32)
    write_random(tmp_path / "ckpt.pt", secmi.naming, spec, lambda state: {"ema_model": state, "step": 1, "x_T": x_t})
    peak = convert_apart(tmp_path / "ckpt.pt", tmp_path / "model")
    denoiser = opening.load_denoiser(tmp_path / "model")
    assert parameter_bytes(denoiser) == 4 * 35_746_307
    assert peak <= 1.3 * parameter_bytes(denoiser) + 1e9
    assert np.isfinite(denoiser.eps(np.zeros((2, 32, 32, 3), np.float32), 5)).all()


def test_guided_imagenet256(tmp_path):
    """The published class-conditional model, recognised by its shapes; one 256×256 forward pass runs."""
    write_random(tmp_path / "256x256_diffusion.pt", guided.naming, guided.presets()["256x256"].architecture)
    peak = convert_apart(tmp_path / "256x256_diffusion.pt", tmp_path / "model")
    (tmp_path / "256x256_diffusion.pt").unlink()
    metadata = json.loads((tmp_path / "model" / "spec.json").read_text())["metadata"]
    assert metadata["setting"] == "256x256"
    denoiser = opening.load_denoiser(tmp_path / "model")
    size = parameter_bytes(denoiser)
    assert size == 4 * 553_838_086
    print(f"peak memory of the conversion: {peak / 1e9:.2f} GB for {size / 1e9:.2f} GB of parameters")
    assert peak <= 1.3 * size + 1e9
    eps = denoiser.eps(np.zeros((1, 256, 256, 3), np.float32), 5, condition=[7])
    assert eps.shape == (1, 256, 256, 3)
    assert np.isfinite(eps).all()
