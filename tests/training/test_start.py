"""Training that starts at a model: all of its weights, or an adapter beside them."""

import json
import pathlib
import shutil

import jax
import numpy as np
import optax
import pytest
import tiny

import dime_jax as dj
from dime_jax import models, training
from dime_jax._util.distributed import data_mesh, replicated
from dime_jax.loading import model_directory
from dime_jax.models import low_rank
from dime_jax.training import checkpoints, inputs, keys, method, objective, step

SPEC = tiny.spec(time_table_steps=1000)
RECIPE = tiny.recipe(steps=10)
RANK = 2


def train(workdir, members=range(6), recipe=RECIPE, spec=SPEC, **more):
    options = training.TrainingOptions(
        log_every=5, save_every=5, snapshot_every=5, silent=True, devices=jax.devices()[:1]
    )
    return training.train(workdir, spec, tiny.source(), np.array(members), recipe, options=options, **more)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return train(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """The workdir of an adapter for six other images."""
    workdir = tmp_path_factory.mktemp("adapted")
    assert train(workdir, range(4, 10), start=base, rank=RANK) == workdir / "adapter.safetensors"
    return workdir


def weights(model):
    return model_directory.read_model(pathlib.Path(model)).variables


def assert_equal(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("rank", [None, RANK])
def test_the_first_update_is_made_at_the_weights_of_the_start(base, rank):
    variables = weights(base)
    state = step.initial_state(SPEC, RECIPE, optax.sgd(1.0), variables, rank)
    assert_equal(state.params, state.ema)
    assert_equal(state.variables(None if rank is None else variables), variables)
    if rank is not None:
        held = sum(leaf.size for leaf in jax.tree.leaves(state))
        assert held < sum(leaf.size for leaf in jax.tree.leaves(variables)), "the base is no part of the state"


def test_an_update_of_an_adapter_is_the_chain_rule(base):
    """And the base is an argument of the step: another one takes the same program."""
    variables, mesh = weights(base), data_mesh(jax.devices()[:1])
    images = np.random.default_rng(0).uniform(-1, 1, (4, 4, 4, 1)).astype(np.float32)
    examples, own = inputs.Examples(images, None, np.ones(4, bool)), keys.update_keys(0, 1)
    noised = objective.noise_examples(own, examples, SPEC.schedule.build(), "epsilon", RECIPE.flips)
    losses = objective.image_losses(models.build(SPEC.denoiser), {"constants": variables["constants"]})
    full = method.mean_gradient(losses, variables["params"], noised, keys.as_key(own.dropout)).gradient
    full = {f"params/{path}": leaf for path, leaf in low_rank.kernels(full).items()}
    plan = method.shuffled_method(RECIPE, 10)._replace(optimizer=optax.sgd(0.5))
    base_tree = jax.device_put(variables, replicated(mesh))
    update = step.make_step(SPEC, RECIPE, plan, mesh, base_tree)

    def fresh():
        state = step.initial_state(SPEC, RECIPE, plan.optimizer, variables, RANK)
        return jax.device_put(state, replicated(mesh))

    before = jax.device_get(fresh().params)
    after, loss = update(fresh(), examples, own)
    assert before.keys() == full.keys()
    for path, (down, up) in after.params.items():
        np.testing.assert_array_equal(down, before[path].down)  # its gradient is 0 while up is
        outer = [np.tensordot(down[..., r], full[path], full[path].ndim - 1) for r in range(RANK)]
        np.testing.assert_allclose(up, -0.5 * np.stack(outer), rtol=1e-4, atol=1e-6)
    other = jax.tree.map(lambda leaf: 1.5 * leaf, base_tree)
    _, other_loss = update.func(update.args[0], other, fresh(), examples, own)
    assert update.func._cache_size() == 1
    assert abs(float(other_loss) - float(loss)) > 1e-3


def test_the_adapter_that_is_written_is_the_average_of_the_last_state(base, adapted):
    opened = dj.open_model(base, lora=[adapted / "adapter.safetensors"]).denoiser
    plan = method.shuffled_method(RECIPE, 6)
    like = step.initial_state(SPEC, RECIPE, plan.optimizer, weights(base), RANK)
    with checkpoints.TrainingCheckpoints(adapted / "train" / "state") as states:
        state, _ = states.restore(jax.device_put(like, jax.devices()[0]))
    expected = low_rank.merge(weights(base), jax.device_get(state.ema))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), opened.params, expected)
    assert opened.fingerprint != dj.load_denoiser(base).fingerprint
    early = dj.open_model(base, lora=[adapted / "snapshots" / "5.safetensors"]).denoiser
    late = dj.open_model(base, lora=[adapted / "snapshots" / "10.safetensors"]).denoiser
    assert early.fingerprint != late.fingerprint == opened.fingerprint
    assert not (adapted / "model").exists()


