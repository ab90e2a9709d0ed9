"""From drawn positions to batches on the devices, read ahead by grain's threads."""

from typing import NamedTuple

import grain
import jax
import numpy as np

from dime_jax import data, models
from dime_jax._util.distributed import split_rows
from dime_jax._util.typing import Array
from dime_jax.data.batches import NUM_THREADS

READ_AHEAD = 4  # batches


class Examples(NamedTuple):
    """A batch of clean images; rows with mask False are padding and must not count."""

    images: Array  # float32 [B, H, W, C] in [-1, 1]
    condition: Array | None  # classes, int32 [B], or None for unconditional networks
    mask: Array  # bool [B]


def shuffled(count: int, batch_size: int, seed: int) -> grain.MapDataset:
    """Batches of positions 0 … count - 1 without end: every position once in each pass, in a new order each time."""
    return grain.MapDataset.range(count).seed(seed).shuffle().repeat().batch(batch_size)


def read_examples(
    draws: grain.MapDataset, source: data.Source, members: np.ndarray, spec: models.ModelSpec
) -> grain.DatasetIterator:
    """Iterate over the drawn batches; each process reads its own, equal share of every batch.

    Args:
      draws: one array of positions in `members` per update, -1 for padding; its length must not change.
      source: where images come from.
      members: indices of the training images in the source.
      spec: the network's; gives the shape of an image, and whether batches carry labels.

    Returns:
      Iterator over Examples in host memory; `get_state` and `set_state` continue it exactly.
    """
    transform = data.transform_for(source, spec.image_shape)
    classes = None if spec.denoiser.num_classes is None else source.labels
    if spec.denoiser.num_classes is not None and classes is None:
        raise ValueError(f"the network is class-conditional, but {source.name} has no labels")

    def load(drawn: np.ndarray) -> Examples:
        share = len(drawn) // jax.process_count()
        drawn = np.asarray(drawn)[jax.process_index() * share :][:share]
        images = np.zeros((share, *transform.shape), np.float32)
        labels = None if classes is None else np.where(drawn >= 0, classes[members[drawn]], np.int32(0))
        for row, position in enumerate(drawn):
            if position < 0:
                continue
            index = members[position]
            try:
                images[row] = transform(source.read(index))
            except data.BadImage as error:
                raise ValueError(f"training image {source.ids[index]!r} {error}: leave it out of the split") from None
        return Examples(images, labels, drawn >= 0)

    options = grain.ReadOptions(num_threads=NUM_THREADS, prefetch_buffer_size=READ_AHEAD)
    return iter(draws.map(load).to_iter_dataset(options))


def on_devices(examples: Examples, mesh: jax.sharding.Mesh) -> Examples:
    """A batch, of which this process read its share, with its rows spread over the mesh."""
    return jax.make_array_from_process_local_data(split_rows(mesh), examples)
