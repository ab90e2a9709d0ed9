"""Several processes and devices: steps that all processes take together, and how arrays lie on the devices."""

import pathlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"

T = TypeVar("T")


def together(step: Callable[[], T]) -> T:
    """Take a step in every process; if it fails in one of them, all stop, and that one reports why."""
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    if jax.process_count() > 1 and multihost_utils.process_allgather(np.int32(error is not None)).any() and not error:
        raise ValueError("another process of this run failed and reports why; stopping this one too")
    if error is not None:
        raise error
    return result


def on_first_process(step: Callable[[], object]) -> None:
    """Take a step in the first process while the others wait; if it fails, all stop."""
    together(step if jax.process_index() == 0 else lambda: None)


def shared_cache(directory: pathlib.Path) -> pathlib.Path | None:
    """Return where a run caches: in its own directory if several processes share it, else None (the user's cache)."""
    return directory if jax.process_count() > 1 else None


def data_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the one mesh, whose single axis cuts batches over the given devices, or all devices of all processes."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def split_rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding that cuts arrays along their first axis, one part per device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts a whole copy of every array on every device."""
    return NamedSharding(mesh, PartitionSpec())
