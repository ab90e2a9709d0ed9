"""Reading a source: multi-threaded batches of a fixed shape, the report of bad images, and the fingerprint.

Threads and prefetching are grain's. Its elements here are whole batches, so that its cost per element is paid once a
batch and a batch is found by its number alone.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from dime_jax._util import validate
from dime_jax.data.sources import BadImage, Item, Source, check_integers, pixel_digest, require_captions
from dime_jax.data.transforms import Transform

MAX_UNUSABLE_FRACTION = 0.1
NUM_THREADS = min(4, os.cpu_count() or 1)
_CHUNK = 64  # images that a thread takes at a time

T = TypeVar("T")


class Batch(NamedTuple):
    """Images for one model call, always of the same shape.

    Rows with mask False hold zeros for an image: either padding (index -1, id "", label 0, caption ""), or a bad image
    under its own index, id, label and caption.
    """

    images: np.ndarray  # float32 [B, H, W, C] in [-1, 1]
    labels: np.ndarray | None  # int32 [B]
    ids: list[str]
    index: np.ndarray  # type: ignore[assignment]  # int64 [B], positions in the source
    mask: np.ndarray  # bool [B]
    captions: list[str] | None = None  # B texts


class TooManyBadImages(ValueError):
    """More than 10 % of the images cannot be used; the message says why."""


def refuse_too_many(count: int, total: int, what: str, why: Callable[[], str]) -> None:
    """Refuse a run in which more than 10 % of the images drop out, unreadable or without an answer.

    The others speak for all of them only while few are missing.

    Args:
      count: how many images dropped out.
      total: how many there were.
      what: what to call them, such as "members that cannot be used".
      why: returns what follows the count in the message; called only if there are too many.

    Raises:
      TooManyBadImages: if they are more than MAX_UNUSABLE_FRACTION.
    """
    if count > MAX_UNUSABLE_FRACTION * total:
        raise TooManyBadImages(
            f"too many {what}: must be <= {MAX_UNUSABLE_FRACTION:.0%} of {total}, got {count}{why()}"
        )


class _Pass:
    """One pass over `total` images: counts bad ones, and stops when there are too many."""

    def __init__(self, total: int):
        self.total = total
        self.bad: dict[str, str] = {}

    def note(self, id: str, reason: str) -> None:
        self.bad[id] = reason
        refuse_too_many(len(self.bad), self.total, "images that cannot be used", self._list)

    def _list(self) -> str:
        """Return a line for each bad image, whatever characters its name has."""
        return " so far:\n" + "\n".join(f"{id!r} {' '.join(reason.split())}" for id, reason in self.bad.items())


class Unusable(NamedTuple):
    """A BadImage's reason; the exception itself would keep the image alive through its traceback."""

    reason: str


