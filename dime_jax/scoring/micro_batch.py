"""The micro-batch: how many images go to one device in one call."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import Denoiser
from dime_jax.scoring.call_runner import network_program

# A micro-batch of 32x32x3 images: one beyond which CPUs gain little, and one that fills an accelerator.
_CPU_IMAGES, _ACCELERATOR_IMAGES = 16, 256
_REFERENCE_SIZE = 32 * 32 * 3
_LARGEST_MICRO_BATCH = 512


def default_micro_batch(shape: Sequence[int], platform: str) -> int:
    """Choose the images per device and call, a power of two: the size of 16 CIFAR images on a CPU, of 256 elsewhere."""
    images = _CPU_IMAGES if platform == "cpu" else _ACCELERATOR_IMAGES
    wanted = images * _REFERENCE_SIZE / math.prod(shape)
    return 2 ** int(np.clip(math.floor(math.log2(wanted)), 0, math.log2(min(8 * images, _LARGEST_MICRO_BATCH))))


def micro_batch_of(denoiser: Denoiser, platform: str) -> int:
    """Return the default for a model: for a hosted one, as many images as are in flight at a time."""
    if denoiser.requests is not None:
        return denoiser.requests.images * denoiser.requests.in_flight
    return default_micro_batch(denoiser.shape, platform)


def tune_micro_batch(denoiser: Denoiser, candidates: Sequence[int] | None = None, rounds: int = 3) -> int:
    """Find the micro-batch that is fastest per image on one device, on blank images that are not counted as queries.

    Candidates are tried in rising order; one that does not fit into memory ends the search.

    Args:
      denoiser: the model.
      candidates: sizes to try; those around the default if None.
      rounds: how often each is measured; the median counts.
    """
    if not denoiser.traceable:
        raise ValueError(f"{denoiser.name} is a plain function: it has no micro-batch to tune")
    default = default_micro_batch(denoiser.shape, jax.local_devices()[0].platform)
    seconds: dict[int, float] = {}
    for size in sorted(candidates or {max(1, default // 4), max(1, default // 2), default, 2 * default, 4 * default}):
        asked = jnp.zeros((size, *denoiser.shape)), jnp.int32(0), _blank(denoiser.condition_shape, size)
        run = functools.partial(network_program(denoiser.apply, None), denoiser.params, *asked)
        try:
            times = [_seconds(run) for _ in range(rounds + 1)]  # the first compiles
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            break
        seconds[size] = statistics.median(times[1:]) / size
    return min(seconds, key=lambda size: seconds[size])


def out_of_memory(error: Exception) -> bool:
    """Whether a smaller micro-batch may help."""
    return "RESOURCE_EXHAUSTED" in str(error)


def _blank(condition_shape: PyTree, size: int) -> PyTree:
    return jax.tree.map(lambda one: jnp.zeros((size, *one.shape), one.dtype), condition_shape)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
