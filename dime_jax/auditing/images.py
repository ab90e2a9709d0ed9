"""The images of an audit: every role in one source, checked before any query is made.

Half of what makes an audit wrong is wrong here: the same pictures on both sides, a folder given twice, images that are
not the size the model was trained on. What would make the result meaningless is refused; what weakens it is a warning
that the report repeats.
"""

import collections
import csv
import dataclasses
import importlib.resources
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dime_jax import checkpoints, data
from dime_jax.auditing.config import EXAMPLE, AuditConfig
from dime_jax.data import Source, Split
from dime_jax.data.batches import map_items
from dime_jax.data.groups import connect
from dime_jax.denoiser import Denoiser

FEWEST_IMAGES = 20  # with 19 held-out images no p-value is below 0.05
EXAMPLE_CANDIDATES = 24  # members, and as many others
_EXAMPLE_SHAPE = (8, 8, 1)
_SAME_IMAGES = 0.5


class AuditImages(NamedTuple):
    """All images of an audit.

    Attributes:
      source: all of them.
      split: known members (none, if none are known) and held-out images.
      candidates: positions in the source, int64 [m].
      truth: which candidates are members, bool [m], where that is known.
      groups: int64 over the source, images that belong together, -1 for none (see `data.groups`).
      duplicates: what was found, for results.json.
      warnings: for the reader.
    """

    source: Source
    split: Split
    candidates: np.ndarray
    truth: np.ndarray | None
    groups: np.ndarray
    duplicates: dict[str, Any]
    warnings: list[str]


class _Roles(NamedTuple):
    source: Source
    split: Split
    candidates: np.ndarray
    truth: np.ndarray | None = None


def open_images(config: AuditConfig, denoiser: Denoiser) -> AuditImages:
    """Open, join and check the images of an audit.

    Raises:
      ValueError: for fewer than 20 images of a side, one set given as two, images smaller than the model's, or missing
        labels.
    """
    roles = _open_roles(config, denoiser)
    source = _with_labels(roles.source, config.labels, denoiser)
    half_sizes = config.sizes()[:2]
    # Both halves get as many images, so nothing beyond twice the larger half is used; finding duplicates takes time.
    # Without members there are no halves, and every held-out image makes p-values finer.
    halved = len(roles.split.member) and None not in half_sizes
    enough = 2 * max(size for size in half_sizes if size is not None) if halved else None
    split = Split(*(_draw(side, enough, config.seed) for side in (roles.split.member, roles.split.heldout)))
    used = np.concatenate([split.member, split.heldout, roles.candidates])
    warnings = _check_sizes(source, split, roles.candidates, denoiser.image_shape)
    duplicates = data.find_duplicates(source, used)
    _refuse_same_images(duplicates, split, roles.candidates)
    kept, found, copies = _without_copies(duplicates, split, roles.candidates)
    _check_counts(kept, members_known=len(split.member) > 0)
    owners = None if config.groups is None else data.read_groups(config.groups, source.ids)
    groups = data.merge_groups(duplicates.groups, source.identities, owners)
    assert groups is not None
    return AuditImages(source, kept, roles.candidates, roles.truth, groups, found, warnings + copies)


def example_split(source: Source, model: str | os.PathLike[str] | Denoiser, fingerprint: str) -> Split:
    """Who is a member of the digits: as the split beside the model's weights says; the shipped model is known by heart.

    Raises:
      ValueError: for other models, of which nobody knows.
    """
    shipped = pathlib.Path(str(importlib.resources.files("dime_jax"))) / "shipped_models" / EXAMPLE
    own = None if isinstance(model, Denoiser) else pathlib.Path(model) / "split.npz"
    if own is not None and own.is_file():
        return data.read_split(own, source)
    if fingerprint != checkpoints.read_spec_file(shipped)["fingerprint"]:
        raise ValueError("expected --heldout, and --members if known: no split.npz beside the model says who is one")
    return data.read_split(shipped / "split.npz", source)


