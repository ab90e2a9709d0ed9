"""Where a run computes: the devices of this process, and batches and weights put on them."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dime_jax._util.distributed import data_mesh, replicated, split_rows
from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import Denoiser


class PlacedBatch(NamedTuple):
    """Images on the devices in the model's own space, padded, and which rows of them are real and readable."""

    x: jax.Array
    draw_ids: jax.Array
    conditions: Mapping[str, PyTree]  # by name, each with a leading axis of B
    index: np.ndarray  # type: ignore[assignment]  # [B], -1 for padding
    ids: list[str]
    usable: np.ndarray
    mask: jax.Array | None = None  # which coordinates of x count in norms; None if all do

    def usable_part(self) -> "PlacedBatch":
        """Return the usable rows alone, on the default device."""
        columns = self.x, self.draw_ids, self.conditions, self.mask
        usable = jax.tree.map(lambda column: np.asarray(column)[self.usable], columns)
        x, draw_ids, conditions, mask = jax.device_put(usable)  # jnp.asarray would compile a program for each shape
        ids = [self.ids[row] for row in np.flatnonzero(self.usable)]
        return PlacedBatch(x, draw_ids, conditions, self.index[self.usable], ids, self.usable[self.usable], mask)


class Placement(NamedTuple):
    """The devices that batches are spread over.

    Attributes:
      devices: one, if the model itself is spread over several or is not JAX.
      mesh: of these devices; None if the model itself decides what lies where.
    """

    devices: Sequence[jax.Device]
    mesh: jax.sharding.Mesh | None

    @property
    def sharding(self) -> jax.sharding.NamedSharding | None:
        """How the rows of a batch are sharded."""
        return None if self.mesh is None else split_rows(self.mesh)

    @property
    def one_program_at_a_time(self) -> bool:
        """Whether a program must end before the next is sent off: where virtual CPU devices outnumber the cores.

        Each device's part of a program holds a thread until all parts have met, so several programs in flight can hold
        every thread of XLA's pool while each waits for one more. XLA then aborts the process.
        """
        virtual = len(self.devices) > 1 and self.devices[0].platform == "cpu"
        return virtual and len(self.devices) > (os.cpu_count() or 1)

    def put(self, tree: PyTree) -> PyTree:
        """Put arrays on the devices, cut along their rows."""
        return jax.device_put(tree, self.sharding)

    def put_everywhere(self, tree: PyTree) -> PyTree:
        """Put a copy of arrays on every device."""
        return jax.device_put(tree, None if self.mesh is None else replicated(self.mesh))


def choose_placement(denoiser: Denoiser, devices: Sequence[jax.Device] | None) -> Placement:
    """Choose the given devices, or all of this process, as far as the model can run on them."""
    devices = devices or jax.local_devices()
    arrays = [leaf for leaf in jax.tree.leaves(denoiser.params) if isinstance(leaf, jax.Array)]
    if not denoiser.traceable or any(len(array.sharding.device_set) > 1 for array in arrays):
        return Placement(devices[:1], None)
    return Placement(devices, data_mesh(devices))
