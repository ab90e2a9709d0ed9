"""The objective is the right one: trained on one image, a network's loss becomes that of the closed form.

For a single image the best possible loss is 0. With flips the image and its mirror image are two training points, the
best loss at middle noise is well above 0, and the closed form knows it.
"""

import jax
import numpy as np
import pytest
import tiny

import dime_jax as dj
from dime_jax import data, training

IMAGE = np.array([[0.9, -0.9], [0.9, -0.9]], np.float32)[None, :, :, None]
TIMES = (300, 400, 500)


@pytest.mark.slow
def test_the_loss_reaches_the_ideal_denoisers(tmp_path, schedule):
    spec = tiny.spec(
        (2, 2, 1), stem_channels=16, level_channels=(16,), time_features=16, time_channels=64, norm_groups=1
    )
    recipe = training.TrainingRecipe(
        steps=500, batch_size=256, learning_rate=3e-3, warmup_steps=50, ema_decay=0.99, flips=True
    )
    options = training.TrainingOptions(silent=True, devices=jax.devices()[:1])
    model = dj.load_denoiser(training.train(tmp_path, spec, data.from_images(IMAGE), [0], recipe, options=options))
    points = np.concatenate([IMAGE, IMAGE[:, :, ::-1]])
    ideal = dj.IdealDenoiser(points, schedule)

    noise = np.random.default_rng(0).standard_normal((1000, 2, 2, 1), np.float32)
    for t in TIMES:
        x = float(schedule.sqrt_abar(t)) * np.tile(points, (500, 1, 1, 1)) + float(schedule.sigma(t)) * noise
        found, best = (float(np.mean((np.asarray(denoiser.eps(x, t)) - noise) ** 2)) for denoiser in (model, ideal))
        assert best > 0.05
        assert 0.9 * best < found < 1.1 * best
