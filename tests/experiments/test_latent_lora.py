"""LoRAs of the latent study: its training loop, and the two experiments that use it, at the smallest scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj
from checkpoints_convert.convert import open_checkpoint
from dime_jax.models import low_rank
from experiments import finetune, latent_finetune, latent_study
from experiments import latent_lora as experiment
from experiments.configs.latent_digits import get_config

BASE = {"denoiser": {"params": {"dense": {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)}}}}
ROLES = ("tuned", "candidates", "heldout")
TARGET = np.arange(6, dtype=np.float32).reshape(3, 2)


def distance(variables, key):
    """From a target, with a little noise, of the kernel; the bias has a gradient, too, if it is trained."""
    dense = variables["denoiser"]["params"]["dense"]
    return jnp.sum((dense["kernel"] - TARGET + 0.01 * jax.random.normal(key, (3, 2))) ** 2) + jnp.sum(dense["bias"])


def fit(directory, steps, **more):
    params = low_rank.init(BASE, 2, np.random.default_rng(0))
    settings = {"base": BASE, "rate": 0.05, "every": 100, **more}
    return latent_study.fit(distance, params, steps, jax.random.key(0), directory, **settings)


def test_the_loop_trains_an_adapter_and_leaves_the_base(tmp_path):
    kept = {}
    adapter = fit(tmp_path, 600, keep=lambda number, average: kept.update({number: average}))
    assert adapter.keys() == {"denoiser/params/dense/kernel"}
    dense = low_rank.merge(BASE, adapter)["denoiser"]["params"]["dense"]
    np.testing.assert_allclose(dense["kernel"], TARGET, atol=0.1)
    np.testing.assert_array_equal(dense["bias"], 1)
    np.testing.assert_array_equal(BASE["denoiser"]["params"]["dense"]["kernel"], 1)
    assert list(kept) == [100, 200, 300, 400, 500, 600]
    jax.tree.map(np.testing.assert_array_equal, kept[600], adapter)


def test_stopped_and_continued_the_adapter_is_the_same(tmp_path):
    fit(tmp_path / "a", 200)
    halves = fit(tmp_path / "a", 400)
    jax.tree.map(np.testing.assert_array_equal, halves, fit(tmp_path / "b", 400))


def test_the_files_in_the_tests_are_what_the_experiment_makes(latent_lora):
    """As far as can be seen without training: network, rank, layers; nobody's image is on two sides."""
    config, spec = get_config("lora"), open_checkpoint(latent_lora / "pipeline").spec
    assert spec == latent_study.model_spec(config.train.width, spec.autoencoder)
    assert config.train.images == experiment.BASE
    model = dj.open_model(latent_lora / "pipeline", lora=[latent_lora / "lora.safetensors"], say=lambda text: None)
    assert model.denoiser.name == "pipeline + lora.safetensors"
    sources = {name: dj.data.open_source(f"folder:{latent_lora / f'lora_{name}'}") for name in ROLES}
    pictures = {name: {of.read(index).tobytes() for index in range(len(of))} for name, of in sources.items()}
    assert {name: len(of) for name, of in sources.items()} == {"tuned": 40, "candidates": 40, "heldout": 150}
    assert not pictures["heldout"] & (pictures["tuned"] | pictures["candidates"])
    assert len(pictures["tuned"] & pictures["candidates"]) == 20
    assert sources["candidates"].read(0).tobytes() in pictures["tuned"]


def tiny(variant):
    config = get_config(variant).copy_and_resolve_references().unlock()
    config.train.update(autoencoder_steps=2, unet_steps=4, width=8)
    return config.lock()


@pytest.mark.slow  # compiles gradients of every network
def test_the_lora_from_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "RECIPE", dataclasses.replace(experiment.RECIPE, steps=2))
    file = experiment.run(tiny("lora"), tmp_path)
    before = file.read_bytes()
    opened = dj.open_model(tmp_path / "pipeline", lora=[file], cache=tmp_path / "cache").denoiser
    base = dj.load_denoiser(tmp_path / "model")
    x, told = jnp.zeros((1, *base.shape)) + 0.5, base.embed(["the digit one"])
    assert float(jnp.abs(opened.eps(x, 100, told) - base.eps(x, 100, told)).max()) > 0
    assert experiment.run(tiny("lora"), tmp_path).read_bytes() == before


@pytest.mark.slow  # trains and asks three fine-tunes
def test_the_study_of_latent_fine_tunes(tmp_path, monkeypatch):
    for name, value in {"IMAGES": 4, "FITTED": 20, "BATCH": 2, "PASSES": (1, 2)}.items():
        monkeypatch.setattr(finetune, name, value)
    config = tiny("finetune").copy_and_resolve_references().unlock()
    config.train.images = 120
    found = latent_finetune.run(config.lock(), tmp_path, "experiments/configs/latent_digits.py:finetune")
    assert [one.kind for one in found] == ["full", "rank-16", "rank-4"]
    for one in found:
        assert (one.members, one.fitted, one.counted, one.passes) == (4, 20, 76, [1, 2])
        assert len(one.found) == 2
        assert {"loss", "level_only", "loss_level", "loss_level_beside"} <= one.found[0].keys()
        assert one.found[0]["loss"].keys() == {"plain", "adjusted", "beside", "beside_adjusted"}
    snapshots = tmp_path / "finetune"
    assert (snapshots / "full" / "snapshots" / "4" / "spec.json").is_file()
    assert (snapshots / "rank-4" / "snapshots" / "2.safetensors").is_file()
