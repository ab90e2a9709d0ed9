"""Roles of images: who is a known member, who is held out, and which images are in question, all in one source."""

import csv
import dataclasses
import os
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from dime_jax.data.opening import open_source
from dime_jax.data.sources import Source, empty_captions, join, why_no_captions
from dime_jax.data.splits import Split, read_split, split_of_joined
from dime_jax.data.transforms import transform_for

EXAMPLE = "digits"  # the set that stands for whatever is not named
EXAMPLE_CANDIDATES = 24  # members, and as many others
_EXAMPLE_SHAPE = (8, 8, 1)


class Named(NamedTuple):
    """Images as a user names them, by URI or as a Source: `members` and `heldout`, or `images` and a `split` file."""

    members: str | Source | None = None
    heldout: str | Source | None = None
    images: str | Source | None = None
    split: str | os.PathLike[str] | None = None
    candidates: str | Source | None = None


class Roles(NamedTuple):
    """Who is who in a source.

    Attributes:
      source: all images.
      split: known members (none, if none are known) and held-out images.
      candidates: positions of the images in question, int64 [m].
      truth: which candidates are members, bool [m], where that is known.
    """

    source: Source
    split: Split
    candidates: np.ndarray
    truth: np.ndarray | None = None

    def by_name(self) -> dict[str, np.ndarray]:
        """Return the positions of the images by role."""
        return {"members": self.split.member, "heldout": self.split.heldout, "candidates": self.candidates}

    def only(self, usable: Collection[int]) -> "Roles":
        """Return the same roles without any other images."""
        members, heldout, candidates = (
            np.array([index for index in indices.tolist() if index in usable], np.int64)
            for indices in self.by_name().values()
        )
        truth = None if self.truth is None else self.truth[np.isin(self.candidates, candidates)]
        return Roles(self.source, Split(members, heldout), candidates, truth)


def open_roles(
    named: Named,
    shape: tuple[int, ...],
    example_split: Callable[[Source], Split] | None = None,
    seed: int = 0,
    members_known: bool = True,
) -> Roles:
    """Open all images into one source; each is preprocessed as its own source says.

    Args:
      named: the images. Held-out images that are not named are those of the example, and so are members if candidates
        are not named either; some of the example's images then become candidates of known truth.
      shape: of the images that the model takes.
      example_split: gives who is a member in the example; raises ValueError if that is not known.
      seed: of the example's candidates.
      members_known: whether to tell who is a member in the example; if not, all of its members become candidates.

    Raises:
      ValueError: if what is named is not enough, or cannot be opened.
    """
    members, heldout, images, candidates = (
        open_source(place) if isinstance(place, str) else place
        for place in (named.members, named.heldout, named.images, named.candidates)
    )
    if images is not None:
        assert named.split is not None
        source, split = images, read_split(named.split, images)
    elif heldout is None:
        if tuple(shape) != _EXAMPLE_SHAPE or example_split is None:
            raise ValueError(
                f"--heldout is missing: images like the members that the model was not trained on; the example's "
                f"digits are {list(_EXAMPLE_SHAPE)}, but this model takes {list(shape)}"
            )
        source = open_source(EXAMPLE)
        split = example_split(source)
        if members is not None:
            source, split = join_known(members, source.take(split.heldout), shape)
        elif candidates is None:
            return _reserve_candidates(source, split, EXAMPLE_CANDIDATES if members_known else len(split.member), seed)
        elif not members_known:
            split = Split(np.zeros(0, np.int64), split.heldout)
    elif members is None:
        source = dataclasses.replace(heldout, ids=[f"heldout/{id}" for id in heldout.ids])
        split = Split(np.zeros(0, np.int64), np.arange(len(heldout)))
    else:
        source, split = join_known(members, heldout, shape)
    if candidates is None:
        if not len(split.member):
            raise ValueError("give --candidates or --members: with held-out images alone there is nothing to find")
        return Roles(source, split, np.zeros(0, np.int64))
    return Roles(_append(source, candidates, shape), split, len(source) + np.arange(len(candidates)))


