"""Show how far a run has come: a bar in a terminal, a plain line now and then elsewhere, nothing if silent."""

import threading
import time
from collections.abc import Callable

import rich.console
import rich.progress

PLAIN_SECONDS = 10.0
_MEASURED_SECONDS = 1.0  # before an estimate is given
COMPILING = "compiling"


class Progress:
    """Progress of `total` queries, as a context manager. Lines go to standard error.

    It shows neither rate nor ETA before `compiled` is called: compilation would make both far too pessimistic.

    Args:
      total: queries to make.
      silent: show nothing; for all processes but the first.
      clock: gives the time in seconds; tests replace it.
      unit: what is counted.
      on_rate: called once with the measured seconds per query, unless silent.
    """

    def __init__(
        self,
        total: int,
        silent: bool = False,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "queries",
        on_rate: Callable[[float], None] | None = None,
    ):
        self._total, self._silent, self._clock, self._unit = total, silent, clock, unit
        self._console = rich.console.Console(stderr=True, soft_wrap=True, highlight=False)
        self._on_rate = on_rate
        self._done, self._shown = 0, clock()
        self._start: float | None = None  # of what runs at full speed
        self._measured_from, self._estimate_due = 0, False
        self._bar: rich.progress.Progress | None = None
        self.what = ""  # is being asked now
        self._at_full_speed = threading.Event()
        self._reminder = threading.Thread(target=self._remind, name="compiling")

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._silent:
            columns = (
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[pace]}"),
                rich.progress.TextColumn("{task.description}"),
            )
            self._bar = rich.progress.Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=self._total, pace=COMPILING)
            self._bar.start()
        if not self._silent:
            self._reminder.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._at_full_speed.set()
        if not self._silent:
            self._reminder.join()
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if not self._silent:
            self._console.print(text, markup=False)

    def _remind(self) -> None:
        """Say now and then, from a thread, that programs are being compiled, for how long and for what."""
        begin = time.monotonic()
        while not self._at_full_speed.wait(PLAIN_SECONDS):
            so_far = f"{COMPILING}, or running for the first time, for {duration(time.monotonic() - begin)}"
            if self._bar is not None:
                self._bar.update(self._task, description=self.what, pace=so_far)
            else:
                self.say(f"{so_far}: {self.what}" if self.what else so_far)

    def compiled(self) -> None:
        """From here on work runs at full speed: measure its rate, and announce the ETA once."""
        self._at_full_speed.set()
        self._start, self._measured_from, self._estimate_due = self._clock(), self._done, True

    def advance(self, queries: int, what: str, measured: bool = True) -> None:
        """Count `queries` more as done, and show `what` as the current step.

        With `measured=False`, for work that took longer than its like will, the measurement starts again after it.
        """
        now = self._clock()
        self._done += queries
        if not measured and self._start is not None:
            self._start, self._measured_from = now, self._done
        seconds = self._seconds_per_query(now)
        pace = self._pace(seconds)
        if seconds is not None and self._estimate_due and now - (self._start or 0) >= _MEASURED_SECONDS:
            self._estimate_due = False
            self.say(f"measured {pace}")
            if self._on_rate is not None and not self._silent:
                self._on_rate(seconds)
        if self._bar is not None:
            self._bar.update(self._task, advance=queries, description=what, pace=pace)
        elif now - self._shown >= PLAIN_SECONDS or self._done == self._total:
            self._shown = now
            self.say(f"{self._done:,} of {self._total:,} {self._unit}, {pace}, {what}")

    def _seconds_per_query(self, now: float) -> float | None:
        """Return the measured rate; None as long as nothing was done at full speed."""
        done = self._done - self._measured_from
        return None if self._start is None or not done else max(now - self._start, 1e-9) / done

    def _pace(self, seconds: float | None) -> str:
        if seconds is None:
            return COMPILING if self._start is None else "not measured yet"
        rate = f"{1 / seconds:,.0f} {self._unit}/s" if seconds < 0.5 else f"{seconds:.1f} s for each"
        return f"{rate}, {duration((self._total - self._done) * seconds)} left"


def duration(seconds: float) -> str:
    """Return a time in words: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
