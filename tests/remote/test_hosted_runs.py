"""Whole runs over `serve`: the same scores and the same count as locally, and the token nowhere."""

import json
import pathlib

import numpy as np
import pytest
from PIL import Image

import dime_jax as dj
from dime_jax import auditing, cli, scoring
from dime_jax.remote.serve import ServeOptions, Server
from dime_jax.scoring import planning
from dime_jax.scoring.query_ledger import Budget, BudgetExceeded, queries_made

SHAPE = (8, 8, 1)
TOKEN = "secret-4711-token"
SCHEDULE = dj.linear_schedule()
PIXELS = np.random.default_rng(0).integers(0, 256, (120, *SHAPE), dtype=np.uint8)
TRAIN = PIXELS[:40].astype(np.float32).reshape(40, -1) / np.float32(127.5) - np.float32(1)
JOBS = [
    *planning.grid_jobs(["loss", "pia_l4"], "quick", settings=[{"t": 70}]),
    *planning.grid_jobs(["dime"], "quick", [2], settings=[{"t": 70, "gamma": 0.1}]),
]


def remembers(x, t):
    """eps = (x - √ᾱ y)/σ, with y the training image nearest to x/√ᾱ; row by row, so that batches change nothing."""
    flat = np.asarray(x).reshape(len(x), -1)
    scale, sigma = np.float32(SCHEDULE.sqrt_abar(int(t))), np.float32(SCHEDULE.sigma(int(t)))
    nearest = [scale * TRAIN[np.argmin(np.sum((row - scale * TRAIN) ** 2, axis=-1))] for row in flat]
    return ((flat - np.stack(nearest)) / sigma).reshape(np.shape(x))


def function():
    return dj.Denoiser.from_function(remembers, SCHEDULE, SHAPE, name="memory")


def score(model, directory, source, **options):
    options = {"silent": True, "micro_batch": 8, **options}
    return scoring.score(model, source, JOBS, directory, options=scoring.ScoringOptions(**options))


def same_readings(one, two):
    return all(np.array_equal(one.readings[name], two.readings[name]) for name in one.readings)


def test_the_scores_are_those_of_the_local_model_to_the_bit(tmp_path):
    source = dj.data.from_images(PIXELS[:24])  # three whole batches: jnp compiles anew for every other shape
    with Server(function(), ServeOptions(max_batch=3)) as server:
        local, remote = function(), dj.RemoteDenoiser(server.url)
        here, there = score(local, tmp_path / "here", source), score(remote, tmp_path / "there", source)
        assert same_readings(here, there)
        assert here.queries_made == there.queries_made == server.hosted.queries == local.queries.count == 24 * 5
        options = dj.RemoteOptions(in_flight=2, max_batch=4)
        default = score(dj.RemoteDenoiser(server.url, options=options), tmp_path / "default", source, micro_batch=None)
        assert default.manifest["micro_batch"] == 2 * 3  # as many as are on their way at a time
        assert same_readings(here, default)


def test_a_server_that_dies_loses_nothing_and_the_budget_holds_over_restarts(tmp_path):
    source = dj.data.from_images(PIXELS[:24])
    whole = score(function(), tmp_path / "whole", source)
    asked = []

    def dying(x, t):
        asked.append(len(x))
        if 50 < sum(asked) < 90:
            raise RuntimeError("out of memory")
        return remembers(x, t)

    ends = []
    with Server(dj.Denoiser.from_function(dying, SCHEDULE, SHAPE, name="memory")) as server:
        for _ in range(8):
            try:
                score(
                    dj.RemoteDenoiser(server.url),
                    tmp_path / "run",
                    source,
                    retry=scoring.Retry(attempts=1),
                    budget=Budget(total=120 + 20),
                )
            except (ConnectionError, BudgetExceeded) as error:
                ends.append(type(error))
            assert queries_made(tmp_path / "run") == sum(asked) <= 140
        finished = score(dj.RemoteDenoiser(server.url), tmp_path / "run", source)
    assert issubclass(ends[0], ConnectionError)
    assert ends[-1] is BudgetExceeded
    assert same_readings(whole, finished)
    assert finished.queries_made == sum(asked)


def folder(path, pixels):
    path.mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image[..., 0]).save(path / f"{number:03}.png")
    return str(path)


