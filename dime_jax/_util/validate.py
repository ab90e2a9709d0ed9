"""Checks on values that users pass in, each a one-line ValueError: `gamma must be finite and > 0, got -0.1`.

Range checks look at concrete values only: under `jit` a tracer has no value to look at, and the caller of the jitted
function has checked it already.
"""

from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

from dime_jax._util.text import shorten


def is_concrete(value: object) -> bool:
    """Whether `value` can be looked at now (not a tracer)."""
    return not isinstance(value, jax.core.Tracer)


def check_timestep(t: ArrayLike, num_steps: int, name: str = "t") -> None:
    """Require integer timesteps in [0, num_steps)."""
    steps = t if isinstance(t, jax.core.Tracer) else np.asarray(t)
    if not np.issubdtype(steps.dtype, np.integer):
        raise ValueError(f"{name} must be an integer timestep, got {_show(t)} of type {steps.dtype}")
    if isinstance(steps, np.ndarray) and steps.size:
        low, high = int(steps.min()), int(steps.max())
        if low < 0 or high >= num_steps:
            raise ValueError(f"{name} must be >= 0 and < {num_steps}, got {low if low < 0 else high}")


def check_positive(value: ArrayLike, name: str) -> None:
    """Require a finite number above 0."""
    if is_concrete(value) and not (np.all(np.isfinite(value)) and np.all(np.asarray(value) > 0)):
        raise ValueError(f"{name} must be finite and > 0, got {_show(value)}")


def check_at_least(value: ArrayLike, bound: float, name: str) -> None:
    """Require value >= bound."""
    if is_concrete(value) and not np.all(np.asarray(value) >= bound):
        raise ValueError(f"{name} must be >= {bound}, got {_show(value)}")


def check_unit(value: ArrayLike, name: str, ends: str = "()") -> None:
    """Require numbers between 0 and 1; `ends` says which ends are allowed, as in "[)"."""
    array = np.asarray(value)
    low = array >= 0 if ends[0] == "[" else array > 0
    high = array <= 1 if ends[1] == "]" else array < 1
    if not np.all(low & high):
        raise ValueError(f"{name} must be in {ends[0]}0, 1{ends[1]}, got {_show(value)}")


def check_shape(array: ArrayLike, shape: Sequence[int | None], name: str) -> None:
    """Require the given shape; None stands for any size."""
    actual = np.shape(array)
    if len(actual) != len(shape) or any(want is not None and want != got for got, want in zip(actual, shape)):
        wanted = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{name} must have shape {wanted}, got {list(actual)}")


def check_choice(value: object, choices: Sequence[object], name: str) -> None:
    """Require one of a few values; the error lists them."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; expected one of {', '.join(map(str, choices))}")


def check_finite(array: ArrayLike, name: str) -> None:
    """Require finite values; the error counts the others."""
    array = np.asarray(array)
    bad = int(np.sum(~np.isfinite(array)))
    if bad:
        raise ValueError(f"{name} must be finite, got {bad} of {array.size} values NaN or infinite")


def check_not_empty(array: ArrayLike, name: str) -> None:
    """Require at least one row."""
    if np.shape(array)[:1] == (0,):
        raise ValueError(f"{name} must not be empty")


def _show(value: ArrayLike) -> str:
    return shorten(str(np.asarray(value) if is_concrete(value) else value))
