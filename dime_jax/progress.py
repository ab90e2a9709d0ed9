"""Showing how far a run has come: a bar in a terminal, a plain line now and then elsewhere, nothing when silent."""

import time
from collections.abc import Callable

import rich.console
import rich.progress

PLAIN_SECONDS = 10.0


class Progress:
    """Progress of `total` queries, as a context manager. Lines go to standard error.

    Args:
      total: queries to make.
      silent: show nothing, for all processes but the first.
      clock: seconds, for tests.
      unit: what is counted, if not queries.
    """

    def __init__(
        self,
        total: int,
        silent: bool = False,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "queries",
    ):
        self._total, self._silent, self._clock, self._unit = total, silent, clock, unit
        self._console = rich.console.Console(stderr=True, soft_wrap=True, highlight=False)
        self._done, self._start, self._shown = 0, clock(), clock()
        self._measured_from, self._estimate_due = 0, False
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._silent:
            columns = (
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn(f"{{task.fields[rate]}} {self._unit}/s"),
                rich.progress.TimeRemainingColumn(),
                rich.progress.TextColumn("{task.description}"),
            )
            self._bar = rich.progress.Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=self._total, rate="…")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line of its own."""
        if not self._silent:
            self._console.print(text, markup=False)

    def compiled(self) -> None:
        """What comes now runs at full speed: measure the rate from here, and say once how long all will take."""
        self._start, self._measured_from, self._estimate_due = self._clock(), self._done, True

    def advance(self, queries: int, what: str) -> None:
        """So many more were done, in the setting `what`."""
        now = self._clock()
        self._done += queries
        rate = (self._done - self._measured_from) / max(now - self._start, 1e-9)
        left = _duration((self._total - self._done) / rate)
        if self._estimate_due:
            self._estimate_due = False
            self.say(f"measured {rate:,.0f} {self._unit}/s: about {left} to go")
        if self._bar is not None:
            self._bar.update(self._task, advance=queries, description=what, rate=f"{rate:,.0f}")
        elif now - self._shown >= PLAIN_SECONDS or self._done == self._total:
            self._shown = now
            self.say(f"{self._done:,} of {self._total:,} {self._unit}, {rate:,.0f}/s, {left} left, {what}")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
