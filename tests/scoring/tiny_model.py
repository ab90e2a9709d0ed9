"""A model and images small enough that a whole grid of attacks takes seconds."""

import jax.numpy as jnp
import numpy as np

import dime_jax as dj
from dime_jax import scoring
from dime_jax.scoring import planning

SHAPE = (4, 4, 1)
SCHEDULE = dj.linear_schedule()
GRID = [
    *planning.grid_jobs(["loss", "pia_l2", "pian", "secmi", "sima_l4"], "quick"),
    *planning.grid_jobs(["sima_mc_norms", "sima_mc_vector", "dime", "dime_central", "level_only"], "quick", [2, 11]),
]
FEW = [
    *planning.grid_jobs(["loss", "pia_l4", "sima_l4"], "quick", settings=[{"t": 70}]),
    *planning.grid_jobs(["dime"], "quick", [2], settings=[{"t": 70, "gamma": 0.1}, {"t": 120, "gamma": 0.1}]),
]
TWO = [job for job in FEW if job.attack.name in ("loss", "dime")]


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), dtype=np.uint8)


def source(count=21, seed=0, labels=None):
    return dj.data.from_images(images(count, seed), labels=labels)


def floats(source, index=None):
    transform = dj.data.transform_for(source, SHAPE)
    return np.stack([transform(source[i].image) for i in (range(len(source)) if index is None else index)])


def unconditional(params, x, t, label):
    """tanh(W x) W' with a time-dependent gain: every pixel of eps depends on every pixel of x."""
    flat = x.reshape(len(x), -1) @ params[0]
    gain = jnp.float32(1) + jnp.broadcast_to(t, (len(x),)).astype(jnp.float32)[:, None] / 100
    return (jnp.tanh(flat * gain) @ params[1]).reshape(x.shape)


def network(seed=0, num_classes=None, apply=unconditional):
    rng = np.random.default_rng(seed)
    params = tuple(jnp.asarray(rng.normal(size=(16, 16)) / 4, jnp.float32) for _ in range(2))
    return dj.Denoiser(apply, params, SCHEDULE, SHAPE, num_classes=num_classes, fingerprint=f"tiny-{seed}", name="tiny")


def function(eps=None, name="mine"):
    """A plain Python model that returns NumPy."""
    return dj.Denoiser.from_function(
        eps or (lambda x, t: np.tanh(np.asarray(x) * (1 + t / 100))), SCHEDULE, SHAPE, name=name
    )


def quiet(**options):
    return scoring.ScoringOptions(silent=True, **options)
