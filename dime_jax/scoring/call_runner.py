"""Make the calls of a unit of work on one batch: compiled, or with retries if the model is a plain function.

A batch is encoded once, whatever is asked about it. Every query is entered in the ledger before it is asked.

Compiling networks takes most of a short audit's time on CPUs, so the network is one program for all calls. What a call
does around it, `Call.query` and `Call.reduce`, are two small programs that know nothing of the model. Random numbers
take long to compile as well, and are drawn beforehand by one program for all calls. Only an attack that cannot be taken
apart into calls is compiled with the network inside (`whole_program`).

Programs are compiled for each kind of call (its template, mostly its class) and batch shape. The class is not an
argument of them: as a registered dataclass it would be part of a pytree structure, and structures of different
dataclasses compare equal in jax 0.10, so that on equal hashes one class would run another's program.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from dime_jax import data
from dime_jax._util import validate
from dime_jax._util.typing import Array, PyTree
from dime_jax.attacks.base import Trees, Whole, WholeTemplate
from dime_jax.attacks.calls import Answer, Arrays, Call, Query, evaluate, query_of
from dime_jax.core import draws
from dime_jax.core.denoiser import ApplyFn, Denoiser, EpsFn, encoder, masker
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.core.xla_options import network_options
from dime_jax.scoring.placement import PlacedBatch, Placement
from dime_jax.scoring.query_ledger import Ledger
from dime_jax.scoring.retry import Retry, Say, ask_in_requests
from dime_jax.scoring.unit_progress import UnitProgress

T = TypeVar("T")
Template = Callable[..., Call]
Arguments = tuple[ArrayLike, ...]


# ------------------------------------------------------------------------------------------------------------ programs


@functools.lru_cache(maxsize=128)
def network_program(apply: ApplyFn, sharding: NamedSharding | None) -> Callable[..., jax.Array]:
    """Compile (params, x, t, condition) -> eps."""

    def run(params: PyTree, x: jax.Array, t: jax.Array, condition: PyTree) -> jax.Array:
        return evaluate(_eps_fn(apply, params, condition), Query(x, t))

    return jax.jit(run, out_shardings=sharding, compiler_options=network_options())


@functools.lru_cache(maxsize=128)
def query_program(template: Template, sharding: NamedSharding | None) -> Callable[..., Query]:
    """Compile (arguments of the template, schedule, x, drawn, given) -> what the call asks."""

    def run(arguments: Arguments, schedule: NoiseSchedule, x: jax.Array, drawn: Arrays, given: PyTree) -> Query:
        asked = query_of(template(*arguments), schedule, x, drawn, given)
        return Query(asked.x, jnp.asarray(asked.t, jnp.int32))

    return jax.jit(run, out_shardings=Query._make((sharding, None)))  # t is mostly one for all rows


@functools.lru_cache(maxsize=128)
def reduce_program(template: Template, sharding: NamedSharding | None) -> Callable[..., Answer]:
    """Compile (arguments of the template, schedule, x, drawn, given, asked, eps, mask) -> the call's answer."""
    return jax.jit(lambda arguments, *inputs: template(*arguments).reduce(*inputs), out_shardings=sharding)


@functools.lru_cache(maxsize=128)
def whole_program(apply: ApplyFn, template: WholeTemplate, sharding: NamedSharding | None) -> Callable[..., Answer]:
    """Compile (arguments of the template, schedule, x, (key, draw ids), params, condition) -> the call's answer."""

    def run(
        arguments: Arguments, schedule: NoiseSchedule, x: jax.Array, drawn: PyTree, params: PyTree, condition: PyTree
    ) -> Answer:
        try:
            return template(*arguments).ask(_eps_fn(apply, params, condition), schedule, x, draws.Draws(*drawn))
        except jax.errors.JAXTypeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"attack {template.attack!r} is not traceable, though declared to be: {reason}") from error

    return jax.jit(run, out_shardings=sharding, compiler_options=network_options())


def _eps_fn(apply: ApplyFn, params: PyTree, condition: PyTree) -> EpsFn:
    return lambda x, t: apply(params, x, jnp.asarray(t, jnp.int32), condition)


# ---------------------------------------------------------------------------------------------------------- the runner


