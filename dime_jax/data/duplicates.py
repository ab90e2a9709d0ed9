"""Exact and near duplicates: the same picture as member and held-out, or in both halves, makes any score meaningless.

Exact duplicates share all pixels. Near duplicates (recompressed, resized, slightly edited) are close by perceptual
hash *and* by pixels: on small images the hash alone is not enough (on scikit-learn's digits a distance of 8 chains 140
different images into one cluster).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.fft
from PIL import Image

from dime_jax._util import validate
from dime_jax.data import decoding, groups
from dime_jax.data.batches import map_items
from dime_jax.data.sources import Item, Source, pixel_digest
from dime_jax.data.splits import Halves, Split
from dime_jax.data.transforms import to_uint8

# Measured on 20,000 images of CIFAR-10: the 40 pairs with distance <= 6 and RMS <= 22 all show the same subject in the
# same view. JPEG at quality 50 moves 99 % of 500 images by a distance <= 4 and an RMS <= 12.2. On digits no pair within
# distance 8 is below RMS 16.
MAX_DISTANCE = 6
MAX_RMS = 14.0

_HASH_SIDE = 32
_THUMBNAIL_SIDE = 16
_BLOCK = 1024
_PAIRS_AT_ONCE = 2**21
_MAX_CHUNKED_DISTANCE = 14


class Duplicates(NamedTuple):
    """Duplicates among the images of a source.

    `groups` is int64 [n] over the whole source: the duplicate cluster of each image, groups.ALONE (-1) for none.
    `exact` and `near` are index pairs [k, 2]: each image with the first one of the same pixels, and each confirmed near
    pair among different ones.
    """

    groups: np.ndarray
    exact: np.ndarray
    near: np.ndarray


class DuplicateReport(NamedTuple):
    """What to tell the reader: pairs found, clusters, and clusters that lie across a boundary."""

    exact_pairs: int
    near_pairs: int
    clusters: int
    largest_cluster: int
    across_member_heldout: int
    across_calibration_test: int | None


class Sketch(NamedTuple):
    """What comparing needs of an image: 1.8 KB, whatever its size."""

    digest: bytes
    grey: np.ndarray
    thumbnail: np.ndarray


def sketch(item: Item) -> Sketch:
    """What comparing needs of one image."""
    pixels = to_uint8(item.image)

    def shrink() -> tuple[np.ndarray, np.ndarray]:
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        grey = image.convert("L").resize((_HASH_SIDE, _HASH_SIDE), Image.Resampling.LANCZOS)
        thumbnail = decoding.as_rgb(image).resize((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE), Image.Resampling.BOX)
        return np.asarray(grey), np.asarray(thumbnail)

    return Sketch(pixel_digest(item.image), *decoding.in_turn(pixels.size // pixels.shape[-1], shrink))


def find_duplicates(
    source: Source,
    indices: Sequence[int] | np.ndarray | None = None,
    *,
    max_distance: int = MAX_DISTANCE,
    max_rms: float = MAX_RMS,
) -> Duplicates:
    """Find exact and near duplicates among some images (all if None) of a source; bad images have none.

    Args:
      source: the images.
      indices: which of them to compare.
      max_distance: largest Hamming distance of two 64-bit perceptual hashes of a near pair.
      max_rms: largest root mean square difference, on 0..255, of their 16x16 RGB thumbnails.
    """
    indices = np.arange(len(source)) if indices is None else np.asarray(indices, np.int64)
    sketches = list(map_items(source, sketch, indices=indices))
    compared = indices[[one is not None for one in sketches]]
    found = [one for one in sketches if one is not None]
    return compare_sketches(len(source), compared, found, max_distance=max_distance, max_rms=max_rms)


def compare_sketches(
    n: int, compared: np.ndarray, found: Sequence[Sketch], *, max_distance: int = MAX_DISTANCE, max_rms: float = MAX_RMS
) -> Duplicates:
    """`find_duplicates` among images that were read before.

    Args:
      n: images in the source.
      compared: positions in the source of those that were read.
      found: their sketches.
      max_distance: see `find_duplicates`.
      max_rms: see `find_duplicates`.
    """
    validate.check_at_least(max_distance, 0, "max_distance")
    validate.check_at_least(max_rms, 0, "max_rms")
    if not found:
        return Duplicates(np.full(n, groups.ALONE, np.int64), np.empty((0, 2), int), np.empty((0, 2), int))

    _, first, inverse = np.unique([one.digest for one in found], return_index=True, return_inverse=True)
    same = first[inverse]
    repeats = np.flatnonzero(same != np.arange(len(found)))
    exact = np.stack([same[repeats], repeats], axis=1)

    distinct = np.sort(first)  # near pairs are looked for once among equal images
    hashes = perceptual_hashes(np.stack([found[row].grey for row in distinct]))
    thumbnails = np.stack([found[row].thumbnail for row in distinct]).reshape(len(distinct), -1)
    near = distinct[_near_pairs(hashes, thumbnails, max_distance, max_rms)]

    exact, near = compared[exact], compared[near]
    return Duplicates(groups.connect(n, np.concatenate([exact, near])), exact, near)


def perceptual_hashes(grey: np.ndarray) -> np.ndarray:
    """The 64-bit DCT hashes, uint64 [n], of greyscale images uint8 [n, 32, 32].

    A bit tells whether one of the 8x8 lowest DCT coefficients is above their median. The bits are those of
    `imagehash.phash`, computed for all images at once: one by one the library takes 0.8 ms an image.
    """
    bits = []
    for start in range(0, len(grey), _BLOCK):
        spectrum = scipy.fft.dctn(grey[start : start + _BLOCK].astype(np.float64), axes=(1, 2))[:, :8, :8]
        low = spectrum.reshape(-1, 64)
        bits.append(low > np.median(low, axis=1, keepdims=True))
    return np.packbits(np.concatenate(bits), axis=1).view(np.uint64)[:, 0]


def report_duplicates(duplicates: Duplicates, split: Split, halves: Halves | None = None) -> DuplicateReport:
    """Count the clusters, and those across member/held-out and across calibration/test."""
    sizes = np.unique(duplicates.groups[duplicates.groups != groups.ALONE], return_counts=True)[1]
    across_halves = None
    if halves is not None:
        calibration = np.concatenate([halves.calibration.member, halves.calibration.heldout])
        test = np.concatenate([halves.test.member, halves.test.heldout])
        across_halves = len(groups.shared_groups(duplicates.groups, calibration, test))
    return DuplicateReport(
        exact_pairs=len(duplicates.exact),
        near_pairs=len(duplicates.near),
        clusters=len(sizes),
        largest_cluster=int(sizes.max(initial=0)),
        across_member_heldout=len(groups.shared_groups(duplicates.groups, split.member, split.heldout)),
        across_calibration_test=across_halves,
    )


def remove_shared(split: Split, grouping: np.ndarray) -> Split:
    """The split without the groups that are on both its sides: all their images go, from both sides."""
    shared = groups.shared_groups(grouping, split.member, split.heldout)
    return Split(*(side[~np.isin(grouping[side], shared)] for side in (split.member, split.heldout)))


def _near_pairs(hashes: np.ndarray, thumbnails: np.ndarray, max_distance: int, max_rms: float) -> np.ndarray:
    """Pairs (i, j), i < j, in order, with hashes and thumbnails close: those that comparing all pairs would find."""
    found = [np.empty((0, 2), np.int64)]
    for pairs in _close_hashes(hashes, max_distance):
        for start in range(0, len(pairs), _BLOCK):
            block = pairs[start : start + _BLOCK]
            difference = thumbnails[block[:, 0]].astype(np.float32) - thumbnails[block[:, 1]]
            found.append(block[np.sqrt(np.mean(difference**2, axis=1)) <= max_rms])
    near = np.concatenate(found)
    return near[np.lexsort((near[:, 1], near[:, 0]))]


class _Chunk(NamedTuple):
    """Some neighbouring bits of a hash."""

    shift: int
    bits: int

    def of(self, hashes: np.ndarray) -> np.ndarray:
        return hashes >> np.uint64(self.shift) & np.uint64((1 << self.bits) - 1)


def _close_hashes(hashes: np.ndarray, max_distance: int) -> Iterator[np.ndarray]:
    """Every pair (i, j), i < j, of hashes at a Hamming distance <= max_distance, once; some pairs at a time.

    Two hashes that differ in at most d bits, cut into d//2 + 1 chunks, have a chunk in which they differ in at most one
    bit (or else d + 2 bits would differ). So only pairs that share a chunk, but for one bit, are looked at. Where most
    pairs would be, all are.
    """
    chunks = _chunks(max_distance // 2 + 1) if max_distance <= _MAX_CHUNKED_DISTANCE else [_Chunk(0, 0)]
    for number, chunk in enumerate(chunks):
        for pairs in _similar_in(chunk.of(hashes), chunk.bits):
            differing = hashes[pairs[:, 0]] ^ hashes[pairs[:, 1]]
            close = np.bitwise_count(differing) <= max_distance
            for earlier in chunks[:number]:  # found there already
                close &= np.bitwise_count(earlier.of(differing)) > 1
            yield np.sort(pairs[close], axis=1)


def _chunks(count: int) -> list[_Chunk]:
    bounds = [64 * number // count for number in range(count + 1)]
    return [_Chunk(start, end - start) for start, end in itertools.pairwise(bounds)]


def _similar_in(keys: np.ndarray, bits: int) -> Iterator[np.ndarray]:
    """Every pair of rows whose keys, numbers of so many bits, differ in at most one bit; once, in any order."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    rows = np.arange(len(keys))
    for pairs in _expand(rows, rows + 1, np.searchsorted(keys, keys, "right")):
        yield order[pairs]
    for bit in range(bits):
        flip = np.uint64(1 << bit)
        rows = np.flatnonzero(keys & flip == 0)  # each pair from one side
        others = keys[rows] | flip
        for pairs in _expand(rows, np.searchsorted(keys, others, "left"), np.searchsorted(keys, others, "right")):
            yield order[pairs]


def _expand(rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Iterator[np.ndarray]:
    """Each row with every number from its start to before its end, as pairs; a bounded number of pairs at a time."""
    counts = ends - starts
    totals = np.cumsum(counts)
    begin = 0
    while begin < len(rows):
        before = totals[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(totals, before + _PAIRS_AT_ONCE, "right")))
        some = counts[begin:end]
        within = np.arange(totals[end - 1] - before) - np.repeat(np.cumsum(some) - some, some)
        yield np.stack([np.repeat(rows[begin:end], some), np.repeat(starts[begin:end], some) + within], axis=1)
        begin = end
