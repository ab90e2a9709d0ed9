"""Random draws that depend on (seed, example id, draw index) only.

So a score does not change with batch size, order, device or process count, and the first q draws of a longer run are
those of a shorter one.
"""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

# Separate streams, so that an attack with Gaussian queries shares no randomness with one that has sign queries, nor any
# attack with how the images were encoded.
_RADEMACHER, _GAUSSIAN, _LATENT, _PULLBACK = range(4)


def id_numbers(ids: Sequence[str | int]) -> Array:
    """Return example ids as uint32: numbers below 2³² as they are, names by their CRC-32."""
    numbers = [i if isinstance(i, (int, np.integer)) else zlib.crc32(i.encode()) for i in ids]
    if numbers and not 0 <= min(numbers) <= max(numbers) < 2**32:
        raise ValueError(f"ids must be from 0 to 2³² - 1, got {min(numbers)} to {max(numbers)}")
    return jax.device_put(np.array(numbers, np.uint32))  # jnp.asarray would compile a program for each length


@functools.partial(jax.jit, static_argnames=("shape", "stream", "dtype"))
def _draw(key: Array, ids: Array, index: ArrayLike, shape: tuple[int, ...], stream: int, dtype: DTypeLike) -> Array:
    key = jax.random.fold_in(key, stream)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), index))(ids)
    sample = jax.random.rademacher if stream in (_RADEMACHER, _PULLBACK) else jax.random.normal
    return jax.vmap(lambda k: sample(k, shape, dtype))(keys)


def rademacher(
    key: Array, ids: Array, index: ArrayLike, shape: tuple[int, ...], dtype: DTypeLike = np.float32
) -> Array:
    """Draw signs ±1 [B, *shape], number `index` of each example.

    Args:
      key: of the run.
      ids: of the examples, uint32 [B] (see `id_numbers`).
      index: number of the draw.
      shape: of one example's draw.
      dtype: of the result.
    """
    return _draw(key, ids, index, tuple(shape), _RADEMACHER, dtype)


def gaussian(key: Array, ids: Array, index: ArrayLike, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Draw standard Gaussian noise [B, *shape], number `index` of each example.

    Args:
      key, ids, index, shape, dtype: as in `rademacher`.
    """
    return _draw(key, ids, index, tuple(shape), _GAUSSIAN, dtype)


@dataclasses.dataclass(frozen=True)
class Draws:
    """The draws of one batch: which examples (uint32 [B], see `id_numbers`), and the key of the run."""

    key: Array
    ids: Array

    def rademacher(self, index: int, like: Array) -> Array:
        """Sign probe number `index`, of the shape and dtype of the batch `like`."""
        return rademacher(self.key, self.ids, index, like.shape[1:], like.dtype)

    def gaussian(self, index: int, like: Array) -> Array:
        """Gaussian noise number `index`, of the shape and dtype of the batch `like`."""
        return gaussian(self.key, self.ids, index, like.shape[1:], like.dtype)

    def latent(self, like: Array) -> Array:
        """The Gaussian noise with which each image's latent is sampled, of the shape and dtype of the batch `like`."""
        return _draw(self.key, self.ids, 0, like.shape[1:], _LATENT, like.dtype)

    def pullback(self, index: ArrayLike, shape: tuple[int, ...]) -> Array:
        """Signs ±1 [B, *shape] number `index`, with which the metric of a decoder is estimated."""
        return _draw(self.key, self.ids, index, tuple(shape), _PULLBACK, np.float32)


class Randomness(Protocol):
    """Where an attack gets its probes and noises from: `Draws`, or arrays that someone made (`Given`)."""

    def rademacher(self, index: int, like: Array) -> Array:
        """Sign probe number `index`."""
        ...

    def gaussian(self, index: int, like: Array) -> Array:
        """Gaussian noise number `index`."""
        ...


class Draw(NamedTuple):
    """One draw for each image of a batch: signs ±1 or standard Gaussian noise, and its number."""

    kind: Literal["rademacher", "gaussian"]
    index: int  # type: ignore[assignment]

    def take(self, draws: Randomness, like: Array) -> Array:
        """Return the draw, of the shape and dtype of the batch `like`."""
        return draws.rademacher(self.index, like) if self.kind == "rademacher" else draws.gaussian(self.index, like)


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """Draws that someone made, [q, B, ...]: number k is row k, whatever kind is asked for."""

    rows: Array | Sequence[Array]

    def rademacher(self, index: int, like: Array) -> Array:
        """Row `index`."""
        del like
        return self.rows[index]

    gaussian = rademacher


NO_DRAWS = Given(())