class CallRunner:
    """Makes calls of one model, and debits a ledger.

    Args:
      denoiser: the model.
      placement: where its batches are.
      ledger: of this process.
      seed: of all draws.
      retry: for models that are plain functions.
      say: shows a line.
    """

    def __init__(self, denoiser: Denoiser, placement: Placement, ledger: Ledger, *, seed: int, retry: Retry, say: Say):
        self._denoiser, self._placement, self._ledger = denoiser, placement, ledger
        self._retry, self._say = retry, say
        self._key = jax.random.key(seed)
        self._constants = placement.put_everywhere((denoiser.params, denoiser.schedule, self._key))
        self._asked_in_python: set[type[Call]] = set()

    def prepare(self, batch: data.Batch, conditions: Collection[str]) -> PlacedBatch:
        """Put a batch on the devices, in the model's own space, with what the model is told under the conditions."""
        denoiser, sharding = self._denoiser, self._placement.sharding
        offered, size = denoiser.conditions_for(batch.labels, batch.captions), len(batch.images)
        told = {name: denoiser.check_condition(offered[name], size) for name in conditions}
        x, ids, told = self._placement.put((batch.images, draws.id_numbers(batch.ids), told))
        params, _, key = self._constants
        if denoiser.encode_fn is not None:
            x = encoder(denoiser.encode_fn, sharding)(params, x, key, ids)
            validate.check_shape(x, (size, *denoiser.shape), f"the latents of {denoiser.name}")
        mask = None if denoiser.mask_fn is None else masker(denoiser.mask_fn, sharding)(params, x, key, ids)
        return PlacedBatch(x, ids, told, batch.index, batch.ids, batch.mask, mask)

    def advance(self, unit: UnitProgress, trees: Trees, most: int) -> UnitProgress:
        """Make the next calls of a unit, depth first, at most `most`; make none if no row of the batch is usable."""
        if not unit.batch.usable.any():
            return unit._replace(stack=(), numbers={})
        stack, numbers, kinds = list(unit.stack), dict(unit.numbers), len(self._asked_in_python)
        while stack and len(numbers) - len(unit.numbers) < most:
            call, given = stack.pop()
            state, numbers[call] = self._ask(call, given, unit.batch)
            stack.extend((child, state) for child in reversed(trees.get(call, ())))
        at_full_speed = unit.at_full_speed and len(self._asked_in_python) == kinds
        return unit._replace(stack=tuple(stack), numbers=numbers, at_full_speed=at_full_speed)

    def _ask(self, call: Call, given: PyTree, batch: PlacedBatch) -> tuple[PyTree, Mapping[str, Array]]:
        """Make one call, and return its state and numbers."""
        if not self._denoiser.traceable or not call.traceable:
            return self._ask_in_python(call, given, batch)
        rows = batch.index[batch.usable]
        for _ in range(call.queries):
            self._ledger.debit(rows)
        self._denoiser.queries.add(len(rows) * call.queries)
        params, schedule, key = self._constants
        apply, sharding, condition = self._denoiser.apply, self._placement.sharding, batch.conditions[call.condition]
        if isinstance(call, Whole):
            program = whole_program(apply, call.template, sharding)
            drawn_from = key, batch.draw_ids
            return self._run(program, call.arguments, schedule, batch.x, drawn_from, params, condition)
        batch_draws = draws.Draws(key, batch.draw_ids)
        drawn = {name: self._run(draw.take, batch_draws, batch.x) for name, draw in call.draws().items()}
        given = self._placement.put(call.start(batch.x) if given is None else given)
        inputs, asked, eps = (call.arguments, schedule, batch.x, drawn, given), None, None
        if call.queries:
            asked = self._run(query_program(call.template, sharding), *inputs)
            eps = self._run(network_program(apply, sharding), params, *asked, condition)
        return self._run(reduce_program(call.template, sharding), *inputs, asked, eps, batch.mask)

    def _run(self, program: Callable[..., T], *arguments: PyTree) -> T:
        """Return what the program returns, which may not be computed yet."""
        result = program(*arguments)
        return jax.block_until_ready(result) if self._placement.one_program_at_a_time else result

    def _ask_in_python(self, call: Call, given: PyTree, batch: PlacedBatch) -> tuple[PyTree, Mapping[str, Array]]:
        """Ask about the usable rows only, since each may cost money; the numbers are spread over [B] again."""
        self._asked_in_python.add(type(call))
        part = batch.usable_part()
        eps_fn = self._retrying_eps_fn(part.conditions[call.condition], part.index)
        batch_draws = draws.Draws(self._key, part.draw_ids)
        answer = call.ask(eps_fn, self._denoiser.schedule, part.x, batch_draws, given, part.mask)
        return answer.state, {name: _spread(row, batch.usable) for name, row in answer.numbers.items()}

    def _retrying_eps_fn(self, condition: PyTree, rows: np.ndarray) -> EpsFn:
        """Return eps(x, t) that enters every attempt in the ledger, and retries where the model fails."""

        def debit(part: slice) -> None:
            self._ledger.debit(rows[part])

        ask = functools.partial(ask_in_requests, self._denoiser, debit=debit, retry=self._retry, say=self._say)
        return lambda x, t: jnp.asarray(ask(x, t, condition))


def _spread(values: Array, usable: np.ndarray) -> np.ndarray:
    column = np.full(usable.shape, np.nan, np.float32)
    column[usable] = np.asarray(values)
    return column
