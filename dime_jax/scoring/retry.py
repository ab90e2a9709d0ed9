"""Asking again: patience with models that are plain functions, such as hosted ones, which fail now and then."""

import random
import threading
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import tenacity

from dime_jax.scoring.query_ledger import LedgerUnwritable

P = ParamSpec("P")
T = TypeVar("T")

LONGEST_PAUSE = 3600.0  # that a model may ask for; the run can be continued later


class Retry(NamedTuple):
    """How to ask again when a model that is a plain function fails.

    Wait n is random, between a half and all of first_wait · 2ⁿ seconds or the longest wait, so that many callers spread
    out; where the model says how long to wait (`TryLater`), at least that.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0


class TryLater(ConnectionError):
    """The model could not answer now, and may say in how many seconds it could; None if it does not say."""

    def __init__(self, message: str, seconds: float | None = None):
        super().__init__(message)
        self.seconds = seconds


def patient(
    ask: Callable[P, T], retry: Retry, say: Callable[[str], object], stop: threading.Event | None = None
) -> Callable[P, T]:
    """The same function, which waits and tries again where the model behind it fails.

    Args:
      ask: the function.
      retry: how often, and how long it waits.
      say: called with a line before each wait.
      stop: once set, waits end and nothing is tried again.
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
        retry=tenacity.retry_if_exception(_may_pass),
        stop=tenacity.stop_after_attempt(retry.attempts) | tenacity.stop_when_event_set(stopped),
        wait=wait,
        sleep=tenacity.sleep_using_event(stopped),
        before_sleep=say_so,
        reraise=True,
    )(ask)


def _may_pass(error: BaseException) -> bool:
    """Whether asking again may help: not where the input or our own disk is at fault, nor for more than an hour."""
    if isinstance(error, TryLater) and error.seconds is not None and error.seconds > LONGEST_PAUSE:
        return False
    return isinstance(error, Exception) and not isinstance(error, ValueError | TypeError | LedgerUnwritable)
