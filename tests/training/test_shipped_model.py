"""The model that ships: what it claims about itself, and that it remembers as much as the example needs."""

import csv
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors

import dime_jax as dj
from dime_jax import data, scoring, training
from dime_jax.evidence import Verdict
from dime_jax.loading import model_directory
from experiments import digits_lora, train
from experiments.configs import digits

DIRECTORY = pathlib.Path(dj.__file__).parent / "shipped_models" / "digits"


@pytest.fixture(scope="module")
def source():
    return data.open_source("digits")


@pytest.fixture(scope="module")
def split(source):
    return data.read_split(DIRECTORY / "split.npz", source)


def test_it_is_what_the_config_describes(source, split):
    config, contents = digits.get_config(), model_directory.read_spec_file(DIRECTORY)
    assert contents["spec"] == train.model_spec(config).to_json()
    recipe = training.TrainingRecipe(**config.train.recipe)
    assert contents["metadata"]["recipe"] == recipe.identity()
    assert contents["metadata"]["steps"] == recipe.steps
    expected = data.random_split(source, 898, 0)
    np.testing.assert_array_equal(split.member, expected.member)
    np.testing.assert_array_equal(split.heldout, expected.heldout)
    assert contents["metadata"]["images"]["fingerprint"] == data.fingerprint(source, split.member)


def test_it_is_small():
    assert sum(path.stat().st_size for path in DIRECTORY.rglob("*")) < 6e6


def test_its_log_and_metrics_are_its_own():
    lines = [json.loads(line) for line in (DIRECTORY / "training_log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == digits.get_config().train.recipe.steps
    assert lines[-1]["loss"] < 0.1 < lines[0]["loss"]
    metrics = json.loads((DIRECTORY / "metrics.json").read_text())
    assert metrics["fingerprints"]["model"] == dj.load_denoiser("digits").fingerprint
    assert 0.9 < max(row["auc"]["value"] for row in metrics["results"]) < 0.99


def test_it_remembers_many_of_its_members_and_not_all(source, split):
    model = dj.load_denoiser("digits")
    transform = data.transform_for(source, model.image_shape)

    def scores(indices):
        images = np.stack([transform(source.read(index)) for index in indices[:300]])
        return np.asarray(dj.pia(model.eps_fn(), model.schedule, images, 50, p=2))

    auc = dj.metrics.evaluate(scores(split.member), scores(split.heldout)).auc.value
    assert 0.9 < auc < 0.99


def test_the_lora_is_what_its_experiment_makes(source, split):
    """Its base, size and images; the digits that nobody saw are not among them."""
    file = model_directory.find_adapter("digits_lora") / model_directory.ADAPTER
    assert file.stat().st_size <= 500_000
    with safetensors.safe_open(file, framework="numpy") as opened:
        said = json.loads(opened.metadata()["adapter"])
    assert (said["base"], said["rank"]) == (dj.load_denoiser("digits").fingerprint, digits_lora.RANK)
    own, expected = data.read_split(file.with_name("split.npz"), source), digits_lora.cut(split, 0)
    assert len(own.member) == digits_lora.IMAGES
    np.testing.assert_array_equal(own.member, expected.member)
    np.testing.assert_array_equal(own.heldout, expected.heldout)


@pytest.mark.slow  # compiles a gradient
def test_the_lora_can_be_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(digits_lora, "PASSES", 1)
    file = digits_lora.run(digits.get_config(), tmp_path)
    opened = dj.open_model("digits", lora=[file]).denoiser
    assert opened.fingerprint != dj.load_denoiser("digits").fingerprint
    assert (file.parent / "split.npz").read_bytes() == (DIRECTORY.parent / "digits_lora" / "split.npz").read_bytes()


@pytest.mark.slow  # the whole example
def test_the_example_names_a_third_of_its_members_with_few_false_alarms(tmp_path):
    options = scoring.ScoringOptions(silent=True, devices=jax.local_devices()[:1])
    dj.audit(dj.AuditConfig(tmp_path, options=options))
    with open(tmp_path / "candidates.csv", newline="") as file:
        named = [row["member"] for row in csv.DictReader(file) if row["verdict"] == Verdict.EVIDENCE]
    assert named.count("True") >= 8
    assert named.count("False") <= 2
