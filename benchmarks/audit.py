"""The example audit with nothing compiled, and again with every program kept.

    python -m benchmarks audit

Each round begins with an empty cache directory; medians over rounds are compared.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from dime_jax._util import compilation_cache

ROUNDS = 3
GOAL = 0.75


def audit(cache: pathlib.Path, output: pathlib.Path) -> float:
    """How long the command takes, from its start to its end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment[compilation_cache.SWITCH] = str(cache)
    start = time.perf_counter()
    command = [sys.executable, "-m", "dime_jax.cli", "audit", "--quiet", "--output", str(output)]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def run() -> None:
    """Measure and print."""
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            directory = pathlib.Path(name)
            rounds.append([audit(directory / "cache", directory / output) for output in ("first", "second")])
    first, second = map(statistics.median, zip(*rounds))
    print(f"example audit, second / first: {second / first:.2f}x (at most {GOAL}); {second:.1f} s and {first:.1f} s")
