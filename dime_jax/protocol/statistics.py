"""Statistics of a run's pictures, computed before anything is asked: what `evidence.difficulty` takes out of scores.

    RUN/statistics.npz     index [n], statistics [n, k] of images of every role, NaN where one cannot be read
    RUN/statistics.json    the digest of that, and of which images

They cost no query, and are the same for every role: members, held-out images and candidates.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np

from dime_jax import data, evidence
from dime_jax._util import digests, files
from dime_jax._util.distributed import on_first_process

FILE = "statistics.json"
_ARRAYS = "statistics.npz"
_BATCH = 64
_FINISHED = ("audit.json", "compare.json")  # what they belong to is not overwritten


@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """`evidence.difficulty_statistics` [n, k] of the images at these positions in the source [n], in rising order."""

    index: np.ndarray
    statistics: np.ndarray

    def of(self, indices: np.ndarray) -> np.ndarray:
        """Return the statistics of some images [m, k].

        Raises:
          ValueError: if one of them is not there.
        """
        rows = np.minimum(np.searchsorted(self.index, indices), len(self.index) - 1)
        if not np.array_equal(self.index[rows], indices):
            raise ValueError("the run has no statistics of some of its images: start again in another directory")
        return self.statistics[rows]


def of_images(statistics: Statistics | None, indices: np.ndarray) -> np.ndarray | None:
    """Return the statistics of some images [m, k]; None where there are none."""
    return None if statistics is None else statistics.of(indices)


def make(directory: pathlib.Path, source: data.Source, indices: np.ndarray, transform: data.Transform) -> None:
    """Write the statistics of some images of a run, unless they are there already: of the same images to the pixel.

    Args:
      directory: of the run.
      source: the images.
      indices: which of them, in any order.
      transform: how the model sees them.

    Raises:
      ValueError: for other images than those of a finished audit; some may be added.
    """

    def write() -> None:
        index = np.unique(indices)
        about = {"images": len(index), "data": data.fingerprint(source, index), "transform": transform.name}
        if exist(directory):
            before = read(directory).index
            if np.array_equal(before, index) and digests.read(directory / FILE).contents == about:
                return
            added = len(before) < len(index) and np.all(np.isin(before, index))
            if not added and any((directory / name).exists() for name in _FINISHED):
                raise ValueError(f"{directory} holds a finished audit of other images: choose another directory")
        directory.mkdir(parents=True, exist_ok=True)
        columns = {"index": index, "statistics": of_source(source, index, transform)}
        files.write_atomically(directory / _ARRAYS, digests.dump_arrays(columns, compress=True))
        digests.write(directory / FILE, about, [_ARRAYS])

    on_first_process(write)


def exist(directory: pathlib.Path) -> bool:
    """Whether a run has statistics."""
    return (directory / FILE).exists()


def read(directory: pathlib.Path) -> Statistics:
    """Read the statistics of a run.

    Raises:
      FileNotFoundError: if there are none.
      digests.Damaged: if they are not what was written.
    """
    columns = digests.read(directory / FILE).read_arrays(_ARRAYS)
    return Statistics(columns["index"], columns["statistics"])


def of_source(
    source: data.Source,
    indices: np.ndarray,
    transform: data.Transform,
    measure: Callable[[np.ndarray], np.ndarray] = evidence.difficulty_statistics,
) -> np.ndarray:
    """Compute statistics of some images [n, k], in their order, batch by batch; NaN where one cannot be read.

    Args:
      source: the images.
      indices: which of them.
      transform: how the model sees them.
      measure: images [n, H, W, C] -> statistics [n, k].
    """
    rows = []
    for batch in data.batches(source, _BATCH, transform, indices=indices):
        found = measure(np.where(batch.mask[:, None, None, None], batch.images, 0))
        rows.append(np.where(batch.mask[:, None], found, np.nan)[: np.sum(batch.index >= 0)])
    return np.concatenate(rows)
