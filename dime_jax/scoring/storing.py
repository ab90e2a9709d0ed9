"""Storing what a model answered: rows for the score table, written as shards now and then, and the progress shown."""

import time
from collections.abc import Mapping

import jax
import numpy as np

from dime_jax.data.batches import refuse_too_many
from dime_jax.progress import Progress
from dime_jax.scoring.asking import Answers
from dime_jax.scoring.placement import PlacedBatch
from dime_jax.scoring.planning import Unit
from dime_jax.scoring.query_ledger import Ledger
from dime_jax.scoring.score_table import NOT_FINITE, OK, UNREADABLE
from dime_jax.scoring.shards import Rows, ShardWriter


class TableStorage:
    """The rows of a run as far as this process knows them.

    Args:
      status: of every row of the table [units, images], -1 where it is missing; kept up to date.
      writer: of this process's shards.
      ledger: of this process; its state is noted with every shard.
      progress: advanced by what is stored.
      shard_seconds: work between two shards.
    """

    def __init__(
        self, status: np.ndarray, writer: ShardWriter, ledger: Ledger, progress: Progress, shard_seconds: float
    ):
        self.status = status
        self._writer, self._ledger, self._progress = writer, ledger, progress
        self._shard_seconds, self._last_flush = shard_seconds, time.monotonic()

    def add(self, number: int, unit: Unit, batch: PlacedBatch, answers: Answers) -> bool:
        """Wait for a unit's answers, and keep them for the next shard, which may be due.

        Returns:
          Whether every image of the batch has a finite answer.
        """
        readings = _readings(unit, batch, answers)
        finite = np.all(np.isfinite(readings), axis=0)
        status = np.where(batch.usable, np.where(finite, OK, NOT_FINITE), UNREADABLE)
        real = batch.index >= 0
        rows, ids = batch.index[real], [batch.ids[i] for i in np.flatnonzero(real)]
        self._writer.add(Rows(number, rows, ids, status[real], readings[:, real]))
        self.status[number, rows] = status[real]
        self._progress.advance(unit.queries * int(batch.usable.sum()), unit.name, measured=answers.at_full_speed)
        if time.monotonic() - self._last_flush >= self._shard_seconds:
            self.flush()
        return not np.any(status[real] != OK)

    def flush(self) -> None:
        """Write the rows kept so far as a shard, if there are any."""
        now = time.monotonic()
        self._writer.flush(now - self._last_flush, self._ledger.state)
        self._last_flush = now


def _readings(unit: Unit, batch: PlacedBatch, answers: Answers) -> np.ndarray:
    """The numbers that the table keeps of a unit [r, B]; NaN where there is no usable image."""
    readings = np.full((len(unit.readings), len(batch.index)), np.nan, np.float32)
    if answers.numbers:
        readings[:] = jax.device_get([answers.numbers[call][name] for call, name in unit.readings])
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
