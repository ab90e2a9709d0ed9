"""Killed at any point and run again: the same table to the byte. What may not be resumed is refused in one line."""

import contextlib
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from tiny_model import FEW, SCHEDULE, TWO, function, network, quiet, source

import dime_jax as dj
from dime_jax import attacks, scoring
from dime_jax._util import digests, files
from dime_jax.scoring import planning, score_table
from dime_jax.scoring.query_ledger import queries_made

pytestmark = pytest.mark.usefixtures("small_batches")

SCRIPT = pathlib.Path(__file__).with_name("killed_run.py")
PLAN = planning.make_plan(TWO, SCHEDULE)
ONE = [planning.Job(attacks.get_attack("sima_l4"), {"t": 70})]


def start(*arguments, **options):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out


def content(directory):
    return (directory / "scores.parquet").read_bytes()


class Killed(BaseException):
    """Stands for SIGKILL: from the moment it is raised nothing reaches the disk any more."""


@pytest.fixture
def small():
    """Forty units of work, each written as a shard of its own."""
    jobs, options = [*ONE, *planning.grid_jobs(["loss"], "quick")], quiet(micro_batch=4, shard_seconds=0.0)
    return lambda path: scoring.score(function(), source(), jobs, path, options=options)


@pytest.fixture
def die_at_write(monkeypatch):
    """die_at_write(n, after): killed before or after the n-th file takes its name; die_at_write(None): no more."""
    replace = os.replace

    def arrange(n, after=False):
        count = itertools.count(1)

        def write(*args):
            now = next(count)
            if n is None or now < n or (after and now == n):
                replace(*args)
            if n is not None and now >= n:
                raise Killed

        monkeypatch.setattr(os, "replace", write)

    return arrange


