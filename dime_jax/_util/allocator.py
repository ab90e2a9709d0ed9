"""Weights that are freed to make room must leave the process, not stay in the allocator's pools."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MIB = 2**20


@contextlib.contextmanager
def returnable() -> Iterator[None]:
    """While this is open, whatever takes a MiB or more gets pages of its own, which go back to the system when freed.

    glibc would keep freed pieces of up to 32 MiB for the thread that had them, and models are read by many threads:
    reading one three times took three times its memory. Other allocators are left alone. JAX keeps what arrays were
    copied from until Python collects garbage, which is done at the end.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MIB)
    try:
        yield
    finally:
        if mallopt is not None:  # what glibc comes to by itself
            mallopt(_MMAP_THRESHOLD, 32 * _MIB)
            mallopt(_TRIM_THRESHOLD, 64 * _MIB)
        gc.collect(0)
