"""Source: a set of images with stable ids and lazy random access, whatever the format on disk.

Every format is opened into the same frozen record: columns that are cheap to hold (ids, labels, identities) and one
function that reads one image. Reading is thread-safe and keeps nothing in memory.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dime_jax._util import validate

MAX_CAPTION = 10_000  # characters


class Item(NamedTuple):
    """One example.

    `image` is uint8 [H, W, C] with C = 1 or 3. Only float arrays that no 8-bit image can hold stay float32 [H, W, C]
    in [-1, 1].
    """

    image: np.ndarray
    label: int | None
    identity: int | None
    id: str
    caption: str | None = None


_LOOKED_AT = 64  # images of an array whose scale is looked at


class BadImage(ValueError):
    """One image cannot be used, for a reason that fits on a line; the other images are not affected."""


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A set of images: `len(source)`, and `source[i]` -> Item for 0 <= i < len(source).

    Attributes:
      name: the format's name, such as "cifar10".
      ids: one string per image, unique, and the same whenever and wherever the set is opened.
      read: `read(i)` -> image i, as `Item.image`; raises BadImage. May be called from any thread.
      labels: int32 [n] class labels, or None.
      identities: int64 [n] numbers of the people shown, or None.
      class_names: where labels are positions in a list that is only this source's, such as its sorted folder names:
        that list. Labels of sources with other lists mean other classes.
      transform: name of the set's usual preprocessing (see `transforms`).
      index_problem: why published index files cannot be applied to this source; None where they can, which means that
        the images are in the order in which they were first published.
      captions: one text per image, perhaps empty; None if there are none (see `require_captions`).
      caption_problem: why there are no captions, where that can be said.
      parts: of a source that was joined from two with different transforms: these (see `roles.own_transforms`).
    """

    name: str
    ids: Sequence[str]
    read: Callable[[int], np.ndarray]
    labels: np.ndarray | None = None
    identities: np.ndarray | None = None
    transform: str = "fit"
    index_problem: str | None = None
    class_names: tuple[str, ...] | None = None
    captions: Sequence[str] | None = None
    caption_problem: str | None = None
    parts: tuple["Source", ...] = ()

    def __post_init__(self) -> None:
        if len(self.ids) == 0:
            raise ValueError(f"{self.name} must have at least one image, got none")
        for column in ("labels", "identities"):
            if getattr(self, column) is not None:
                validate.check_shape(getattr(self, column), (len(self.ids),), f"{column} of {self.name}")
        if len(set(self.ids)) != len(self.ids):
            seen: set[str] = set()
            twice = next(i for i in self.ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
            raise ValueError(f"ids in {self.name} must be unique, got {twice!r} more than once")
        if self.captions is not None:
            _check_captions(self.captions, self.ids, self.name)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, indices: np.ndarray, ids: Sequence[str] | None = None) -> "Source":
        """Return the source of some images, in this order; `ids` are new names, where an image is taken twice."""
        return dataclasses.replace(
            self,
            ids=[self.ids[i] for i in indices] if ids is None else ids,
            read=lambda index: self.read(int(indices[index])),
            labels=None if self.labels is None else self.labels[indices],
            identities=None if self.identities is None else self.identities[indices],
            captions=None if self.captions is None else [self.captions[i] for i in indices],
            parts=(),
        )

    def __getitem__(self, index: int) -> Item:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"index in {self.name} must be >= 0 and < {len(self)}, got {index}")
        return Item(
            image=self.read(index),
            label=None if self.labels is None else int(self.labels[index]),
            identity=None if self.identities is None else int(self.identities[index]),
            id=self.ids[index],
            caption=None if self.captions is None else self.captions[index],
        )


def require_captions(source: Source) -> Sequence[str]:
    """Return the captions of a source, one per image.

    Raises:
      ValueError: if it has none; the line says why, where that is known.
    """
    if source.captions is None:
        raise ValueError(why_no_captions(source))
    return source.captions


def empty_captions(source: Source) -> Source:
    """Return the source with the empty caption for every image, whatever captions it has."""
    return dataclasses.replace(source, captions=[""] * len(source), caption_problem=None)


def check_caption(caption: object, place: str) -> str:
    """Return the caption if it is text that can be stored, and not absurdly long; the error names `place`."""
    if not isinstance(caption, str):
        kind = f"a list of {len(caption)}" if isinstance(caption, list) else type(caption).__name__
        raise ValueError(f"the caption of {place} must be one string, got {kind}")
    if len(caption) > MAX_CAPTION:
        raise ValueError(f"the caption of {place} must have at most {MAX_CAPTION} characters, got {len(caption)}")
    try:
        caption.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the caption of {place} must be valid Unicode, got half a surrogate pair") from None
    return caption


def _check_captions(captions: Sequence[str], ids: Sequence[str], name: str) -> None:
    if isinstance(captions, str) or len(captions) != len(ids):
        raise ValueError(f"captions of {name} must be a list of {len(ids)}, got {len(captions)}")
    for id, caption in zip(ids, captions):
        check_caption(caption, f"{id!r} of {name}")


