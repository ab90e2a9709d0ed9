"""A source over data that TensorFlow Datasets has prepared (array_record files); reading needs no TensorFlow."""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dime_jax._util import validate
from dime_jax._util.text import one_line
from dime_jax._util.typing import PyTree
from dime_jax.data import decoding
from dime_jax.data.sources import Source

_ID_FEATURES = ("id", "file_name", "image/filename")
_TRANSFORMS = {
    "cifar10": "cifar",
    "cifar100": "cifar",
    "stl10": "stl10u",
    "celeb_a": "celeba",
    "imagenet2012": "imagenet256",
    "imagenet_v2": "imagenet256",
}

# A record's features by name: bytes, numbers, and dicts of these.
_Record = Mapping[str, PyTree]


class _Metadata(NamedTuple):
    """What a record says besides its pixels; None where it does not say."""

    id: str | None
    digest: str
    label: int | None
    identity: int | None


def tfds(
    name: str,
    split: str = "train",
    data_dir: str | os.PathLike[str] | None = None,
    decode: decoding.Decode = "torchvision",
) -> Source:
    """A dataset prepared by TensorFlow Datasets with file_format="array_record", such as "cifar10".

    TFDS shuffles when it prepares. Where the records carry an id (CIFAR: b"train_00006") they are sorted by it, which
    restores the published order. Where they do not (STL-10, CelebA) an image is named by the hash of its encoded bytes,
    which is stable too, but no published index file can be applied. Opening reads all records once.

    Args:
      name: the dataset's TFDS name, "name/config:version".
      split: one of its splits.
      data_dir: where it was prepared; TFDS's own default if None.
      decode: see `decoding.decode_image`.
    """
    validate.check_choice(decode, decoding.DECODES, "decode")
    records = _open_records(name, split, data_dir)
    rows = [_metadata(records[position]) for position in range(len(records))]
    names = [row.id for row in rows if row.id is not None]
    has_ids = len(names) == len(rows)
    ids = names if has_ids else _number_repeats([row.digest for row in rows])
    order = sorted(range(len(ids)), key=ids.__getitem__)

    def column(values: Sequence[int | None], dtype: type) -> np.ndarray | None:
        # -1 is TFDS's label of unlabelled images.
        return None if any(value is None or value < 0 for value in values) else np.array(values, dtype)[order]

    return Source(
        name=name,
        ids=[ids[position] for position in order],
        read=lambda index: decoding.decode_image(records[order[index]]["image"], decode),
        labels=column([row.label for row in rows], np.int32),
        identities=column([row.identity for row in rows], np.int64),
        transform=_TRANSFORMS.get(name.partition(":")[0].partition("/")[0], "fit"),
        index_problem=None
        if has_ids
        else f"{name} in TFDS has no ids, so its published order is lost in TFDS's shuffle",
    )


def _open_records(name: str, split: str, data_dir: str | os.PathLike[str] | None) -> Sequence[_Record]:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ValueError(f"tfds:{name} needs the extra dime_jax[tfds], which is not installed: {error}") from error
    try:
        return tensorflow_datasets.data_source(
            name,
            split=split,
            data_dir=None if data_dir is None else os.path.expanduser(data_dir),
            download=False,
            decoders={"image": tensorflow_datasets.decode.SkipDecoding()},
        )
    # TFDS reports a missing dataset, version, split or format by as many exception types.
    except Exception as error:
        place = f"{name} (split {split}) is not prepared as array_record in {data_dir}"
        raise ValueError(f"{place}: {one_line(error)}") from error


def _metadata(record: _Record) -> _Metadata:
    identity = record.get("identity")
    if isinstance(identity, dict):  # celeb_a: {"Identity_No": number}
        identity = next(iter(identity.values()))
    return _Metadata(
        id=next((record[key].decode() for key in _ID_FEATURES if key in record), None),
        digest=hashlib.blake2b(record["image"], digest_size=8).hexdigest(),
        label=record.get("label"),
        identity=identity,
    )


def _number_repeats(names: list[str]) -> list[str]:
    """Make names unique: the second "ab" becomes "ab-2"."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique
