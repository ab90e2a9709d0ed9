"""Store what a model answered, as rows of the score table that are written in shards, and show the progress."""

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
from dime_jax.scoring.shards import ShardWriter, rows_of
from dime_jax.scoring.unit_progress import StoredProgress, UnitProgress, encode


class TableStorage:
    """The rows of a run as far as this process knows them.

    Args:
      plan: of the run.
      status: of every row of the table [units, images], -1 where it is missing; kept up to date.
      writer: of this process's shards.
      ledger: of this process; its state is noted with every shard.
      progress: advanced by what is stored.
      shard_seconds: the most work that a kill may cost.
      partials: units that were unfinished when the run was interrupted.

    Attributes:
      calls_at_once: how many calls of a unit to ask before `note`, so that they take a small part of shard_seconds.
    """

    def __init__(
        self,
        plan: Plan,
        status: np.ndarray,
        writer: ShardWriter,
        ledger: Ledger,
        progress: Progress,
        shard_seconds: float,
        partials: Sequence[StoredProgress] = (),
    ):
        self._plan, self.status, self.calls_at_once = plan, status, 1
        self._writer, self._ledger, self._progress = writer, ledger, progress
        self._shard_seconds, self._last_flush = shard_seconds, time.monotonic()
        self._partials = partials
        self._middle: Callable[[], bytes | None] | None = None
        self._noted, self._call_seconds = time.monotonic(), math.inf

    def find(self, number: int, batch: PlacedBatch) -> StoredProgress | None:
        """Return what was stored of a unit on a batch, if anything."""
        return next((partial for partial in self._partials if partial.is_of(number, batch)), None)

    def note(self, unit: UnitProgress, calls: int) -> None:
        """Wait for the answers of an unfinished unit, and store them if that is due.

        Args:
          unit: how far it has got.
          calls: how many of its calls were made since `note` or `add` was last called.
        """
        jax.block_until_ready(list(unit.numbers.values()))
        now = time.monotonic()
        self._call_seconds = min(self._call_seconds, max(now - self._noted, 1e-6) / calls)
        self.calls_at_once = max(1, int(self._shard_seconds / 8 / self._call_seconds))
        self._noted = now
        self._middle = functools.partial(encode, unit, self._plan)
        self._flush_if_due()

    def add(self, unit: UnitProgress) -> bool:
        """Wait for the answers of a finished unit, and hold them for the next shard, which may be due.

        Returns:
          Whether every image of the batch has a finite answer.
        """
        planned, batch = self._plan.units[unit.number], unit.batch
        readings = _readings(planned, unit)
        finite = np.all(np.isfinite(readings), axis=0)
        status = np.where(batch.usable, np.where(finite, OK, NOT_FINITE), UNREADABLE)
        real = batch.index >= 0
        rows, ids = batch.index[real], [batch.ids[i] for i in np.flatnonzero(real)]
        self._writer.add(rows_of(unit.number, rows, ids, status[real], readings[:, real]))
        self.status[unit.number, rows] = status[real]
        queries = (planned.queries - unit.resumed) * int(batch.usable.sum())
        self._progress.advance(queries, planned.name, measured=unit.at_full_speed)
        self._noted, self._middle = time.monotonic(), None  # what was noted last is of this unit, or written
        self._flush_if_due()
        return not np.any(status[real] != OK)

    def _flush_if_due(self) -> None:
        # Half of what may be lost: the other half is for what is under way.
        if time.monotonic() - self._last_flush >= self._shard_seconds / 2:
            self.flush()

    def flush(self) -> None:
        """Write the rows held so far as a shard, if there are any, and the unfinished unit."""
        now = time.monotonic()
        self._writer.flush(now - self._last_flush, self._ledger.state, self._middle and self._middle())
        self._last_flush, self._middle = now, None


def _readings(planned: Unit, unit: UnitProgress) -> np.ndarray:
    """Return the numbers that the table keeps of a unit [r, B]; NaN where there is no usable image."""
    readings = np.full((len(planned.readings), len(unit.batch.index)), np.nan, np.float32)
    if unit.numbers:
        readings[:] = jax.device_get([unit.numbers[call][name] for call, name in planned.readings])
        readings[:, ~unit.batch.usable] = np.nan
    return readings


def refuse_unanswered(status: np.ndarray, counted: np.ndarray, unreadable: Mapping[str, str]) -> None:
    """Stop a run in which too many images have no answer (`data.batches.refuse_too_many`).

    Args:
      status: of every row of the table [units, images].
      counted: positions of the images that count.
      unreadable: why images of this process could not be read, by id.
    """
    worst = status.max(axis=0)[counted]
    kinds = {"not finite": NOT_FINITE, "unreadable": UNREADABLE}
    counts = {what: int(np.sum(worst == code)) for what, code in kinds.items()}

    def why() -> str:
        found = " and ".join(f"{count} {what}" for what, count in counts.items() if count)
        example = f", such as {next(iter(unreadable.items()))}" if unreadable else ""
        return f" so far ({found}{example}); stopped"

    refuse_too_many(sum(counts.values()), len(counted), "images without an answer", why)
