"""Interleaved timing: runs alternate, so that a change in the machine's load meets every side."""

import importlib.util
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

HAS_TORCH = importlib.util.find_spec("torch") is not None
Key = TypeVar("Key", bound=Hashable)


def median_seconds(runs: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, float]:
    """Median wall time of each function over `rounds` alternating rounds, after one warm-up call each."""
    for run in runs.values():
        run()
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[key].append(time.perf_counter() - start)
    return {key: statistics.median(times) for key, times in seconds.items()}


def median_seconds_apart(
    sides: Mapping[str, Callable[[], Callable[[], Any]]], turns: int, calls: int
) -> dict[str, float]:
    """Median wall time of a call, each side in a process of its own and called back to back, as its users run it.

    The sides take turns of one call that is not counted and `calls` that are: what a process had in memory and gave
    back, the system may have taken away while it was the other's turn, and the first call pays for getting it again.
    Each value of `sides` is an importable function that makes the function to time.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, prepare in sides.items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(prepare, calls, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, pipe in pipes.items():
            pipe.send(None)
            seconds[name] += pipe.recv()
    for process in processes:
        process.terminate()
    return {name: statistics.median(times) for name, times in seconds.items()}


def _serve(prepare: Callable[[], Callable[[], Any]], calls: int, pipe: Connection) -> None:
    """Make the function, and at each request call it and send the times of all calls but the first."""
    run = prepare()
    while True:
        pipe.recv()
        times = [time.perf_counter()]
        for _ in range(calls + 1):
            run()
            times.append(time.perf_counter())
        pipe.send([end - start for start, end in itertools.pairwise(times[1:])])
