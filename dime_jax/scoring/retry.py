"""Asking again: patience with models that are plain functions, such as hosted ones, which fail now and then."""

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import tenacity

from dime_jax.scoring.query_ledger import LedgerUnwritable

P = ParamSpec("P")
T = TypeVar("T")


class Retry(NamedTuple):
    """How to ask again when a model that is a plain function fails.

    Wait n is random, between 0 and first_wait · 2ⁿ seconds or the longest wait, so that many callers spread out.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0


def patient(ask: Callable[P, T], retry: Retry, say: Callable[[str], object]) -> Callable[P, T]:
    """The same function, which waits and tries again where the model behind it fails.

    Args:
      ask: the function.
      retry: how often, and how long it waits.
      say: called with a line before each wait.
    """

    def say_so(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error = state.outcome.exception()
        say(f"waiting {state.next_action.sleep:.1f} s, the model failed: {error!r}")

    return tenacity.retry(
        retry=tenacity.retry_if_exception(_may_pass),
        stop=tenacity.stop_after_attempt(retry.attempts),
        wait=tenacity.wait_random_exponential(multiplier=retry.first_wait, max=retry.longest_wait),
        before_sleep=say_so,
        reraise=True,
    )(ask)


def _may_pass(error: BaseException) -> bool:
    """Whether asking again may help: not where the input or our own disk is at fault."""
    return isinstance(error, Exception) and not isinstance(error, ValueError | TypeError | LedgerUnwritable)