def test_a_full_fine_tune_is_a_model_directory(base, tmp_path):
    tuned = train(tmp_path / "run", range(4, 10), tiny.recipe(steps=5), start=base)
    assert tuned == tmp_path / "run" / "model"
    fresh = train(tmp_path / "fresh", range(4, 10), tiny.recipe(steps=5))
    started, others = weights(base), (weights(tuned), weights(fresh))
    moved, elsewhere = (
        sum(float(np.sum((a - b) ** 2)) for a, b in zip(jax.tree.leaves(started), jax.tree.leaves(other)))
        for other in others
    )
    assert 0 < moved < 0.1 * elsewhere, "it stays near where it started"
    facts = model_directory.read_spec_file(tuned)["metadata"]
    assert facts["start"] == dj.load_denoiser(base).fingerprint
    assert "start" not in model_directory.read_spec_file(fresh)["metadata"]


def test_stopped_and_continued_an_adapter_is_the_same(base, adapted, tmp_path):
    train(tmp_path / "run", range(4, 10), tiny.recipe(steps=5), start=base, rank=RANK)
    half = (tmp_path / "run" / "adapter.safetensors").read_bytes()
    file = train(tmp_path / "run", range(4, 10), start=base, rank=RANK)
    assert half != file.read_bytes() == (adapted / "adapter.safetensors").read_bytes()
    before = file.stat().st_mtime_ns
    train(tmp_path / "run", range(4, 10), start=base, rank=RANK)
    assert file.stat().st_mtime_ns == before, "a finished run is left alone"


def test_another_start_or_rank_is_another_run(base, adapted, tmp_path):
    def refused(match, workdir=adapted, **more):
        with pytest.raises(ValueError, match=match) as error:
            train(workdir, range(4, 10), **more)
        assert "\n" not in str(error.value)

    prints = [model_directory.read_spec_file(base.parent / name)["fingerprint"] for name in ("model", "snapshots/5")]
    refused(
        f"holds another run, which differs: start {prints[0]} -> {prints[1]}$",
        start=base.parent / "snapshots/5",
        rank=RANK,
    )
    refused(f"rank {RANK} -> 3$", start=base, rank=3)
    refused(f"rank {RANK} -> None$", start=base)
    refused(f"start {prints[0]} -> None, rank {RANK} -> None$")
    refused("rank=2 needs start", tmp_path, rank=2)
    refused(r"rank must be an integer in \[1, 8192\], got 0", tmp_path, start=base, rank=0)
    other = tiny.spec(time_table_steps=1000, stem_channels=16)
    refused(
        "must be that of .*model, from which it differs: spec.architecture.stem_channels 8 -> 16",
        tmp_path,
        start=base,
        spec=other,
    )
    refused("no model directory 'nowhere'", tmp_path, start="nowhere", rank=2)
    assert not list(tmp_path.iterdir())
    (tmp_path / "adapter.safetensors").write_bytes(b"mine")
    refused("adapter.safetensors exists already and was not trained here", tmp_path, start=base, rank=2)


def test_a_run_that_was_begun_before_there_was_a_start_goes_on(base, tmp_path):
    shutil.copytree(base.parent, tmp_path / "run")
    path = tmp_path / "run" / "train" / "run.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in facts.items() if name not in ("start", "rank")}))
    assert train(tmp_path / "run", recipe=tiny.recipe(steps=11)) == tmp_path / "run" / "model"