def batches(
    source: Source,
    batch_size: int,
    transform: Transform,
    *,
    indices: Sequence[int] | np.ndarray | None = None,
    num_threads: int = NUM_THREADS,
) -> Iterator[Batch]:
    """Iterate over a source in batches of exactly `batch_size` rows, the last one padded.

    Bad images are masked; once they are more than 10 % of `indices`, TooManyBadImages ends the iteration.

    Args:
      source: where images come from.
      batch_size: B, rows in a batch.
      transform: pipeline applied to each image, in the reading threads.
      indices: which images, in this order; all in their order if None.
      num_threads: reading threads, each of which reads one batch ahead; 0 reads in the calling thread.

    Yields:
      Batch; images in the order of `indices`, whatever the threads do.
    """
    indices = _check_indices(source, indices)
    validate.check_at_least(batch_size, 1, "batch_size")

    def load(number: int) -> tuple[Batch, dict[str, str]]:
        return _load_batch(source, transform, indices[number * batch_size : (number + 1) * batch_size], batch_size)

    return _reporting(_read_ahead(load, -(-len(indices) // batch_size), num_threads), _Pass(len(indices)))


def _reporting(loaded: Iterator[tuple[Batch, dict[str, str]]], this_pass: _Pass) -> Iterator[Batch]:
    for batch, bad in loaded:
        for id, reason in bad.items():
            this_pass.note(id, reason)
        yield batch


def _load_batch(
    source: Source, transform: Transform, index: np.ndarray, batch_size: int
) -> tuple[Batch, dict[str, str]]:
    images = np.zeros((batch_size, *transform.shape), np.float32)
    mask = np.zeros(batch_size, bool)
    bad = {}
    for row, i in enumerate(index):
        try:
            images[row] = transform(source[i].image)
        except BadImage as error:
            bad[source.ids[i]] = str(error)
            continue
        mask[row] = True
    padding = batch_size - len(index)
    index = np.concatenate([index, np.full(padding, -1)])
    labels = None if source.labels is None else np.where(index >= 0, source.labels[index], np.int32(0))
    ids = [source.ids[i] if i >= 0 else "" for i in index]
    captions = None if source.captions is None else [source.captions[i] if i >= 0 else "" for i in index]
    return Batch(images, labels, ids, index, mask, captions), bad


def map_items(
    source: Source,
    function: Callable[[Item], T],
    *,
    indices: Sequence[int] | np.ndarray | None = None,
) -> Iterator[T | None]:
    """Yield function(item) for each image in order, computed in threads.

    Args:
      source: the images.
      function: of an item; called from any thread.
      indices: of the images; all if None.

    Yields:
      None for bad images; TooManyBadImages once they are more than 10 %.
    """
    indices = _check_indices(source, indices)
    this_pass = _Pass(len(indices))
    for index, result in zip(indices, try_items(source, function, indices=indices)):
        if isinstance(result, Unusable):
            this_pass.note(source.ids[index], result.reason)
        yield None if isinstance(result, Unusable) else result


def try_items(
    source: Source,
    function: Callable[[Item], T],
    *,
    indices: Sequence[int] | np.ndarray | None = None,
) -> Iterator[T | Unusable]:
    """Do as `map_items`, but yield the reason in place of a bad image, however many there are."""
    indices = _check_indices(source, indices)

    def one(index: int) -> T | Unusable:
        try:
            return function(source[index])
        except BadImage as error:
            return Unusable(str(error))

    def load(number: int) -> list[T | Unusable]:
        return [one(index) for index in indices[number * _CHUNK : (number + 1) * _CHUNK]]

    for results in _read_ahead(load, -(-len(indices) // _CHUNK), NUM_THREADS):
        yield from results


def fingerprint(source: Source, indices: Sequence[int] | np.ndarray | None = None, *, captions: bool = False) -> str:
    """Return 32 hex digits that change with any id, label or pixel, but not with order, format or path.

    Images are streamed; bad ones enter by id only.

    Args:
      source: where images come from.
      indices: which images; all if None.
      captions: whether a model is asked about the images with their captions: then the digits change with any caption
        as well. Captions that no model sees leave them as they are.

    Raises:
      ValueError: if captions are used and the source has none.
    """
    indices = _check_indices(source, indices)
    if captions:
        require_captions(source)

    def digest(id: str, content: bytes) -> bytes:
        return hashlib.blake2b(id.encode() + b"\0" + content, digest_size=16).digest()

    def content_of(item: Item) -> bytes:
        caption = hashlib.blake2b((item.caption or "").encode(), digest_size=16).digest() if captions else b""
        return f"{item.label}".encode() + pixel_digest(item.image) + caption

    contents = map_items(source, content_of, indices=indices)
    digests = [digest(source.ids[i], b"bad" if content is None else content) for i, content in zip(indices, contents)]
    return hashlib.blake2b(b"".join(sorted(digests)), digest_size=16).hexdigest()


def _read_ahead(load: Callable[[int], T], count: int, num_threads: int) -> Iterator[T]:
    """Yield load(0), load(1), ..., load(count - 1), in order, computed ahead by grain's threads."""
    import grain

    if count == 0:
        return iter(())
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=num_threads)
    return iter(grain.MapDataset.range(count).map(load).to_iter_dataset(options))


def _check_indices(source: Source, indices: Sequence[int] | np.ndarray | None) -> np.ndarray:
    if indices is None:
        return np.arange(len(source))
    indices = check_integers(indices, "indices")
    if indices.size and not (indices.min() >= 0 and indices.max() < len(source)):
        place = f"[0, {len(source)}) for {source.name}"
        raise ValueError(f"indices must be in {place}, got {indices.min()} to {indices.max()}")
    return indices
