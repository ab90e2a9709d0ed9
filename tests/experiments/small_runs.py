"""A finished attack run on a made-up model, in seconds: for tests of what is made from runs."""

import importlib
import json

import numpy as np

import dime_jax as dj
from dime_jax import scoring
from dime_jax.protocol import stages
from experiments import without_model

SHAPE = (2, 2, 1)


def knows_small_images(x, t):
    """A model whose responses are smaller for images of small pixel values; before t = 100 it knows only signs."""
    x = np.asarray(x)
    return x * np.abs(x).mean(axis=(1, 2, 3), keepdims=True) if t > 100 else np.sign(x)


def pictures(size, member_scale, heldout_scale):
    """`size` members and as many held-out images, which differ in the size of their pixel values."""
    rng = np.random.default_rng(0)
    scale = np.repeat([member_scale, heldout_scale], size) * rng.uniform(0.8, 1.2, 2 * size)
    return np.clip(scale[:, None, None, None] * rng.uniform(-1, 1, (2 * size, *SHAPE)), -1, 1).astype(np.float32)


def make_run(directory, jobs, size, member_scale, heldout_scale, seed):
    """Run the jobs on `pictures`."""
    source = dj.data.from_images(pictures(size, member_scale, heldout_scale))
    halves = dj.data.halves(dj.data.Split(np.arange(size), np.arange(size, 2 * size)), source.ids, seed=seed)
    model = dj.Denoiser.from_function(knows_small_images, dj.linear_schedule(), SHAPE, name="small")
    options = scoring.ScoringOptions(micro_batch=64, silent=True)
    stages.run(directory, model, source, halves, jobs, seed=seed, options=options)
    without_model.look_once(directory, source, dj.data.transform_for(source, SHAPE), seed)


def pretend(directory, study, variant, **changes):
    """Let the run say that it was made by a config, with some values changed: data__source="digits"."""
    config = json.loads(importlib.import_module(f"experiments.configs.{study}").get_config(variant).to_json())
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = config
        for section in sections:
            place = place[section]
        place[key] = value
    contents = {"file": f"experiments/configs/{study}.py:{variant}", "config": config}
    (directory / "config.json").write_text(json.dumps(contents))


def naive_auc(scores, member):
    """P(member < held-out) + P(equal)/2, pair by pair."""
    return np.mean(np.sign(scores[~member][None] - scores[member][:, None])) / 2 + 0.5
