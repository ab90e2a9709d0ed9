"""`dime-jax serve`: the protocol, its limits, the token, the rate, the log, and a clean end."""

import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from faulty_server import SHAPE, tanh_model

import dime_jax as dj
from dime_jax.remote import serve
from dime_jax.remote.serve import ServeOptions, Server

X = np.random.default_rng(0).normal(size=(10, *SHAPE)).astype(np.float32)
MODEL = dj.Denoiser.from_function(tanh_model, dj.linear_schedule(), SHAPE, name="a model/1")


def request(server, method="POST", path=None, body=b"", **headers):
    host = server.url.split("/")[2]
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request(method, path or "/v2/models/a-model-1/infer", body, headers)
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def asked(**changes):
    tensors = [
        {"name": "x", "datatype": "FP32", "shape": [2, *SHAPE], "data": X[:2].ravel().tolist()},
        {"name": "t", "datatype": "INT32", "shape": [2], "data": [7, 9]},
    ]
    for tensor in tensors:
        tensor.update(changes.get(tensor["name"], {}))
    return json.dumps({"inputs": tensors}).encode()


@pytest.fixture(scope="module")
def server():
    with Server(MODEL, ServeOptions(max_batch=4), log=lambda line: None) as running:
        yield running


def test_anyone_can_ask_it_in_json(server):
    status, _, body = request(server, body=asked())
    (eps,) = json.loads(body)["outputs"]
    assert (status, eps["name"], eps["datatype"], eps["shape"]) == (200, "eps", "FP32", [2, *SHAPE])
    np.testing.assert_array_equal(
        np.array(eps["data"], np.float32).reshape(2, *SHAPE), tanh_model(X[:2], np.array([7, 9]))
    )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (asked(x={"shape": [1, 2, *SHAPE]}), 400, "x must have shape"),
        (
            asked(x={"shape": [0, *SHAPE], "data": []}, t={"shape": [0], "data": []}),
            400,
            "a request must have 1 to 4 images, got 0",
        ),
        (
            asked(x={"shape": [5, *SHAPE], "data": X[:5].ravel().tolist()}),
            400,
            "a request must have 1 to 4 images, got 5",
        ),
        (asked(t={"data": [7, 1000]}), 400, "t must be >= 0 and < 1000, got 1000"),
        (asked(t={"data": [7, -1]}), 400, "t must be >= 0 and < 1000, got -1"),
        (asked(t={"name": "time"}), 400, "inputs must be t, x, got time, x"),
        (b"{", 400, "not JSON"),
        (b"{}", 400, "inputs"),
        (b"0" * 100_000, 413, "a request must have at most"),
    ],
)
def test_bad_requests_are_refused_in_one_line(server, body, status, message):
    before = server.hosted.queries
    found, _, text = request(server, body=body)
    assert found == status
    assert message in json.loads(text)["error"]
    assert server.hosted.queries == before


def test_pages(server):
    assert request(server, "GET", "/v2/health/ready")[0] == 200
    assert "binary_tensor_data" in json.loads(request(server, "GET", "/v2")[2])["extensions"]
    assert request(server, "GET", "/v2/models/another")[0] == 404
    assert request(server, "GET", "/../../etc/passwd")[0] == 404
    assert request(server, path="/v2/models/another/infer", body=asked())[0] == 404
    assert request(server, "DELETE", "/v2")[0] == 501


def test_the_client_understands_it(server):
    denoiser = dj.RemoteDenoiser(server.url)
    before = server.hosted.queries
    np.testing.assert_array_equal(denoiser.eps(X, 70), tanh_model(X, 70))
    assert server.hosted.queries - before == denoiser.queries.count == 10
    assert denoiser.fingerprint == "served:function:a model/1"
    np.testing.assert_array_equal(denoiser.schedule.sigma_table, MODEL.schedule.sigma_table)
    same = dj.RemoteDenoiser(server.url.partition("/v2")[0], "a-model-1")
    assert same.fingerprint == denoiser.fingerprint


def test_conditions_travel():
    seen = []

    def eps(x, t, label):
        seen.extend(np.asarray(label).tolist())
        return np.asarray(x)

    model = dj.Denoiser.from_function(eps, dj.linear_schedule(), SHAPE, num_classes=5, name="classes")
    with Server(model) as running:
        denoiser = dj.RemoteDenoiser(running.url)
        assert denoiser.num_classes == 5
        denoiser.eps(X[:3], 70, np.array([4, 0, 2]))
    assert seen == [4, 0, 2]


def test_latents_are_for_python_only(tmp_path):
    model = dj.Denoiser(
        lambda params, x, t, condition: x,
        (),
        dj.linear_schedule(),
        (8, 8, 3),
        shape=SHAPE,
        encode=lambda params, pixels, draws: pixels[:, ::2, ::2, :1],
        name="latent",
    )
    with Server(model) as running:
        np.testing.assert_array_equal(dj.RemoteDenoiser(running.url).eps(X[:2], 3), X[:2])
        with pytest.raises(ValueError, match="latent takes latents; a hosted model must take images"):
            dj.open_model(running.url, cache=tmp_path)


