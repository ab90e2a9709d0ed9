"""Names for types that Python cannot spell."""

from typing import Any, TypeAlias

import jax
import numpy as np

# An array on the host or on a device.
Array: TypeAlias = jax.Array | np.ndarray
# Dicts, tuples and other containers that JAX knows, nested, with arrays at their ends; None is an empty one.
PyTree: TypeAlias = Any
# What a JSON file of ours holds.
JsonObject: TypeAlias = dict[str, Any]
