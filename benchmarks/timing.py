"""Interleaved timing: runs alternate, so that a change in the machine's load meets every side."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

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
