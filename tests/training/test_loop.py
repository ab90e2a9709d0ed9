"""Whole runs: killed and continued, on other devices, longer, and everything that is refused."""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny

import dime_jax as dj
from dime_jax import data, training
from dime_jax.loading import model_directory, opening
from dime_jax.training.checkpoints import TrainingCheckpoints

SPEC = tiny.spec(dropout=0.1)
SCRIPT = pathlib.Path(__file__).with_name("killed_training.py")
STEPS = 20


def start(workdir, *arguments):
    command = [sys.executable, str(SCRIPT), str(workdir), str(STEPS), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def finish(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


def failure(process):
    """What the ValueError of a failed process said, line by line."""
    out, error = process.communicate(timeout=300)
    assert process.returncode == 1, error
    return out.splitlines()


def train(workdir, devices=1, steps=STEPS, start=None, rank=None, members=range(6), **options):
    options = training.TrainingOptions(
        **{"log_every": 5, "save_every": 5, "silent": True, "devices": jax.devices()[:devices], **options}
    )
    what = workdir, SPEC, tiny.source(), np.array(members), tiny.recipe(steps=steps)
    return training.train(*what, options=options, start=start, rank=rank)


def variables(model):
    return opening.load_denoiser(model).params


def logged(workdir):
    lines = (workdir / "train" / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def equal(first, second):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, first, second)))


def apart(first, second):
    """The largest difference between two trees."""
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), first, second)))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run on one device that nobody disturbs."""
    workdir = tmp_path_factory.mktemp("unbroken")
    train(workdir)
    return workdir


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The first half of the same run."""
    workdir = tmp_path_factory.mktemp("half")
    train(workdir, steps=STEPS // 2)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 2])
def test_killed_and_continued_ends_with_the_same_bits(unbroken, half, tmp_path, rank):
    arguments = () if rank is None else (0, half / "model", rank)
    result = "model" if rank is None else "adapter.safetensors"
    process = start(tmp_path, *arguments)
    log = tmp_path / "train" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 3):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / result).exists()
    finish(start(tmp_path, *arguments))
    if rank is not None:
        unbroken = tmp_path / "unbroken"
        train(unbroken, start=half / "model", rank=rank)
        assert (tmp_path / result).read_bytes() == (unbroken / result).read_bytes()
    else:
        assert equal(variables(unbroken / "model"), variables(tmp_path / "model"))
    assert logged(unbroken) == logged(tmp_path)
    assert [step for step, _ in logged(unbroken)] == list(range(5, STEPS + 1, 5))


@pytest.mark.parametrize(("devices", "most"), [(1, 0.0), pytest.param(2, 1e-4, marks=pytest.mark.slow)])
def test_stopped_and_continued_it_is_the_same_and_on_two_devices_close(unbroken, half, tmp_path, devices, most):
    workdir = tmp_path / "run"
    shutil.copytree(half, workdir)
    train(workdir, devices=devices)
    assert apart(variables(half / "model"), variables(unbroken / "model")) > 1e-3  # ten updates do change the weights
    assert apart(variables(workdir / "model"), variables(unbroken / "model")) <= most


def test_the_model_directory_is_like_any_other(unbroken):
    model = dj.load_denoiser(unbroken / "model")
    assert model.image_shape == (4, 4, 1)
    assert model.eps(np.zeros((2, 4, 4, 1), np.float32), 10).shape == (2, 4, 4, 1)
    facts = model_directory.read_spec_file(unbroken / "model")["metadata"]
    assert facts["weights"] == "ema"
    assert facts["steps"] == STEPS
    assert facts["images"] == {"count": 6, "fingerprint": data.fingerprint(tiny.source(), np.arange(6))}
    assert facts["recipe"]["learning_rate"] == 1e-3
    assert (unbroken / "train" / "loss.png").stat().st_size > 0


def test_a_finished_run_is_left_alone(unbroken):
    before = {path: path.stat().st_mtime_ns for path in (unbroken / "model").rglob("*")}
    train(unbroken)
    assert before == {path: path.stat().st_mtime_ns for path in (unbroken / "model").rglob("*")}


def test_what_does_not_belong_to_the_run_is_refused(unbroken):
    source, members, recipe = tiny.source(), np.arange(6), tiny.recipe(steps=STEPS)
    options = training.TrainingOptions(log_every=5, save_every=5, silent=True, devices=jax.devices()[:1])

    def refused(match, spec=SPEC, source=source, members=members, recipe=recipe):
        with pytest.raises(ValueError, match=match) as error:
            training.train(unbroken, spec, source, members, recipe, options=options)
        assert "\n" not in str(error.value)

    refused(
        r"holds another run.*spec.architecture.stem_channels 8 -> 16", spec=tiny.spec(dropout=0.1, stem_channels=16)
    )
    refused("recipe.learning_rate 0.001 -> 0.1", recipe=tiny.recipe(steps=STEPS, learning_rate=0.1))
    refused("images.count 6 -> 5", members=np.arange(5))
    refused("images.fingerprint", members=np.arange(1, 7))
    refused(
        f"steps must be >= {STEPS}, the updates of the run in .*, got {STEPS - 5}", recipe=tiny.recipe(steps=STEPS - 5)
    )


def test_wrong_inputs_are_refused_before_anything_is_written(tmp_path):
    def refused(match, **arguments):
        defaults = {"spec": tiny.spec(), "source": tiny.source(), "members": np.arange(6), "recipe": tiny.recipe()}
        with pytest.raises(ValueError, match=match) as error:
            training.train(tmp_path, **{**defaults, **arguments})
        assert "\n" not in str(error.value)
        assert not list(tmp_path.iterdir())

    refused("members must not be empty", members=np.array([], int))
    refused(r"indices must be in \[0, 10\) for arrays, got 0 to 10", members=np.array([0, 10]))
    refused("class-conditional, but arrays has no labels", spec=tiny.spec(num_classes=2))
    refused("batch_size must be divisible by 4, the devices, got 6", recipe=tiny.recipe(batch_size=6))


def test_a_damaged_state_is_named(half, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(half, workdir)
    for file in (workdir / "train" / "state" / str(STEPS // 2)).rglob("d/*"):
        file.write_bytes(b"")
    # In a process of its own, since orbax leaves exceptions behind that would disturb other tests.
    (line,) = failure(start(workdir))
    assert f"state/{STEPS // 2} cannot be read: " in line


def test_a_full_disk_is_seen_before_it_is_written_to(half, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    shutil.copytree(half, workdir)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"a training state needs [\d,]+ bytes free in .*state, got 1,000"):
        train(workdir)


@pytest.mark.slow
def test_a_failed_write_is_one_line_and_earlier_states_stay(half, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(half, workdir)
    line, *_ = failure(start(workdir, 4096))
    assert re.search(rf"state/{STEPS // 2 + 5} cannot be written: .*File too large", line)
    with TrainingCheckpoints(workdir / "train" / "state") as states:
        assert states.latest_step == STEPS // 2


def test_a_model_from_elsewhere_is_not_overwritten(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="was not trained here"):
        train(tmp_path)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be finite and > 0, got 0.0"),
        ({"ema_decay": 1.0}, r"ema_decay must be in \[0, 1\), got 1.0"),
        ({"compute_dtype": "float16"}, "unknown compute_dtype 'float16'"),
    ],
)
def test_recipes_check_themselves(fields, match):
    with pytest.raises(ValueError, match=match):
        tiny.recipe(**fields)


def test_options_check_themselves():
    with pytest.raises(ValueError, match="save_every must be a multiple of log_every=10, got 15"):
        training.TrainingOptions(log_every=10, save_every=15)
