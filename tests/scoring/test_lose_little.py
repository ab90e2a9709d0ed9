"""Killed in the middle of a long unit of work: what was answered until shortly before is not asked again."""

import os
import types

import numpy as np
import pytest
from tiny_model import SCHEDULE, function, network, quiet, source

from dime_jax import attacks, scoring
from dime_jax.scoring import planning, storing
from dime_jax.scoring.query_ledger import queries_made

IMAGES = 6
# DIME at one timestep of the paper's grid, and a trajectory, whose states are pairs of arrays.
JOBS = [
    *planning.grid_jobs(["dime"], "paper", settings=[{"t": 70}]),
    planning.Job(attacks.get_attack("secmi"), {"t": 100, "k": 10}),
]
PLAN = planning.make_plan(JOBS, SCHEDULE)


class Killed(BaseException):
    """Stands for SIGKILL: from the moment it is raised nothing reaches the disk any more."""


@pytest.fixture
def clock(monkeypatch):
    """A clock that storing goes by, and that stands still unless it is advanced."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(storing, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def content(directory):
    return (directory / "scores.parquet").read_bytes()


def score(model, directory, shard_seconds=30.0):
    options = quiet(micro_batch=4, shard_seconds=shard_seconds)
    return scoring.score(model, source(IMAGES), JOBS, directory, options=options)


@pytest.mark.parametrize(("call_seconds", "most_lost"), [(5.0, 6), (100.0, 1)])
def test_ten_kills_cost_thirty_seconds_each_or_one_call(tmp_path, monkeypatch, clock, call_seconds, most_lost):
    whole = score(function(), tmp_path / "whole")
    moments = iter(np.random.default_rng(0).integers(1, 2 * PLAN.queries_per_image // 10, 10).tolist())
    replace, asked = os.replace, []

    def slow(left):
        def eps(x, t):
            nonlocal left
            asked.append(len(x))
            left -= 1
            if left == 0:
                monkeypatch.setattr(os, "replace", dead)
                raise Killed
            clock.seconds += call_seconds
            return np.tanh(np.asarray(x) * (1 + t / 100))

        return function(eps)

    def dead(*paths):
        raise Killed

    table = tmp_path / "killed"
    for moment in moments:
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            score(slow(moment), table)
    monkeypatch.setattr(os, "replace", replace)
    resumed = score(slow(-1), table)
    assert content(table) == content(tmp_path / "whole")
    assert not list((table / "shards").iterdir())
    assert queries_made(table) == resumed.queries_made == sum(asked)
    # Beside what was answered, the call that was being asked is asked again.
    assert resumed.queries_made - whole.queries_made <= 10 * (most_lost + 1) * 4


def test_a_network_goes_on_in_the_middle_of_a_unit(tmp_path, monkeypatch):
    """Every answer is stored at once here; the states that the next calls start from survive to the bit."""
    model, replace = network(), os.replace
    whole = score(model, tmp_path / "whole", shard_seconds=0.0)
    table = tmp_path / "killed"
    for writes in (150, 61, 32):
        left = [writes]

        def write(*paths, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            replace(*paths)

        monkeypatch.setattr(os, "replace", write)
        with pytest.raises(Killed):
            score(model, table, shard_seconds=0.0)
    monkeypatch.setattr(os, "replace", replace)
    resumed = score(model, table, shard_seconds=0.0)
    assert content(table) == content(tmp_path / "whole")
    assert resumed.queries_made - whole.queries_made <= 3 * 4 * 4


def test_a_failing_model_loses_nothing(tmp_path):
    def failing(x, t):
        failing.left -= 1
        if failing.left == 0:
            raise RuntimeError("gone")
        return np.tanh(np.asarray(x) * (1 + t / 100))

    failing.left = 100
    options = quiet(micro_batch=4, retry=scoring.Retry(attempts=1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            scoring.score(function(failing), source(IMAGES), JOBS, tmp_path / "table", options=options)
        failing.left = 120
    failing.left = -1
    finished = scoring.score(function(failing), source(IMAGES), JOBS, tmp_path / "table", options=options)
    assert finished.queries_made - IMAGES * PLAN.queries_per_image <= 2 * 4  # the two calls that failed
