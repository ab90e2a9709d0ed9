"""What a run shows, with and without a terminal, and from when on it says how long it will take."""

import re
import sys
import time

import pytest

from dime_jax._util.progress import Progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_plain_lines_now_and_then(capsys):
    clock = Clock()
    with Progress(1000, clock=clock) as progress:
        progress.compiled()
        for second in range(1, 11):
            clock.now = 2.0 * second
            progress.advance(100, f"step {second}")
    assert capsys.readouterr().err.splitlines() == [
        "measured 50 queries/s, 18 s left",
        "500 of 1,000 queries, 50 queries/s, 10 s left, step 5",
        "1,000 of 1,000 queries, 50 queries/s, 0 s left, step 10",
    ]


def test_a_long_compilation_is_said(capsys, monkeypatch):
    monkeypatch.setattr("dime_jax._util.progress.PLAIN_SECONDS", 0.01)
    with Progress(10) as progress:
        progress.what = "Base(t=70)"
        time.sleep(0.2)
        progress.compiled()
        said = capsys.readouterr().err
    assert "compiling, or running for the first time, for 0 s: Base(t=70)\n" in said
    time.sleep(0.05)
    assert not capsys.readouterr().err


def test_the_estimate_leaves_out_compilation(capsys):
    clock = Clock()
    with Progress(100_000, clock=clock) as progress:
        clock.now = 9.0
        progress.advance(100, "compiling")
        progress.compiled()
        clock.now = 10.0
        progress.advance(900, "running")
    assert capsys.readouterr().err.splitlines()[0] == "measured 900 queries/s, 2 min left"


@pytest.mark.parametrize("terminal", [False, True])
def test_there_is_no_rate_before_compilation_is_done(capsys, monkeypatch, terminal):
    """74 minutes left that become 3 are no estimate."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    clock = Clock()
    with Progress(1000, clock=clock) as progress:
        for second in (20.0, 40.0):
            clock.now = second
            progress.advance(1, "step")
        assert (progress._bar is not None) == terminal
        if progress._bar is not None:
            progress._bar.refresh()
        before = capsys.readouterr().err
        progress.compiled()
        clock.now = 42.0
        progress.advance(998, "step")
    after = capsys.readouterr().err
    assert not re.search(r"/s|left|\d:\d\d", before)
    assert terminal or before.splitlines() == [
        "1 of 1,000 queries, compiling, step",
        "2 of 1,000 queries, compiling, step",
    ]
    assert "compiling" in before
    assert "499 queries/s, 0 s left" in after


def test_a_batch_without_any_query_is_no_measurement(capsys):
    clock = Clock()
    with Progress(10, clock=clock) as progress:
        progress.compiled()
        clock.now = 20.0
        progress.advance(0, "unreadable")
    assert capsys.readouterr().err == "0 of 10 queries, not measured yet, unreadable\n"


def test_the_rate_is_handed_on_once(capsys):
    clock, rates = Clock(), []
    with Progress(100, clock=clock, on_rate=rates.append) as progress:
        progress.compiled()
        for second in (0.5, 3.0, 9.0):  # half a second is too short to measure anything
            clock.now = second
            progress.advance(2, "step")
    assert rates == [3.0 / 4]
    assert capsys.readouterr().err == "measured 0.8 s for each, 72 s left\n"


def test_silent_processes_say_nothing(capsys):
    with Progress(10, silent=True) as progress:
        progress.say("hello")
        progress.advance(10, "all")
    assert capsys.readouterr().err == ""


def test_what_took_longer_than_it_will_is_not_measured(capsys):
    clock, rates = Clock(), []
    with Progress(100, clock=clock, on_rate=rates.append) as progress:
        progress.compiled()
        for second, measured in ((50.0, False), (52.0, True)):
            clock.now = second
            progress.advance(4, "step", measured)
    assert rates == [0.5]
    assert capsys.readouterr().err.splitlines()[0] == "4 of 100 queries, not measured yet, step"
