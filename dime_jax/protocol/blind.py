"""Fit the classifiers that never see the model: what pictures, or captions, show by themselves."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from dime_jax import data, evidence
from dime_jax.data import Pair, Split
from dime_jax.data.groups import groups_of
from dime_jax.evidence.metrics import Estimate
from dime_jax.protocol.arrays import BlindScores

# The blind baseline holds its images in memory: the most images of a side, and the most values.
BLIND_IMAGES, _BLIND_VALUES = 1500, 2**26
_CAPTIONS = 20_000  # of a side that the blind baseline on captions reads

T = TypeVar("T")


class Blind(NamedTuple):
    """The blind baseline: its AUC and scores, or why there is none."""

    auc: Estimate | None
    scores: BlindScores | None
    warnings: tuple[str, ...] = ()


def fit_blind(source: data.Source, groups: np.ndarray, transform: data.Transform, split: Split, seed: int) -> Blind:
    """Fit the blind baseline on pictures; its scores serve the paired comparison with an attack.

    Args:
      source: the images.
      groups: over the source, images that are never cut between folds, -1 for none.
      transform: how the model sees them.
      split: which are compared, or a part of them where they are very many.
      seed: of folds, and of that part.
    """
    most = max(20, min(BLIND_IMAGES, _BLIND_VALUES // int(np.prod(transform.shape))))
    drawn = _draw(split, most, seed)
    batches = drawn.map(lambda side: next(data.batches(source, len(side), transform, indices=side)))
    sides = batches.map(lambda batch: batch.index[batch.mask])
    pictures = batches.map(lambda batch: batch.images[batch.mask])
    what = "whether members and held-out images differ without the model"
    return _fit(evidence.blind_baseline, pictures, sides, groups, seed, what)


def fit_caption_baseline(source: data.Source, groups: np.ndarray, split: Split, seed: int) -> Blind:
    """Fit the blind baseline on the captions that the model was asked with; arguments as of `fit_blind`."""
    captions = data.require_captions(source)
    sides = _draw(split, _CAPTIONS, seed)
    texts = sides.map(lambda side: [captions[index] for index in side.tolist()])
    return _fit(evidence.caption_baseline, texts, sides, groups, seed, "whether captions tell members apart")


def _draw(split: Split, most: int, seed: int) -> Pair[np.ndarray]:
    rng = np.random.default_rng(seed)
    return split.sides.map(lambda side: np.sort(rng.permutation(side)[:most]))


def _fit(
    baseline: Callable[..., evidence.BlindBaseline],
    contents: Pair[T],
    sides: Pair[np.ndarray],
    groups: np.ndarray,
    seed: int,
    what: str,
) -> Blind:
    """Fit a baseline on pictures or captions of the images `sides`; a warning says `what` could not be checked."""
    try:
        blind = baseline(*contents, groups=groups_of(groups, np.concatenate(sides)), seed=seed)
    except evidence.GroupsTooLarge as error:
        return Blind(None, None, (f"{what} could not be checked: {error}",))
    return Blind(blind.auc, BlindScores(*sides, blind.scores_member, blind.scores_heldout))
