"""The images of an audit: every role in one source, each image read once and checked before any query is made.

Half of what makes an audit wrong is wrong here: the same pictures on both sides, a folder given twice, images that are
not the size the model was trained on. What would make the result meaningless is refused; what weakens it is a warning
that the report repeats. Images that cannot be used are listed together, in a warning and in unusable_images.csv.
"""

import collections
import csv
import dataclasses
import functools
import importlib.resources
import itertools
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import data
from dime_jax._util import csv as _csv
from dime_jax.auditing.config import EXAMPLE, AuditConfig
from dime_jax.core.denoiser import Denoiser
from dime_jax.data import Source, Split
from dime_jax.data.batches import Unusable, refuse_too_many, try_items
from dime_jax.data.duplicates import Sketch, compare_sketches, sketch
from dime_jax.data.groups import ALONE, connect
from dime_jax.data.sources import why_no_captions
from dime_jax.loading import model_directory
from dime_jax.protocol.facts import CandidateCopy, DuplicateFacts, RoleCounts, UnusableCandidate
from dime_jax.remote.options import SERVED

FEWEST_IMAGES = 20  # with 19 held-out images no p-value is below 0.05
EXAMPLE_CANDIDATES = 24  # members, and as many others
UNUSABLE_FILE = "unusable_images.csv"
_ROLES = {"members": "members", "heldout": "held-out images", "candidates": "candidates"}
_EXAMPLE_SHAPE = (8, 8, 1)
_SAME_IMAGES = 0.5
_NAMED_UNUSABLE = 10  # in the warning; the file has all


class UnusableImage(NamedTuple):
    """An image that could not be used, and why; its role is "members", "heldout" or "candidates"."""

    role: str
    id: str
    reason: str


