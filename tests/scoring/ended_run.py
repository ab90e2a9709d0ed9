"""A scoring run that ends as asked, with the command line's codes: python ended_run.py TABLE done|error|interrupt."""

import sys

import numpy as np
from tiny_model import TWO, function, network, quiet, source

from dime_jax import cli, scoring


def score(table, end):
    """Score with a network, or with a function that fails in the middle."""
    asked = 0

    def gone(x, t):
        nonlocal asked
        asked += 1
        if asked == 20:
            raise RuntimeError("gone")
        return np.asarray(x)

    options = quiet(micro_batch=2, shard_seconds=0.0, retry=scoring.Retry(attempts=1))
    print("ready", flush=True)
    scoring.score(function(gone) if end == "error" else network(), source(40), TWO, table, options=options)
    return cli.DONE


def main(table, end):
    """As `cli.main` does."""
    try:
        return score(table, end)
    except KeyboardInterrupt:
        return cli.INTERRUPTED
    except RuntimeError:
        return cli.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