def _open_roles(config: AuditConfig, denoiser: Denoiser) -> _Roles:
    shape = denoiser.image_shape
    members, heldout, images, candidates = (
        None if place is None else _open(place)
        for place in (config.members, config.heldout, config.images, config.candidates)
    )
    if images is not None:
        assert config.split is not None
        source, split = images, data.read_split(config.split, images)
    elif heldout is None:
        digits = data.open_source(EXAMPLE)
        if tuple(shape) != _EXAMPLE_SHAPE:
            raise ValueError(
                f"expected --heldout: images like the members that the model was not trained on; the example's digits "
                f"are {list(_EXAMPLE_SHAPE)}, this model takes {list(shape)}"
            )
        source, split = digits, example_split(digits, config.model, denoiser.fingerprint)
        if members is not None:
            members, heldout = _alike([members, _part(digits, split.heldout)], shape)
            source, split = data.join(members, heldout), data.split_of_joined(members, heldout)
        elif candidates is None:
            return _reserve_candidates(source, split, config.seed)
    elif members is None:
        source = dataclasses.replace(heldout, ids=[f"heldout/{id}" for id in heldout.ids])
        split = Split(np.zeros(0, np.int64), np.arange(len(heldout)))
    else:
        members, heldout = _alike([members, heldout], shape)
        source, split = data.join(members, heldout), data.split_of_joined(members, heldout)
    if candidates is None:
        if not len(split.member):
            raise ValueError("expected --candidates or --members: with held-out images alone there is nothing to find")
        return _Roles(source, split, np.zeros(0, np.int64))
    return _Roles(_append(source, candidates, shape), split, len(source) + np.arange(len(candidates)))


def _open(place: str | Source) -> Source:
    return place if isinstance(place, Source) else data.open_source(place)


def _reserve_candidates(source: Source, split: Split, seed: int) -> _Roles:
    """Take some members and some held-out images of the example out of its split, as candidates of known truth."""
    rng = np.random.default_rng(seed)
    reserved = [np.sort(rng.permutation(side)[:EXAMPLE_CANDIDATES]) for side in (split.member, split.heldout)]
    candidates = np.sort(np.concatenate(reserved))
    rest = Split(*(np.setdiff1d(side, candidates) for side in (split.member, split.heldout)))
    return _Roles(source, rest, candidates, np.isin(candidates, reserved[0]))


def _append(first: Source, candidates: Source, shape: tuple[int, ...]) -> Source:
    """One source of both. Candidates keep their ids, unless the others have the same."""
    ids = list(candidates.ids)
    if set(ids) & set(first.ids):
        ids = [f"candidates/{id}" for id in ids]
    first, second = _alike([first, candidates], shape)
    joined = data.join(first, second)
    return dataclasses.replace(joined, ids=[*first.ids, *ids])


def _alike(sources: Sequence[Source], shape: tuple[int, ...]) -> list[Source]:
    """Sources to join. If their pipelines differ, each is put through its own first, which joining would forget."""
    if len({source.transform for source in sources}) == 1:
        return list(sources)
    return [_preprocessed(source, shape) for source in sources]


def _preprocessed(source: Source, shape: tuple[int, ...]) -> Source:
    transform = data.transform_for(source, shape)
    return dataclasses.replace(source, read=lambda index: transform(source.read(index)), transform="fit")


def _part(source: Source, indices: np.ndarray) -> Source:
    return dataclasses.replace(
        source,
        ids=[source.ids[i] for i in indices],
        read=lambda index: source.read(int(indices[index])),
        labels=None if source.labels is None else source.labels[indices],
        identities=None if source.identities is None else source.identities[indices],
    )


def _with_labels(source: Source, file: str | os.PathLike[str] | None, denoiser: Denoiser) -> Source:
    """The source with the labels of a CSV file of lines "id,label", which must name every image."""
    if denoiser.num_classes is not None and file is None and source.labels is None:
        raise ValueError(
            f"{denoiser.name} is class-conditional: expected class labels for all images, in their sources or by "
            "--labels FILE.csv of lines id,label"
        )
    if file is None:
        return source
    with open(file, newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.reader(stream) if row and row != ["id", "label"]]
    wrong = next((row for row in rows if len(row) != 2 or not row[1].strip().isdecimal()), None)
    if wrong is not None:
        raise ValueError(f"expected lines id,label in {file}, got {','.join(wrong)!r}")
    label = {id: int(number) for id, number in rows}
    missing = [id for id in source.ids if id not in label]
    if missing:
        raise ValueError(f"expected a label for each image in {file}, got none for {missing[0]!r}")
    return dataclasses.replace(source, labels=np.array([label[id] for id in source.ids], np.int32))