def test_a_compiled_model_answers_alike_in_any_company():
    """One program, whatever the size of the request: an image's answer does not depend on its neighbours."""
    traces = []

    def apply(params, x, t, condition):
        traces.append(x.shape)
        return x @ x.swapaxes(1, 2) @ x

    square = dj.Denoiser(apply, (), dj.linear_schedule(), (4, 4), name="square")
    with Server(square) as running:
        running.hosted.warm_up()
        assert (len(traces), running.hosted.queries) == (1, 0)
        denoiser = dj.RemoteDenoiser(running.url)
        x = X[..., 0]
        whole = np.asarray(denoiser.eps(x, 70))
        for rows in (slice(0, 1), slice(3, 6), slice(9, 10)):
            np.testing.assert_array_equal(denoiser.eps(x[rows], 70), whole[rows])
    assert len(traces) == 1


def test_the_token_is_asked_for_and_the_log_counts_without_images(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret-4711")
    lines = []
    with Server(MODEL, ServeOptions(token_env="A_TOKEN"), log=lines.append) as running:
        for wrong in ({}, {"Authorization": "Bearer secret-4712"}, {"Authorization": "secret-4711"}):
            assert request(running, body=asked(), **wrong)[0] == 401
            assert request(running, "GET", "/v2/models/a-model-1", **wrong)[0] == 401
        with pytest.raises(ValueError, match="requires a token"):
            dj.RemoteDenoiser(running.url)
        monkeypatch.setenv("ANOTHER", "secret-4712")
        with pytest.raises(ValueError, match="rejects the token") as caught:
            dj.RemoteDenoiser(running.url, options=dj.RemoteOptions(token_env="ANOTHER"))
        assert "secret" not in str(caught.value)
        denoiser = dj.RemoteDenoiser(running.url, options=dj.RemoteOptions(token_env="A_TOKEN"))
        denoiser.eps(X, 70)
        request(running, "GET", "/\x1b[31mred".replace("\x1b", "%1b"))
    assert lines[-2].endswith("POST /v2/models/a-model-1/infer 200, 10 images, 10 queries in all")
    assert lines[-1].endswith("GET ? 401")
    assert not re.search("secret|4711", "".join(lines))


def test_a_rate_is_refused_politely_and_obeyed(monkeypatch):
    with Server(MODEL, ServeOptions(rate=10)) as running:
        denoiser = dj.RemoteDenoiser(running.url, options=dj.RemoteOptions(max_batch=5), say=lambda line: None)
        start = time.monotonic()
        np.testing.assert_array_equal(denoiser.eps(X, 70), tanh_model(X, 70))
        assert time.monotonic() - start >= 0.5
        assert running.hosted.queries == 10 < denoiser.queries.count  # what was refused was asked all the same


def test_a_failing_model_says_nothing_of_itself():
    def eps(x, t):
        raise RuntimeError("weights at /home/owner/secret")

    failing = dj.Denoiser.from_function(eps, dj.linear_schedule(), SHAPE, name="failing")
    with Server(failing) as running:
        status, _, body = request(running, path="/v2/models/failing/infer", body=asked())
    assert (status, json.loads(body)) == (500, {"error": "the model failed: RuntimeError"})


def test_it_is_not_opened_to_others_without_a_token():
    with pytest.raises(ValueError, match=r"--host 0.0.0.0 requires --token_env"):
        ServeOptions(host="0.0.0.0")
    with Server(MODEL) as running:
        port = int(running.url.split(":")[2].split("/")[0])
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
            Server(MODEL, ServeOptions(port=port))


def test_stopping_answers_what_is_under_way():
    begun = threading.Event()

    def eps(x, t):
        begun.set()
        time.sleep(0.3)
        return np.asarray(x)

    answers = []
    running = Server(dj.Denoiser.from_function(eps, dj.linear_schedule(), SHAPE, name="slow")).start()
    denoiser = dj.RemoteDenoiser(running.url)
    thread = threading.Thread(target=lambda: answers.append(np.asarray(denoiser.eps(X[:2], 3))))
    thread.start()
    begun.wait()
    running.stop()
    thread.join()
    np.testing.assert_array_equal(answers[0], X[:2])


def test_a_stopped_server_answers_no_idle_connection():
    running = Server(MODEL).start()
    connection = http.client.HTTPConnection(running.url.split("/")[2], timeout=10)
    connection.request("GET", "/v2")
    assert connection.getresponse().read()
    running.stop()
    connection.request("GET", "/v2")
    with pytest.raises(http.client.RemoteDisconnected):
        connection.getresponse()
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_cleanly(number):
    root = str(pathlib.Path(serve.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "A_TOKEN": "secret-4711"}
    command = [sys.executable, "-m", "dime_jax.cli", "serve", "digits", "--port", "0", "--token-env", "A_TOKEN"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert re.fullmatch(r"serving http://127.0.0.1:\d+/v2/models/digits\n", process.stdout.readline())
        assert "4711" not in pathlib.Path(f"/proc/{process.pid}/cmdline").read_text()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.splitlines()[-1] == "stopped; 0 queries were answered"
    assert "4711" not in out + err
