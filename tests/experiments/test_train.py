"""The training experiment end to end, and the networks and recipes that configs describe."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import data, models, training
from experiments import attack, launch, train
from experiments.configs import cifar10, digits
from experiments.study import open_study


def test_smoke_needs_only_a_workdir_and_makes_a_model(tmp_path):
    model = train.run(digits.get_config("smoke"), tmp_path)
    assert model == tmp_path / "model"
    denoiser = dj.load_denoiser(model)
    assert denoiser.image_shape == (8, 8, 1)
    source = data.open_source("digits")
    split = data.read_split(model / "split.npz", source)
    expected = data.random_split(source, 898, 0)
    np.testing.assert_array_equal(split.member, expected.member)
    np.testing.assert_array_equal(split.heldout, expected.heldout)
    lines = [json.loads(line) for line in (model / "training_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert {path.name for path in (tmp_path / "train").glob("*.png")} == {
        "loss.png",
        "samples_000002.png",
        "samples_000004.png",
    }


def test_an_attack_on_a_model_of_another_split_or_recipe_is_refused(tmp_path):
    config = digits.get_config("smoke").copy_and_resolve_references().unlock()
    with pytest.raises(ValueError, match=r"no model in .*: run experiments\.train with the same config"):
        attack.run(config, tmp_path)
    train.run(config, tmp_path)
    attack.check_trained(config, tmp_path / "model", open_study(config, tmp_path))
    config.data.split_seed = 1
    with pytest.raises(ValueError, match=r"was trained with images .*, expected the config's"):
        attack.run(config, tmp_path)
    config.data.split_seed, config.train.recipe.steps = 0, 5
    with pytest.raises(ValueError, match="was trained with steps 4, expected the config's 5"):
        attack.run(config, tmp_path)


def test_the_paper_network_is_the_one_of_the_published_checkpoints():
    spec = train.model_spec(cifar10.get_config())
    shapes = models.param_shapes(spec.architecture)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == 35_746_307
    assert shapes["constants"]["time_table"].shape == (1000, 128)
    assert spec.architecture.dropout == 0.1


@pytest.mark.parametrize(
    "config",
    [digits.get_config(), *(cifar10.get_config(variant) for variant in ("paper", "laptop", "smoke"))],
    ids=["digits", "paper", "laptop", "smoke"],
)
def test_every_config_describes_a_recipe(config):
    train.model_spec(config)
    assert training.TrainingRecipe(**config.train.recipe).steps > 0


def test_unknown_networks_are_refused():
    config = digits.get_config("smoke").copy_and_resolve_references().unlock()
    config.train.architecture.kind = "transformer"
    with pytest.raises(ValueError, match=r"unknown config\.train\.architecture\.kind 'transformer'"):
        train.model_spec(config)


def start_digits(workdir, steps, devices=1):
    """The training of the shipped model, shortened, in a process of its own."""
    command = [sys.executable, "-m", "experiments.train", "--config=experiments/configs/digits.py"]
    command += [f"--workdir={workdir}", f"--config.train.recipe.steps={steps}"]
    command += [f"--config.train.{name}_every=10" for name in ("log", "save", "sample")]
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(command, env={**os.environ, "XLA_FLAGS": flags}, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_digits_run_killed_or_moved_to_two_devices_ends_where_it_would_have(tmp_path):
    unbroken, killed, moved = tmp_path / "unbroken", tmp_path / "killed", tmp_path / "moved"
    assert start_digits(unbroken, 40).wait() == 0

    process, log = start_digits(killed, 40), killed / "train" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "model").exists()
    assert start_digits(killed, 40).wait() == 0

    assert start_digits(moved, 20).wait() == 0
    shutil.rmtree(moved / "model")
    assert start_digits(moved, 40, devices=2).wait() == 0

    expected = dj.load_denoiser(unbroken / "model").params
    same = dj.load_denoiser(killed / "model").params
    close = dj.load_denoiser(moved / "model").params
    jax.tree.map(np.testing.assert_array_equal, same, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), close, expected)


def test_flags_of_experiments_are_read_in_both_spellings(monkeypatch):
    seen = []
    monkeypatch.setattr(launch.app, "run", lambda main: seen.extend(sys.argv))
    monkeypatch.setattr(sys, "argv", ["a-b", "--num-processes=2", "--config.attack.max-queries", "3-4"])
    launch.run_app(print)
    assert seen == ["a-b", "--num_processes=2", "--config.attack.max_queries", "3-4"]
