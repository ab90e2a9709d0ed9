"""What the network is asked and what its error is, against formulas written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dime_jax import models
from dime_jax.training import inputs, keys, method, objective

IMAGES = np.random.default_rng(0).uniform(-1, 1, (6, 4, 4, 1)).astype(np.float32)
MASK = np.array([True, True, False, True, True, False])


def noised(schedule, prediction="epsilon", flips=False, images=IMAGES, number=1):
    examples = inputs.Examples(images, None, np.ones(len(images), bool))
    return objective.noise_examples(keys.update_keys(0, number), examples, schedule, prediction, flips)


@pytest.mark.parametrize("prediction", models.spec.PREDICTIONS)
def test_question_and_answer_are_of_one_draw(schedule, prediction):
    batch, noise = noised(schedule, prediction), np.asarray(noised(schedule).target)
    t = np.asarray(batch.t)
    scale, sigma = (
        np.asarray(table)[t][:, None, None, None] for table in (schedule.sqrt_abar_table, schedule.sigma_table)
    )
    np.testing.assert_allclose(batch.x, scale * IMAGES + sigma * noise, rtol=1e-6, atol=1e-6)
    target = {"epsilon": noise, "sample": IMAGES, "v_prediction": scale * noise - sigma * IMAGES}[prediction]
    np.testing.assert_allclose(batch.target, target, rtol=1e-6, atol=1e-6)


def test_noise_is_standard_gaussian_and_t_uniform(schedule):
    batch = noised(schedule, images=np.zeros((4000, 4, 4, 1), np.float32))
    noise, t = np.asarray(batch.target), np.asarray(batch.t)
    assert abs(noise.mean()) < 0.02
    assert abs(noise.var() - 1) < 0.03
    assert abs((noise**4).mean() - 3) < 0.2
    counts = np.bincount(t // 100, minlength=10)
    assert counts.shape == (10,)
    assert np.all(np.abs(counts - 400) < 5 * np.sqrt(400))
    assert not np.array_equal(t, np.asarray(noised(schedule, images=batch.x, number=2).t))


def test_flips_mirror_half_of_the_images(schedule):
    images = np.tile(IMAGES[:1], (1000, 1, 1, 1))
    shown = np.asarray(noised(schedule, "sample", flips=True, images=images).target)
    mirrored = np.all(shown == images[:, :, ::-1], axis=(1, 2, 3))
    assert np.all(mirrored | np.all(shown == images, axis=(1, 2, 3)))
    assert 420 < mirrored.sum() < 580


def test_streams_are_apart():
    first, second = keys.update_keys(0, 1), keys.update_keys(0, 2)
    every = [tuple(bits) for bits in (*first, *second, *keys.update_keys(1, 1))]
    assert len(set(every)) == 12
    assert all(np.array_equal(a, b) for a, b in zip(first, keys.update_keys(0, 1)))


def losses_by_hand(params, batch, key):
    """Squared distance of a linear "network" from the target, one loss per row."""
    del key
    return jnp.mean((params["gain"] * batch.x - batch.target) ** 2, axis=(1, 2, 3))


def test_masked_rows_do_not_count(schedule):
    batch = noised(schedule)._replace(mask=jnp.asarray(MASK))
    x, target = np.asarray(batch.x)[MASK], np.asarray(batch.target)[MASK]
    params = {"gain": jnp.float32(0.3)}
    loss, gradient = method.mean_gradient(losses_by_hand, params, batch, jax.random.key(0))
    np.testing.assert_allclose(loss, np.mean((0.3 * x - target) ** 2), rtol=1e-5)
    np.testing.assert_allclose(gradient["gain"], np.mean(2 * x * (0.3 * x - target)), rtol=1e-5)


def test_a_batch_of_padding_has_no_gradient(schedule):
    batch = noised(schedule)._replace(mask=jnp.zeros(len(IMAGES), bool))
    loss, gradient = method.mean_gradient(losses_by_hand, {"gain": jnp.float32(0.3)}, batch, jax.random.key(0))
    assert loss == 0
    assert gradient["gain"] == 0


def test_loss_is_the_mean_over_pixels_of_the_image_channels():
    spec = tiny.spec(learned_sigma=True)
    network = models.build(spec.denoiser)
    variables = models.init(spec.denoiser, jax.random.key(0))
    losses = objective.image_losses(network, {})
    batch = noised(spec.schedule.build())

    @jax.jit
    def losses_and_gradient(params):
        found, pull_back = jax.vjp(lambda p: losses(p, batch, jax.random.key(0)), params)
        return found, pull_back(jnp.ones_like(found))[0]

    found, gradient = losses_and_gradient(variables["params"])
    # A fresh network answers 0, so its loss is the target's mean square.
    np.testing.assert_allclose(found, np.mean(np.asarray(batch.target) ** 2, axis=(1, 2, 3)), rtol=1e-5)
    bias = np.asarray(gradient["conv_out"]["bias"])
    assert bias.shape == (2,)
    assert bias[0] != 0
    assert bias[1] == 0
