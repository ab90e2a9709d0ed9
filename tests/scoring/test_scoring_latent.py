"""A latent, text-conditioned model through the engine, against plain loops over the same eps."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import quiet

import dime_jax as dj
from dime_jax import attacks, draws, scoring
from dime_jax.scoring import planning

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "latent" / "stable_diffusion"
SEED = 5
JOBS = [
    planning.Job(attacks.get_attack("loss"), {"t": 70}),
    planning.Job(attacks.get_attack("sima_l4"), {"t": 70}),
    planning.Job(attacks.get_attack("dime"), {"t": 70, "gamma": 0.1, "q": 2}),
    planning.Job(attacks.get_attack("clid"), {"t": 495, "step": 10}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dj.open_model(GOLDEN, tmp_path_factory.mktemp("model")).denoiser


def source(count=4):
    pixels = np.random.default_rng(0).uniform(-1, 1, (count, 16, 16, 3)).astype(np.float32)
    return dj.data.from_images(pixels, captions=[f"{'ab'[n % 2]}{n}" for n in range(count)])


def score(model, directory, images=None, jobs=JOBS, **options):
    options = quiet(**{"micro_batch": 2, "devices": jax.local_devices()[:1], **options})
    return scoring.score(model, images or source(), jobs, directory, seed=SEED, options=options)


def naive(model, images, index):
    """Every term of one image, by the formulas."""
    id, caption, schedule = images.ids[index], images.captions[index], model.schedule
    x = model.encode(images.read(index)[None])
    own = draws.Draws(jax.random.key(SEED), draws.id_numbers([id]))
    abar = lambda t: float(schedule.abar(t))  # noqa: E731

    def eps(x, t, text):
        return np.asarray(model.eps(x, t, model.embed([text])))

    def error(t, number, text):
        noise = np.asarray(own.gaussian(number, x))
        return noise - eps(np.sqrt(abar(t)) * x + np.sqrt(1 - abar(t)) * noise, t, text)

    sigma = np.sqrt(1 - abar(70))
    scaled = np.sqrt(abar(70)) * np.asarray(x)
    base = eps(scaled, 70, caption)
    norms, traces = [], []
    for number in range(2):
        z = np.asarray(own.rademacher(number, x))
        moved = eps(scaled + 0.1 * sigma * z, 70, caption)
        norms.append(np.linalg.norm(moved))
        traces.append(np.sum(z * (moved - base)) / (0.1 * sigma))
    thirds = [caption[: len(caption) // 3], caption[len(caption) // 3 : 2 * len(caption) // 3]]
    thirds.append(caption[2 * len(caption) // 3 :])
    losses = [
        np.mean([np.mean(error(t, number, text) ** 2) for number, t in enumerate((485, 495, 505))])
        for text in (caption, *thirds, "")
    ]
    return {
        "loss": [np.linalg.norm(error(70, 0, caption))],
        "dime": [np.mean(norms) ** 2, np.mean(traces)],
        "clid": [losses[0], losses[0] - np.mean(losses[1:])],
    }


def test_attacks_are_naive_loops_over_the_same_eps(tmp_path, model):
    images, table = source(), score(model, tmp_path)
    queries = 1 + 1 + 3 + 15  # loss; SimA; DIME's base and two probes; CLiD: nothing to share
    assert table.queries_made == queries * len(images)
    want = [naive(model, images, index) for index in range(len(images))]
    for job in JOBS:
        if job.attack.name == "sima_l4":
            x, told = model.encode(np.stack([images.read(n) for n in range(len(images))])), model.embed(images.captions)
            expected = dj.sima(model.eps_fn(told), model.schedule, x, 70)[None]
        else:
            expected = np.array([one[job.attack.name] for one in want]).T
        got = table.terms(job)
        np.testing.assert_allclose(got, np.asarray(expected), rtol=2e-3, atol=2e-3, err_msg=job.label)


def test_captions_are_part_of_the_data(tmp_path, model):
    images = source()
    other = dj.data.from_images(np.stack([images.read(n) for n in range(len(images))]), captions=["x"] * len(images))
    first = score(model, tmp_path / "own", jobs=JOBS[:1])
    second = score(model, tmp_path / "other", other, jobs=JOBS[:1])
    identities = [table.manifest["identity"]["data"] for table in (first, second)]
    assert identities[0] != identities[1]
    assert np.all(np.abs(first.terms(JOBS[0]) - second.terms(JOBS[0])) > 0)
    with pytest.raises(ValueError, match="data"):
        score(model, tmp_path / "own", other, jobs=JOBS[:1])
    silent = dj.data.from_images(np.stack([images.read(n) for n in range(len(images))]))
    with pytest.raises(ValueError, match="expected captions for the images of arrays"):
        score(model, tmp_path / "silent", silent, jobs=JOBS[:1])


def test_a_killed_run_ends_in_the_same_table(tmp_path, model, monkeypatch):
    whole = score(model, tmp_path / "whole")
    stop = {"left": 7}
    asked = scoring.asking.Asker._ask

    def dying(self, *arguments):
        stop["left"] -= 1
        if stop["left"] < 0:
            raise KeyboardInterrupt
        return asked(self, *arguments)

    monkeypatch.setattr(scoring.asking.Asker, "_ask", dying)
    with pytest.raises(KeyboardInterrupt):
        score(model, tmp_path / "killed", shard_seconds=0.0)
    monkeypatch.undo()
    resumed = score(model, tmp_path / "killed", shard_seconds=0.0)
    for job in JOBS:
        np.testing.assert_array_equal(resumed.terms(job), whole.terms(job))
    assert jnp.isfinite(resumed.terms(JOBS[-1])).all()
