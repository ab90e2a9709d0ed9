"""The training experiment end to end, and the networks and recipes that configs describe."""

import json

import jax
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import data, models, training
from experiments import train
from experiments.configs import cifar10, digits


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
    assert training.Recipe(**config.train.recipe).steps > 0


def test_unknown_networks_are_refused():
    config = digits.get_config("smoke").copy_and_resolve_references().unlock()
    config.train.architecture.kind = "transformer"
    with pytest.raises(ValueError, match=r"unknown config\.train\.architecture\.kind 'transformer'"):
        train.model_spec(config)
