"""Retries and requests, for models that are plain functions and fail now and then, as hosted ones do.

A batch of queries is asked as the model takes it: all at once, or in requests of a few images, several at a time. Every
attempt at a request is entered in a ledger before it is sent, and repeated alone where it fails.
"""

import random
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from dime_jax._util.typing import Array, PyTree
from dime_jax.core.denoiser import Denoiser
from dime_jax.scoring.query_ledger import LedgerUnwritable

Say = Callable[[str], object]
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


def with_retries(ask: Callable[P, T], retry: Retry, say: Say, stop: threading.Event | None = None) -> Callable[P, T]:
    """Return the same function with retries: it waits and tries again where the model behind it fails.

    Args:
      ask: the function.
      retry: how often to try, and how long to wait.
      say: called with a line before each wait.
      stop: once set, waits end and nothing is retried.
    """

    stopped = stop or threading.Event()

    def with_waits(*args: P.args, **kwargs: P.kwargs) -> T:
        attempt = 0
        while True:
            attempt += 1
            try:
                return ask(*args, **kwargs)
            except Exception as error:
                if attempt >= retry.attempts or stopped.is_set() or not _may_help(error):
                    raise
                seconds = _wait(error, attempt, retry)
                say(f"the model failed: {error!r}; retrying in {seconds:.1f} s")
                if stopped.wait(seconds):
                    raise

    return with_waits


def _wait(error: Exception, attempt: int, retry: Retry) -> float:
    if isinstance(error, TryLater) and error.seconds is not None:
        return error.seconds
    longest = min(retry.longest_wait, retry.first_wait * 2.0 ** (attempt - 1))
    return random.uniform(longest / 2, longest)


def _may_help(error: Exception) -> bool:
    """Return whether a retry may help: not if our input or our disk is at fault, or the wait exceeds an hour."""
    if isinstance(error, TryLater) and error.seconds is not None and error.seconds > LONGEST_PAUSE:
        return False
    return not isinstance(error, ValueError | TypeError | LedgerUnwritable)


def ask_in_requests(
    denoiser: Denoiser,
    x: Array,
    t: ArrayLike,
    condition: PyTree,
    *,
    debit: Callable[[slice], object],
    retry: Retry,
    say: Say,
) -> Array:
    """eps(x, t), from a model that may fail now and then.

    If a request fails for good, those under way are waited for, and no other is sent.

    Args:
      denoiser: the model.
      x: the batch.
      t: a timestep, or one for each row.
      condition: of the rows.
      debit: called with the rows of a request before each attempt to send it, perhaps from several threads.
      retry: how to ask again.
      say: shows a line.
    """
    stop = threading.Event()

    def ask(part: slice) -> jax.Array:
        denoiser.wait_turn(len(x[part]), stop)
        debit(part)
        told = jax.tree.map(lambda rows: rows[part], condition)
        return denoiser.ask_once(x[part], np.asarray(t)[part] if np.ndim(t) else t, told)

    ask_with_retries = with_retries(ask, retry, say, stop)
    if denoiser.requests is None or len(x) <= denoiser.requests.images:
        return ask_with_retries(slice(None))
    size = denoiser.requests.images
    x = np.asarray(x)
    parts = [slice(start, start + size) for start in range(0, len(x), size)]
    with ThreadPoolExecutor(min(denoiser.requests.in_flight, len(parts))) as pool:
        answers = [pool.submit(ask_with_retries, part) for part in parts]
        try:
            for answer in wait(answers, return_when=FIRST_EXCEPTION).done:
                answer.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return np.concatenate([np.asarray(answer.result()) for answer in answers])
