"""Data as users have it: sources, transforms, splits and duplicates (`dj.data`)."""

from dime_jax.data.batches import Batch, ImageReport, TooManyBadImages, batches, fingerprint
from dime_jax.data.captions import reduced_captions
from dime_jax.data.duplicates import DuplicateReport, Duplicates, find_duplicates, remove_shared, report_duplicates
from dime_jax.data.groups import merge_groups, read_groups, shared_groups
from dime_jax.data.opening import open_source
from dime_jax.data.pairs import Pair
from dime_jax.data.sources import BadImage, Item, Source, empty_captions, from_images, join, require_captions
from dime_jax.data.splits import (
    Halves,
    Split,
    halves,
    identity_split,
    per_class_split,
    random_split,
    read_split,
    sima_celeba_split,
    split_of_joined,
    write_split,
)
from dime_jax.data.transforms import Transform, get_transform, recognise_range, transform_for

__all__ = [
    "BadImage",
    "Batch",
    "DuplicateReport",
    "Duplicates",
    "Halves",
    "ImageReport",
    "Item",
    "Pair",
    "Source",
    "Split",
    "TooManyBadImages",
    "Transform",
    "batches",
    "empty_captions",
    "find_duplicates",
    "fingerprint",
    "from_images",
    "get_transform",
    "halves",
    "identity_split",
    "join",
    "merge_groups",
    "open_source",
    "per_class_split",
    "random_split",
    "read_groups",
    "read_split",
    "recognise_range",
    "reduced_captions",
    "remove_shared",
    "report_duplicates",
    "require_captions",
    "shared_groups",
    "sima_celeba_split",
    "split_of_joined",
    "transform_for",
    "write_split",
]
