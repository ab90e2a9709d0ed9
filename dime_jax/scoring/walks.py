"""A unit of work in the middle: which of its calls were asked about a batch, and what the others start from.

A unit may be hundreds of calls long, so it is stored when time is up and not only at its end. What the calls still to
come start from is stored with it, so that nothing is asked twice.
"""

import io
from collections.abc import Sequence
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


class UnitWalk(NamedTuple):
    """A unit under way on one batch.

    Attributes:
      asked: how many of the unit's calls were asked, in the order of `calls_below`.
      stack: the calls to ask next, the next one last, each with the state that it starts from.
      numbers: what was answered, each [B], by call and name; of a network they may still be on their way.
    """

    asked: int
    stack: tuple[tuple[Call, PyTree], ...]
    numbers: dict[Call, dict[str, Array]]

    @property
    def finished(self) -> bool:
        """Whether all calls were asked."""
        return not self.stack


class Partial(NamedTuple):
    """A walk on disk: of which unit and images, the readings of the calls asked so far [r, B], and the rest of it."""

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


def begin(unit: Unit) -> UnitWalk:
    """Nothing asked yet."""
    return UnitWalk(0, tuple((root, None) for root in reversed(unit.roots)), {})


def to_partial(number: int, unit: Unit, trees: Trees, batch: PlacedBatch, walk: UnitWalk) -> Partial | None:
    """What to store of a walk, after waiting for its numbers; None if its states are of a kind that cannot be."""
    states = list({id(state): state for _, state in walk.stack if state is not None}.values())
    if any(jax.tree.structure(state) not in _KINDS for state in states):
        return None
    place = {id(state): i for i, state in enumerate(states)}
    order = {call: i for i, call in enumerate(calls_below(unit.roots, trees))}
    stack = tuple((order[call], -1 if state is None else place[id(state)]) for call, state in walk.stack)
    known = [walk.numbers[call][name] for call, name in unit.readings if call in walk.numbers]
    readings = np.zeros((len(known), len(batch.index)), np.float32)
    if known:
        readings[:] = jax.device_get(known)
    return Partial(number, batch.index, batch.usable, walk.asked, readings, stack, tuple(jax.device_get(states)))


def from_partial(partial: Partial, unit: Unit, trees: Trees) -> UnitWalk:
    """Go on where a stored walk ended."""
    calls = calls_below(unit.roots, trees)
    stack = tuple((calls[call], None if state < 0 else partial.states[state]) for call, state in partial.stack)
    numbers: dict[Call, dict[str, Array]] = {call: {} for call in calls[: partial.asked]}
    known = [reading for reading in unit.readings if reading.call in numbers]
    for (call, name), values in zip(known, partial.readings, strict=True):
        numbers[call][name] = values
    return UnitWalk(partial.asked, stack, numbers)


def queries_known(partial: Partial, plan: Plan) -> int:
    """What the stored part of a unit has cost per image."""
    calls = calls_below(plan.units[partial.unit].roots, plan.trees)
    return sum(call.queries for call in calls[: partial.asked])


def encode(partial: Partial) -> bytes:
    """A file of arrays."""
    arrays = {f"state_{i}_{j}": leaf for i, state in enumerate(partial.states) for j, leaf in enumerate(_leaves(state))}
    buffer, stack = io.BytesIO(), np.array(partial.stack, np.int64).reshape(-1, 2)
    numbers = np.array([partial.unit, partial.asked])
    fields = {"index": partial.index, "usable": partial.usable, "readings": partial.readings}
    np.savez(buffer, allow_pickle=False, numbers=numbers, stack=stack, **fields, **arrays)
    return buffer.getvalue()


def decode(sealed: digests.Sealed, name: str) -> Partial:
    """What `encode` wrote, from a file that a list of shards names, checked."""
    arrays = sealed.read_arrays(name)
    try:
        unit, asked = arrays["numbers"].tolist()
        stack = tuple((int(call), int(state)) for call, state in arrays["stack"])
        count = 1 + max((state for _, state in stack), default=-1)
        leaves = [[arrays[name] for name in (f"state_{i}_0", f"state_{i}_1") if name in arrays] for i in range(count)]
        states = tuple(map(_state, leaves))
        return Partial(unit, arrays["index"], arrays["usable"], asked, arrays["readings"], stack, states)
    except (KeyError, ValueError) as error:
        raise Damaged(f"{sealed.path.parent / name} is damaged: {error}") from None


def _leaves(state: PyTree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def _state(leaves: Sequence[np.ndarray]) -> PyTree:
    return leaves[0] if len(leaves) == 1 else Place._make(leaves)
