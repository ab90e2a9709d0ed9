"""Fit the classifiers that never see the model: what pictures, or captions, show by themselves."""

from typing import NamedTuple

import numpy as np

from dime_jax import data, evidence
from dime_jax.data import Split
from dime_jax.evidence.metrics import Estimate
from dime_jax.protocol.arrays import BlindScores

# The blind baseline holds its images in memory: at most so many of a side, and so many values.
BLIND_IMAGES, _BLIND_VALUES = 1500, 2**26
_CAPTIONS = 20_000  # of a side that the blind baseline on captions reads


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
    member, heldout = _draw(split, most, seed)
    (members, readable_members), (others, readable_others) = (
        _load(source, side, transform) for side in (member, heldout)
    )
    member, heldout = member[readable_members], heldout[readable_others]
    try:
        own = _groups_of(groups, member, heldout)
        blind = evidence.blind_baseline(members, others, groups=own, seed=seed)
    except evidence.GroupsTooLarge as error:
        unknown = f"whether members and held-out images differ without the model could not be checked: {error}"
        return Blind(None, None, (unknown,))
    return Blind(blind.auc, BlindScores(member, heldout, blind.scores_member, blind.scores_heldout))


def fit_caption_baseline(source: data.Source, groups: np.ndarray, split: Split, seed: int) -> Blind:
    """Fit the blind baseline on the captions that the model was asked with; arguments as of `fit_blind`."""
    captions = data.require_captions(source)
    member, heldout = _draw(split, _CAPTIONS, seed)
    of_member, of_heldout = ([captions[index] for index in side.tolist()] for side in (member, heldout))
    try:
        own = _groups_of(groups, member, heldout)
        blind = evidence.caption_baseline(of_member, of_heldout, groups=own, seed=seed)
    except evidence.GroupsTooLarge as error:
        return Blind(None, None, (f"whether captions tell members apart could not be checked: {error}",))
    return Blind(blind.auc, BlindScores(member, heldout, blind.scores_member, blind.scores_heldout))


def _draw(split: Split, most: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return np.sort(rng.permutation(split.member)[:most]), np.sort(rng.permutation(split.heldout)[:most])


def _groups_of(groups: np.ndarray, member: np.ndarray, heldout: np.ndarray) -> np.ndarray | None:
    own = groups[np.concatenate([member, heldout])]
    return own if np.any(own >= 0) else None


def _load(source: data.Source, indices: np.ndarray, transform: data.Transform) -> tuple[np.ndarray, np.ndarray]:
    """The readable images [n, H, W, C] among some, and which these are."""
    (batch,) = data.batches(source, len(indices), transform, indices=indices)
    return batch.images[batch.mask], batch.mask
