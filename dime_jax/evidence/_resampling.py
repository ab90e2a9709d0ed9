"""Resamples are drawn many at a time, which is quick, and not all at once, which would take memory without bound."""

from collections.abc import Iterator

_NUMBERS_AT_ONCE = 2**22


def portions(resamples: int, numbers_each: int) -> Iterator[int]:
    """How many to draw at a time: sizes that add up to `resamples`.

    Args:
      resamples: all of them.
      numbers_each: that one resample is made of.
    """
    at_once = max(1, _NUMBERS_AT_ONCE // numbers_each)
    for start in range(0, resamples, at_once):
        yield min(at_once, resamples - start)