class AuditImages(NamedTuple):
    """All images of an audit.

    Attributes:
      source: all of them; what cannot be used is in neither split nor candidates.
      split: known members (none, if none are known) and held-out images.
      candidates: positions in the source, int64 [m].
      truth: which candidates are members, bool [m], where that is known.
      groups: int64 over the source, images that belong together, -1 for none (see `data.groups`).
      duplicates: what was found; of candidates that are copies of other images, at most one record for each.
      unusable: images that were left out because they cannot be used.
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
        """How many images of each role could not be used."""
        return RoleCounts(*(sum(one.role == role for one in self.unusable) for role in _ROLES))

    def reference(self, calibration: Split) -> np.ndarray:
        """The held-out images to compare candidates with: those without a part in calibration, nor a copy that had."""
        rest = np.setdiff1d(self.split.heldout, calibration.heldout)
        calibrated = self.groups[np.concatenate([calibration.member, calibration.heldout])]
        return rest[~np.isin(self.groups[rest], calibrated[calibrated >= 0])]

    def unusable_candidates(self) -> tuple[UnusableCandidate, ...]:
        """The candidates that could not be used."""
        return tuple(UnusableCandidate(one.id, one.reason) for one in self.unusable if one.role == "candidates")


class _Roles(NamedTuple):
    source: Source
    split: Split
    candidates: np.ndarray
    truth: np.ndarray | None = None

    def by_name(self) -> dict[str, np.ndarray]:
        return {"members": self.split.member, "heldout": self.split.heldout, "candidates": self.candidates}

    def without_unusable(self, usable: Collection[int]) -> "_Roles":
        members, heldout, candidates = (
            np.array([index for index in indices.tolist() if index in usable], np.int64)
            for indices in self.by_name().values()
        )
        truth = None if self.truth is None else self.truth[np.isin(self.candidates, candidates)]
        return _Roles(self.source, Split(members, heldout), candidates, truth)


class _Look(NamedTuple):
    """What is kept of an image that was read."""

    size: tuple[int, int]
    sketch: Sketch


def open_images(config: AuditConfig, denoiser: Denoiser) -> AuditImages:
    """Open, join and check the images of an audit; writes unusable_images.csv into its directory if there are any.

    Raises:
      ValueError: for fewer than 20 images of a side, one set given as two, missing labels, or too many images that
        cannot be used: more than 10 % of the members or of the held-out images, or all candidates.
    """
    roles = _open_roles(config, denoiser)
    source = with_captions(_with_labels(roles.source, config.labels, denoiser), config.captions, denoiser)
    *half_sizes, _, every = config.sizes()
    # Both halves get as many images, so nothing beyond twice the larger half is used; finding duplicates takes time.
    # But candidates are compared with every held-out image there is: each makes their p-values finer.
    halved = len(roles.split.member) and None not in half_sizes
    enough = 2 * max(size for size in half_sizes if size is not None) if halved else None
    split = Split(
        _draw(roles.split.member, enough, config.seed),
        _draw(roles.split.heldout, None if every and len(roles.candidates) else enough, config.seed),
    )
    given = _Roles(source, split, roles.candidates, roles.truth)
    looks, unusable = _look_at_all(given, denoiser.image_shape)
    _list_unusable(config.directory, unusable)
    _refuse_unusable(given, unusable)
    roles = given.without_unusable(looks)
    warnings = _unusable_warning(unusable) + _size_warnings(roles, looks, denoiser.image_shape)
    used = np.concatenate(list(roles.by_name().values()))
    duplicates = compare_sketches(len(source), used, [looks[index].sketch for index in used.tolist()])
    _refuse_same_images(config, duplicates, roles)
    copies = _candidate_copies(duplicates, roles)
    kept, found, copy_warnings = _without_copies(duplicates, roles, copies)
    _check_counts(kept, members_known=len(split.member) > 0)
    owners = None if config.groups is None else data.read_groups(config.groups, source.ids)
    groups = data.merge_groups(duplicates.groups, source.identities, owners)
    assert groups is not None
    return AuditImages(source, kept, roles.candidates, roles.truth, groups, found, unusable, warnings + copy_warnings)


def example_split(source: Source, model: str | os.PathLike[str] | Denoiser, fingerprint: str) -> Split:
    """Who is a member of the digits: as the split beside the model's weights says; the shipped model is known by heart.

    Raises:
      ValueError: for other models, of which nobody knows.
    """
    shipped = pathlib.Path(str(importlib.resources.files("dime_jax"))) / "shipped_models" / EXAMPLE
    own = None if isinstance(model, Denoiser) else pathlib.Path(model) / "split.npz"
    if own is not None and own.is_file():
        return data.read_split(own, source)
    if fingerprint.removeprefix(SERVED) != model_directory.read_spec_file(shipped)["fingerprint"]:
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
        captions=None if source.captions is None else [source.captions[i] for i in indices],
    )


def _with_labels(source: Source, file: str | os.PathLike[str] | None, denoiser: Denoiser) -> Source:
    """The source with the labels of a CSV file of lines "id,label", which must name every image."""
    if denoiser.num_classes is not None and file is None and source.labels is None:
        raise ValueError(
            f"{denoiser.name} is class-conditional: expected class labels for all images, in their sources (folders of "
            "classes must have the same names everywhere, or labels would mean different classes) or by --labels "
            "FILE.csv of lines id,label"
        )
    if file is None:
        names = source.class_names
        if denoiser.num_classes is not None and names is not None and len(names) != denoiser.num_classes:
            raise ValueError(
                f"expected {denoiser.num_classes} folders of classes, as many as {denoiser.name} has, got "
                f"{len(names)}: their positions are not its labels; give --labels FILE.csv of lines id,label"
            )
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


def with_captions(source: Source, captions: str | None, denoiser: Denoiser) -> Source:
    """The source with the captions that a model is asked with: its own, or with captions="none" the empty one.

    Raises:
      ValueError: if the model takes captions and the source has none, or the other way round.
    """
    if not denoiser.takes_text:
        if captions is not None:
            raise ValueError(f"{denoiser.name} takes no text: expected no --captions {captions}")
        return source
    if captions == "none":
        return data.empty_captions(source)
    if source.captions is None:
        raise ValueError(
            f"{denoiser.name} takes captions, and not all images have one: give --captions none to ask with the empty "
            f"caption ({why_no_captions(source)})"
        )
    return source


def _draw(side: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    if size is None or len(side) <= size:
        return side
    return np.sort(np.random.default_rng(seed).choice(side, size, replace=False))


def _look_at_all(roles: _Roles, shape: tuple[int, ...]) -> tuple[dict[int, _Look], list[UnusableImage]]:
    """Read every image once, as the engine will: what is kept of it by its position, and the unusable ones."""
    source, transform = roles.source, data.transform_for(roles.source, shape)

    def look(item: data.Item) -> _Look:
        height, width = item.image.shape[:2]
        if height < shape[0] or width < shape[1]:
            raise data.BadImage(
                f"is {height}x{width}, smaller than the model's {shape[0]}x{shape[1]}: enlarge it as training did"
            )
        transform(item.image)  # refuses what has not the model's colours
        return _Look((height, width), sketch(item))

    looks: dict[int, _Look] = {}
    unusable = []
    for role, indices in roles.by_name().items():
        for index, found in zip(indices.tolist(), try_items(source, look, indices=indices)):
            if isinstance(found, Unusable):
                unusable.append(UnusableImage(role, source.ids[index], found.reason))
            else:
                looks[index] = found
    return looks, unusable


def _list_unusable(directory: pathlib.Path, unusable: Sequence[UnusableImage]) -> None:
    """Write the file that names them; a list of an earlier attempt goes."""
    if unusable:
        directory.mkdir(parents=True, exist_ok=True)
        _csv.write_csv(directory / UNUSABLE_FILE, [one._asdict() for one in unusable])
    else:
        (directory / UNUSABLE_FILE).unlink(missing_ok=True)


def _refuse_unusable(roles: _Roles, unusable: Sequence[UnusableImage]) -> None:
    for role, indices in roles.by_name().items():
        these = [one for one in unusable if one.role == role]
        if role != "candidates":
            what = f"{_ROLES[role]} that cannot be used"
            refuse_too_many(len(these), len(indices), what, functools.partial(_such_as, these))
        elif these and len(these) == len(indices):
            raise ValueError(f"expected candidates that can be used, got none of {len(these)}{_such_as(these)}")


def _such_as(unusable: Sequence[UnusableImage]) -> str:
    return f", such as {_name_and_reason(unusable[0])}; {UNUSABLE_FILE} lists all"


def _unusable_warning(unusable: Sequence[UnusableImage]) -> list[str]:
    if not unusable:
        return []
    counts = collections.Counter(_ROLES[one.role] for one in unusable)
    roles = ", ".join(f"{count} {role}" for role, count in counts.items())
    named = "; ".join(_name_and_reason(one) for one in unusable[:_NAMED_UNUSABLE])
    more = f"; and {len(unusable) - _NAMED_UNUSABLE} more" if len(unusable) > _NAMED_UNUSABLE else ""
    return [f"{len(unusable)} images cannot be used ({roles}; {UNUSABLE_FILE} lists all): {named}{more}"]


def _name_and_reason(one: UnusableImage) -> str:
    return f"{_csv.printable(one.id)}: {one.reason}"


def _size_warnings(roles: _Roles, looks: Mapping[int, _Look], shape: tuple[int, ...]) -> list[str]:
    """Say which images are resized, and whether that tells roles apart."""
    sizes = {
        role: collections.Counter(looks[index].size for index in indices.tolist())
        for role, indices in roles.by_name().items()
    }
    height, width = shape[:2]
    warnings = []
    for role, counts in sizes.items():
        resized = sum(count for size, count in counts.items() if size != (height, width))
        if resized:
            most = max(counts, key=lambda size: counts[size])
            warnings.append(
                f"{resized} of {counts.total()} {_ROLES[role]} were resized to the model's {height}x{width} (most are "
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


def _refuse_same_images(config: AuditConfig, duplicates: data.Duplicates, roles: _Roles) -> None:
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
            first, second = (_flag(config, role) for role in _ROLES if role in (one, two))
            raise ValueError(
                f"expected {first} and {second} to be different images, got {shared} of {total} that are the same to "
                "the pixel: was the same folder given twice?"
            )


def _flag(config: AuditConfig, role: str) -> str:
    """How the user named a role."""
    return f"the {_ROLES[role]}" if getattr(config, role) is None else f"--{role}"


def _candidate_copies(duplicates: data.Duplicates, roles: _Roles) -> list[CandidateCopy]:
    """For each candidate that has copies one of them: of a known member, else held-out, else another candidate."""
    groupings = {"exact": connect(len(duplicates.groups), duplicates.exact), "near": duplicates.groups}
    places = [
        (role, kind, grouping, _first_two(grouping, indices))
        for role, indices in roles.by_name().items()
        for kind, grouping in groupings.items()
    ]
    ids, found = roles.source.ids, []
    for index in roles.candidates.tolist():
        others = (
            CandidateCopy(ids[index], role, ids[other], kind)
            for role, kind, grouping, firsts in places
            for other in firsts.get(int(grouping[index]), ())
            if other != index
        )
        found += list(itertools.islice(others, 1))
    return found


def _first_two(grouping: np.ndarray, indices: np.ndarray) -> dict[int, list[int]]:
    """The first two images of each group: one of them is another than any given one."""
    firsts: dict[int, list[int]] = {}
    for index in indices[grouping[indices] != ALONE].tolist():
        group = firsts.setdefault(int(grouping[index]), [])
        if len(group) < 2:
            group.append(index)
    return firsts


def _without_copies(
    duplicates: data.Duplicates, roles: _Roles, copies: Sequence[CandidateCopy]
) -> tuple[Split, DuplicateFacts, list[str]]:
    """The split without images that have copies in another role, what was found, and warnings about it."""
    groups, split, candidates = duplicates.groups, roles.split, roles.candidates
    kept = data.remove_shared(split, groups)
    found = data.report_duplicates(duplicates, split)
    facts = DuplicateFacts(
        exact_pairs=found.exact_pairs,
        near_pairs=found.near_pairs,
        clusters=found.clusters,
        largest_cluster=found.largest_cluster,
        across_member_heldout=found.across_member_heldout,
        left_out=len(split.member) + len(split.heldout) - len(kept.member) - len(kept.heldout),
        candidates_among_members=len(_shared(groups, candidates, split.member)),
        candidates_among_heldout=len(_shared(groups, candidates, split.heldout)),
        candidates=tuple(copies),
    )
    # An image that is a candidate too would be a witness in its own case.
    sides = (np.setdiff1d(side, _shared(groups, side, candidates)) for side in (kept.member, kept.heldout))
    return Split(*sides), facts, _copy_warnings(facts)


def _copy_warnings(facts: DuplicateFacts) -> list[str]:
    among = sum(copy.role == "candidates" for copy in facts.candidates or ())
    said = (
        (facts.left_out, "images were left out: there are copies of them among both members and held-out images"),
        (
            facts.candidates_among_members,
            "candidates are copies or near copies of known members, which were left out",
        ),
        (
            facts.candidates_among_heldout,
            "candidates are copies or near copies of held-out images, which were left out",
        ),
        (among, "candidates are copies or near copies of other candidates: the test of the set counts them once"),
    )
    return [f"{count} {words}" for count, words in said if count]


def _shared(groups: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Those of the first images that are in a group with one of the second."""
    return first[np.isin(groups[first], data.shared_groups(groups, first, second))]


def _check_counts(split: Split, members_known: bool) -> None:
    for side, name in ((split.member, "members"), (split.heldout, "held-out images")):
        if len(side) < FEWEST_IMAGES and (name != "members" or members_known):
            raise ValueError(
                f"expected at least {FEWEST_IMAGES} {name}, got {len(side)} that can be used and are no copies: fewer "
                "decide nothing"
            )
