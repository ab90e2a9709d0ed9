"""What an audit keeps of the pictures themselves: thumbnails, statistics, and the classifier that sees nothing else."""

from typing import NamedTuple

import numpy as np
from PIL import Image

from dime_jax import data, evidence
from dime_jax.data import Halves, Split
from dime_jax.data.role_checks import CheckedImages
from dime_jax.evidence.metrics import Estimate
from dime_jax.protocol.arrays import BlindScores, KnownStatistics, PictureStatistics, Thumbnails
from dime_jax.protocol.record import Sides

THUMBNAIL_SIDE = 96
SHOWN = 8  # images in each row of examples
_MOST_CANDIDATE_THUMBNAILS = 200
# The blind baseline holds its images in memory: at most so many of a side, and so many values.
_BLIND_IMAGES, _BLIND_VALUES = 1500, 2**26
_CAPTIONS = 20_000  # of a side that the blind baseline on captions reads
_STATISTICS_BATCH = 64


class Blind(NamedTuple):
    """The blind baseline: its AUC and scores, or why there is none."""

    auc: Estimate | None
    scores: BlindScores | None
    warnings: tuple[str, ...] = ()


def make_thumbnails(images: CheckedImages, image_shape: tuple[int, ...], split: Split, scores: Sides) -> Thumbnails:
    """Small pictures, as the model sees them, of the candidates and of the images with extreme scores."""
    rows = (
        _extremes(split.member, scores.member),
        _extremes(split.heldout, -scores.heldout),
        _extremes(split.heldout, scores.heldout),
    )
    indices = np.unique(np.concatenate([*rows, images.candidates[:_MOST_CANDIDATE_THUMBNAILS]]))
    transform = data.transform_for(images.source, image_shape)
    pictures = [_thumbnail(images.source, index, transform) for index in indices]
    return Thumbnails(*rows, indices, np.stack(pictures))


def _extremes(indices: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The images of lowest finite score, lowest first."""
    order = np.argsort(np.where(np.isfinite(scores), scores, np.inf), kind="stable")[:SHOWN]
    return indices[order]


def _thumbnail(source: data.Source, index: int, transform: data.Transform) -> np.ndarray:
    try:
        pixels = transform(source[index].image)
    except data.BadImage:
        pixels = np.zeros(transform.shape, np.float32)
    pixels = np.round((np.clip(pixels, -1, 1) + 1) * 127.5).astype(np.uint8)
    picture = Image.fromarray(pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., 0])
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    return np.asarray(picture.convert("RGB"))


def fit_blind_baseline(images: CheckedImages, image_shape: tuple[int, ...], split: Split, seed: int) -> Blind:
    """The blind baseline on the test half, or a part of it, and its scores for the paired comparison."""
    return fit_blind(images.source, images.groups, data.transform_for(images.source, image_shape), split, seed)


def fit_blind(source: data.Source, groups: np.ndarray, transform: data.Transform, split: Split, seed: int) -> Blind:
    """The same for the images of any source.

    Args:
      source: the images.
      groups: over the source, images that are never cut between folds, -1 for none.
      transform: how the model sees them.
      split: which are compared, or a part of them where they are very many.
      seed: of folds, and of that part.
    """
    most = max(20, min(_BLIND_IMAGES, _BLIND_VALUES // int(np.prod(transform.shape))))
    rng = np.random.default_rng(seed)
    sides = [np.sort(rng.permutation(side)[:most]) for side in (split.member, split.heldout)]
    (members, readable_members), (heldout, readable_heldout) = (_load(source, side, transform) for side in sides)
    sides = [sides[0][readable_members], sides[1][readable_heldout]]
    own = groups[np.concatenate(sides)]
    try:
        blind = evidence.blind_baseline(members, heldout, groups=own if np.any(own >= 0) else None, seed=seed)
    except evidence.GroupsTooLarge as error:
        unknown = f"whether members and held-out images differ without the model could not be checked: {error}"
        return Blind(None, None, (unknown,))
    return Blind(blind.auc, BlindScores(sides[0], sides[1], blind.scores_member, blind.scores_heldout))


def fit_caption_baseline(images: CheckedImages, split: Split, seed: int) -> Blind:
    """The blind baseline on the captions of the test half, or a part of it, that the model was asked with."""
    captions, rng = data.require_captions(images.source), np.random.default_rng(seed)
    members, heldout = (np.sort(rng.permutation(side)[:_CAPTIONS]) for side in (split.member, split.heldout))
    groups = images.groups[np.concatenate([members, heldout])]
    of_members, of_heldout = ([captions[index] for index in side.tolist()] for side in (members, heldout))
    try:
        given = groups if np.any(groups >= 0) else None
        blind = evidence.caption_baseline(of_members, of_heldout, groups=given, seed=seed)
    except evidence.GroupsTooLarge as error:
        return Blind(None, None, (f"whether captions tell members apart could not be checked: {error}",))
    return Blind(blind.auc, BlindScores(members, heldout, blind.scores_member, blind.scores_heldout))


def picture_statistics(
    images: CheckedImages, image_shape: tuple[int, ...], heldout: np.ndarray, seed: int
) -> PictureStatistics:
    """Statistics of the candidates' pictures, and of held-out ones to compare them with."""
    transform = data.transform_for(images.source, image_shape)
    compared = np.sort(np.random.default_rng(seed).permutation(heldout)[:_BLIND_IMAGES])
    statistics = _statistics(images.source, compared, transform)
    readable = np.all(np.isfinite(statistics), axis=1)
    of_candidates = _statistics(images.source, images.candidates, transform)
    return PictureStatistics(of_candidates, compared[readable], statistics[readable])


def known_statistics(
    images: CheckedImages, image_shape: tuple[int, ...], heldout: np.ndarray, halves: Halves
) -> KnownStatistics:
    """Statistics of the known images that adjusted p-values, and their power, are made from."""
    transform = data.transform_for(images.source, image_shape)
    sides = (halves.calibration.heldout, heldout, halves.test.member)
    return KnownStatistics(*(_statistics(images.source, side, transform) for side in sides))


def _statistics(source: data.Source, indices: np.ndarray, transform: data.Transform) -> np.ndarray:
    """`evidence.image_statistics` of some images [n, k], batch by batch; NaN where unreadable."""
    rows = []
    for batch in data.batches(source, _STATISTICS_BATCH, transform, indices=indices):
        statistics = evidence.image_statistics(np.where(batch.mask[:, None, None, None], batch.images, 0))
        rows.append(np.where(batch.mask[:, None], statistics, np.nan)[: np.sum(batch.index >= 0)])
    return np.concatenate(rows)


def _load(source: data.Source, indices: np.ndarray, transform: data.Transform) -> tuple[np.ndarray, np.ndarray]:
    """The readable images [n, H, W, C] among some, and which these are."""
    (batch,) = data.batches(source, len(indices), transform, indices=indices)
    return batch.images[batch.mask], batch.mask
