"""CLiD against a naive loop, and where it is planned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import attacks, scoring
from dime_jax.core import draws
from dime_jax.core.denoiser import TEXT_CONDITIONS, Denoiser
from dime_jax.scoring import planning

SCHEDULE = dj.linear_schedule(1000, 1e-4, 0.02)
SHAPE = (4, 4, 1)
SETTING = {"t": 495, "step": 10}
SEED = 3


def apply(params, x, t, condition):
    return jnp.tanh(x * (1 + t / 1000)) + condition[:, None, None, None]


class Told(Denoiser):
    """What it is told is a number for each image and condition."""

    def conditions_for(self, labels, captions):
        return {
            name: jnp.asarray([told(caption, place) for caption in captions], jnp.float32)
            for place, name in enumerate(self.conditions)
        }


def told(id, place):
    return 0.1 * place * (1 + (hash_of(id) % 7))


def hash_of(id):
    return int(id.rpartition("-")[2] or 0)


def model(conditions=TEXT_CONDITIONS):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return Told(apply, (), SCHEDULE, SHAPE, condition_shape=shape, conditions=conditions, name="told")


def source(count=9):
    images = np.random.default_rng(0).uniform(-1, 1, (count, *SHAPE)).astype(np.float32)
    ids = [f"image-{number}" for number in range(count)]
    return dj.data.from_images(images, ids=ids, captions=ids)


def test_the_engine_gives_the_published_statistic(tmp_path):
    job = planning.Job(attacks.get_attack("clid"), SETTING)
    denoiser, images = model(), source()
    table = scoring.score(
        denoiser, images, [job], tmp_path, seed=SEED, options=scoring.ScoringOptions(micro_batch=4, silent=True)
    )
    expected = []
    for index in range(len(images)):
        id, x = images.ids[index], images.read(index)[None]
        batch = draws.Draws(jax.random.key(SEED), draws.id_numbers([id]))
        losses = dict.fromkeys(TEXT_CONDITIONS, 0.0)
        for number, t in enumerate((485, 495, 505)):
            abar = float(SCHEDULE.abar(t))
            noise = np.asarray(batch.gaussian(number, jnp.asarray(x)))
            noisy = np.sqrt(abar) * x + np.sqrt(1 - abar) * noise
            for place, name in enumerate(TEXT_CONDITIONS):
                eps = np.tanh(noisy * (1 + t / 1000)) + told(id, place)
                losses[name] += np.mean((noise - eps) ** 2) / 3
        own = losses.pop("own")
        discrepancy = np.mean([loss - own for loss in losses.values()])
        expected.append((own, -discrepancy))
    np.testing.assert_allclose(table.terms(job), np.array(expected).T, rtol=1e-4, atol=1e-5)
    assert job.queries == 15
    assert table.queries_made == 15 * len(images)


def test_weights_are_those_of_the_paper():
    weights = attacks.get_attack("clid").rule.weights(SCHEDULE, SETTING, None)
    assert [one.values for one in weights] == [(1 - one.parameters["a"], one.parameters["a"]) for one in weights]
    assert (weights[0].parameters["a"], weights[-1].parameters["a"]) == (0, 1)


def test_it_is_planned_for_models_that_offer_its_conditions():
    plain = {job.attack.name for job in planning.grid_jobs(None, "quick")}
    worded = {job.attack.name for job in planning.grid_jobs(None, "quick", conditions=TEXT_CONDITIONS)}
    assert worded - plain == {"clid"}
    with pytest.raises(ValueError, match="attack clid is for text-conditioned models: it asks under"):
        planning.grid_jobs(["clid"], "quick")
    assert "clid" in attacks.attack_names()
