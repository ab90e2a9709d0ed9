"""Servers that others wrote, installed from the package index into environments of their own, asked by our client.

The model code is that of docs/audit_hosted.md. Where a server cannot be installed, its test is skipped and says why.
DIME_JAX_SERVERS names a directory to keep the environments in; else they go with the test's own.
"""

import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

import dime_jax as dj
from dime_jax import scoring
from dime_jax.scoring import planning

pytestmark = pytest.mark.slow
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "audit_hosted.md"
SHAPE, SCHEDULE = (8, 8, 1), dj.linear_schedule(1000, 1e-4, 0.02)
NETWORK = "import numpy as np\n\n\ndef network(x, t):\n    return np.tanh(x * (1 + t[:, None, None, None] / 100))\n"


def network(x, t):
    return np.tanh(np.asarray(x) * np.float32(1 + t / 100))


def blocks(name):
    """The files of a server's chapter in the guide, by their names."""
    chapter = GUIDE.read_text(encoding="utf-8").partition(f"### {name}\n")[2].partition("\n### ")[0]
    found = re.findall(r"`([\w.-]+)`:?\n+(?:<!-- [\w ]+ -->\n)?```\w+\n(.*?)```", chapter, re.DOTALL)
    assert "model.py" in dict(found), f"no model.py for {name} in {GUIDE}"
    return {file: text.replace("[-1, 32, 32, 3]", "[-1, 8, 8, 1]") for file, text in found}


def install(name, version, tmp_path):
    """Its Python, in an environment of its own; skips where that cannot be."""
    place = pathlib.Path(os.environ.get("DIME_JAX_SERVERS", tmp_path)) / name
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
    command = [python, "-m", "pip", "install", "--quiet", f"{name}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"{name} {version} cannot be installed here: {done.stderr.strip().splitlines()[-1][:200]}")
    return python


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def running(command, directory, port):
    """A server, from when it is ready until the test is done."""
    log = (directory / "log").open("wb")
    with log, subprocess.Popen(command, cwd=directory, stdout=log, stderr=log) as process:
        try:
            for _ in range(120):
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/mine/ready", timeout=2),
                ):
                    break
                assert process.poll() is None, (directory / "log").read_text()[-2000:]
                time.sleep(0.5)
            else:
                pytest.fail((directory / "log").read_text()[-2000:])
            yield f"http://127.0.0.1:{port}/v2/models/mine"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def write(directory, files, port):
    for name, text in {**files, "network.py": NETWORK}.items():
        (directory / name).write_text(text.replace("8000", str(port)), encoding="utf-8")


def check(url, tmp_path, **stated):
    """Scores over the server are those of the function, and every query is in the ledger."""
    local = dj.Denoiser.from_function(network, SCHEDULE, SHAPE, name="mine")
    remote = dj.RemoteDenoiser(url, **stated, options=dj.RemoteOptions(max_batch=8, in_flight=2))
    jobs = planning.grid_jobs(["loss", "pia_l4"], "quick", settings=[{"t": 70}])
    source = dj.data.from_images(np.random.default_rng(0).integers(0, 256, (32, *SHAPE), dtype=np.uint8))
    options = scoring.ScoringOptions(silent=True, micro_batch=16)
    here = scoring.score(local, source, jobs, tmp_path / "here", options=options)
    there = scoring.score(remote, source, jobs, tmp_path / "there", options=options)
    for name, readings in here.readings.items():
        np.testing.assert_allclose(there.readings[name], readings, rtol=1e-5, atol=1e-6)
    return remote, there.queries_made - here.queries_made


def test_kserve_takes_binary_tensors(tmp_path):
    python, port = install("kserve", "0.21.*", tmp_path), free_port()
    write(tmp_path, blocks("KServe"), port)
    with running([python, "model.py"], tmp_path, port) as url:
        with pytest.raises(ValueError, match="add --schedule"):
            dj.RemoteDenoiser(url)  # its metadata has no place for it
        remote, extra = check(url, tmp_path, schedule="linear", prediction="epsilon")
        assert remote._takes_binary
        assert extra == 0


def test_mlserver_takes_json(tmp_path):
    if sys.version_info >= (3, 13):
        pytest.skip("mlserver 1.7 needs Python below 3.13")
    python, port = install("mlserver", "1.7.1", tmp_path), free_port()
    write(tmp_path, blocks("MLServer"), port)
    with running([python.with_name("mlserver"), "start", "."], tmp_path, port) as url:
        remote, extra = check(url, tmp_path)
        assert remote._takes_binary is False
        assert 0 < extra <= 16  # the first requests, which it refused
