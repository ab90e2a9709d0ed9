"""How far a unit of work is on a batch: which of its calls were made, and what the others start from.

A unit may be hundreds of calls long, so it is stored when time is up and not only at its end. What the calls still to
come start from is stored with it, so that nothing is asked twice.
"""

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dime_jax._util import digests
from dime_jax._util.digests import Damaged
from dime_jax._util.typing import Array, PyTree
from dime_jax.attacks.base import Call, Trees, calls_below
from dime_jax.attacks.calls import Place
from dime_jax.scoring.placement import PlacedBatch
from dime_jax.scoring.planning import Plan, Unit

# How states may be built of arrays; a unit with other states is stored at its end only.
_KINDS = (jax.tree.structure(0), jax.tree.structure(Place._make((0, 0))))


class UnitProgress(NamedTuple):
    """A unit under way on one batch.

    Attributes:
      asked: how many of the unit's calls were asked, in the order of `calls_below`.
      stack: the calls to ask next, the next one last, each with the state that it starts from.
      numbers: what was answered, each [B], by call and name; of a network they may still be on their way.
      resumed: queries per image whose answers were stored by an earlier run.
    """

    asked: int
    stack: tuple[tuple[Call, PyTree], ...]
    numbers: Mapping[Call, Mapping[str, Array]]
    resumed: int = 0

    @property
    def finished(self) -> bool:
        """Whether all calls were asked."""
        return not self.stack


class StoredProgress(NamedTuple):
    """The same on disk: of which unit and images, the readings of the calls made so far [r, B], and the rest of it."""

    unit: int
    index: np.ndarray  # type: ignore[assignment]
    usable: np.ndarray
    asked: int
    readings: np.ndarray
    stack: tuple[tuple[int, int], ...]  # which call of the unit starts from which state, -1 for none
    states: tuple[PyTree, ...]

    def is_of(self, unit: int, batch: PlacedBatch) -> bool:
        """Whether it is about this unit on this batch."""
        same = self.unit == unit and np.array_equal(self.index, batch.index)
        return same and np.array_equal(self.usable, batch.usable)


def begin(unit: Unit) -> UnitProgress:
    """Return the state of a unit of which no call was made."""
    return UnitProgress(0, tuple((root, None) for root in reversed(unit.roots)), {})


def to_stored(
    number: int, unit: Unit, trees: Trees, batch: PlacedBatch, progress: UnitProgress
) -> StoredProgress | None:
    """Wait for the numbers of a unit, and return what to store of it; None if its states cannot be stored.

    Args:
      number: of the unit.
      unit: the unit.
      trees: which call starts from which.
      batch: the images.
      progress: how far the unit is.
    """
    states = list({id(state): state for _, state in progress.stack if state is not None}.values())
    if any(jax.tree.structure(state) not in _KINDS for state in states):
        return None
    place = {id(state): i for i, state in enumerate(states)}
    order = {call: i for i, call in enumerate(calls_below(unit.roots, trees))}
    stack = tuple((order[call], -1 if state is None else place[id(state)]) for call, state in progress.stack)
    known = [progress.numbers[call][name] for call, name in unit.readings if call in progress.numbers]
    readings = np.zeros((len(known), len(batch.index)), np.float32)
    if known:
        readings[:] = jax.device_get(known)
    states = jax.device_get(states)
    return StoredProgress(number, batch.index, batch.usable, progress.asked, readings, stack, tuple(states))


def resume(stored: StoredProgress, plan: Plan) -> UnitProgress:
    """Return the state of the unit that was stored."""
    unit = plan.units[stored.unit]
    calls = calls_below(unit.roots, plan.trees)
    stack = tuple((calls[call], None if state < 0 else stored.states[state]) for call, state in stored.stack)
    numbers: dict[Call, dict[str, Array]] = {call: {} for call in calls[: stored.asked]}
    known = [reading for reading in unit.readings if reading.call in numbers]
    for (call, name), values in zip(known, stored.readings, strict=True):
        numbers[call][name] = values
    return UnitProgress(stored.asked, stack, numbers, sum(call.queries for call in numbers))


def encode(stored: StoredProgress) -> bytes:
    """Return the content of an npz file."""
    arrays = {f"state_{i}_{j}": leaf for i, state in enumerate(stored.states) for j, leaf in enumerate(_leaves(state))}
    buffer, stack = io.BytesIO(), np.array(stored.stack, np.int64).reshape(-1, 2)
    numbers = np.array([stored.unit, stored.asked])
    fields = {"index": stored.index, "usable": stored.usable, "readings": stored.readings}
    np.savez(buffer, allow_pickle=False, numbers=numbers, stack=stack, **fields, **arrays)
    return buffer.getvalue()


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


def _leaves(state: PyTree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def _state(leaves: Sequence[np.ndarray]) -> PyTree:
    return leaves[0] if len(leaves) == 1 else Place._make(leaves)
