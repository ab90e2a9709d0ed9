"""ReadImage at the images of a run before any query is made: each is read once, and checked against the others.

Half of what makes a result wrong is wrong here: the same pictures on both sides, a folder given twice, images that are
not the size the model was trained on. What would make the result meaningless is refused; what weakens it is a warning
for the reader. Images that cannot be used are listed together, in a warning and in unusable_images.csv.
"""

import collections
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dime_jax._util import csv as _csv
from dime_jax._util.distributed import on_first_process
from dime_jax._util.text import printable
from dime_jax.data.batches import Unusable, refuse_too_many, try_items
from dime_jax.data.duplicates import (
    Duplicates,
    Sketch,
    compare_sketches,
    copies_of_others,
    remove_shared,
    report_duplicates,
    sketch,
)
from dime_jax.data.groups import ALONE, connect, merge_groups, read_groups, shared_groups
from dime_jax.data.roles import Roles
from dime_jax.data.sources import BadImage, Item, Source
from dime_jax.data.splits import Split
from dime_jax.data.transforms import transform_for

UNUSABLE_FILE = "unusable_images.csv"
ROLES = {"members": "members", "heldout": "held-out images", "candidates": "candidates"}
_SAME_IMAGES = 0.5
_NAMED_UNUSABLE = 10  # in the warning; the file has all
_TRAINED_ON = "the reference was trained on it, or on a copy of it"


@dataclasses.dataclass(frozen=True)
class RoleCounts:
    """A number of images for each role."""

    members: int
    heldout: int
    candidates: int

    @property
    def total(self) -> int:
        """Return how many there are of all roles."""
        return self.members + self.heldout + self.candidates


class UnusableCandidate(NamedTuple):
    """A candidate that could not be used, and why."""

    id: str
    reason: str


class CandidateCopy(NamedTuple):
    """A candidate of which there is a copy.

    Attributes:
      candidate: its id.
      role: of the copy: "members", "heldout" or "candidates"; the first such role if there are several copies.
      other: the copy's id.
      kind: "exact", the same to the pixel, or "near".
    """

    candidate: str
    role: str
    other: str
    kind: str

    @property
    def note(self) -> str:
        """In words: "near copy of members/cat.png"."""
        known = "" if self.role == "candidates" or self.other.startswith(f"{self.role}/") else f" ({self.role})"
        whose = "another candidate, " if self.role == "candidates" else ""
        return f"{self.kind} copy of {whose}{self.other}{known}"


@dataclasses.dataclass(frozen=True)
class DuplicateFacts:
    """Copies among the images, the first five as in `DuplicateReport`.

    Attributes:
      exact_pairs: the same to the pixel.
      near_pairs: nearly the same.
      clusters: of images that are copies of each other.
      largest_cluster: how many images it has.
      across_member_heldout: clusters with both members and held-out images.
      left_out: images that were left out for that.
      candidates_among_members: candidates that are copies of known members.
      candidates_among_heldout: candidates that are copies of held-out images.
      candidates: those of which there are copies.
    """

    exact_pairs: int
    near_pairs: int
    clusters: int
    largest_cluster: int
    across_member_heldout: int
    left_out: int
    candidates_among_members: int
    candidates_among_heldout: int
    candidates: tuple[CandidateCopy, ...]


class UnusableImage(NamedTuple):
    """An image that could not be used, and why; its role is "members", "heldout" or "candidates"."""

    role: str
    id: str
    reason: str

    def __str__(self) -> str:
        return f"{printable(self.id)}: {self.reason}"


class CheckedImages(NamedTuple):
    """All images of a run, checked.

    Attributes:
      source: all of them; what was left out is in neither split nor candidates.
      split: known members (none, if none are known) and held-out images.
      candidates: positions in the source, int64 [m].
      truth: which candidates are members, bool [m], where that is known.
      groups: int64 over the source, images that belong together, -1 for none (see `data.groups`).
      duplicates: what was found; of candidates that are copies of other images, at most one record for each.
      unusable: images that cannot be used.
      warnings: for the reader.
    """

    source: Source
    split: Split
    candidates: np.ndarray
    truth: np.ndarray | None
    groups: np.ndarray
    duplicates: DuplicateFacts
    unusable: list[UnusableImage]
    warnings: list[str]

    def count_unusable(self) -> RoleCounts:
        """Count the images of each role that could not be used."""
        return RoleCounts(*(sum(one.role == role for one in self.unusable) for role in ROLES))

    def heldout_beside(self, calibration: Split) -> np.ndarray:
        """Return the held-out images to compare candidates with: neither they nor their copies were calibrated on."""
        rest = np.setdiff1d(self.split.heldout, calibration.heldout)
        calibrated = self.groups[np.concatenate([calibration.member, calibration.heldout])]
        return rest[~np.isin(self.groups[rest], calibrated[calibrated >= 0])]

    def unusable_candidates(self) -> tuple[UnusableCandidate, ...]:
        """Return the candidates that could not be used."""
        return tuple(UnusableCandidate(one.id, one.reason) for one in self.unusable if one.role == "candidates")


