"""Weights that are freed and read again: the same model, the same programs."""

import pathlib
import shutil
import weakref

import jax
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import models, scoring
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.loading import model_directory
from dime_jax.scoring import call_runner
from dime_jax.scoring.planning import grid_jobs

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "latent" / "stable_diffusion"


def copied(model, directory, factor):
    """A model of the same architecture with other weights."""
    stored = model_directory.read_model(model_directory.find_model(model))
    variables = jax.tree.map(lambda leaf: np.float32(factor) * leaf, stored.variables)
    return model_directory.save_model(directory, stored.spec, variables, {}, stored.tokenizer_files)


def weak_leaves(denoiser):
    return [weakref.ref(leaf) for leaf in jax.tree.leaves(denoiser.params)]


@pytest.fixture
def traces(monkeypatch):
    """The shapes for which networks are traced, in order."""
    seen, noise_of = [], NoiseSchedule.noise_of

    def counting(schedule, output, *rest):
        seen.append(output.shape)
        return noise_of(schedule, output, *rest)

    models.denoise.cache_clear()  # what other tests have compiled
    monkeypatch.setattr(NoiseSchedule, "noise_of", counting)
    return seen


def asked(denoiser):
    x = np.random.default_rng(0).normal(size=(2, *denoiser.shape)).astype(np.float32)
    condition = denoiser.embed(["a cat", ""]) if denoiser.takes_text else None
    return np.asarray(denoiser.eps(x, 30, condition))


@pytest.mark.parametrize(("what", "options"), [("digits", {}), (FOLDER, {}), (FOLDER, {"hold": "bfloat16"})])
def test_released_weights_are_freed_and_read_again_without_compiling_anything(what, options, tmp_path, traces):
    denoiser = dj.open_model(what, cache=tmp_path, say=lambda text: None, **options).denoiser
    before, leaves = asked(denoiser), weak_leaves(denoiser)
    denoiser.release()
    assert {leaf() for leaf in leaves} == {None}
    denoiser.release()  # twice is once
    np.testing.assert_array_equal(asked(denoiser), before)
    assert {leaf.dtype for leaf in jax.tree.leaves(denoiser.params)} == {np.dtype(options.get("hold", "float32"))}
    assert len(traces) == 1


def test_a_model_of_the_same_spec_shares_the_program(tmp_path, traces):
    """In the engine, and called by itself; the weights of a finished table are held by nobody."""
    source = dj.data.from_images(np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), np.uint8))
    options = scoring.ScoringOptions(silent=True, micro_batch=2, devices=jax.devices()[:1])
    jobs = grid_jobs(["loss"], "light")
    pair = [dj.load_denoiser("digits"), dj.load_denoiser(copied("digits", tmp_path / "other", 1.01))]
    for turn in range(2):
        for number, denoiser in enumerate(pair):
            scoring.score(denoiser, source, jobs, tmp_path / f"{turn}_{number}", options=options)
            leaves = weak_leaves(denoiser)
            denoiser.release()
            assert {leaf() for leaf in leaves} == {None}
    assert traces == [(2, 8, 8, 1)]
    assert asked(pair[0]).shape == asked(pair[1]).shape
    assert not np.array_equal(asked(pair[0]), asked(pair[1]))
    assert len(traces) == 2
    assert call_runner.network_program(pair[0].apply, None) is call_runner.network_program(pair[1].apply, None)


def test_arrays_in_memory_are_kept():
    stored = model_directory.read_model(model_directory.find_model("digits"))
    denoiser = models.image_denoiser(stored.spec, stored.variables)
    denoiser.release()
    assert denoiser.params is stored.variables


def test_another_model_in_the_same_place_is_refused(tmp_path):
    directory = copied("digits", tmp_path / "model", 1.0)
    denoiser = dj.load_denoiser(directory)
    denoiser.release()
    shutil.rmtree(directory)
    copied("digits", directory, 1.01)
    with pytest.raises(ValueError, match=r"must hold the model that was opened, 6d28d82e.*, got ") as error:
        asked(denoiser)
    assert "\n" not in str(error.value)
    shutil.rmtree(directory)
    with pytest.raises(ValueError, match="is not a model directory"):
        asked(denoiser)
