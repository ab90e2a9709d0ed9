"""Checks on scores, levels and group labels that the rooms of `dime_jax.evidence` share."""

import numpy as np
import numpy.typing as npt

from dime_jax._util import validate
from dime_jax.data.groups import ALONE


def finite_scores(scores: npt.ArrayLike, name: str) -> np.ndarray:
    """Return scores as one-dimensional float64; they must be finite, and at least one."""
    array = numbers(scores, name)
    validate.check_finite(array, name)
    return array


def numbers(values: npt.ArrayLike, name: str) -> np.ndarray:
    """Return values as one-dimensional float64, at least one; NaN and infinities are allowed."""
    return one_dimensional(values, name).astype(np.float64)


def one_dimensional(values: npt.ArrayLike, name: str) -> np.ndarray:
    """Return numbers of any type, one-dimensional and not empty, as they are."""
    array = np.asarray(values)
    validate.check_shape(array, (None,), name)
    validate.check_not_empty(array, name)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be numbers, got type {array.dtype}")
    return array


def group_index(groups: npt.ArrayLike | None, n: int, name: str) -> np.ndarray:
    """Number the groups of n images from 0; without labels, or with the label -1, an image is a group of its own."""
    if groups is None:
        return np.arange(n)
    labels = np.asarray(groups)
    validate.check_shape(labels, (n,), name)
    index = np.unique(labels, return_inverse=True)[1]
    if labels.dtype.kind in "iu":
        alone = labels == ALONE
        index[alone] = index.max() + 1 + np.arange(np.sum(alone))
        index = np.unique(index, return_inverse=True)[1]
    return index
