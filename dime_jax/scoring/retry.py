"""Retries, for models that are plain functions and fail now and then, as hosted ones do."""

import random
import threading
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import tenacity

from dime_jax.scoring.query_ledger import LedgerUnwritable

P = ParamSpec("P")
T = TypeVar("T")

LONGEST_PAUSE = 3600.0  # seconds that a model may ask us to wait; beyond that the run ends and can be resumed


class Retry(NamedTuple):
    """How often to retry, and how long to wait before.

    The n-th wait is random, between half and all of min(longest_wait, first_wait · 2ⁿ) seconds, so that many callers
    spread out; where the model says how long to wait (`TryLater`), it is that long.

    Attributes:
      attempts: how often to ask in all.
      first_wait: the bound on the first wait, in seconds.
      longest_wait: the bound on every wait, in seconds.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0


class TryLater(ConnectionError):
    """The model cannot answer now.

    Args:
      message: why.
      seconds: how long the model asks us to wait; None if it does not say.
    """

    def __init__(self, message: str, seconds: float | None = None):
        super().__init__(message)
        self.seconds = seconds


def with_retries(
    ask: Callable[P, T], retry: Retry, say: Callable[[str], object], stop: threading.Event | None = None
) -> Callable[P, T]:
    """Return the same function with retries: it waits and tries again where the model behind it fails.

    Args:
      ask: the function.
      retry: how often to try, and how long to wait.
      say: called with a line before each wait.
      stop: once set, waits end and nothing is retried.
    """

    def say_so(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error = state.outcome.exception()
        say(f"waiting {state.next_action.sleep:.1f} s, the model failed: {error!r}")

    def wait(state: tenacity.RetryCallState) -> float:
        assert state.outcome is not None
        error = state.outcome.exception()
        if isinstance(error, TryLater) and error.seconds is not None:
            return error.seconds
        longest = min(retry.longest_wait, retry.first_wait * 2.0 ** (state.attempt_number - 1))
        return random.uniform(longest / 2, longest)

    stopped = stop or threading.Event()
    return tenacity.retry(
        retry=tenacity.retry_if_exception(_may_help),
        stop=tenacity.stop_after_attempt(retry.attempts) | tenacity.stop_when_event_set(stopped),
        wait=wait,
        sleep=tenacity.sleep_using_event(stopped),
        before_sleep=say_so,
        reraise=True,
    )(ask)


def _may_help(error: BaseException) -> bool:
    """Return whether a retry may help: not if our input or our disk is at fault, or the wait exceeds an hour."""
    if isinstance(error, TryLater) and error.seconds is not None and error.seconds > LONGEST_PAUSE:
        return False
    return isinstance(error, Exception) and not isinstance(error, ValueError | TypeError | LedgerUnwritable)
