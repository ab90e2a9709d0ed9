"""The randomness of an update, as a function of (seed, number of the update).

Keys are made on the host and used with JAX's "rbg" generator: the default one costs seconds of compilation per draw on
CPUs, and dropout draws in every block of a network.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax._util.typing import Array


class Keys(NamedTuple):
    """One stream for each kind of draw, uint32 [4]; see `as_key`."""

    t: Array
    noise: Array
    flips: Array
    dropout: Array


def update_keys(seed: int, number: int) -> Keys:
    """The keys of an update."""
    streams = len(Keys._fields)
    return Keys(*np.random.SeedSequence((seed, number)).generate_state(4 * streams).reshape(streams, 4))


def as_key(bits: Array) -> jax.Array:
    """The key for `jax.random`."""
    return jax.random.wrap_key_data(jnp.asarray(bits), impl="rbg")
