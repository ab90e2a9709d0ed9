"""A training run in a process of its own, to be killed.

python killed_training.py WORKDIR STEPS [largest file, or 0 for no limit [START RANK]]
"""

import resource
import sys

import jax
import numpy as np
import tiny

from dime_jax import training


def main(workdir, steps, largest_file=0, start=None, rank=None):
    if int(largest_file):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest_file), int(largest_file)))
    options = training.TrainingOptions(log_every=5, save_every=5, silent=True, devices=jax.devices()[:1])
    spec, recipe = tiny.spec(dropout=0.1), tiny.recipe(steps=int(steps))
    rank = None if rank is None else int(rank)
    training.train(workdir, spec, tiny.source(), np.arange(6), recipe, options=options, start=start, rank=rank)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        print(error, flush=True)  # on standard output: orbax's threads write across each other on the other one
        sys.exit(1)
