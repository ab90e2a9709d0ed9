"""A scoring run in a process of its own, to be killed: python killed_run.py TABLE [devices] [coordinator id count]."""

import os
import sys

if len(sys.argv) > 2:
    flags = os.environ.get("XLA_FLAGS", "")  # of which the last wins
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={sys.argv[2]}"

import jax

if len(sys.argv) > 3:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[3], int(sys.argv[5]), int(sys.argv[4]))

from tiny_model import TWO, network, quiet, source

from dime_jax import scoring


def main():
    print("ready", flush=True)
    # A shard after every unit of work, so that a kill often falls into a write.
    options = quiet(micro_batch=2, shard_seconds=0.0)
    table = scoring.score(network(), source(40), TWO, sys.argv[1], options=options)
    print(f"{len(table.index)} images, {table.queries_made} queries", flush=True)


if __name__ == "__main__":
    main()
