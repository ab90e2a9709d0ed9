"""How far a unit of work has got on a batch: which of its calls were made, and what the others start from.

A unit may be hundreds of calls long, so it is stored when time is up, not only at its end. What the calls still to come
start from is stored with it, so that nothing is asked twice.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dime_jax._util import digests
from dime_jax._util.digests import Damaged
from dime_jax._util.typing import Array, PyTree
from dime_jax.attacks.base import calls_below
from dime_jax.attacks.calls import Call, Place
from dime_jax.scoring.placement import PlacedBatch
from dime_jax.scoring.planning import Plan

# How states may be built of arrays; a unit with other states is stored at its end only.
_KINDS = (jax.tree.structure(0), jax.tree.structure(Place._make((0, 0))))


class UnitProgress(NamedTuple):
    """A unit under way on one batch.

    Attributes:
      number: of the unit in the plan.
      batch: the images.
      stack: the calls to make next, the next one last, each with the state that it starts from.
      numbers: what the calls made so far answered, in the order of `calls_below`: each [B], by call and name; a
        network may not have computed them yet.
      resumed: queries per image whose answers were stored by an earlier run.
      at_full_speed: False if a kind of call was made in Python for the first time, which compiles what it does around
        the model.
    """

    number: int
    batch: PlacedBatch
    stack: tuple[tuple[Call, PyTree], ...]
    numbers: Mapping[Call, Mapping[str, Array]]
    resumed: int = 0
    at_full_speed: bool = True


class StoredProgress(NamedTuple):
    """An unfinished unit on disk: its number and images, the readings of the calls made so far [r, B], and the rest."""

    unit: int
    index: np.ndarray  # type: ignore[assignment]
    usable: np.ndarray
    asked: int
    readings: np.ndarray
    stack: tuple[tuple[int, int], ...]  # which call of the unit starts from which state, -1 for none
    states: tuple[PyTree, ...]

    def is_of(self, unit: int, batch: PlacedBatch) -> bool:
        """Whether it is of this unit on this batch."""
        same = self.unit == unit and np.array_equal(self.index, batch.index)
        return same and np.array_equal(self.usable, batch.usable)


def queries_stored(stored: StoredProgress, plan: Plan) -> int:
    """Return what the stored part of a unit has cost per image."""
    calls = calls_below(plan.units[stored.unit].roots, plan.trees)
    return sum(call.queries for call in calls[: stored.asked])


def begin(number: int, plan: Plan, batch: PlacedBatch, stored: StoredProgress | None) -> UnitProgress:
    """Return a unit as it was stored, or with all of its calls to come.

    Args:
      number: of the unit.
      plan: the plan that it belongs to.
      batch: the images.
      stored: what was stored of the unit on this batch.
    """
    unit = plan.units[number]
    if stored is None:
        return UnitProgress(number, batch, tuple((root, None) for root in reversed(unit.roots)), {})
    calls = calls_below(unit.roots, plan.trees)
    stack = tuple((calls[call], None if state < 0 else stored.states[state]) for call, state in stored.stack)
    numbers: dict[Call, dict[str, Array]] = {call: {} for call in calls[: stored.asked]}
    known = [reading for reading in unit.readings if reading.call in numbers]
    for (call, name), values in zip(known, stored.readings, strict=True):
        numbers[call][name] = values
    return UnitProgress(number, batch, stack, numbers, queries_stored(stored, plan))


def encode(unit: UnitProgress, plan: Plan) -> bytes | None:
    """Wait for the numbers of a unit, and return the content of an npz file; None if its states cannot be stored."""
    states = list({id(state): state for _, state in unit.stack if state is not None}.values())
    if any(jax.tree.structure(state) not in _KINDS for state in states):
        return None
    place = {id(state): i for i, state in enumerate(states)}
    planned = plan.units[unit.number]
    order = {call: i for i, call in enumerate(calls_below(planned.roots, plan.trees))}
    stack = [(order[call], -1 if state is None else place[id(state)]) for call, state in unit.stack]
    known = [unit.numbers[call][name] for call, name in planned.readings if call in unit.numbers]
    readings = np.zeros((len(known), len(unit.batch.index)), np.float32)
    if known:
        readings[:] = jax.device_get(known)
    leaves = [jax.tree.leaves(state) for state in jax.device_get(states)]
    arrays = {
        "numbers": np.array([unit.number, len(unit.numbers)]),
        "stack": np.array(stack, np.int64).reshape(-1, 2),
        "index": unit.batch.index,
        "usable": unit.batch.usable,
        "readings": readings,
        **{f"state_{i}_{j}": leaf for i, state in enumerate(leaves) for j, leaf in enumerate(state)},
    }
    return digests.dump_arrays(arrays)


def decode(sealed: digests.Sealed, name: str) -> StoredProgress:
    """Read what `encode` wrote, from a file that a list of shards names, and check it."""
    arrays = sealed.read_arrays(name)
    try:
        unit, asked = arrays["numbers"].tolist()
        stack = tuple((int(call), int(state)) for call, state in arrays["stack"])
        count = 1 + max((state for _, state in stack), default=-1)
        leaves = [[arrays[name] for name in (f"state_{i}_0", f"state_{i}_1") if name in arrays] for i in range(count)]
        states = tuple(map(_state, leaves))
        return StoredProgress(unit, arrays["index"], arrays["usable"], asked, arrays["readings"], stack, states)
    except (KeyError, ValueError) as error:
        raise Damaged(f"{sealed.path.parent / name} is damaged: {error}") from None


def _state(leaves: Sequence[np.ndarray]) -> PyTree:
    return leaves[0] if len(leaves) == 1 else Place._make(leaves)
