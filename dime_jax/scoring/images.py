"""The images of a run: which still miss answers, which process asks about them, and how they are read."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dime_jax import data


class Images:
    """The images of a source, transformed as they are read; bad ones read as zeros and are noted.

    What `data.batches` tolerates is a share of one pass; here it must be a share of the whole run, over its resumes.

    Attributes:
      unreadable: why, by id, of the bad images met so far.
    """

    def __init__(self, source: data.Source, transform: data.Transform):
        self.unreadable: dict[str, str] = {}

        def read(index: int) -> np.ndarray:
            try:
                return transform(source.read(index))
            except data.BadImage as error:
                self.unreadable[source.ids[index]] = str(error)
                return np.zeros(transform.shape, np.float32)

        self._source = dataclasses.replace(source, read=read)
        self._transform = transform._replace(resize=lambda image: image)

    def batches(self, rows: np.ndarray, size: int) -> Iterator[data.Batch]:
        """Yield the images at these positions in batches of one size; masks leave out padding and unreadable ones."""
        for batch in data.batches(self._source, size, self._transform, indices=rows):
            readable = np.array([id not in self.unreadable for id in batch.ids])
            yield batch._replace(mask=batch.mask & readable)


class Group(NamedTuple):
    """Images that miss the same units."""

    units: np.ndarray
    rows: np.ndarray


def missing_groups(status: np.ndarray, index: np.ndarray) -> list[Group]:
    """Return the images at `index` that miss a unit, in their order, grouped by what they miss, by first appearance.

    Args:
      status: of every row of the table [units, images], -1 where it is missing.
      index: positions of images.
    """
    missing = status[:, index] < 0
    patterns, first, member = np.unique(missing, axis=1, return_index=True, return_inverse=True)
    groups = [Group(np.flatnonzero(patterns[:, g]), index[member.reshape(-1) == g]) for g in np.argsort(first)]
    return [group for group in groups if len(group.units)]


def images_of_process(
    status: np.ndarray, index: np.ndarray, batch_size: int, process: int, processes: int
) -> np.ndarray:
    """Return the positions of the images that one of several processes asks about, in whole batches.

    Whole batches are stored too, so a resumed run has the batches of an unbroken one.

    Args:
      status, index: as in `missing_groups`.
      batch_size: images in a batch.
      process: which one this is, from 0.
      processes: how many there are.
    """
    groups = [group.rows for group in missing_groups(status, index)]
    batches = [rows[start : start + batch_size] for rows in groups for start in range(0, len(rows), batch_size)]
    return np.concatenate([np.zeros(0, np.int64), *batches[process::processes]])
