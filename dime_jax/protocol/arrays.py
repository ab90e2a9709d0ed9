"""The arrays that go with an audit's facts: audit.npz and compare.npz. Images are positions in the audit's source."""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from dime_jax.data.groups import ALONE

_Arrays = TypeVar("_Arrays")
_BLIND = ("blind_member", "blind_heldout", "blind_member_scores", "blind_heldout_scores")
# The names in the files of the arrays of each part, in the order of its fields; other arrays are named as their fields.
_NAMES = {
    "thumbnails": ("members_found", "heldout_cleared", "heldout_mistaken", "thumbnail_index", "thumbnails"),
    "statistics": ("candidate_statistics", "compared", "compared_statistics"),
    "blind": _BLIND,
    "caption_blind": tuple(f"caption_{name}" for name in _BLIND),
}


@dataclasses.dataclass(frozen=True, eq=False)
class PictureStatistics:
    """`evidence.image_statistics` of candidates, and of held-out images to compare them with.

    Attributes:
      candidates: [m, k], NaN where unreadable.
      compared: the held-out images [n].
      of_compared: their statistics [n, k].
    """

    candidates: np.ndarray
    compared: np.ndarray
    of_compared: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class BlindScores:
    """The blind baseline's scores of some members and held-out images, lower for members."""

    member: np.ndarray
    heldout: np.ndarray
    member_scores: np.ndarray
    heldout_scores: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Thumbnails:
    """Small pictures, uint8 [n, H, W, 3], of the images `index` [n], and which images have extreme scores."""

    members_found: np.ndarray
    heldout_cleared: np.ndarray
    heldout_mistaken: np.ndarray
    index: np.ndarray
    pictures: np.ndarray


NO_IMAGES = np.zeros(0, np.int64)
NO_THUMBNAILS = Thumbnails(*[NO_IMAGES] * len(_NAMES["thumbnails"]))


@dataclasses.dataclass(frozen=True, eq=False)
class AuditArrays:
    """audit.npz, and of a comparison compare.npz.

    Attributes:
      heldout: held-out images that candidates are compared with.
      candidates: [m].
      groups: of all images of the source, -1 for one on its own.
      truth: which candidates are members, bool [m]; [0] where that is not known.
      thumbnails: for the report.
      statistics: with candidates.
      blind: with known members, where a blind baseline could be fitted.
      caption_blind: the same on captions, where the model was asked with them.
    """

    heldout: np.ndarray
    candidates: np.ndarray
    groups: np.ndarray
    truth: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))
    thumbnails: Thumbnails = NO_THUMBNAILS
    statistics: PictureStatistics | None = None
    blind: BlindScores | None = None
    caption_blind: BlindScores | None = None

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray]) -> "AuditArrays":
        """Read what `columns_of` returned.

        Raises:
          KeyError: if one of them is missing.
        """
        has_candidates = len(columns["candidates"]) > 0
        return cls(
            columns["heldout"],
            columns["candidates"],
            columns["groups"],
            columns["truth"],
            _read(Thumbnails, "thumbnails", columns),
            _read(PictureStatistics, "statistics", columns) if has_candidates else None,
            _read(BlindScores, "blind", columns) if "blind_member" in columns else None,
            _read(BlindScores, "caption_blind", columns) if "caption_blind_member" in columns else None,
        )

    @classmethod
    def of_comparison(cls, columns: Mapping[str, np.ndarray]) -> "AuditArrays":
        """Read what `compare_columns` returned; other images than those have no groups.

        Raises:
          KeyError: if one of them is missing.
        """
        statistics = _read(PictureStatistics, "statistics", columns)
        images = np.concatenate([columns["heldout"], columns["candidates"]])
        groups = np.full(images.max() + 1, ALONE)
        groups[images] = columns["groups"]
        return cls(columns["heldout"], columns["candidates"], groups, statistics=statistics)


def columns_of(arrays: AuditArrays) -> dict[str, np.ndarray]:
    """Return all arrays by their names in the file."""
    columns: dict[str, np.ndarray] = {}
    for field, value in vars(arrays).items():
        if field not in _NAMES:
            columns[field] = value
        elif value is not None:
            columns |= zip(_NAMES[field], vars(value).values(), strict=True)
    return columns


def compare_columns(arrays: AuditArrays) -> dict[str, np.ndarray]:
    """Return those of a comparison: the groups are of held-out images and candidates alone."""
    columns = columns_of(arrays)
    own = {name: columns[name] for name in ("heldout", "candidates", *_NAMES["statistics"])}
    return {**own, "groups": arrays.groups[np.concatenate([arrays.heldout, arrays.candidates])]}


def _read(kind: type[_Arrays], part: str, columns: Mapping[str, np.ndarray]) -> _Arrays:
    return kind(*(columns[name] for name in _NAMES[part]))
