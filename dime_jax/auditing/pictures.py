"""What an audit keeps of the pictures themselves: thumbnails and statistics."""

import numpy as np
from PIL import Image

from dime_jax import data, evidence
from dime_jax.data import Pair, Split
from dime_jax.data.role_checks import CheckedImages
from dime_jax.data.transforms import to_uint8
from dime_jax.protocol import statistics
from dime_jax.protocol.arrays import PictureStatistics, Thumbnails
from dime_jax.protocol.blind import BLIND_IMAGES

THUMBNAIL_SIDE = 96
SHOWN = 8  # images in each row of examples
_MOST_CANDIDATE_THUMBNAILS = 200


def make_thumbnails(
    images: CheckedImages, image_shape: tuple[int, ...], split: Split, scores: Pair[np.ndarray]
) -> Thumbnails:
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
    pixels = to_uint8(pixels)
    picture = Image.fromarray(pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., 0])
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    return np.asarray(picture.convert("RGB"))


def picture_statistics(
    images: CheckedImages, image_shape: tuple[int, ...], heldout: np.ndarray, seed: int
) -> PictureStatistics:
    """Statistics of the candidates' pictures, and of held-out ones to compare them with."""
    transform = data.transform_for(images.source, image_shape)
    compared = np.sort(np.random.default_rng(seed).permutation(heldout)[:BLIND_IMAGES])
    measure = evidence.image_statistics
    found = statistics.of_source(images.source, compared, transform, measure)
    of_candidates = statistics.of_source(images.source, images.candidates, transform, measure)
    readable = np.all(np.isfinite(found), axis=1)
    return PictureStatistics(of_candidates, compared[readable], found[readable])
