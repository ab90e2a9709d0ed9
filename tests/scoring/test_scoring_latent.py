"""A latent, text-conditioned model through the engine, against plain loops over the same eps."""

import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import quiet

import dime_jax as dj
from dime_jax import attacks, scoring
from dime_jax.core import draws
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
    return dj.open_model(GOLDEN, cache=tmp_path_factory.mktemp("model")).denoiser


def source(count=6):
    pixels = np.random.default_rng(0).uniform(-1, 1, (count, 16, 16, 3)).astype(np.float32)
    return dj.data.from_images(pixels, captions=[f"{'ab'[n % 2]} picture {n}" for n in range(count)])


def score(model, directory, images=None, jobs=JOBS, **options):
    options = quiet(**{"micro_batch": 2, "devices": jax.local_devices()[:1], **options})
    return scoring.score(model, images or source(), jobs, directory, seed=SEED, options=options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    """Two images at a time on one device, undisturbed."""
    return score(model, tmp_path_factory.mktemp("whole"))


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


def test_attacks_are_naive_loops_over_the_same_eps(model, whole):
    images, table = source(), whole
    queries = 1 + 1 + 3 + 15  # loss; SimA; DIME's base and two probes; CLiD: nothing to share
    assert table.queries_made == queries * len(images)
    want = [naive(model, images, index) for index in range(len(images))]
    told = model.embed(images.captions)
    assert np.abs(np.diff(told, axis=0)).max(axis=(1, 2)).min() > 0.1  # the captions are not all the same to the model
    assert np.abs(table.terms(JOBS[-1])[1]).min() > 1e-4  # nor are their parts
    for job in JOBS:
        if job.attack.name == "sima_l4":
            x = model.encode(np.stack([images.read(n) for n in range(len(images))]))
            expected = dj.sima(model.eps_fn(told), model.schedule, x, 70)[None]
        else:
            expected = np.array([one[job.attack.name] for one in want]).T
        got = table.terms(job)
        np.testing.assert_allclose(got, np.asarray(expected), rtol=2e-3, atol=2e-3, err_msg=job.label)


def test_captions_are_part_of_the_data(tmp_path, model, whole):
    images = source()
    other = dj.data.from_images(np.stack([images.read(n) for n in range(6)]), captions=["x"] * 6)
    table = score(model, tmp_path / "other", other, jobs=JOBS[:1])
    assert table.manifest["identity"]["data"] != whole.manifest["identity"]["data"]
    assert np.all(np.abs(table.terms(JOBS[0]) - whole.terms(JOBS[0])) > 1e-4)
    with pytest.raises(ValueError, match="data"):
        score(model, tmp_path / "other", images, jobs=JOBS[:1])
    silent = dj.data.from_images(np.stack([images.read(n) for n in range(6)]))
    with pytest.raises(ValueError, match="the images of arrays have no captions"):
        score(model, tmp_path / "silent", silent, jobs=JOBS[:1])


def test_several_devices_give_the_table_of_one(tmp_path, model, whole):
    table = score(model, tmp_path, jobs=JOBS[1:2], micro_batch=1, devices=jax.local_devices()[:3])
    np.testing.assert_allclose(table.terms(JOBS[1]), whole.terms(JOBS[1]), rtol=1e-5)


@pytest.mark.slow
def test_two_processes_give_the_table_of_one(tmp_path, whole):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, str(tmp_path), address]
    for process in [subprocess.Popen([*command, str(number)]) for number in range(2)]:
        assert process.wait(timeout=600) == 0
    table = scoring.score_table.read_table(tmp_path / "table")
    assert table.queries_made == whole.queries_made
    assert len(list((tmp_path / "table").glob("queries-*.bin"))) == 2
    for job in JOBS:
        np.testing.assert_allclose(table.terms(job), whole.terms(job), rtol=1e-4, atol=1e-5)


def test_a_killed_run_ends_in_the_same_table(tmp_path, model, whole, monkeypatch):
    stop = {"left": 7}
    asked = scoring.call_runner.CallRunner._ask

    def dying(self, *arguments):
        stop["left"] -= 1
        if stop["left"] < 0:
            raise KeyboardInterrupt
        return asked(self, *arguments)

    monkeypatch.setattr(scoring.call_runner.CallRunner, "_ask", dying)
    with pytest.raises(KeyboardInterrupt):
        score(model, tmp_path / "killed", shard_seconds=0.0)
    monkeypatch.undo()
    resumed = score(model, tmp_path / "killed", shard_seconds=0.0)
    for job in JOBS:
        np.testing.assert_array_equal(resumed.terms(job), whole.terms(job))
    assert jnp.isfinite(resumed.terms(JOBS[-1])).all()


def main():
    """One of two processes of a run: python test_scoring_latent.py DIRECTORY HOST:PORT NUMBER."""
    directory, address, number = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, number)
    score(dj.open_model(GOLDEN, cache=directory / f"model-{number}").denoiser, directory / "table")


if __name__ == "__main__":
    main()
