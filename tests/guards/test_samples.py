"""`check_model` on models whose errors and samples are known."""

import json

import numpy as np
import pytest
from PIL import Image

import dime_jax as dj
from dime_jax.guards import samples as check


@pytest.fixture
def images():
    return np.random.default_rng(0).uniform(-1, 1, size=(3, 4, 4, 3)).astype(np.float32)


def test_the_ideal_model_has_no_error_and_samples_its_image(images, schedule, tmp_path):
    """One training image: eps* = (x - √ᾱ x₁)/σ is the noise itself, and DDIM ends at x₁."""
    ideal = dj.IdealDenoiser(images[:1], schedule)
    found = check.check_model(ideal, images[:1], tmp_path / "out", num_samples=5, ddim_steps=10)
    assert found.timesteps[0] == 0
    assert found.timesteps[-1] == 999
    np.testing.assert_allclose(found.errors, 0, atol=1e-4)
    np.testing.assert_allclose(found.samples, np.repeat(images[:1], 5, axis=0), atol=1e-3)
    one_step = check.ddim_sample(ideal, np.ones((1, 4, 4, 3), np.float32), steps=1)  # x₀ straight from t = T - 1
    np.testing.assert_allclose(one_step, images[:1], atol=1e-3)
    with Image.open(found.figure) as sheet:
        assert sheet.size == (12, 8)
        np.testing.assert_allclose(np.asarray(sheet)[:4, :4], (images[0] + 1) * 127.5, atol=1)
    rows = json.loads((tmp_path / "out" / "check.json").read_text())["errors"]
    assert [row["t"] for row in rows] == list(found.timesteps)
    assert found.check.passed


def test_a_dead_model_has_error_one_and_labels_reach_the_model(images, schedule, tmp_path):
    seen = []

    def dead(x, t, label):
        seen.append(np.asarray(label))
        return np.zeros_like(x)

    denoiser = dj.Denoiser.from_function(dead, schedule, (4, 4, 3), num_classes=2)
    found = check.check_model(denoiser, images, tmp_path, condition=[0, 1, 0], num_samples=3, ddim_steps=2)
    np.testing.assert_allclose(found.errors, found.errors[0])
    assert not found.check.passed
    assert 0.5 < found.errors[0] < 1.6  # mean square of 144 standard normals
    assert [list(label) for label in (seen[0], seen[-1])] == [[0, 1, 0], [0, 1, 0]]
    with pytest.raises(ValueError, match="num_samples"):
        check.check_model(denoiser, images, tmp_path, condition=[0, 1, 0], num_samples=0)