def _draw(side: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    if size is None or len(side) <= size:
        return side
    return np.sort(np.random.default_rng(seed).choice(side, size, replace=False))


def _check_sizes(source: Source, split: Split, candidates: np.ndarray, shape: tuple[int, ...]) -> list[str]:
    """Refuse images that are smaller than the model's; say which are resized, and whether that tells sides apart."""
    sizes: dict[str, collections.Counter[tuple[int, int]]] = {}
    for role, indices in (("members", split.member), ("held-out images", split.heldout), ("candidates", candidates)):
        if len(indices):
            shapes = map_items(source, lambda item: item.image.shape[:2], indices=indices)
            sizes[role] = collections.Counter(size for size in shapes if size is not None)
    height, width = shape[:2]
    warnings = []
    for role, counts in sizes.items():
        for size, count in counts.items():
            if size[0] < height or size[1] < width:
                raise ValueError(
                    f"expected {role} of at least {height}x{width}, the model's size, got {count} of "
                    f"{size[0]}x{size[1]}: bring them to that size as it was done for training"
                )
        resized = sum(count for size, count in counts.items() if size != (height, width))
        if resized:
            most = max(counts, key=lambda size: counts[size])
            warnings.append(
                f"{resized} of {counts.total()} {role} were resized to the model's {height}x{width} (most are "
                f"{most[0]}x{most[1]}): scores are only comparable if training did it the same way"
            )
    sides = [set(sizes[role]) for role in ("members", "held-out images") if role in sizes]
    if len(sides) == 2 and not sides[0] & sides[1]:
        warnings.append("members and held-out images come in different sizes: what is found may be the resizing")
    return warnings


def _refuse_same_images(duplicates: data.Duplicates, split: Split, candidates: np.ndarray) -> None:
    """Refuse two roles that are one set: most images of the smaller one have exact copies in the other."""
    exact = connect(len(duplicates.groups), duplicates.exact)
    for one, two, names in (
        (split.member, split.heldout, "members and held-out images"),
        (candidates, split.heldout, "candidates and held-out images"),
    ):
        smaller, other = sorted((one, two), key=len)
        shared = len(_shared(exact, smaller, other))
        if len(smaller) and shared > _SAME_IMAGES * len(smaller):
            raise ValueError(
                f"expected {names} to be different images, got {shared} of {len(smaller)} that are the same to the "
                "pixel: was the same folder given twice?"
            )


def _without_copies(
    duplicates: data.Duplicates, split: Split, candidates: np.ndarray
) -> tuple[Split, dict[str, Any], list[str]]:
    """The split without images that have copies in another role, what was found, and warnings about it."""
    groups = duplicates.groups
    found: dict[str, Any] = data.report_duplicates(duplicates, split)._asdict()
    del found["across_calibration_test"]  # clusters are never cut
    kept = data.remove_shared(split, groups)
    found["left_out"] = len(split.member) + len(split.heldout) - len(kept.member) - len(kept.heldout)
    warnings = []
    if found["left_out"]:
        warnings.append(f"{found['left_out']} images were left out: copies of them are both members and held-out")
    for role, what, side in (
        ("members", "known members", split.member),
        ("heldout", "held-out images", split.heldout),
    ):
        count = found[f"candidates_among_{role}"] = len(_shared(groups, candidates, side))
        if count:
            warnings.append(f"{count} candidates are copies or near copies of {what}, which were left out")
    # An image that is a candidate too would be a witness in its own case.
    sides = (np.setdiff1d(side, _shared(groups, side, candidates)) for side in (kept.member, kept.heldout))
    return Split(*sides), found, warnings


def _shared(groups: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Those of the first images that are in a group with one of the second."""
    return first[np.isin(groups[first], data.shared_groups(groups, first, second))]


def _check_counts(split: Split, members_known: bool) -> None:
    for side, name in ((split.member, "members"), (split.heldout, "held-out images")):
        if len(side) < FEWEST_IMAGES and (name != "members" or members_known):
            raise ValueError(
                f"expected at least {FEWEST_IMAGES} {name}, got {len(side)} without copies: fewer decide nothing"
            )
