"""The arrays that go with an audit's facts: audit.npz and compare.npz. Images are positions in the audit's source."""

import dataclasses
import io
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


class PictureStatistics(NamedTuple):
    """`evidence.image_statistics` of candidates, and of held-out images to compare them with.

    Attributes:
      candidates: [m, k], NaN where unreadable.
      compared: the held-out images [n].
      of_compared: theirs [n, k].
    """

    candidates: np.ndarray
    compared: np.ndarray
    of_compared: np.ndarray


class KnownStatistics(NamedTuple):
    """`evidence.image_statistics` of known images, by which scores are adjusted; NaN where unreadable.

    Attributes:
      calibration: of the calibration half's held-out images [c, k].
      heldout: of the held-out images that candidates are compared with [n, k].
      members: of the test half's members [m, k].
    """

    calibration: np.ndarray
    heldout: np.ndarray
    members: np.ndarray


class BlindScores(NamedTuple):
    """The blind baseline's scores of some members and held-out images, lower for members."""

    member: np.ndarray
    heldout: np.ndarray
    member_scores: np.ndarray
    heldout_scores: np.ndarray


class Thumbnails(NamedTuple):
    """Small pictures, uint8 [n, H, W, 3], of the images `index` [n], and which images have extreme scores."""

    members_found: np.ndarray
    heldout_cleared: np.ndarray
    heldout_mistaken: np.ndarray
    index: np.ndarray  # type: ignore[assignment]
    pictures: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class AuditArrays:
    """audit.npz.

    Attributes:
      heldout: held-out images that candidates are compared with.
      candidates: [m].
      truth: which candidates are members, bool [m]; [0] where that is not known.
      groups: of all images of the source, -1 for one on its own.
      thumbnails: for the report.
      statistics: with candidates; audits of older versions have none.
      blind: with known members, where a blind baseline could be fitted.
      caption_blind: the same on captions, where the model was asked with them.
      known_statistics: with candidates and known members; audits of older versions have none.
    """

    heldout: np.ndarray
    candidates: np.ndarray
    truth: np.ndarray
    groups: np.ndarray
    thumbnails: Thumbnails
    statistics: PictureStatistics | None = None
    blind: BlindScores | None = None
    caption_blind: BlindScores | None = None
    known_statistics: KnownStatistics | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class CompareArrays:
    """compare.npz.

    Attributes:
      heldout: held-out images that candidates are compared with [n].
      candidates: [m].
      groups: of both, held-out images first [n + m], -1 for one on its own.
      statistics: comparisons of older versions have none.
    """

    heldout: np.ndarray
    candidates: np.ndarray
    groups: np.ndarray
    statistics: PictureStatistics | None = None


# The parts of these records, by field: what they are, and the names of their arrays in the file.
_PARTS: Mapping[str, tuple[type[tuple[np.ndarray, ...]], tuple[str, ...]]] = {
    "thumbnails": (
        Thumbnails,
        ("members_found", "heldout_cleared", "heldout_mistaken", "thumbnail_index", "thumbnails"),
    ),
    "statistics": (PictureStatistics, ("candidate_statistics", "compared", "compared_statistics")),
    "blind": (BlindScores, tuple(f"blind_{name}" for name in BlindScores._fields)),
    "caption_blind": (BlindScores, tuple(f"caption_blind_{name}" for name in BlindScores._fields)),
    "known_statistics": (KnownStatistics, tuple(f"statistics_{name}" for name in KnownStatistics._fields)),
}


def npz_bytes(arrays: AuditArrays | CompareArrays) -> bytes:
    """The bytes of an .npz file with these arrays."""
    columns: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(arrays):
        value = getattr(arrays, field.name)
        if field.name not in _PARTS:
            columns[field.name] = value
        elif value is not None:
            columns.update(zip(_PARTS[field.name][1], value))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **columns)
    return buffer.getvalue()


def from_columns(kind: type[T], columns: Mapping[str, np.ndarray]) -> T:
    """The record that `npz_bytes` wrote, from the arrays of the file."""
    # Audits of older versions do not say which images have extreme scores.
    columns = {**dict.fromkeys(_PARTS["thumbnails"][1][:3], np.zeros(0, np.int64)), **columns}
    found: dict[str, np.ndarray | tuple[np.ndarray, ...]] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        part, names = _PARTS.get(field.name, (None, ()))
        if part is None:
            found[field.name] = columns[field.name]
        elif names[-1] in columns:
            found[field.name] = part(*(columns[name] for name in names))
    return kind(**found)
