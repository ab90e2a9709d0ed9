"""Several processes of one run: a step that all of them take, and what happens if it fails in one."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")


def together(step: Callable[[], T]) -> T:
    """Take a step in every process; if it fails in one of them, all stop, and that one says why."""
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    if jax.process_count() > 1 and multihost_utils.process_allgather(np.int32(error is not None)).any() and not error:
        raise ValueError("another process of this run failed and says why; this one stops with it")
    if error is not None:
        raise error
    return result


def on_first_process(step: Callable[[], object]) -> None:
    """Take a step in the first process while the others wait; if it fails, all stop."""
    together(step if jax.process_index() == 0 else lambda: None)
