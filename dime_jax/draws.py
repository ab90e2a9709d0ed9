"""Random draws that depend on (seed, example id, draw index) only.

So a score does not change with batch size, order, device or process count, and the first q draws of a longer run are
those of a shorter one.
"""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Separate streams, so that an attack with Gaussian queries shares no randomness with one that has sign queries.
_RADEMACHER, _GAUSSIAN = 0, 1


def id_numbers(ids: Sequence[str | int]) -> jax.Array:
    """Example ids as uint32: numbers below 2³² as they are, names by their CRC-32."""
    return jnp.asarray([i if isinstance(i, (int, np.integer)) else zlib.crc32(i.encode()) for i in ids], jnp.uint32)


@functools.partial(jax.jit, static_argnames=("shape", "stream", "dtype"))
def _draw(key: jax.Array, ids: jax.Array, index: Any, shape: tuple[int, ...], stream: int, dtype: Any) -> jax.Array:
    key = jax.random.fold_in(key, stream)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), index))(ids)
    sample = jax.random.rademacher if stream == _RADEMACHER else jax.random.normal
    return jax.vmap(lambda k: sample(k, shape, dtype))(keys)


def rademacher(
    key: jax.Array, ids: jax.Array, index: Any, shape: tuple[int, ...], dtype: Any = np.float32
) -> jax.Array:
    """Signs ±1 [B, *shape] for draw number `index` of each example."""
    return _draw(key, ids, index, tuple(shape), _RADEMACHER, dtype)


def gaussian(key: jax.Array, ids: jax.Array, index: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
    """Standard Gaussian noise [B, *shape] for draw number `index` of each example."""
    return _draw(key, ids, index, tuple(shape), _GAUSSIAN, dtype)


@dataclasses.dataclass(frozen=True)
class Draws:
    """The draws of one batch: which examples (uint32 [B], see `id_numbers`), and the key of the run."""

    key: jax.Array
    ids: jax.Array

    def rademacher(self, index: int, like: jax.Array) -> jax.Array:
        """Sign probe number `index`, of the shape and dtype of the batch `like`."""
        return rademacher(self.key, self.ids, index, like.shape[1:], like.dtype)

    def gaussian(self, index: int, like: jax.Array) -> jax.Array:
        """Gaussian noise number `index`, of the shape and dtype of the batch `like`."""
        return gaussian(self.key, self.ids, index, like.shape[1:], like.dtype)