class ReadImage(NamedTuple):
    """What is kept of an image that was read."""

    size: tuple[int, int]
    sketch: Sketch


def check_roles(
    roles: Roles,
    shape: tuple[int, ...],
    directory: pathlib.Path,
    *,
    named: Collection[str] = (),
    groups: str | os.PathLike[str] | None = None,
    as_given: bool = False,
    apart: Sequence[Sketch] = (),
) -> CheckedImages:
    """Read and check all images that have a role; writes unusable_images.csv if there are any such.

    Args:
      roles: who is who.
      shape: of the images that the model takes.
      directory: of the run.
      named: the roles whose images the user named.
      groups: a CSV file of lines "id,group": images that belong together.
      as_given: whether every image keeps its role, and copies and small images are only reported. Otherwise what cannot
        be used is left out, and images that have copies in another role.
      apart: sketches of the images that the reference was trained on. Candidates that are copies of them cannot be
        used; held-out images that are, or that belong together with such, are left out, as given or not.

    Raises:
      ValueError: for one set given as two, or too many images that cannot be used: more than 10 % of the members or of
        the held-out images, or all candidates.
    """
    looks, unusable = _look_at_all(roles, shape, may_enlarge=as_given)
    _refuse_unusable(roles, unusable, directory)
    usable, source = roles.only(looks), roles.source
    used, n = np.concatenate(list(usable.by_name().values())), len(source)
    sketches = [*(looks[index].sketch for index in used.tolist()), *apart]
    found = compare_sketches(n + len(apart), np.concatenate([used, n + np.arange(len(apart))]), sketches)
    duplicates, copied = copies_of_others(found, n)
    owners = None if groups is None else read_groups(groups, source.ids)
    merged = merge_groups(duplicates.groups, source.identities, owners)
    assert merged is not None
    known = _known_to_reference(copied, merged, usable)
    if len(known["candidates"]):
        unusable += [UnusableImage("candidates", source.ids[i], _TRAINED_ON) for i in known["candidates"].tolist()]
        _refuse_unusable(roles, unusable, directory)
    usable = usable.only(looks.keys() - {*known["heldout"].tolist(), *known["candidates"].tolist()})
    warnings = _unusable_warning(unusable) + _size_warnings(usable, looks, shape) + _reference_warnings(known)
    _refuse_same_images(duplicates, usable, named)
    if as_given:
        split = Split(roles.split.member, roles.split.heldout[~np.isin(roles.split.heldout, known["heldout"])])
    else:
        split = _without_copies(duplicates.groups, usable)
    copies = _describe_copies(duplicates, usable, as_given)
    warnings += _copy_warnings(copies)
    return CheckedImages(source, split, usable.candidates, usable.truth, merged, copies, unusable, warnings)


def _look_at_all(
    roles: Roles, shape: tuple[int, ...], may_enlarge: bool
) -> tuple[dict[int, ReadImage], list[UnusableImage]]:
    """Read every image once; return what is kept of each by position, and the unusable ones."""
    looks: dict[int, ReadImage] = {}
    unusable = []
    for role, indices in roles.by_name().items():
        for index, found in zip(indices.tolist(), look_at(roles.source, shape, indices, may_enlarge)):
            if isinstance(found, Unusable):
                unusable.append(UnusableImage(role, roles.source.ids[index], found.reason))
            else:
                looks[index] = found
    return looks, unusable


