"""A model that remembers its training images, small enough for whole audits in seconds."""

import numpy as np

import dime_jax as dj
from dime_jax import scoring
from dime_jax.auditing import AuditConfig

SHAPE = (8, 8, 1)
SCHEDULE = dj.linear_schedule()
GRID = [{"t": 70, "gamma": 0.1}, {"t": 120, "gamma": 0.1}]
ATTACKS = ("sima_l4", "pia_l2", "dime")


def images(count, seed, shape=SHAPE, brightest=256):
    return np.random.default_rng(seed).integers(0, brightest, (count, *shape), dtype=np.uint8)


def source(pixels, name="arrays", **columns):
    return dj.data.from_images(pixels, name=name, **columns)


def floats(pixels):
    return pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)


def memoriser(train, name="memoriser", num_classes=None, labels=None):
    """eps = (x - √ᾱ y)/σ, with y the training image nearest to x/√ᾱ: the ideal denoiser at low noise.

    With `labels` of the training images, the nearest among those of the class that is asked for.
    """
    train = floats(train).reshape(len(train), -1)

    def eps(x, t, label=None):
        flat = np.asarray(x).reshape(len(x), -1)
        scale, sigma = float(SCHEDULE.sqrt_abar(int(t))), float(SCHEDULE.sigma(int(t)))
        distances = np.sum((flat[:, None] - scale * train[None]) ** 2, axis=-1)
        if labels is not None:
            distances[np.asarray(label)[:, None] != labels] = np.inf
        nearest = scale * train[np.argmin(distances, axis=1)]
        return ((flat - nearest) / sigma).reshape(np.shape(x)).astype(np.float32)

    return dj.Denoiser.from_function(eps, SCHEDULE, SHAPE, name=name, num_classes=num_classes)


def config(output, **settings):
    defaults = {
        "attacks": ATTACKS,
        "queries": (3,),
        "grid": GRID,
        "options": scoring.ScoringOptions(silent=True, micro_batch=64),
    }
    return AuditConfig(output=output, **{**defaults, **settings})
