"""The training experiment end to end, and the networks and recipes that configs describe."""

import importlib
import json
import os
import pathlib
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
from dime_jax._util import records as _records
from dime_jax.evidence import metrics
from dime_jax.training.records import read_records
from experiments import attack, launch, memorisation, questions, runs, train
from experiments.configs import cifar10, digits
from experiments.rendering import render
from experiments.study_data import open_study


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Where the smoke training of the digits was."""
    workdir = tmp_path_factory.mktemp("digits")
    assert train.run(digits.get_config("smoke"), workdir) == workdir / "model"
    return workdir


def test_smoke_needs_only_a_workdir_and_makes_a_model(workdir):
    model = workdir / "model"
    denoiser = dj.load_denoiser(model)
    assert denoiser.image_shape == (8, 8, 1)
    source = data.open_source("digits")
    split = data.read_split(model / "split.npz", source)
    expected = data.random_split(source, 898, 0)
    np.testing.assert_array_equal(split.member, expected.member)
    np.testing.assert_array_equal(split.heldout, expected.heldout)
    lines = [json.loads(line) for line in (model / "training_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert {path.name for path in (workdir / "train").glob("*.png")} == {
        "loss.png",
        "samples_000002.png",
        "samples_000004.png",
    }
    assert sorted(path.name for path in (workdir / "snapshots").iterdir()) == ["2", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "stl10u", "celeba"])
def test_smoke_is_smoke_everywhere(tmp_path, name):
    config = importlib.import_module(f"experiments.configs.{name}").get_config("smoke")
    model = train.run(config, tmp_path)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(dj.load_denoiser(model).params))
    assert parameters < 50_000
    assert [line["step"] for line in read_records(tmp_path / "train")] == [2, 4]
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == ["2", "4"]


@pytest.mark.parametrize("path", sorted((pathlib.Path(train.__file__).parent / "configs").glob("*.py")))
def test_every_smoke_training_is_of_a_tiny_network_and_a_few_updates(path):
    module = importlib.import_module(f"experiments.configs.{path.stem}")
    if not hasattr(module, "get_config"):
        return
    config = module.get_config("smoke")
    if "recipe" in config.get("train", {}):
        assert config.train.recipe.steps <= 4
        assert config.train.recipe.batch_size <= 16
        shapes = models.param_shapes(train.model_spec(config).denoiser)["params"]
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 50_000


class TestProgress:
    """On what the smoke training of the digits leaves."""

    def test_snapshots_are_the_models_on_the_way(self, workdir):
        last, model = dj.load_denoiser(workdir / "snapshots" / "4"), dj.load_denoiser(workdir / "model")
        assert last.fingerprint == model.fingerprint
        assert dj.load_denoiser(workdir / "snapshots" / "2").fingerprint != model.fingerprint

    def test_loss_and_auc_over_updates(self, workdir):
        memorisation.main(digits.get_config("smoke"), str(workdir), "experiments/configs/digits.py:smoke")
        assert (workdir / "progress.png").read_bytes().startswith(b"\x89PNG")
        numbers = _records.parse(
            memorisation.TrainingProgress, json.loads((workdir / "progress.json").read_text()), "progress"
        )
        assert numbers.study == "digits:smoke, seed 0"
        assert (numbers.updates, numbers.logged, numbers.images) == ([2, 4], [2, 4], (30, 30))
        # The last AUC again, from the model itself.
        study, model = open_study(digits.get_config("smoke"), workdir), dj.load_denoiser(workdir / "model")
        half = attack.halves_of(digits.get_config("smoke"), study).calibration
        transform = data.transform_for(study.source, model.image_shape)
        scores = [
            dj.sima(model.eps_fn(), model.schedule, np.stack([transform(study.source[i].image) for i in side]), 70)
            for side in (half.member, half.heldout)
        ]
        assert numbers.auc["70"][1].value == pytest.approx(metrics.auc(*scores), abs=1e-6)
        text = render("progress.md", numbers=numbers, picture="progress.png")
        assert f"`{model.fingerprint[:16]}`" in text
        assert f"| 4 | {numbers.loss[1]:.4f} |" in text

    def test_the_model_can_be_attacked(self, workdir):
        results = attack.run(digits.get_config("smoke"), workdir, "experiments/configs/digits.py:smoke")
        assert {row.label for row in results.results} == {"loss@1", "pia_l4@2", "dime@2", "level_only@1"}
        assert results.blind_baseline.images == (40, 40)
        (study,) = runs.group_runs([runs.read_run(workdir / "attack")])
        assert study.labels == ["seed 0"]
        assert "Does crowding help?" in render("questions.md", study=study, answers=questions.answers(study))

    def test_visible_means_from_there_on(self):
        aucs = [metrics.Estimate(0.6, low, 0.7) for low in (0.55, 0.45, 0.51, 0.6)]
        assert memorisation.first_visible([1, 2, 3, 4], aucs) == 3
        assert memorisation.first_visible([1, 2], aucs[:2]) is None
        assert memorisation.first_visible([3, 4], aucs[2:]) == 3

    def test_without_snapshots_it_says_how_to_get_them(self, tmp_path):
        with pytest.raises(ValueError, match=r"train with --config\.train\.snapshot_every=N"):
            memorisation.run(digits.get_config("smoke"), tmp_path, "digits")


def test_an_attack_on_a_model_of_another_split_or_recipe_is_refused(workdir, tmp_path):
    config = digits.get_config("smoke").copy_and_resolve_references().unlock()
    with pytest.raises(ValueError, match=r"no model in .*: run experiments\.train with the same config"):
        attack.run(config, tmp_path)
    attack.check_trained(config, workdir / "model", open_study(config, workdir))
    config.data.split_seed = 1
    with pytest.raises(ValueError, match=r"must be trained with the config's images, .*, got"):
        attack.run(config, workdir)
    config.data.split_seed, config.train.recipe.steps = 0, 5
    with pytest.raises(ValueError, match="must be trained with the config's steps, 5, got 4"):
        attack.run(config, workdir)


def test_the_paper_network_is_the_one_of_the_published_checkpoints():
    spec = train.model_spec(cifar10.get_config())
    shapes = models.param_shapes(spec.denoiser)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == 35_746_307
    assert shapes["constants"]["time_table"].shape == (1000, 128)
    assert spec.denoiser.dropout == 0.1


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
