"""Training states.

STATE/1000/        the state after 1000 updates, as orbax's Checkpointer lays it out
"""

import os
import shutil
from pathlib import Path

import jax

from dime_jax._util.typing import PyTree
from dime_jax.loading.model_directory import one_line


class TrainingCheckpoints:
    """The states of one training run, as a context manager. A state is there completely or not at all.

    Args:
      directory: where; made if needed.
      keep: how many of the latest states stay.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2):
        from orbax.checkpoint import v1 as ocp

        context = ocp.Context()
        context.array.saving.use_compression = False  # weights do not compress
        self._directory = Path(directory).absolute()
        policy = ocp.training.preservation_policies.LatestN(keep)
        with one_line(self._directory, "used for training states"):
            self._checkpointer = ocp.training.Checkpointer(
                self._directory, context=context, preservation_policy=policy, cleanup_tmp_directories=True
            )

    def __enter__(self) -> "TrainingCheckpoints":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._checkpointer.close()
        except Exception:  # a failed save, which has been reported when it happened, is raised again here
            if error[0] is None:
                raise

    @property
    def latest_step(self) -> int | None:
        """The number of updates in the latest state, None if there is none yet."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, step: int, state: PyTree, inputs: PyTree) -> None:
        """Write the state and the JSON-able position of the input pipeline; returns when they are on disk."""
        needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), shutil.disk_usage(self._directory).free
        if free < needed:
            raise ValueError(f"a training state needs {needed:,} bytes free in {self._directory}, got {free:,}")
        with one_line(self._directory / str(step), "written"):
            self._checkpointer.save(step, state, custom_metadata={"inputs": inputs}, force=True)

    def restore(self, like: PyTree) -> tuple[PyTree, PyTree]:
        """The latest state and input position; `like` has the shapes, dtypes and shardings to restore to."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
        with one_line(self._directory / str(self.latest_step), "read"):
            state = self._checkpointer.load(abstract_state=shapes)
            return state, self._checkpointer.metadata().custom_metadata["inputs"]