def look_at(
    source: Source, shape: tuple[int, ...], indices: np.ndarray, may_enlarge: bool = False
) -> Iterator[ReadImage | Unusable]:
    """Read images as the engine and training will: what is kept of each, or why it cannot be used.

    Args:
      source: the images.
      shape: of the images that the model takes.
      indices: of those to read.
      may_enlarge: whether images smaller than that are usable.
    """
    transform = transform_for(source, shape)

    def look(item: Item) -> ReadImage:
        height, width = item.image.shape[:2]
        if (height < shape[0] or width < shape[1]) and not may_enlarge:
            raise BadImage(
                f"is {height}x{width}, smaller than the model's {shape[0]}x{shape[1]}: enlarge it as training did"
            )
        transform(item.image)  # refuses images whose colours are not the model's
        return ReadImage((height, width), sketch(item))

    return try_items(source, look, indices=indices)


def _list_unusable(directory: pathlib.Path, unusable: Sequence[UnusableImage]) -> None:
    """Write the file that lists them; that of an earlier attempt is removed."""
    if unusable:
        directory.mkdir(parents=True, exist_ok=True)
        _csv.write_csv(directory / UNUSABLE_FILE, [one._asdict() for one in unusable])
    else:
        (directory / UNUSABLE_FILE).unlink(missing_ok=True)


def _refuse_unusable(roles: Roles, unusable: Sequence[UnusableImage], directory: pathlib.Path) -> None:
    """List the images that cannot be used, and end the run if they are too many."""
    on_first_process(lambda: _list_unusable(directory, unusable))
    for role, indices in roles.by_name().items():
        these = [one for one in unusable if one.role == role]
        such_as = f", such as {these[0]}; {UNUSABLE_FILE} lists all" if these else ""
        if role != "candidates":
            why = functools.partial(str, such_as)
            refuse_too_many(len(these), len(indices), f"{ROLES[role]} that cannot be used", why)
        elif these and len(these) == len(indices):
            raise ValueError(f"none of the {len(these)} candidates can be used{such_as}")


def _unusable_warning(unusable: Sequence[UnusableImage]) -> list[str]:
    if not unusable:
        return []
    counts = collections.Counter(ROLES[one.role] for one in unusable)
    roles = ", ".join(f"{count} {role}" for role, count in counts.items())
    named = "; ".join(map(str, unusable[:_NAMED_UNUSABLE]))
    more = f"; and {len(unusable) - _NAMED_UNUSABLE} more" if len(unusable) > _NAMED_UNUSABLE else ""
    return [f"{len(unusable)} images cannot be used ({roles}; {UNUSABLE_FILE} lists all): {named}{more}"]


def _known_to_reference(copied: np.ndarray, groups: np.ndarray, roles: Roles) -> dict[str, np.ndarray]:
    """By role, the images that the reference knows.

    Held-out images that belong together with such count as known: the reference would explain more of them than of a
    candidate that it never saw, and innocent candidates would look like members beside them.
    """
    known = {role: indices[copied[indices]] for role, indices in roles.by_name().items()}
    heldout = roles.split.heldout
    relatives = _shared(groups, heldout, np.flatnonzero(copied))
    return {**known, "heldout": heldout[copied[heldout] | np.isin(heldout, relatives)]}


def _reference_warnings(known: Mapping[str, np.ndarray]) -> list[str]:
    """What is said of images that the reference knows; candidates are among the unusable images."""
    said = {
        "heldout": "held-out images were left out: the reference was trained on them, on copies of them, or on others "
        "of their group",
        "members": "known members are copies of images that the reference was trained on: what the model learned from "
        "these hardly shows beside it",
    }
    return [f"{len(known[role])} {words}" for role, words in said.items() if len(known[role])]


def _size_warnings(roles: Roles, looks: Mapping[int, ReadImage], shape: tuple[int, ...]) -> list[str]:
    """Say which images are resized, and whether that tells roles apart."""
    given = roles.by_name().items()
    sizes = {role: collections.Counter(looks[index].size for index in indices.tolist()) for role, indices in given}
    height, width = shape[:2]
    warnings = []
    for role, counts in sizes.items():
        resized = sum(count for size, count in counts.items() if size != (height, width))
        if resized:
            most = max(counts, key=lambda size: counts[size])
            warnings.append(
                f"{resized} of {counts.total()} {ROLES[role]} were resized to the model's {height}x{width} (most are "
                f"{most[0]}x{most[1]}): scores are only comparable if training did it the same way"
            )
    if sizes["members"] and not set(sizes["members"]) & set(sizes["heldout"]):
        warnings.append("members and held-out images come in different sizes: what is found may be the resizing alone")
    own = sum(count for size, count in sizes["candidates"].items() if size not in sizes["heldout"])
    if own:
        warnings.append(
            f"{own} of {sizes['candidates'].total()} candidates come in sizes that no held-out image has, so they were "
            "resized differently: what is found may be the resizing alone"
        )
    return warnings


