"""Who is a member and who is held out, and which half calibrates: index arrays into a source.

Half of the wrong results in this field are split mistakes, so a Split checks itself, published indices go only onto
sources that kept the published order, and no person or duplicate ends up on both sides of a half.
"""

import dataclasses
import hashlib
import math
import os
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dime_jax._util import validate
from dime_jax.data.groups import ALONE
from dime_jax.data.pairs import Pair
from dime_jax.data.sources import Source, check_integers

_FILE_KEYS = {"SecMI": ("mia_train_idxs", "mia_eval_idxs"), "dime-mia": ("member", "heldout")}
MODES = ("by_id", "as_published")


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Indices into a source, int64: images the model was trained on, and images it was not. Unique and disjoint."""

    member: np.ndarray
    heldout: np.ndarray

    def __post_init__(self) -> None:
        for name in ("member", "heldout"):
            index = check_integers(getattr(self, name), name)
            object.__setattr__(self, name, index)
            if index.size and index.min() < 0:
                raise ValueError(f"indices in {name} must be >= 0, got {index.min()}")
            if repeated := _repeated(index):
                raise ValueError(f"indices in {name} must be unique, got {repeated[0]} twice")
        if shared := _repeated(np.concatenate(self.sides)):
            raise ValueError(f"member and heldout must be disjoint, got index {shared[0]} in both")

    @property
    def sides(self) -> Pair[np.ndarray]:
        """Return the two index arrays as a pair."""
        return Pair(self.member, self.heldout)

    def check(self, source: Source) -> "Split":
        """Return this split if its indices fit the source: in range, and in an order that they can refer to."""
        if source.index_problem:
            raise ValueError(f"cannot apply a split by index to {source.name}: {source.index_problem}")
        largest = max(self.member.max(initial=-1), self.heldout.max(initial=-1))
        if largest >= len(source):
            raise ValueError(f"split indices must be < {len(source)} in {source.name}, got {largest}")
        return self


class Halves(NamedTuple):
    """The half that chooses hyper-parameters, and the half that is read once."""

    calibration: Split
    test: Split

    def together(self) -> Split:
        """Return the members of both halves, and the held-out images of both."""
        return Split(*(np.concatenate([getattr(half, side) for half in self]) for side in ("member", "heldout")))


def read_split(path: str | os.PathLike[str], source: Source) -> Split:
    """Read SecMI's split file (mia_train_idxs, mia_eval_idxs) or dime-mia's (member, heldout) for this source."""
    try:
        with np.load(path, allow_pickle=False) as file:
            for member, heldout in _FILE_KEYS.values():
                if member in file and heldout in file:
                    return Split(file[member], file[heldout]).check(source)
            keys = ", ".join(file)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from error
    wanted = " or ".join(f"{member} and {heldout} ({name})" for name, (member, heldout) in _FILE_KEYS.items())
    raise ValueError(f"{path}: must hold {wanted}, got {keys}")


def write_split(path: str | os.PathLike[str], split: Split) -> None:
    """Write a .npz that `read_split` and dime-mia's code read."""
    with open(path, "wb") as file:
        np.savez(file, member=split.member, heldout=split.heldout)


def split_of_joined(members: Source, heldout: Source) -> Split:
    """Return the split of `sources.join(members, heldout)`."""
    return Split(np.arange(len(members)), np.arange(len(members), len(members) + len(heldout)))


def random_split(source: Source, size: int, seed: int = 0) -> Split:
    """`size` members and `size` held-out: the first and second run of default_rng(seed).permutation(n), each sorted.

    With seed 0 these are dime-mia's splits: STL10-U with size 10,000 of 100,000, CelebA with 30,000 of its 162,770
    training images.
    """
    _check_room(source, 2 * size)
    order = np.random.default_rng(seed).permutation(len(source))
    return Split(np.sort(order[:size]), np.sort(order[size : 2 * size])).check(source)