def join_known(members: Source, heldout: Source, shape: tuple[int, ...]) -> tuple[Source, Split]:
    """Join members and held-out images, each preprocessed as its own source says; return the source and its split."""
    return own_transforms(join(members, heldout), shape), split_of_joined(members, heldout)


def own_transforms(source: Source, shape: tuple[int, ...]) -> Source:
    """Put each image of a joined source through the pipeline of the set that it comes from."""
    if not source.parts:
        return source
    preprocessed = [_preprocessed(part, shape) for part in source.parts]
    return dataclasses.replace(source, read=join(*preprocessed).read, parts=())


def _reserve_candidates(source: Source, split: Split, count: int, seed: int) -> Roles:
    """Take some members and as many held-out images of the example out of its split, as candidates of known truth."""
    rng = np.random.default_rng(seed)
    reserved = [np.sort(rng.permutation(side)[:count]) for side in (split.member, split.heldout)]
    candidates = np.sort(np.concatenate(reserved))
    rest = Split(*(np.setdiff1d(side, candidates) for side in (split.member, split.heldout)))
    return Roles(source, rest, candidates, np.isin(candidates, reserved[0]))


def _append(first: Source, candidates: Source, shape: tuple[int, ...]) -> Source:
    """Join both. Ids of candidates always get their prefix: draws follow from ids, so if the prefix depended on the
    other names, a p-value would depend on who else was asked about.
    """
    ids = [f"candidates/{id}" for id in candidates.ids]
    return dataclasses.replace(own_transforms(join(first, candidates), shape), ids=[*first.ids, *ids])


def _preprocessed(source: Source, shape: tuple[int, ...]) -> Source:
    transform = transform_for(source, shape)
    return dataclasses.replace(source, read=lambda index: transform(source.read(index)), transform="fit")


def with_labels(source: Source, file: str | os.PathLike[str] | None, model: str, num_classes: int | None) -> Source:
    """Return the source with the labels of a CSV file of lines "id,label", which must name every image.

    Args:
      source: the images.
      file: the CSV file; None to use the source's own labels.
      model: its name, for messages.
      num_classes: that the model was trained on; None if it takes no labels.
    """
    if num_classes is not None and file is None and source.labels is None:
        raise ValueError(
            f"{model} is class-conditional: all images need class labels, in their sources (folders of "
            "classes must have the same names everywhere, or labels would mean different classes) or by --labels "
            "FILE.csv of lines id,label"
        )
    if file is None:
        names = source.class_names
        if num_classes is not None and names is not None and len(names) != num_classes:
            raise ValueError(
                f"there must be {num_classes} folders of classes, as many as {model} has classes, got "
                f"{len(names)}: their positions are not its labels; give --labels FILE.csv of lines id,label"
            )
        return source
    with open(file, newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.reader(stream) if row and row != ["id", "label"]]
    wrong = next((row for row in rows if len(row) != 2 or not row[1].strip().isdecimal()), None)
    if wrong is not None:
        raise ValueError(f"lines of {file} must be id,label, got {','.join(wrong)!r}")
    label = {id: int(number) for id, number in rows}
    missing = [id for id in source.ids if id not in label]
    if missing:
        raise ValueError(f"{file} has no label for {missing[0]!r}")
    return dataclasses.replace(source, labels=np.array([label[id] for id in source.ids], np.int32))


def with_captions(source: Source, captions: str | None, model: str, takes_text: bool) -> Source:
    """Return the source with the captions that a model is asked with: its own, or empty ones for captions="none".

    Args:
      source: the images.
      captions: "own", "none" or None.
      model: its name, for messages.
      takes_text: whether it takes captions.

    Raises:
      ValueError: if the model takes captions and the source has none, or the other way round.
    """
    if not takes_text:
        if captions is not None:
            raise ValueError(f"{model} takes no text: omit --captions {captions}")
        return source
    if captions == "none":
        return empty_captions(source)
    if source.captions is None:
        raise ValueError(
            f"{model} takes captions, and not all images have one: give --captions none to ask with the empty "
            f"caption ({why_no_captions(source)})"
        )
    return source
