"""Storing what a model answered: rows for the score table, written as shards now and then, and the progress shown."""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from dime_jax._util.progress import Progress
from dime_jax.data.batches import refuse_too_many
from dime_jax.scoring.placement import PlacedBatch
from dime_jax.scoring.planning import Plan, Unit
from dime_jax.scoring.query_ledger import Ledger
from dime_jax.scoring.score_table import NOT_FINITE, OK, UNREADABLE
from dime_jax.scoring.shards import Rows, ShardWriter
from dime_jax.scoring.unit_progress import StoredProgress, UnitProgress, encode, to_stored


class TableStorage:
    """The rows of a run as far as this process knows them.

    Args:
      status: of every row of the table [units, images], -1 where it is missing; kept up to date.
      writer: of this process's shards.
      ledger: of this process; its state is noted with every shard.
      progress: advanced by what is stored.
      shard_seconds: the most work that a kill may cost.
      partials: units that were in the middle when the run was interrupted.

    Attributes:
      calls_at_once: how many calls of a unit to ask before `note`, so that they take a small part of shard_seconds.
    """

    def __init__(
        self,
        status: np.ndarray,
        writer: ShardWriter,
        ledger: Ledger,
        progress: Progress,
        shard_seconds: float,
        partials: Sequence[StoredProgress] = (),
    ):
        self.status, self.calls_at_once = status, 1
        self._writer, self._ledger, self._progress = writer, ledger, progress
        self._shard_seconds, self._last_flush = shard_seconds, time.monotonic()
        self._partials = partials
        self._middle: Callable[[], StoredProgress | None] | None = None
        self._noted, self._call_seconds = time.monotonic(), math.inf

    def find(self, number: int, batch: PlacedBatch) -> StoredProgress | None:
        """Return what was stored of a unit on a batch, if anything."""
        return next((partial for partial in self._partials if partial.is_of(number, batch)), None)

    def note(self, number: int, plan: Plan, batch: PlacedBatch, progress: UnitProgress, calls: int) -> None:
        """Wait for the answers of a unit in the middle, and store them if that is due.

        Args:
          number: of the unit.
          plan: that it is of.
          batch: the images.
          progress: how far the unit is.
          calls: how many of its calls were made since `note` or `add` was last called.
        """
        jax.block_until_ready(list(progress.numbers.values()))
        now = time.monotonic()
        self._call_seconds = min(self._call_seconds, max(now - self._noted, 1e-6) / calls)
        self.calls_at_once = max(1, int(self._shard_seconds / 8 / self._call_seconds))
        self._noted = now
        self._middle = functools.partial(to_stored, number, plan.units[number], plan.trees, batch, progress)
        self._flush_if_due()

    def add(self, number: int, unit: Unit, batch: PlacedBatch, progress: UnitProgress, *, at_full_speed: bool) -> bool:
        """Wait for a unit's answers, and hold them for the next shard, which may be due.

        Args:
          number: of the unit.
          unit: the unit.
          batch: the images.
          progress: the finished unit.
          at_full_speed: False if something was compiled on the way, so that its time says nothing of the next one's.

        Returns:
          Whether every image of the batch has a finite answer.
        """
        readings = _readings(unit, batch, progress)
        finite = np.all(np.isfinite(readings), axis=0)
        status = np.where(batch.usable, np.where(finite, OK, NOT_FINITE), UNREADABLE)
        real = batch.index >= 0
        rows, ids = batch.index[real], [batch.ids[i] for i in np.flatnonzero(real)]
        self._writer.add(Rows(number, rows, ids, status[real], readings[:, real]))
        self.status[number, rows] = status[real]
        queries = (unit.queries - progress.resumed) * int(batch.usable.sum())
        self._progress.advance(queries, unit.name, measured=at_full_speed)
        self._noted, self._middle = time.monotonic(), None  # what was noted last is of this unit, or written
        self._flush_if_due()
        return not np.any(status[real] != OK)

    def _flush_if_due(self) -> None:
        # Half of what may be lost: the other half is for what is under way.
        if time.monotonic() - self._last_flush >= self._shard_seconds / 2:
            self.flush()

    def flush(self) -> None:
        """Write the rows kept so far as a shard, if there are any, and the unit in the middle."""
        now = time.monotonic()
        middle = self._middle and self._middle()
        self._writer.flush(now - self._last_flush, self._ledger.state, middle and encode(middle))
        self._last_flush, self._middle = now, None


def _readings(unit: Unit, batch: PlacedBatch, progress: UnitProgress) -> np.ndarray:
    """The numbers that the table keeps of a unit [r, B]; NaN where there is no usable image."""
    readings = np.full((len(unit.readings), len(batch.index)), np.nan, np.float32)
    if progress.numbers:
        readings[:] = jax.device_get([progress.numbers[call][name] for call, name in unit.readings])
        readings[:, ~batch.usable] = np.nan
    return readings


def refuse_unanswered(status: np.ndarray, counted: np.ndarray, unreadable: Mapping[str, str]) -> None:
    """Stop a run in which too many images have no answer (`data.batches.refuse_too_many`).

    Args:
      status: of every row of the table [units, images].
      counted: positions of the images that count.
      unreadable: why images of this process could not be read, by id.
    """
    worst = status.max(axis=0)[counted]
    counts = {
        what: int(np.sum(worst == code)) for what, code in (("not finite", NOT_FINITE), ("unreadable", UNREADABLE))
    }

    def why() -> str:
        kinds = " and ".join(f"{count} {what}" for what, count in counts.items() if count)
        example = f", such as {next(iter(unreadable.items()))}" if unreadable else ""
        return f" so far ({kinds}{example}); stopped"

    refuse_too_many(sum(counts.values()), len(counted), "images without an answer", why)