def _refuse_same_images(duplicates: Duplicates, roles: Roles, named: Collection[str]) -> None:
    """Refuse two roles that are one set: most images of a role have exact copies in the other.

    Members and held-out images contradict each other where either is mostly the other. A few candidates that are known
    images are only named; the two are one set if most of the known images are candidates.
    """
    exact, given = connect(len(duplicates.groups), duplicates.exact), roles.by_name()
    smaller = min(("members", "heldout"), key=lambda role: len(given[role]))
    larger = "heldout" if smaller == "members" else "members"
    for one, two in ((smaller, larger), ("heldout", "candidates"), ("members", "candidates")):
        shared, total = len(_shared(exact, given[one], given[two])), len(given[one])
        if shared > _SAME_IMAGES * total:
            first, second = (
                f"--{role}" if role in named else f"the {ROLES[role]}" for role in ROLES if role in (one, two)
            )
            raise ValueError(
                f"{first} and {second} must be different images, but {shared} of {total} are identical to the pixel: "
                "was the same folder given twice?"
            )


def _candidate_copies(duplicates: Duplicates, roles: Roles) -> list[CandidateCopy]:
    """Name one copy of each candidate that has any: a known member, else a held-out image, else another candidate."""
    groupings = {"exact": connect(len(duplicates.groups), duplicates.exact), "near": duplicates.groups}
    copies: dict[tuple[str, str, int], list[int]] = collections.defaultdict(list)
    for (role, indices), (kind, grouping) in itertools.product(roles.by_name().items(), groupings.items()):
        for index in indices[grouping[indices] != ALONE].tolist():
            copies[role, kind, int(grouping[index])].append(index)
    ids, found = roles.source.ids, []
    for index in roles.candidates.tolist():
        others = (
            CandidateCopy(ids[index], role, ids[other], kind)
            for role, (kind, grouping) in itertools.product(ROLES, groupings.items())
            for other in copies.get((role, kind, int(grouping[index])), ())[:2]  # one of the two is another
            if other != index
        )
        found += list(itertools.islice(others, 1))
    return found


def _without_copies(groups: np.ndarray, roles: Roles) -> Split:
    """Return the split without images that have copies in another role."""
    kept = remove_shared(roles.split, groups)
    # An image that is a candidate too would be a witness in its own case.
    return Split(*kept.sides.map(lambda side: np.setdiff1d(side, _shared(groups, side, roles.candidates))))


def _describe_copies(duplicates: Duplicates, roles: Roles, as_given: bool) -> DuplicateFacts:
    groups, split, candidates = duplicates.groups, roles.split, roles.candidates
    found, kept = report_duplicates(duplicates, split), split if as_given else remove_shared(split, groups)
    return DuplicateFacts(
        *found[:5],
        left_out=sum(split.sides.map(len)) - sum(kept.sides.map(len)),
        candidates_among_members=len(_shared(groups, candidates, split.member)),
        candidates_among_heldout=len(_shared(groups, candidates, split.heldout)),
        candidates=tuple(_candidate_copies(duplicates, roles)),
    )


def _copy_warnings(facts: DuplicateFacts) -> list[str]:
    among = sum(copy.role == "candidates" for copy in facts.candidates)
    left_in = 0 if facts.left_out else facts.across_member_heldout
    copies = "candidates are copies or near copies of"
    said = (
        (left_in, "clusters of copies lie across members and held-out images, and were left in"),
        (facts.left_out, "images were left out: there are copies of them among both members and held-out images"),
        (facts.candidates_among_members, f"{copies} known members, which were left out"),
        (facts.candidates_among_heldout, f"{copies} held-out images, which were left out"),
        (among, f"{copies} other candidates: the test of the set counts them once"),
    )
    return [f"{count} {words}" for count, words in said if count]


def _shared(groups: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return those of the first images that are in a group with one of the second."""
    return first[np.isin(groups[first], shared_groups(groups, first, second))]
