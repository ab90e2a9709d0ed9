"""Asking the model: the calls of a unit of work on one batch, as compiled programs or, of a plain function, patiently.

A batch is encoded once, whatever is asked about it. Every query is entered in the ledger before it is asked.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dime_jax import data
from dime_jax._util import validate
from dime_jax._util.typing import Array, PyTree
from dime_jax.attacks.base import Answer, Call, Trees, Whole, keeping, start_from
from dime_jax.core import draws
from dime_jax.core.denoiser import Denoiser, EpsFn, encoder, keeper
from dime_jax.scoring import programs
from dime_jax.scoring.placement import PlacedBatch, Placement
from dime_jax.scoring.query_ledger import Ledger
from dime_jax.scoring.requests import ask_in_requests
from dime_jax.scoring.retry import Retry
from dime_jax.scoring.walks import UnitWalk

T = TypeVar("T")


class Answers(NamedTuple):
    """What a unit's calls answered about a batch.

    Attributes:
      numbers: each [B], by call and name; of a network they may still be on their way.
      at_full_speed: False if a kind of call was asked in Python for the first time, which compiles what it does around
        the model.
      known: queries per image whose answers were stored before.
    """

    numbers: dict[Call, dict[str, Array]]
    at_full_speed: bool
    known: int = 0


class Asker:
    """Asks one model, and debits a ledger.

    Args:
      denoiser: the model.
      placement: where its batches are.
      ledger: of this process.
      seed: of all draws.
      retry: for models that are plain functions.
      say: shows a line.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        placement: Placement,
        ledger: Ledger,
        *,
        seed: int,
        retry: Retry,
        say: Callable[[str], object],
    ):
        self._denoiser, self._placement, self._ledger = denoiser, placement, ledger
        self._retry, self._say = retry, say
        self._key = jax.random.key(seed)
        self._constants = placement.put_everywhere((denoiser.params, denoiser.schedule, self._key))
        self.asked_in_python: set[type[Call]] = set()

    def prepare(self, batch: data.Batch, conditions: Collection[str]) -> PlacedBatch:
        """A batch on the devices, in the model's own space, with what the model is told under the named conditions."""
        offered, size = self._denoiser.conditions_for(batch.labels, batch.captions), len(batch.images)
        told = {name: self._denoiser.check_condition(offered[name], size) for name in conditions}
        pixels, draw_ids, told = self._placement.put((batch.images, draws.id_numbers(batch.ids), told))
        x = self._encode(pixels, draw_ids)
        return PlacedBatch(x, draw_ids, told, batch.index, batch.ids, batch.mask, self._kept(x, draw_ids))

    def _encode(self, pixels: jax.Array, draw_ids: jax.Array) -> jax.Array:
        denoiser = self._denoiser
        if denoiser.encode_fn is None:
            return pixels
        params, _, key = self._constants
        x = encoder(denoiser.encode_fn, self._placement.sharding)(params, pixels, key, draw_ids)
        validate.check_shape(x, (len(pixels), *denoiser.shape), f"what {denoiser.name} encodes")
        return x

    def _kept(self, x: jax.Array, draw_ids: jax.Array) -> jax.Array | None:
        if self._denoiser.keep_fn is None:
            return None
        params, _, key = self._constants
        return keeper(self._denoiser.keep_fn, self._placement.sharding)(params, x, key, draw_ids)

    def go_on(self, walk: UnitWalk, trees: Trees, batch: PlacedBatch, most: int) -> UnitWalk:
        """Ask the next calls of a unit, at most so many, depth first; none if no row of the batch is usable."""
        if not batch.usable.any():
            return UnitWalk(walk.asked, (), {})
        asked, stack, numbers = walk.asked, list(walk.stack), dict(walk.numbers)
        while stack and asked - walk.asked < most:
            call, given = stack.pop()
            state, numbers[call] = self._ask(call, given, batch)
            stack.extend((child, state) for child in reversed(trees.get(call, ())))
            asked += 1
        return UnitWalk(asked, tuple(stack), numbers)

    def _ask(self, call: Call, given: PyTree, batch: PlacedBatch) -> Answer:
        if not self._denoiser.traceable or not call.traceable:
            return self._ask_in_python(call, given, batch)
        rows = batch.index[batch.usable]
        for _ in range(call.queries):
            self._ledger.debit(rows)
        self._denoiser.queries.add(len(rows) * call.queries)
        params, schedule, key = self._constants
        given = self._placement.put(start_from(call, given, batch.x))
        about = programs.About(schedule, key, batch.x, batch.draw_ids, call.arguments, given, {}, batch.kept)
        apply, sharding, condition = self._denoiser.apply, self._placement.sharding, batch.conditions[call.condition]
        if isinstance(call, Whole) or call.queries > 1:
            return self._run(programs.whole(apply, call.template, sharding), about, params, condition)
        about, eps = about._replace(drawn=self._draw(call, about)), None
        if call.queries:
            x, t = self._run(programs.query(call.template, sharding), about)
            eps = self._run(programs.network(apply, sharding), params, x, t, condition)
        return self._run(programs.answer(call.template, sharding), about, eps)

    def _draw(self, call: Call, about: programs.About) -> dict[programs.Drawn, jax.Array]:
        """What can be drawn before the call is made."""
        batch_draws = draws.Draws(about.key, about.draw_ids)
        return {
            drawn: self._run(getattr(batch_draws, drawn.kind), call.arguments[drawn.position], about.x)
            for drawn in programs.drawn_by(call.template)(about)
        }

    def _run(self, program: Callable[..., T], *arguments: object) -> T:
        """What the program returns, which may still be on its way."""
        result = program(*arguments)
        return jax.block_until_ready(result) if self._placement.one_program_at_a_time else result

    def _ask_in_python(self, call: Call, given: PyTree, batch: PlacedBatch) -> Answer:
        """Ask about the usable rows only, since each may cost money; the numbers are spread over [B] again."""
        self.asked_in_python.add(type(call))
        part = batch.usable_part()
        eps_fn = programs.at_most(call, self._patient_eps_fn(part.conditions[call.condition], part.index))
        batch_draws = draws.Draws(self._key, part.draw_ids)
        with keeping(part.kept):
            answer = call.ask(eps_fn, self._denoiser.schedule, part.x, batch_draws, start_from(call, given, part.x))
        return Answer(answer.state, {name: _spread(values, batch.usable) for name, values in answer.numbers.items()})

    def _patient_eps_fn(self, condition: PyTree, rows: np.ndarray) -> EpsFn:
        """eps(x, t) that enters every attempt in the ledger, and waits and tries again where the model fails."""

        def debit(part: slice) -> None:
            self._ledger.debit(rows[part])

        def eps_fn(x: jax.Array, t: ArrayLike) -> jax.Array:
            answer = ask_in_requests(self._denoiser, x, t, condition, debit=debit, retry=self._retry, say=self._say)
            return jnp.asarray(answer)

        return eps_fn


def _spread(values: Array, usable: np.ndarray) -> np.ndarray:
    column = np.full(usable.shape, np.nan, np.float32)
    column[usable] = np.asarray(values)
    return column
