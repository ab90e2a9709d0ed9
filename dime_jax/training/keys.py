"""The randomness of an update, as a function of (seed, number of the update).

Keys are made on the host and used with JAX's "rbg" generator: the default one costs seconds of compilation per draw on
CPUs, and dropout draws in every block of a network.
"""

from typing import Any, NamedTuple

import jax
import numpy as np


class Keys(NamedTuple):
    """One stream for each kind of draw, uint32 [4]; see `as_key`."""

    t: Any
    noise: Any
    flips: Any
    dropout: Any


def update_keys(seed: int, number: int) -> Keys:
    """The keys of an update."""
    streams = len(Keys._fields)
    return Keys(*np.random.SeedSequence((seed, number)).generate_state(4 * streams).reshape(streams, 4))


def as_key(bits: jax.Array) -> jax.Array:
    """The key for `jax.random`."""
    return jax.random.wrap_key_data(bits, impl="rbg")