def why_no_captions(source: Source) -> str:
    """Say why a source has no captions."""
    return source.caption_problem or f"the images of {source.name} have no captions"


def from_images(
    images: np.ndarray,
    *,
    name: str = "arrays",
    ids: Sequence[str] | None = None,
    labels: np.ndarray | None = None,
    transform: str = "fit",
    captions: Sequence[str] | None = None,
) -> Source:
    """Make a Source of images [N, H, W, C] that are in memory or memory-mapped: uint8, or floats in [-1, 1].

    Without ids, image 42 is called "{name}-00042": stable as long as the order of the array is. A single image with a
    value that is not finite, or beyond [-1, 1], is a `BadImage` when it is read.

    Args:
      images: as above; they are not copied.
      name: the format's name.
      ids: unique, one for each image.
      labels: class labels [N].
      transform: name of the set's usual preprocessing (see `transforms`).
      captions: one text for each image.

    Raises:
      ValueError: for other shapes and types, and for floats that look like [0, 1]: the first images have no value below
        0, and some above 1/2.
    """
    validate.check_shape(images, (None, None, None, None), f"images of {name}")
    if images.shape[-1] not in (1, 3):
        raise ValueError(f"images of {name} must have 1 or 3 channels last, got shape {list(images.shape)}")
    if images.dtype != np.uint8:
        _check_floats(images, name)
    return Source(
        name=name,
        ids=numbered_ids(f"{name}-", len(images)) if ids is None else ids,
        read=lambda index: _in_range(np.ascontiguousarray(images[index])),
        labels=labels,
        transform=transform,
        captions=captions,
    )


def _check_floats(images: np.ndarray, name: str) -> None:
    """Refuse integers, and values on another scale, as far as the first images show it."""
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"images of {name} must be uint8 or floats, got {images.dtype}: convert 0..255 to uint8")
    first = np.asarray(images[:_LOOKED_AT])
    if first.size and np.all(first >= 0) and np.any(first > 0.5):
        raise ValueError(
            f"images of {name} must be in [-1, 1], got values from {first.min():g} to {first.max():g}: "
            "scale [0, 1] by 2 x - 1, or convert 0..255 to uint8"
        )


def _in_range(image: np.ndarray) -> np.ndarray:
    """Return an image that is uint8, or in [-1, 1] up to rounding; refuse any other."""
    if image.dtype == np.uint8 or np.all(np.abs(image) <= 1 + 1e-3):  # NaN is not
        return image
    if not np.all(np.isfinite(image)):
        raise BadImage(f"{int(np.sum(~np.isfinite(image)))} of {image.size} values are NaN or infinite")
    raise BadImage(f"values must be in [-1, 1], got {image.min():g} to {image.max():g}")


def check_integers(values: npt.ArrayLike, name: str) -> np.ndarray:
    """Return a list of integers, perhaps empty, as int64 [n]; anything else is refused."""
    array = np.asarray(values)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise ValueError(f"{name} must be a list of integers, got {array.dtype} {list(array.shape)}")
    return array.astype(np.int64)


def numbered_ids(prefix: str, count: int) -> list[str]:
    """Return prefix00000, prefix00001, ...: five digits or more, so that they sort in order."""
    width = max(5, len(str(count - 1)))
    return [f"{prefix}{index:0{width}d}" for index in range(count)]


def digits() -> Source:
    """Open scikit-learn's 1,797 handwritten digits, 8x8x1: the built-in set, which needs no files.

    Their values are 0..16; v becomes round(255 v / 16), which is exact enough to be undone.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)[..., None]
    return from_images(images, name="digits", labels=data.target.astype(np.int32), transform="digits")


def join(members: Source, heldout: Source) -> Source:
    """Join two sources: first the members, then the held-out images (see `splits.split_of_joined`).

    Ids get the prefix "members/" or "heldout/", since two folders often use the same file names. Labels, identities and
    captions survive only if both sides have them, and labels only if they number the same classes.
    """
    same_classes = members.class_names == heldout.class_names
    silent = next((side for side in (members, heldout) if side.captions is None), None)

    def read(index: int) -> np.ndarray:
        return members.read(index) if index < len(members) else heldout.read(index - len(members))

    def both(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
        return None if first is None or second is None else np.concatenate([first, second])

    return Source(
        name=members.name if members.name == heldout.name else f"{members.name}+{heldout.name}",
        ids=[f"members/{i}" for i in members.ids] + [f"heldout/{i}" for i in heldout.ids],
        read=read,
        labels=both(members.labels, heldout.labels) if same_classes else None,
        identities=both(members.identities, heldout.identities),
        transform=members.transform if members.transform == heldout.transform else "fit",
        parts=() if members.transform == heldout.transform else (members, heldout),
        index_problem="it joins two sources, so no published index file applies to it",
        class_names=members.class_names if same_classes else None,
        captions=None if silent else [*require_captions(members), *require_captions(heldout)],
        caption_problem=why_no_captions(silent) if silent else None,
    )


def pixel_digest(image: np.ndarray) -> bytes:
    """Return 16 bytes that identify an image's shape, type and pixels."""
    digest = hashlib.blake2b(f"{image.dtype}{image.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()