def test_killed_at_every_third_write(tmp_path, small, die_at_write):
    whole = small(tmp_path / "whole")
    # Schedule, manifest and list of shards; a shard and the list for each unit; table and manifest.
    writes = 3 + 2 * 6 * 4 + 2
    for number, point in enumerate(range(1, writes + 1, 3)):
        table = tmp_path / str(point)
        die_at_write(point, after=bool(number % 2))
        with pytest.raises(Killed):
            small(table)
        die_at_write(None)
        resumed = small(table)
        assert content(table) == content(tmp_path / "whole")
        assert not list(table.rglob(".*"))
        assert not list((table / "shards").iterdir())
        # Three units may have been under way or unwritten, of at most four images and one query each.
        assert whole.queries_made <= resumed.queries_made <= whole.queries_made + 3 * 4


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The table of one process that nobody disturbed, and how long it took."""
    table, begin = tmp_path_factory.mktemp("unbroken"), time.monotonic()
    assert finish(start(table, 2)).endswith(f"40 images, {40 * PLAN.queries_per_image} queries\n")
    return table, time.monotonic() - begin


def kill_and_resume(tmp_path, unbroken, points, seed):
    reference, longest = unbroken
    rng, table, killed = random.Random(seed), tmp_path / "killed", 0
    while killed < points:
        process = start(table, 2)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, longest / 2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:  # it was done before: check it, and begin a new table
            assert content(table) == content(reference)
            table = tmp_path / f"killed-{killed}"
        else:
            killed += 1
    finish(start(table, 2))
    assert content(table) == content(reference)
    # Units under way or not yet written: at most three a kill, of at most 4 images and 2 queries.
    assert 0 <= queries_made(table) - queries_made(reference) <= points * 3 * 4 * 2


@pytest.mark.slow
def test_sigkill_then_resume(tmp_path, unbroken):
    kill_and_resume(tmp_path, unbroken, points=1, seed=0)


@pytest.mark.slow
def test_sigkill_at_twenty_random_points_then_resume(tmp_path, unbroken):
    kill_and_resume(tmp_path, unbroken, points=20, seed=1)


def test_two_processes_of_two_devices_give_the_table_of_one_process(tmp_path, unbroken):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    for process in [start(tmp_path, 2, address, i, 2) for i in range(2)]:
        assert finish(process).endswith(f"40 images, {40 * PLAN.queries_per_image} queries\n")
    assert content(tmp_path) == content(unbroken[0])
    assert len(list(tmp_path.glob("queries-*.bin"))) == 2


class TestOtherCircumstances:
    """A table half done, by a model that failed in the middle."""

    @pytest.fixture
    def half_done(self, tmp_path):
        calls = []

        def eps(x, t):
            calls.append(t)
            if len(calls) > 13:
                raise RuntimeError("gone")
            return np.tanh(np.asarray(x) * (1 + t / 100))

        with pytest.raises(RuntimeError, match="gone"):
            self.score(tmp_path, function(eps), micro_batch=4)
        return tmp_path

    def score(self, path, model=None, images=None, jobs=FEW, seed=0, **options):
        retry = scoring.Retry(attempts=1)
        return scoring.score(
            model or function(), images or source(), jobs, path, seed=seed, options=quiet(retry=retry, **options)
        )

    def test_another_batch_size_may_finish_it(self, half_done, tmp_path_factory):
        finished = self.score(half_done, micro_batch=3)
        whole = self.score(tmp_path_factory.mktemp("whole"), micro_batch=4)
        for job in FEW:
            np.testing.assert_allclose(finished.terms(job), whole.terms(job), rtol=1e-4)
        assert finished.queries_made <= whole.queries_made + 3 * 4

    def test_the_recorded_micro_batch_is_used_again(self, half_done, tmp_path_factory):
        whole = tmp_path_factory.mktemp("whole")
        self.score(whole, micro_batch=4)
        self.score(half_done)
        assert content(half_done) == content(whole)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": function(name="other")}, "model was 'function:mine', now 'function:other'"),
            ({"images": source(seed=1)}, "data was '[0-9a-f]{32}', now '[0-9a-f]{32}'"),
            ({"images": source(20)}, "images was 21, now 20"),
            ({"seed": 1}, "seed was 0, now 1"),
            ({"jobs": FEW[:-1]}, r"settings have changed: of the readings 2 gone \(such as Probe\(t=120, gamma=0.1"),
            ({"jobs": [*FEW, *ONE, *planning.grid_jobs(["secmi"], "quick")]}, r"3 new \(such as Walk\(k=10, n="),
        ],
    )
    def test_anything_else_is_refused_with_the_difference(self, half_done, change, message):
        before = queries_made(half_done)
        with pytest.raises(ValueError, match=f"cannot continue the score table .*{message}") as error:
            self.score(half_done, **change)
        assert "\n" not in str(error.value)
        assert queries_made(half_done) == before

    def test_so_is_another_noise_schedule(self, half_done):
        model = function()
        model.schedule = dj.linear_schedule(1000, 1e-4, 0.03)
        with pytest.raises(ValueError, match="the model's noise schedule has changed"):
            self.score(half_done, model)

    @pytest.mark.parametrize(("key", "value"), [("precision", "default"), ("code", "0.0.0"), ("transform", "cifar")])
    def test_so_are_another_precision_code_and_transform(self, half_done, key, value):
        manifest = score_table.read_manifest(half_done)
        manifest["identity"][key] = value
        score_table.write_manifest(half_done, manifest)
        with pytest.raises(ValueError, match=f"{key} was '{value}', now"):
            self.score(half_done)

    def test_two_runs_are_kept_apart(self, half_done):
        with (
            files.locked(half_done, "score table"),
            pytest.raises(ValueError, match="another run is writing the score table"),
        ):
            self.score(half_done)
        self.score(half_done)

    def test_a_damaged_shard_is_named(self, half_done):
        shard = next((half_done / "shards").glob("*.parquet"))
        shard.write_bytes(shard.read_bytes()[:-20])
        with pytest.raises(ValueError, match=rf"{shard.name} is damaged") as error:
            self.score(half_done)
        assert "\n" not in str(error.value)

    def test_a_foreign_manifest_is_refused(self, half_done):
        (half_done / "manifest.json").write_text(json.dumps({"format": "other"}))
        with pytest.raises(ValueError, match=r"manifest\.json holds no digests"):
            self.score(half_done)
        digests.write(half_done / "manifest.json", {"format": "dime_jax score table", "version": 2}, [])
        expected = "must be a dime_jax score table of version 1, got dime_jax score table of version 2"
        with pytest.raises(ValueError, match=rf"manifest\.json: {expected}"):
            self.score(half_done)


@contextlib.contextmanager
def largest_file(size):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize(
    ("micro_batch", "shards", "size", "file"), [(4, 6, 1000, "parquet"), (60, 3, 800, "queries-0.bin")]
)
def test_a_full_disk_is_a_clean_error_and_keeps_earlier_rows(tmp_path, die_at_write, micro_batch, shards, size, file):
    """In small batches a shard is the largest file; in one batch the ledger, of 240 bytes a unit, is full first."""
    jobs, options = [*ONE, *planning.grid_jobs(["loss"], "quick")], quiet(micro_batch=micro_batch, shard_seconds=0.0)
    run = lambda path: scoring.score(function(), source(60), jobs, path, options=options)  # noqa: E731
    run(tmp_path / "whole")
    table = tmp_path / "full"
    die_at_write(3 + 2 * shards)
    with pytest.raises(Killed):
        run(table)
    die_at_write(None)
    before = score_table.rows_done(table, 4, 60)
    assert np.sum(before >= 0) == (shards - 1) * micro_batch
    with largest_file(size), pytest.raises(OSError, match=f"cannot write: File too large.*{file}") as error:
        run(table)
    assert "\n" not in str(error.value)
    np.testing.assert_array_equal(score_table.rows_done(table, 4, 60), before)
    run(table)
    assert content(table) == content(tmp_path / "whole")


def test_a_directory_that_cannot_be_written_is_a_clean_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write a score table: Not a directory"):
        scoring.score(function(), source(), ONE, tmp_path / "file" / "table", options=quiet())


def test_a_read_only_table_is_a_clean_error_with_rows_intact(tmp_path, small, monkeypatch):
    """Root may write anywhere, so the refusal comes from where the kernel would give it."""
    replaced = []

    def refuse(source, target):
        if len(replaced) >= 9:  # schedule, manifest, list; three shards, each with the list
            raise PermissionError(13, "Permission denied")
        replaced.append(target)
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=r"cannot write: Permission denied.*parquet"):
        small(tmp_path)
    monkeypatch.undo()
    assert np.sum(score_table.rows_done(tmp_path, 4, 21) >= 0) == 3 * 4
    small(tmp_path)


def test_reading_a_table_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"is not a score table: no manifest\.json in it"):
        score_table.read_table(tmp_path)


def test_a_table_answers_only_what_was_asked(tmp_path):
    table = scoring.score(network(), source(), ONE, tmp_path, options=quiet(devices=jax.local_devices()[:1]))
    assert table.readings["Raw(t=70).l4"].shape == (21,)
    np.testing.assert_array_equal(table.schedule.sigma_table, SCHEDULE.sigma_table)
    with pytest.raises(ValueError, match=r"has no sima_l4 at \{'t': 10\}: no Raw\(t=10\).l4"):
        table.terms(planning.Job(ONE[0].attack, {"t": 10}))
    assert table.seconds_per_query > 0
