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


def memoriser(train, name="memoriser", num_classes=None, labels=None, schedule=SCHEDULE):
    """eps = (x - √ᾱ y)/σ, with y the training image nearest to x/√ᾱ: the ideal denoiser at low noise.

    With `labels` of the training images, the nearest among those of the class that is asked for.
    """
    train = floats(train).reshape(len(train), -1)

    def eps(x, t, label=None):
        flat = np.asarray(x).reshape(len(x), -1)
        scale, sigma = float(schedule.sqrt_abar(int(t))), float(schedule.sigma(int(t)))
        distances = np.sum((flat[:, None] - scale * train[None]) ** 2, axis=-1)
        if labels is not None:
            distances[np.asarray(label)[:, None] != labels] = np.inf
        nearest = scale * train[np.argmin(distances, axis=1)]
        return ((flat - nearest) / sigma).reshape(np.shape(x)).astype(np.float32)

    return dj.Denoiser.from_function(eps, schedule, SHAPE, name=name, num_classes=num_classes)


def contrasts(count, seed):
    """Noise of more or less contrast."""
    rng = np.random.default_rng(seed)
    contrast = rng.uniform(0.3, 1, (count, 1, 1, 1))
    return np.uint8(np.round(127.5 + contrast * rng.uniform(-127.5, 127.5, (count, *SHAPE))))


FORGOTTEN = 0.45  # of every training image


def forgetful(train, name="forgetful"):
    """Remembers a paler version of its training images, so that what it forgot grows with their contrast."""
    train = floats(train).reshape(len(train), -1)

    def eps(x, t):
        flat = np.asarray(x).reshape(len(x), -1)
        scale, sigma = float(SCHEDULE.sqrt_abar(int(t))), float(SCHEDULE.sigma(int(t)))
        nearest = np.argmin(np.sum((flat[:, None] - scale * train[None]) ** 2, axis=-1), axis=1)
        return ((flat - scale * (1 - FORGOTTEN) * train[nearest]) / sigma).reshape(np.shape(x)).astype(np.float32)

    return dj.Denoiser.from_function(eps, SCHEDULE, SHAPE, name=name)


def partly(train, strength, name="partly"):
    """Remembers as far as `strength` goes; what it makes of a picture otherwise, no statistic of pictures explains.

    Of two such models that is the same, as of a fine-tune and its base.
    """
    remembers, waves = memoriser(train), np.random.default_rng(77).normal(size=(64, 3)) / 4

    def eps(x, t):
        flat = np.asarray(x).reshape(len(x), -1)
        own = 0.08 * np.exp(np.sin(flat @ waves).sum(axis=1))[:, None] * np.sign(flat)
        guess, memory = float(SCHEDULE.sigma(int(t))) * flat, np.asarray(remembers.eps(x, t)).reshape(len(x), -1)
        return ((1 - strength) * guess + strength * memory + own).reshape(np.shape(x)).astype(np.float32)

    return dj.Denoiser.from_function(eps, SCHEDULE, SHAPE, name=name)


class Counting:
    """A model that counts the images it sees, and is interrupted at one call."""

    def __init__(self, model, interrupted=None):
        self.model, self.interrupted, self.calls, self.images = model, interrupted, 0, 0

    def __call__(self, x, t):
        self.calls += 1
        self.images += len(x)
        if self.calls == self.interrupted:
            raise KeyboardInterrupt
        return self.model.eps(x, t)

    @property
    def denoiser(self):
        return dj.Denoiser.from_function(self, self.model.schedule, SHAPE, name=self.model.name)


def config(output, **settings):
    defaults = {
        "attacks": ATTACKS,
        "queries": (3,),
        "grid": GRID,
        "options": scoring.ScoringOptions(silent=True, micro_batch=64),
    }
    return AuditConfig(output=output, **{**defaults, **settings})
