"""Groups of images that belong together (one person, one duplicate cluster, one album): int64 [n], -1 for none.

Halves never cut a group. Groups from several origins are merged until no two overlap.
"""

import csv
import os
from collections.abc import Sequence

import numpy as np
from scipy import sparse

from dime_jax._util import validate

ALONE = -1


def merge_groups(*groupings: np.ndarray | None) -> np.ndarray | None:
    """Return the finest grouping that keeps every group of every grouping together; None stands for no grouping."""
    given = [np.asarray(grouping) for grouping in groupings if grouping is not None]
    if not given:
        return None
    n = len(given[0])
    for grouping in given:
        validate.check_shape(grouping, (n,), "groups")
    pairs = [_consecutive_pairs(grouping) for grouping in given]
    return connect(n, np.concatenate(pairs))


def connect(n: int, pairs: np.ndarray) -> np.ndarray:
    """Group n images by pairs [k, 2] that belong together: connected components, ALONE for unpaired images."""
    links = sparse.coo_array((np.ones(len(pairs), np.int8), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    _, component = sparse.csgraph.connected_components(links, directed=False)
    size = np.bincount(component, minlength=1)
    return np.where(size[component] > 1, component, ALONE).astype(np.int64)


def read_groups(path: str | os.PathLike[str], ids: Sequence[str]) -> np.ndarray:
    """Read groups from a CSV file of lines "id,group", with or without that header; ids not listed stay alone."""
    position = {id: index for index, id in enumerate(ids)}
    groups = np.full(len(ids), ALONE, np.int64)
    numbers: dict[str, int] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for number, fields in enumerate(csv.reader(file), 1):
            if number == 1 and fields == ["id", "group"]:
                continue
            if len(fields) != 2 or fields[0] not in position:
                raise ValueError(f"{path} line {number} must be a known id and a group, got {','.join(fields)!r}")
            if groups[position[fields[0]]] != ALONE:
                raise ValueError(f"{path} line {number} gives {fields[0]!r} a second group")
            groups[position[fields[0]]] = numbers.setdefault(fields[1], len(numbers))
    return groups


def groups_of(groups: np.ndarray, indices: np.ndarray) -> np.ndarray | None:
    """Return the groups of some images; None if none of them is in a group."""
    own = groups[indices]
    return own if np.any(own != ALONE) else None


def shared_groups(groups: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the groups that have images in both index sets."""
    shared = np.intersect1d(groups[first], groups[second])
    return shared[shared != ALONE]


def _consecutive_pairs(grouping: np.ndarray) -> np.ndarray:
    order = np.argsort(grouping, kind="stable")
    order = order[grouping[order] != ALONE]
    same = grouping[order[:-1]] == grouping[order[1:]]
    return np.stack([order[:-1][same], order[1:][same]], axis=1)
