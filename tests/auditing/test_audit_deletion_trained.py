"""The deletion check end to end: two networks are trained on digits, with and without ten given images."""

import jax
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import auditing, models, scoring, training

DELETED, KEPT, HELDOUT = np.arange(10), np.arange(10, 110), np.arange(200, 600)
ARCHITECTURE = models.DdpmUnetSpec(
    image_channels=1,
    stem_channels=32,
    time_features=32,
    time_channels=128,
    level_channels=(32, 64),
    num_res_blocks=1,
    attention_levels=(),
    norm_groups=8,
)
RECIPE = training.TrainingRecipe(
    steps=2500, batch_size=32, learning_rate=1e-3, warmup_steps=100, ema_decay=0.995, flips=False, seed=0
)


def trained(workdir, source, members):
    spec = models.ModelSpec(denoiser=ARCHITECTURE, image_shape=(8, 8, 1))
    options = training.TrainingOptions(silent=True, devices=jax.devices()[:1])
    return training.train(workdir, spec, source, members, RECIPE, options=options)


def part(source, indices, name):
    return dj.data.from_images(np.stack([source[i].image for i in indices]), name=name, transform="digits")


@pytest.mark.slow
def test_deleting_ten_images_shows(tmp_path):
    digits = dj.data.open_source("digits")
    order = np.random.default_rng(0).permutation(len(digits))
    with_all = trained(tmp_path / "with", digits, np.sort(order[np.concatenate([DELETED, KEPT])]))
    without = trained(tmp_path / "without", digits, np.sort(order[KEPT]))
    config = auditing.AuditConfig(
        output=tmp_path / "compare",
        model=with_all,
        members=part(digits, order[KEPT], "kept"),
        heldout=part(digits, order[HELDOUT], "heldout"),
        candidates=part(digits, order[DELETED], "deleted"),
        attacks=("pia_l2", "sima_l4", "dime"),
        queries=(2,),
        options=scoring.ScoringOptions(silent=True),
    )
    results = auditing.compare(config, without).results
    print(results["headline"])
    assert results["set_before"]["p_value"] < 0.01
    assert results["set_after"]["p_value"] > 0.05
    assert results["change"]["p_value"] < 0.05
    assert results["verdict"] == "no evidence of membership after"
