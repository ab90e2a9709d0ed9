"""A reference beside a model takes no more memory than the model alone: the two take turns."""

import gc
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import models
from dime_jax.loading import conversion, model_directory
from dime_jax.models import low_rank

SCRIPT = pathlib.Path(__file__).with_name("audited_alone.py")
# Most of its weights are at a resolution of one pixel, so that asking it is quick.
SPEC = models.ModelSpec(
    denoiser=models.DdpmUnetSpec(
        image_channels=1,
        stem_channels=32,
        time_features=32,
        time_channels=128,
        level_channels=(32, 64, 256, 768),
        num_res_blocks=1,
        attention_levels=(),
        norm_groups=8,
        middle_attention=False,
    ),
    image_shape=(8, 8, 1),
)


def some_adapter(variables, scale):
    rng = np.random.default_rng(1)
    adapter = low_rank.init(variables, 4, rng)
    return {p: f._replace(up=scale * rng.standard_normal(f.up.shape, np.float32)) for p, f in adapter.items()}


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.usefixtures("small_batches", "small_model_check", "no_figures")
def test_whenever_a_model_is_read_no_other_is_in_memory(tmp_path, monkeypatch):
    digits = model_directory.find_model("digits")
    stored = model_directory.read_model(digits)
    variables = jax.device_get(stored.variables)
    adapter = some_adapter(variables, np.float32(1e-3))
    file = conversion.save_adapter(tmp_path / "x.safetensors", stored.spec, adapter, stored.fingerprint)
    del stored
    before, held, read = live_bytes(), [], model_directory.read_model

    def reading(directory):
        held.append(live_bytes() - before)
        return read(directory)

    monkeypatch.setattr(model_directory, "read_model", reading)
    images = np.stack([dj.data.open_source("digits").read(index) for index in range(34)])
    dj.audit(
        dj.AuditConfig(
            output=tmp_path / "audit",
            heldout=dj.data.from_images(images[:30]),
            candidates=dj.data.from_images(images[30:]),
            use=dj.UseOptions(lora=(file,)),
            options=dj.scoring.ScoringOptions(silent=True, devices=jax.devices()[:1]),
        )
    )
    assert len(held) >= 6, "each of the two, when it is opened, checked, and asked"
    assert max(held) < 2 * models.count_values(variables), "less than half of a model's four bytes a weight"


def random_variables(scale):
    rng = np.random.default_rng(0)

    def fill(leaf):
        return np.float32(scale / np.sqrt(np.prod(leaf.shape[:-1]))) * rng.standard_normal(leaf.shape, np.float32)

    return jax.tree.map(fill, models.model_shapes(SPEC))


def peak_memory(*arguments):
    """In bytes, of one audit; on one device, or each would hold the weights."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1")
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.splitlines()[-1])


@pytest.mark.slow  # two audits, in processes of their own
@pytest.mark.parametrize("kind", ["adapter on every kernel", "full fine-tune"])
def test_a_reference_takes_at_most_a_tenth_more(kind, tmp_path):
    variables = random_variables(1.0)
    assert 4 * models.count_values(variables) >= 200e6
    base = model_directory.save_model(tmp_path / "base", SPEC, variables)
    if kind == "full fine-tune":
        tuned = model_directory.save_model(tmp_path / "tuned", SPEC, random_variables(1.01))
        model, reference, loras = tuned, base, ()
    else:
        adapter, file = some_adapter(variables, np.float32(0.1)), tmp_path / "x.safetensors"
        conversion.save_adapter(file, SPEC, adapter, model_directory.read_spec_file(base)["fingerprint"])
        model, reference, loras = base, "own", (file,)
    alone = peak_memory(tmp_path / "alone", model, "none", *loras)
    beside = peak_memory(tmp_path / "beside", model, reference, *loras)
    print(f"{kind}: {alone / 1e6:.0f} MB alone, {beside / 1e6:.0f} MB beside a reference, {beside / alone:.3f} times")
    assert (tmp_path / "beside" / "reference").is_dir()
    assert not (tmp_path / "alone" / "reference").exists()
    assert beside <= 1.1 * alone