def sima_celeba_split(source: Source, size: int = 30_000, seed: int = 42) -> Split:
    """SimA's CelebA split: the first 2 x `size` images shuffled by default_rng(seed), the first half members."""
    _check_room(source, 2 * size)
    order = np.arange(2 * size)
    np.random.default_rng(seed).shuffle(order)
    return Split(order[:size], order[size:]).check(source)


def identity_split(source: Source, size: int = 1000, per_identity: int = 2, seed: int = 0) -> Split:
    """No person on both sides, few photos of each: dime-mia's CelebA split for its DP study.

    People come in an order shuffled by default_rng(seed), each with at most `per_identity` of their photos, shuffled
    too. They fill the members up to `size`, then the held-out images.

    Args:
      source: has identities.
      size: images on each side.
      per_identity: the most photos of one person.
      seed: of the shuffles.
    """
    if source.identities is None:
        raise ValueError(f"{source.name} has no identities, which an identity-disjoint split needs")
    validate.check_at_least(per_identity, 1, "per_identity")
    rng = np.random.default_rng(seed)
    people = np.unique(source.identities)
    rng.shuffle(people)
    by_person = np.argsort(source.identities, kind="stable")
    first = np.searchsorted(source.identities[by_person], people, side="left")
    last = np.searchsorted(source.identities[by_person], people, side="right")
    member: list[int] = []
    heldout: list[int] = []
    for begin, end in zip(first, last):
        unfilled = [side for side in (member, heldout) if len(side) < size]
        if not unfilled:
            break
        photos = by_person[begin:end].copy()
        rng.shuffle(photos)
        unfilled[0].extend(photos[:per_identity])
    if len(heldout) < size:
        raise ValueError(f"{source.name} must have people for 2 x {size} images, got {len(member) + len(heldout)}")
    return Split(np.sort(member[:size]), np.sort(heldout[:size])).check(source)


def per_class_split(members: Source, heldout: Source, per_class: int = 3, seed: int = 2025) -> Split:
    """`per_class` random images of every class from each side, for `sources.join(members, heldout)`.

    With ImageNet and ImageNetV2 this is the published draw of 3 + 3 a class: one random.Random(seed) shuffles each
    class, folder after folder, and then the selection; the members' draw comes first.
    """
    rng = random.Random(seed)

    def draw(source: Source) -> np.ndarray:
        if source.labels is None:
            raise ValueError(f"{source.name} has no class labels, so {per_class} images per class cannot be drawn")
        classes: dict[int, list[int]] = {}
        for index, label in enumerate(source.labels):
            classes.setdefault(int(label), []).append(index)
        chosen = []
        for label, images in classes.items():
            if len(images) < per_class:
                raise ValueError(f"class {label} of {source.name} must have {per_class} images, got {len(images)}")
            rng.shuffle(images)
            chosen += images[:per_class]
        rng.shuffle(chosen)
        return np.array(chosen)

    return Split(draw(members), draw(heldout) + len(members))