def test_the_token_of_a_run_is_nowhere(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("A_TOKEN", TOKEN)
    lines, run = [], tmp_path / "run"
    members, heldout = folder(tmp_path / "m", PIXELS[:40]), folder(tmp_path / "h", PIXELS[40:80])
    with Server(function(), ServeOptions(token_env="A_TOKEN"), log=lines.append) as server:
        arguments = ["score", str(run), "--model", server.url, "--token-env", "A_TOKEN", "--profile", "light"]
        arguments += ["--members", members, "--heldout", heldout, "--attacks", "sima_l4"]
        for _ in range(2):  # the second time it is only recognised
            assert cli.main(arguments) == cli.DONE
            assert queries_made(run) == server.hosted.queries
        assert cli.main([*arguments, "--max_queries", "3"]) == cli.DONE
    check_nowhere(run, "\n".join([*capfd.readouterr(), *lines]))


def check_nowhere(directory, said):
    written = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert TOKEN.encode() not in b"".join([*written, said.encode()])
    assert TOKEN not in pathlib.Path("/proc/self/cmdline").read_text()


@pytest.mark.slow
def test_an_audit_over_serve_is_the_audit_and_the_token_is_nowhere(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("A_TOKEN", TOKEN)
    lines = []
    images = {
        "members": folder(tmp_path / "m", PIXELS[:40]),
        "heldout": folder(tmp_path / "h", PIXELS[40:80]),
        "candidates": folder(tmp_path / "c", PIXELS[80:90]),
    }
    settings = {"attacks": ["sima_l4", "pia_l2"], "calibration_size": 20, "test_size": 20, "profile": "light"}
    with Server(function(), ServeOptions(token_env="A_TOKEN"), log=lines.append) as server:
        local = auditing.audit(
            dj.AuditConfig(
                output=tmp_path / "local",
                model=function(),
                options=scoring.ScoringOptions(silent=True),
                **images,
                **settings,
            )
        )
        arguments = ["audit", "--model", server.url, "--output", str(tmp_path / "remote"), "--token-env", "A_TOKEN"]
        arguments += [f"--{name}={place}" for name, place in images.items()]
        arguments += ["--attacks", *settings["attacks"], "--profile", "light"]
        arguments += ["--calibration_size", "20", "--test_size", "20"]
        assert cli.main(arguments) == cli.DONE
        asked = server.hosted.queries
    remote = json.loads((tmp_path / "remote" / "results.json").read_text())
    here = json.loads((tmp_path / "local" / "results.json").read_text())
    assert remote["queries_made"] == here["queries_made"] == asked == queries_made(tmp_path / "remote")
    assert local.findings.queries_made == asked
    assert lines[-1].endswith(f"{asked:,} queries in all")
    for row, expected in zip(remote["results"], here["results"], strict=True):
        assert {**row, "seconds_per_image": 0} == {**expected, "seconds_per_image": 0}
    for name in ("headline", "candidates", "direction", "decided_by"):
        assert remote[name] == here[name]
    assert remote["model"]["origin"].startswith("hosted at http://127.0.0.1:")
    assert remote["fingerprints"]["model"] == "served:function:memory"
    check_nowhere(tmp_path / "remote", "\n".join([*capfd.readouterr(), *lines]))


def test_a_server_that_repeats_the_token_does_not_make_us_print_it(tmp_path, monkeypatch, capsys):
    import faulty_server as stub

    monkeypatch.setenv("A_TOKEN", "secret-4711-token")
    echo = stub.busy(413, text=b'{"error": "Bearer secret-4711-token is not enough"}')
    with stub.FaultyServer(gets={"/v2/models/m": echo}) as server:
        arguments = ["models", "check", server.url, "--images", "digits", "--output", str(tmp_path), "--token-env"]
        assert cli.main([*arguments, "A_TOKEN"]) == cli.BAD_INPUT
    assert capsys.readouterr().err == (
        f"dime-jax: {server.place} has no model at /v2/models/m: HTTP 413 Bearer *** is not enough\n"
    )


def test_options_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret-4711")
    with Server(function()) as server:
        with pytest.raises(
            ValueError, match=r"^--weights applies only when a checkpoint is converted; .* is hosted at"
        ):
            dj.open_model(server.url, cache=tmp_path, weights="ema")
        with pytest.raises(ValueError, match="--schedule=cosine contradicts the server"):
            dj.open_model(server.url, cache=tmp_path, schedule="cosine")
        opened = dj.open_model(server.url, cache=tmp_path, prediction="epsilon")
        assert "prediction: epsilon (the server says so)" in opened.describe()
    with pytest.raises(
        ValueError, match="--max_rate applies only to hosted models; this one is not asked over a network"
    ):
        dj.open_model("digits", cache=tmp_path, remote=dj.RemoteOptions(max_rate=3))
    config = dj.AuditConfig(
        output=tmp_path,
        model="http://127.0.0.1:1/v2/models/m",
        candidates="digits",
        remote=dj.RemoteOptions(token_env="A_TOKEN"),
    )
    with pytest.raises(ValueError, match="both models must be on one server if a token is given"):
        auditing.compare(config, "http://127.0.0.1:2/v2/models/m")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_compiled_network_gives_the_same_scores_over_serve(tmp_path):
    """XLA rounds a network that is compiled with the query around it otherwise than one that is compiled alone."""
    model, digits = dj.load_denoiser("digits"), dj.data.open_source("digits")
    source = dj.data.from_images(np.stack([digits[i].image for i in range(40)]))
    with Server(model) as server:
        here, there = score(model, tmp_path / "a", source), score(dj.RemoteDenoiser(server.url), tmp_path / "b", source)
        assert here.queries_made == there.queries_made == server.hosted.queries
    for name, readings in here.readings.items():
        np.testing.assert_allclose(there.readings[name], readings, rtol=1e-5, atol=1e-5)
