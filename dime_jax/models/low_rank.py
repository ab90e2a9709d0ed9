"""Low-rank adapters (LoRA, Hu et al. 2021) of any network, as functions of its tree of variables.

    W + scale · (down @ up),    down [..., rank] ~ N(0, 1 / inputs),  up [rank, out] = 0 at the start,

for every kernel W [..., out] with two axes or more; the axes before the last are taken as one. An adapted network
therefore begins as the network that it adapts. Merged, it is a tree like any other, and costs nothing more to ask.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flax import traverse_util

from dime_jax._util.typing import Array, PyTree


class Factors(NamedTuple):
    """The two factors of a kernel's change."""

    down: Array
    up: Array


def kernels(tree: PyTree) -> dict[str, Array]:
    """Return the leaves that have adapters, or their shapes, by path: "params/conv_in/kernel"."""
    leaves = traverse_util.flatten_dict(tree, sep="/")
    return {path: leaf for path, leaf in leaves.items() if path.endswith("/kernel") and leaf.ndim >= 2}


def init(tree: PyTree, rank: int, rng: np.random.Generator) -> dict[str, Factors]:
    """Return an adapter that changes nothing yet, by the paths of the kernels."""

    def fresh(kernel: Array) -> Factors:
        *inputs, outputs = kernel.shape
        down = rng.standard_normal((*inputs, rank), np.float32) / np.float32(np.sqrt(np.prod(inputs)))
        return Factors(down, np.zeros((rank, outputs), np.float32))

    return {path: fresh(kernel) for path, kernel in kernels(tree).items()}


def merge(tree: PyTree, adapter: Mapping[str, Factors], scale: float = 1.0) -> PyTree:
    """Return the tree with an adapter merged; leaves without factors are passed on as they are.

    Args:
      tree: of variables.
      adapter: factors by the path of the kernel.
      scale: alpha / rank, times how strongly to apply it.
    """
    leaves = traverse_util.flatten_dict(tree, sep="/")
    changed = {path: merge_kernel(leaves[path], factors, scale) for path, factors in adapter.items()}
    return traverse_util.unflatten_dict({**leaves, **changed}, sep="/")


def merge_kernel(kernel: Array, factors: Factors, scale: float) -> Array:
    """Return one kernel with its factors merged; NumPy arrays give a NumPy array."""
    down = factors.down.reshape(-1, factors.down.shape[-1])
    # The transpose of down @ up, as LoRA files define it: a product in other order may round otherwise. In one
    # expression, so that NumPy reuses the memory of what is computed on the way.
    return kernel + scale * (factors.up.T @ down.T).T.reshape(kernel.shape)
