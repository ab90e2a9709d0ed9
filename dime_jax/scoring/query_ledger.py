"""The ledger of queries: one number on disk for every query, written before it is asked.

So what a killed run has spent is known exactly, and a budget holds across resumes. Damage gives no budget
back: with every shard of the score table the state of the ledger is noted, and a ledger that does not begin as it did
then is refused (`check`). What was entered after the last shard before a kill is only checked to be about known images.
"""

import hashlib
import os
import pathlib
import threading
from typing import NamedTuple

import numpy as np

from dime_jax._util.digests import Damaged

_ENTRY = np.dtype("<i4")
NO_IMAGE = -1  # a query about none of the images: it counts in the total only
REFERENCE = "reference"  # in a run: the part about a second model, whose own ledgers count what it was asked


class Budget(NamedTuple):
    """The most queries that may be made, over all resumes; None for no bound.

    Attributes:
      total: about all images together.
      per_image: about any one image.
      directory: of a run with several score tables about one source, which share the budget; the table's own if None.
    """

    total: int | None = None
    per_image: int | None = None
    directory: pathlib.Path | None = None


class BudgetExceeded(ValueError):
    """The next query would go beyond the budget; it was not asked."""


class LedgerUnwritable(OSError):
    """A query could not be entered, so it was not asked."""


class State(NamedTuple):
    """How many queries a ledger holds, and the digest of these."""

    queries: int
    queries_digest: str


class Ledger:
    """The queries of one process of a run, appended to `queries-PROCESS.bin` as positions in the source.

    Args:
      directory: of the score table.
      process: whose file to append to.
      images: number of images in the source.
      allowance: how many queries this process may still make; None for no bound.
      budget: its bound per image is kept, over every table that shares it.
    """

    def __init__(self, directory: pathlib.Path, process: int | str, images: int, allowance: int | None, budget: Budget):
        self._path = ledger_path(directory, process)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the run)
        whole = self._path.stat().st_size // _ENTRY.itemsize * _ENTRY.itemsize
        os.truncate(self._path, whole)  # a full disk may have cut the last entry
        self._entered, self._hash = whole // _ENTRY.itemsize, _hash(self._path.read_bytes())
        self._spent = spent_per_image(budget.directory or directory, images)
        self._allowance = allowance
        self._per_image = budget.per_image
        self.debited = 0
        self._lock = threading.Lock()

    def debit(self, index: np.ndarray) -> None:
        """Enter one query about each of these images, or raise BudgetExceeded and enter none; from any thread."""
        with self._lock:
            if self._allowance is not None and self.debited + len(index) > self._allowance:
                rest = self._allowance - self.debited
                raise BudgetExceeded(f"the query budget is used up: {len(index)} more are needed, but {rest} are left")
            images = index[index != NO_IMAGE]
            if self._per_image is not None and np.any(self._spent[images] >= self._per_image):
                raise BudgetExceeded(f"the budget allows {self._per_image} queries per image, but one more is needed")
            left = entry = np.asarray(index, _ENTRY).tobytes()
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError as error:
                raise LedgerUnwritable(error.errno, f"cannot write: {error.strerror}", str(self._path)) from None
            self._hash.update(entry)
            self._entered += len(index)
            self._spent[images] += 1
            self.debited += len(index)

    @property
    def state(self) -> State:
        """What was entered so far, by this process and earlier ones with its number."""
        return State(self._entered, self._hash.hexdigest())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def ledger_path(directory: pathlib.Path, process: int | str) -> pathlib.Path:
    """Return the path of one process's ledger."""
    return directory / f"queries-{process}.bin"


def ledgers(directory: pathlib.Path) -> list[pathlib.Path]:
    """List the ledgers of all processes of a score table, or of all tables of a run except its reference's."""
    found = sorted(directory.rglob("queries-*.bin"))
    return [path for path in found if path.relative_to(directory).parts[0] != REFERENCE]


def check(path: pathlib.Path, noted: State, images: int) -> None:
    """Require that a ledger begins with what was noted, and is about images of the source.

    Raises:
      Damaged: naming the ledger.
    """
    entries = _read(path) if path.exists() else np.zeros(0, _ENTRY)
    if len(entries) < noted.queries:
        raise Damaged(f"{path} is damaged: it holds {len(entries):,} queries, but {noted.queries:,} were made")
    if _hash(entries[: noted.queries].tobytes()).hexdigest() != noted.queries_digest:
        raise Damaged(f"{path} is damaged or from another run: its queries are not those that were made")
    if np.any((entries < 0) | (entries >= images)):
        raise Damaged(f"{path} is damaged: it lists image indices that do not exist")


def spent_per_image(directory: pathlib.Path, images: int) -> np.ndarray:
    """Count the queries made so far about each image of the source [images], by every process and resume."""
    files = [_read(path) for path in ledgers(directory)]
    entries = np.concatenate([np.zeros(0, _ENTRY), *files])
    return np.bincount(entries[entries != NO_IMAGE], minlength=images)


def queries_made(directory: pathlib.Path) -> int:
    """Count all queries made so far."""
    return sum(path.stat().st_size // _ENTRY.itemsize for path in ledgers(directory))


def allowance(
    directory: pathlib.Path, budget: Budget, needed: np.ndarray, index: np.ndarray, mine: np.ndarray, processes: int
) -> int | None:
    """Return how many queries one of several processes may make: its plan, and its share of what the plan leaves.

    Args:
      directory: of the score table.
      budget: of the run.
      needed: queries that each image of the source still needs [images].
      index: positions of the run's images.
      mine: positions of this process's images among them.
      processes: how many share the rest of the budget.

    Returns:
      The number; None for no bound.

    Raises:
      BudgetExceeded: if the plan takes more than the budget has left.
    """
    directory = budget.directory or directory
    if budget.per_image is not None:
        spent = spent_per_image(directory, len(needed))[index]
        most = int(np.max(np.where(needed[index] > 0, spent + needed[index], 0)))
        if most > budget.per_image:
            raise BudgetExceeded(f"the budget allows {budget.per_image} queries per image, but the plan takes {most}")
    if budget.total is None:
        return None
    planned, left = int(needed[index].sum()), max(0, budget.total - queries_made(directory))
    if planned > left:
        raise BudgetExceeded(f"this takes {planned:,} queries, but the budget of {budget.total:,} has {left:,} left")
    return int(needed[mine].sum()) + (left - planned) // processes


def _hash(content: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(content, digest_size=16)


def _read(path: pathlib.Path) -> np.ndarray:
    content = path.read_bytes()
    return np.frombuffer(content[: len(content) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)