def halves(
    split: Split,
    ids: Sequence[str],
    *,
    mode: str = "by_id",
    seed: int = 0,
    groups: np.ndarray | None = None,
    calibration_size: int | None = None,
    test_size: int | None = None,
    calibration_share: float = 0.5,
) -> Halves:
    """Cut members and held-out images into a calibration and a test half.

    mode="by_id" orders images by a hash of (seed, id): the same image gets the same half however the source is ordered.
    A group never lies on both sides. Group sizes permitting, the sides have the shares that are asked for, to less than
    one member and one held-out image; an odd one goes to the test half.

    mode="as_published" permutes members and then held-out images by index with one default_rng(seed) and cuts them at
    n // 2, as the authors do (seed 0; 2025 for ImageNet). It knows no groups.

    Args:
      split: members and held-out images.
      ids: the source's ids.
      mode: "by_id" or "as_published".
      seed: another seed gives other halves.
      groups: int [n], the group of each image of the source, ALONE (-1) for none: see `groups`.
      calibration_size: the most members, and the most held-out images, to keep in the calibration half; drawn from it.
      test_size: the same for the test half.
      calibration_share: of the members, and of the held-out images, that go to the calibration half, with mode "by_id".
    """
    validate.check_choice(mode, MODES, "mode")
    validate.check_unit(calibration_share, "calibration_share")
    if mode == "as_published":
        if calibration_share != 0.5:
            raise ValueError(f"calibration_share must be 0.5 with mode as_published, got {calibration_share}")
        if groups is not None:
            raise ValueError("groups must be None with mode as_published, which cannot keep groups together")
        return _published_halves(split, seed, calibration_size, test_size)
    rows = np.concatenate([split.member, split.heldout])
    heldout = np.arange(len(rows)) >= len(split.member)
    keys = np.array([_hash(seed, ids[row]) for row in rows], np.uint64)
    groups = np.full(len(ids), ALONE) if groups is None else np.asarray(groups)
    validate.check_shape(groups, (len(ids),), "groups")
    calibrates = _choose_sides(heldout, keys, groups[rows], calibration_share)

    def half(side: bool, size: int | None) -> Split:
        chosen = [np.flatnonzero((calibrates == side) & (heldout == kind)) for kind in (0, 1)]
        return Split(*(rows[np.sort(c[np.argsort(keys[c], kind="stable")][:size])] for c in chosen))

    return Halves(half(True, calibration_size), half(False, test_size))


def _published_halves(split: Split, seed: int, calibration_size: int | None, test_size: int | None) -> Halves:
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(side) for side in (split.member, split.heldout)]
    calibration, test = [order[: len(order) // 2] for order in orders], [order[len(order) // 2 :] for order in orders]

    def draw(half: list[np.ndarray], size: int | None) -> Split:
        if size is not None:
            half = [rng.choice(side, min(size, len(side)), replace=False) for side in half]
        return Split(*half)

    return Halves(draw(calibration, calibration_size), draw(test, test_size))


def _choose_sides(heldout: np.ndarray, keys: np.ndarray, group: np.ndarray, share: float) -> np.ndarray:
    """Choose which rows calibrate, bool [n], by keys and groups alone; members and held-out rows are balanced apart."""
    calibrates = np.zeros(len(keys), bool)
    alone = np.ones(len(keys), bool)
    surplus = np.zeros(2)  # that calibrate beyond their share, of members and of held-out rows
    for rows in _rows_by_group(group, keys):  # each to the side that lacks more so far
        size = np.bincount(heldout[rows].astype(np.int64), minlength=2)
        with_them, without = surplus + (1 - share) * size, surplus - share * size
        calibrates[rows] = side = np.sum(with_them**2) < np.sum(without**2)
        surplus = with_them if side else without
        alone[rows] = False
    for kind in (0, 1):  # rows without a group even out what is left
        single = np.flatnonzero(alone & (heldout == kind))
        single = single[np.argsort(keys[single], kind="stable")]
        calibrates[single[: max(0, math.floor(share * len(single) - surplus[kind]))]] = True
    return calibrates


def _rows_by_group(group: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Rows of each group of two or more, largest group first, equal ones by their smallest key."""
    order = np.argsort(group, kind="stable")
    order = order[group[order] != ALONE]
    cuts = np.flatnonzero(np.diff(group[order])) + 1
    found = [rows for rows in np.split(order, cuts) if len(rows) > 1]
    return sorted(found, key=lambda rows: (-len(rows), keys[rows].min()))


def _hash(seed: int, id: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{id}".encode(), digest_size=8).digest(), "big")


def _check_room(source: Source, wanted: int) -> None:
    if wanted > len(source):
        raise ValueError(f"{source.name} must have at least {wanted} images, got {len(source)}")


def _repeated(index: np.ndarray) -> list[int]:
    values, counts = np.unique(index, return_counts=True)
    return values[counts > 1].tolist()
