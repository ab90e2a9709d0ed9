"""Exact and near duplicates: the same picture as member and held-out, or in both halves, makes any score meaningless.

Exact duplicates share all pixels. Near duplicates are copies in which a viewer sees the same picture; `near_copies` has
how they are found.
"""

import io
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from dime_jax._util import files, validate
from dime_jax._util.text import one_line
from dime_jax.data import decoding, groups
from dime_jax.data.batches import map_items
from dime_jax.data.near_copies import GRID, MAX_RMS, MIN_CORRELATION, Pictures, find_near_copies
from dime_jax.data.sources import Item, Source, pixel_digest
from dime_jax.data.splits import Halves, Split
from dime_jax.data.transforms import to_uint8

_THUMBNAIL_SIDE = 16


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
    """What a comparison needs of an image: 1.8 KB, whatever its size.

    Attributes:
      digest: of the pixels.
      grey: uint8 [32, 32], the mean of the channels.
      thumbnail: uint8 [16, 16, 3].
      side: the shorter one, in pixels.
    """

    digest: bytes
    grey: np.ndarray
    thumbnail: np.ndarray
    side: int


def sketch(item: Item) -> Sketch:
    """Sketch one image for comparison."""
    pixels = to_uint8(item.image)

    def shrink() -> tuple[np.ndarray, np.ndarray]:
        image = decoding.as_rgb(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels))
        grid = np.asarray(image.resize((GRID, GRID), Image.Resampling.LANCZOS))
        thumbnail = image.resize((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE), Image.Resampling.BOX)
        return np.round(grid.mean(-1)).astype(np.uint8), np.asarray(thumbnail)

    side = min(pixels.shape[:2])
    return Sketch(pixel_digest(item.image), *decoding.in_turn(pixels.size // pixels.shape[-1], shrink), side)


_STORED = np.dtype(
    [
        ("digest", np.uint8, 16),
        ("grey", np.uint8, (GRID, GRID)),
        ("thumbnail", np.uint8, (_THUMBNAIL_SIDE, _THUMBNAIL_SIDE, 3)),
        ("side", "<i4"),
    ]
)


def sketches_file(directory: pathlib.Path, fingerprint: str) -> pathlib.Path:
    """Where the sketches of the images of a trained model are kept, beside it; `fingerprint` is that of the images."""
    return directory / f"trained_on-{fingerprint}.npy"


def write_sketches(path: pathlib.Path, sketches: Sequence[Sketch]) -> None:
    """Write sketches to an .npy file, completely or not at all."""
    rows, buffer = np.zeros(len(sketches), _STORED), io.BytesIO()
    for row, one in zip(rows, sketches):
        row["digest"], row["side"] = np.frombuffer(one.digest, np.uint8), one.side
        row["grey"], row["thumbnail"] = one.grey, one.thumbnail
    np.save(buffer, rows, allow_pickle=False)
    files.write_atomically(path, buffer.getvalue())


def read_sketches(path: pathlib.Path) -> list[Sketch]:
    """Read what `write_sketches` wrote; no more memory is taken than the file has bytes.

    Raises:
      ValueError: in one line, for any other file.
    """
    try:
        rows = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged file fails in many ways
        raise ValueError(f"{path} cannot be read as sketches of images: {one_line(error)}") from None
    if rows.dtype != _STORED or rows.ndim != 1 or np.any(rows["side"] < 1):
        raise ValueError(f"{path} must hold sketches of images, as dime_jax writes them")
    return [
        Sketch(row["digest"].tobytes(), np.array(row["grey"]), np.array(row["thumbnail"]), int(row["side"]))
        for row in rows
    ]


def find_duplicates(
    source: Source,
    indices: Sequence[int] | np.ndarray | None = None,
    *,
    min_correlation: float = MIN_CORRELATION,
    max_rms: float = MAX_RMS,
) -> Duplicates:
    """Find exact and near duplicates among some images (all if None) of a source; bad images have none.

    Args:
      source: the images.
      indices: which of them to compare.
      min_correlation: the least high-pass correlation of a near pair, whatever the colours.
      max_rms: or else the largest root mean square difference, on 0..255, of their 16x16 RGB thumbnails.
    """
    indices = np.arange(len(source)) if indices is None else np.asarray(indices, np.int64)
    sketches = list(map_items(source, sketch, indices=indices))
    compared = indices[[one is not None for one in sketches]]
    found = [one for one in sketches if one is not None]
    return compare_sketches(len(source), compared, found, min_correlation=min_correlation, max_rms=max_rms)


def compare_sketches(
    n: int,
    compared: np.ndarray,
    found: Sequence[Sketch],
    *,
    min_correlation: float = MIN_CORRELATION,
    max_rms: float = MAX_RMS,
) -> Duplicates:
    """Do what `find_duplicates` does, with images that were read before.

    Args:
      n: images in the source.
      compared: positions in the source of those that were read.
      found: their sketches.
      min_correlation: see `find_duplicates`.
      max_rms: see `find_duplicates`.
    """
    validate.check_at_least(min_correlation, 0, "min_correlation")
    validate.check_at_least(max_rms, 0, "max_rms")
    if not found:
        return Duplicates(np.full(n, groups.ALONE, np.int64), np.empty((0, 2), int), np.empty((0, 2), int))

    _, first, inverse = np.unique([one.digest for one in found], return_index=True, return_inverse=True)
    same = first[inverse]
    repeats = np.flatnonzero(same != np.arange(len(found)))
    exact = np.stack([same[repeats], repeats], axis=1)

    distinct = np.sort(first)  # of equal images, one is searched for near pairs
    pictures = Pictures(
        np.stack([found[row].grey for row in distinct]),
        np.stack([found[row].thumbnail for row in distinct]),
        np.array([found[row].side for row in distinct]),
    )
    near = distinct[find_near_copies(pictures, min_correlation=min_correlation, max_rms=max_rms)]

    exact, near = compared[exact], compared[near]
    return Duplicates(groups.connect(n, np.concatenate([exact, near])), exact, near)


def copies_of_others(found: Duplicates, n: int) -> tuple[Duplicates, np.ndarray]:
    """Take the images beyond the first n out again.

    Args:
      found: duplicates among all images.
      n: how many of them stay.

    Returns:
      Duplicates: those among the first n.
      np.ndarray: which of the first n are copies of one that goes, or of copies of it, bool [n].
    """
    exact, near = (pairs[pairs.max(axis=1, initial=0) < n] for pairs in (found.exact, found.near))
    kept = Duplicates(groups.connect(n, np.concatenate([exact, near])), exact, near)
    return kept, np.isin(found.groups[:n], np.setdiff1d(found.groups[n:], [groups.ALONE]))


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
    """Return the split without groups that lie on both sides: all their images are removed, from both."""
    shared = groups.shared_groups(grouping, split.member, split.heldout)
    return Split(*(side[~np.isin(grouping[side], shared)] for side in (split.member, split.heldout)))
