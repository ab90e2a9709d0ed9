"""The arrays that go with an audit's facts: audit.npz and compare.npz. Images are positions in the audit's source."""

import dataclasses
import io
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class PictureStatistics:
    """`evidence.image_statistics` of candidates, and of held-out images to compare them with.

    Attributes:
      candidates: [m, k], NaN where unreadable.
      compared: the held-out images [n].
      of_compared: theirs [n, k].
    """

    candidates: np.ndarray
    compared: np.ndarray
    of_compared: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class KnownStatistics:
    """`evidence.image_statistics` of known images, by which scores are adjusted; NaN where unreadable.

    Attributes:
      calibration: of the calibration half's held-out images [c, k].
      heldout: of the held-out images that candidates are compared with [n, k].
      members: of the test half's members [m, k].
    """

    calibration: np.ndarray
    heldout: np.ndarray
    members: np.ndarray


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

    def columns(self) -> dict[str, np.ndarray]:
        """The arrays by their names in the file."""
        pictures = self.thumbnails
        return {
            "heldout": self.heldout,
            "candidates": self.candidates,
            "truth": self.truth,
            "groups": self.groups,
            "members_found": pictures.members_found,
            "heldout_cleared": pictures.heldout_cleared,
            "heldout_mistaken": pictures.heldout_mistaken,
            "thumbnail_index": pictures.index,
            "thumbnails": pictures.pictures,
            **_statistics_columns(self.statistics),
            **_prefixed("blind", self.blind),
            **_prefixed("caption_blind", self.caption_blind),
            **_prefixed("statistics", self.known_statistics),
        }

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray]) -> "AuditArrays":
        """What `columns` gave."""
        none = np.zeros(0, np.int64)
        found, cleared, mistaken = (
            columns.get(name, none) for name in ("members_found", "heldout_cleared", "heldout_mistaken")
        )
        return cls(
            columns["heldout"],
            columns["candidates"],
            columns["truth"],
            columns["groups"],
            Thumbnails(found, cleared, mistaken, columns["thumbnail_index"], columns["thumbnails"]),
            _read_statistics(columns),
            _read_blind("blind", columns),
            _read_blind("caption_blind", columns),
            _read_known_statistics(columns),
        )


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
    statistics: PictureStatistics | None

    def columns(self) -> dict[str, np.ndarray]:
        """The arrays by their names in the file."""
        own = {"heldout": self.heldout, "candidates": self.candidates, "groups": self.groups}
        return {**own, **_statistics_columns(self.statistics)}

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray]) -> "CompareArrays":
        """What `columns` gave."""
        return cls(columns["heldout"], columns["candidates"], columns["groups"], _read_statistics(columns))


def npz_bytes(columns: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of an .npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **columns)
    return buffer.getvalue()


def _statistics_columns(found: PictureStatistics | None) -> dict[str, np.ndarray]:
    if found is None:
        return {}
    return {
        "candidate_statistics": found.candidates,
        "compared": found.compared,
        "compared_statistics": found.of_compared,
    }


def _read_statistics(columns: Mapping[str, np.ndarray]) -> PictureStatistics | None:
    if "candidate_statistics" not in columns:
        return None
    return PictureStatistics(columns["candidate_statistics"], columns["compared"], columns["compared_statistics"])


def _prefixed(prefix: str, arrays: BlindScores | KnownStatistics | None) -> dict[str, np.ndarray]:
    if arrays is None:
        return {}
    return {f"{prefix}_{field.name}": getattr(arrays, field.name) for field in dataclasses.fields(arrays)}


def _read_blind(prefix: str, columns: Mapping[str, np.ndarray]) -> BlindScores | None:
    if f"{prefix}_member_scores" not in columns:
        return None
    return BlindScores(*(columns[f"{prefix}_{field.name}"] for field in dataclasses.fields(BlindScores)))


def _read_known_statistics(columns: Mapping[str, np.ndarray]) -> KnownStatistics | None:
    if "statistics_calibration" not in columns:
        return None
    return KnownStatistics(*(columns[f"statistics_{field.name}"] for field in dataclasses.fields(KnownStatistics)))
