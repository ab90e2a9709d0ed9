"""Draw resamples many at a time, which is quick, but not all at once, which would take unbounded memory."""

from collections.abc import Iterator

_NUMBERS_AT_ONCE = 2**22


def portions(resamples: int, numbers_each: int) -> Iterator[int]:
    """Yield how many resamples to draw at a time: sizes that add up to `resamples`.

    Args:
      resamples: how many there are in all.
      numbers_each: how many numbers one resample takes.
    """
    at_once = max(1, _NUMBERS_AT_ONCE // numbers_each)
    for start in range(0, resamples, at_once):
        yield min(at_once, resamples - start)
