"""The scoring engine: every planned model call on every image, on all devices, into a score table.

Guarantees
- Draws depend on (seed, example id, draw index) only.
- One compilation per class of call and batch shape, for the whole (t, γ, probe) grid: a call's numbers, the weights and
  the schedule are arguments of the program, and probes are drawn inside it.
- The host waits for the device once per unit of work, with the next unit already under way.
- A run that was killed continues from its last shard. With the same micro-batch it ends in the same table to the bit,
  with another micro-batch or other devices or processes to about 1e-5.
- Every query is entered in the ledger before it is asked; no budget is exceeded.

With several processes (`jax.distributed`) each reads and scores its own images on its local devices and writes its own
shards; the processes meet only at the start and at the end, when the first one merges the shards.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tenacity

from dime_jax import _validate, data, digests, draws, score_table
from dime_jax.attacks.calls import Answer, Call, Scaled
from dime_jax.attacks.recipes import start_from, walk_trees
from dime_jax.data.batches import refuse_too_many
from dime_jax.denoiser import PRECISION, ApplyFn, Denoiser, EpsFn
from dime_jax.planning import Job, Plan, Unit, Whole, make_plan
from dime_jax.processes import together
from dime_jax.progress import Progress
from dime_jax.query_ledger import Budget, BudgetExceeded, Ledger, LedgerUnwritable, queries_made, spent_per_image
from dime_jax.schedule import NoiseSchedule
from dime_jax.score_table import NOT_FINITE, OK, UNREADABLE, Rows, ScoreTable, ShardWriter

# A micro-batch of 32x32x3 images: one that stays in a CPU's caches, and one that fills an accelerator.
_CPU_IMAGES, _ACCELERATOR_IMAGES = 8, 256
_REFERENCE_SIZE = 32 * 32 * 3
_LARGEST_MICRO_BATCH = 512
_UNITS_UNDER_WAY = 2

P = ParamSpec("P")
T = TypeVar("T")


class Retry(NamedTuple):
    """How to ask again when a model that is a plain function fails.

    Wait n is random, between 0 and first_wait · 2ⁿ seconds or the longest wait, so that many callers spread out.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0


NO_BUDGET, DEFAULT_RETRY = Budget(), Retry()


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run; nothing here changes what the scores mean.

    Attributes:
      micro_batch: images per device and call; a fixed function of image shape and device if None.
      budget: the most queries to make.
      retry: for models that are plain functions.
      shard_seconds: work between two shards, of which a kill costs at most one.
      devices: local devices to use; all if None.
      silent: show no progress.
      on_rate: called once with the seconds that a query takes, as soon as they are measured; not if silent.
    """

    micro_batch: int | None = None
    budget: Budget = NO_BUDGET
    retry: Retry = DEFAULT_RETRY
    shard_seconds: float = 30.0
    devices: Sequence[jax.Device] | None = None
    silent: bool = False
    on_rate: Callable[[float], None] | None = None

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            _validate.check_at_least(self.micro_batch, 1, "micro_batch")
        for name, bound in self.budget._asdict().items():
            if bound is not None:
                _validate.check_at_least(bound, 0, f"budget {name}")


def score(
    denoiser: Denoiser,
    source: data.Source,
    jobs: Sequence[Job],
    directory: str | os.PathLike[str],
    *,
    indices: Sequence[int] | np.ndarray | None = None,
    tolerated: np.ndarray | None = None,
    transform: data.Transform | None = None,
    seed: int = 0,
    options: Options | None = None,
) -> ScoreTable:
    """Run every job on every image, or finish a run that was interrupted.

    Args:
      denoiser: the model.
      source: the images.
      jobs: attacks and settings, see `planning.grid_jobs`.
      directory: of the score table.
      indices: which images; all if None.
      tolerated: those of them that may all go without an answer: they do not count when too many have none.
      transform: preprocessing; the source's own, or `fit`, if None.
      seed: of all draws.
      options: how to run.

    Raises:
      ValueError: before any query, if the table there is of something else, the plan exceeds the budget, or labels are
        missing; later, with all finished rows stored, if the budget is used up or too many images are without an answer
        (`data.batches.refuse_too_many`).
    """
    directory, options = pathlib.Path(directory), options or Options()
    plan = make_plan(jobs, denoiser.schedule)
    index = np.arange(len(source)) if indices is None else np.asarray(indices, np.int64)
    _validate.check_not_empty(index, "indices")
    transform = transform or data.transform_for(source, denoiser.image_shape)
    _check_labels(denoiser, source, index)
    devices = _choose_devices(denoiser, options.devices)
    first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:

        def open_table() -> None:
            if first:
                stack.enter_context(score_table.locked(directory))
                micro_batch = options.micro_batch or default_micro_batch(denoiser.image_shape, devices[0].platform)
                identity = score_table.identity(
                    plan,
                    model=denoiser.fingerprint,
                    data=data.fingerprint(source, index),
                    images=len(index),
                    transform=transform.name,
                    seed=seed,
                    precision=PRECISION,
                    code=_code_version(),
                )
                score_table.open_manifest(directory, identity, micro_batch, denoiser.schedule)

        def merge() -> None:
            if first:
                score_table.merge(directory, len(plan.units), index)

        together(open_table)
        # All processes must have read the table before one of them adds to it, or they would share the work unevenly.
        counted = index if tolerated is None else np.setdiff1d(index, tolerated)
        run = together(
            lambda: _Run(denoiser, source, plan, directory, index, counted, transform, seed, options, devices)
        )
        together(run.finish)
        together(merge)
    return score_table.read_table(directory)


def default_micro_batch(image_shape: Sequence[int], platform: str) -> int:
    """Images per device and call, a power of two: as many values as 8 CIFAR images on a CPU, as 256 elsewhere."""
    images = _CPU_IMAGES if platform == "cpu" else _ACCELERATOR_IMAGES
    wanted = images * _REFERENCE_SIZE / math.prod(image_shape)
    return 2 ** int(np.clip(math.floor(math.log2(wanted)), 0, math.log2(min(8 * images, _LARGEST_MICRO_BATCH))))


def tune_micro_batch(denoiser: Denoiser, candidates: Sequence[int] | None = None, rounds: int = 3) -> int:
    """The fastest micro-batch per image on one device, measured on blank images that count as no queries.

    Candidates are tried in rising order; one that does not fit into memory ends the search.
    """
    if not denoiser.traceable:
        raise ValueError(f"{denoiser.name} is a plain function: its speed per image is not ours to tune")
    default = default_micro_batch(denoiser.image_shape, jax.local_devices()[0].platform)
    seconds: dict[int, float] = {}
    for size in sorted(candidates or {max(1, default // 4), max(1, default // 2), default, 2 * default, 4 * default}):
        x = jnp.zeros((size, *denoiser.image_shape))
        label = None if denoiser.num_classes is None else jnp.zeros(size, jnp.int32)
        arguments = (denoiser.schedule, jax.random.key(0), x, jnp.zeros(size, jnp.uint32), label, (0,), None)
        run = functools.partial(_program(denoiser.apply, Scaled, None), denoiser.params, *arguments)
        try:
            times = [_seconds(run) for _ in range(rounds + 1)]  # the first compiles
        except jax.errors.JaxRuntimeError as error:
            if not _out_of_memory(error):
                raise
            break
        seconds[size] = statistics.median(times[1:]) / size
    return min(seconds, key=lambda size: seconds[size])


def patient(ask: Callable[P, T], retry: Retry, say: Callable[[str], object]) -> Callable[P, T]:
    """The same function, which waits and tries again where the model behind it fails."""

    def say_so(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error = state.outcome.exception()
        say(f"waiting {state.next_action.sleep:.1f} s, the model failed: {error!r}")

    return tenacity.retry(
        retry=tenacity.retry_if_exception(_may_pass),
        stop=tenacity.stop_after_attempt(retry.attempts),
        wait=tenacity.wait_random_exponential(multiplier=retry.first_wait, max=retry.longest_wait),
        before_sleep=say_so,
        reraise=True,
    )(ask)


class _Batch(NamedTuple):
    """Images on the devices, padded, and which rows of them are real and readable."""

    x: Any
    draw_ids: Any
    label: Any
    index: np.ndarray  # type: ignore[assignment]  # [B], -1 for padding
    ids: list[str]
    usable: np.ndarray

    def usable_part(self) -> tuple[Any, ...]:
        """Images, draw ids and labels of the usable rows, on the default device."""
        return tuple(None if column is None else jnp.asarray(np.asarray(column)[self.usable]) for column in self[:3])


class _Run:
    """What one process has to do to finish the table."""

    def __init__(
        self,
        denoiser: Denoiser,
        source: data.Source,
        plan: Plan,
        directory: pathlib.Path,
        index: np.ndarray,
        counted: np.ndarray,
        transform: data.Transform,
        seed: int,
        options: Options,
        devices: Sequence[jax.Device],
    ):
        self.denoiser, self.plan, self.directory, self.options = denoiser, plan, directory, options
        self.num_images, self.counted = len(index), counted
        self.manifest = score_table.read_manifest(directory)
        self.micro_batch = options.micro_batch or self.manifest["micro_batch"]
        self.num_devices = len(devices)
        self.unreadable: dict[str, str] = {}
        self.source, self.transform = _guarded(source, transform, self.unreadable)
        self.status = score_table.rows_done(directory, len(plan.units), len(source))
        process, processes = jax.process_index(), jax.process_count()
        chunks = list(_chunks(self.status, index, self.batch_size))
        self.mine = np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in chunks[process::processes])])
        self.cost = np.array([unit.queries for unit in plan.units])
        allowance = self._allowance(index, processes)
        self.writer = ShardWriter(directory, process)
        silent = options.silent or process > 0
        self.progress = Progress(self._planned(self.mine), silent, on_rate=options.on_rate)
        self.ledger = Ledger(directory, process, len(source), allowance, options.budget.per_image)
        self.last_flush = time.monotonic()
        self.kinds: set[type[Call]] = set()  # asked in Python so far
        self.first_of_kind = False
        self.key = jax.random.key(seed)
        self.sharding = _data_sharding(denoiser, devices)
        everywhere = self.sharding and jax.sharding.NamedSharding(self.sharding.mesh, jax.sharding.PartitionSpec())
        self.constants = jax.device_put((denoiser.params, denoiser.schedule, self.key), everywhere)

    @property
    def batch_size(self) -> int:
        return self.micro_batch * self.num_devices

    def finish(self) -> None:
        """Score what is missing among this process's images."""
        for warning in digests.warn_of_unsealed(self.directory, ["manifest.json"]):
            self.progress.say(f"warning: {warning}")
        if not len(self.mine):
            self.ledger.close()
            return
        with self.progress, jax.default_matmul_precision(PRECISION), contextlib.closing(self.ledger):
            self._flush()
            self.progress.say(self.plan.describe(self.num_images))
            while True:
                try:
                    self._score_missing()
                except jax.errors.JaxRuntimeError as error:
                    if not _out_of_memory(error) or self.micro_batch == 1:
                        raise
                    self.micro_batch //= 2
                    score_table.write_manifest(self.directory, {**self.manifest, "micro_batch": self.micro_batch})
                    self.progress.say(f"out of memory: going on with a micro-batch of {self.micro_batch}")
                else:
                    return

    def _score_missing(self) -> None:
        under_way: collections.deque[tuple[int, _Batch, dict[Call, dict[str, Any]]]] = collections.deque()
        # A plain function has answered when it returns, and does not compile.
        most_under_way, first_measured = (_UNITS_UNDER_WAY, 1) if self.denoiser.traceable else (0, 0)

        def store(leave: int) -> None:
            while len(under_way) > leave:
                self._store(*under_way.popleft())

        try:
            for number, (units, batch) in enumerate(self._batches()):
                if number == first_measured:
                    store(leave=0)
                    self.progress.compiled()
                for unit in units:
                    under_way.append((unit, batch, self._ask_unit(self.plan.units[unit], batch)))
                    store(leave=most_under_way)
            store(leave=0)
        except Exception:
            with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError, OSError):  # the first error is raised
                store(leave=0)
            raise
        finally:  # also when interrupted
            with contextlib.suppress(OSError) if sys.exc_info()[0] else contextlib.nullcontext():
                self._flush()

    def _batches(self) -> Iterator[tuple[np.ndarray, _Batch]]:
        """Batches of images that miss the same units, and those units."""
        for units, rows in _groups(self.status, self.mine):
            for batch in data.batches(self.source, self.batch_size, self.transform, indices=rows):
                usable = batch.mask & np.array([id not in self.unreadable for id in batch.ids])
                yield units, self._place(batch, usable)

    def _place(self, batch: data.Batch, usable: np.ndarray) -> _Batch:
        label = None if self.denoiser.num_classes is None else batch.labels
        x, draw_ids, label = jax.device_put((batch.images, draws.id_numbers(batch.ids), label), self.sharding)
        return _Batch(x, draw_ids, label, batch.index, batch.ids, usable)

    def _ask_unit(self, unit: Unit, batch: _Batch) -> dict[Call, dict[str, Any]]:
        if not batch.usable.any():
            return {}

        def ask(call: Call, given: Any) -> Answer:
            if not self.denoiser.traceable or isinstance(call, Whole):
                return self._ask_in_python(call, given, batch)
            rows = batch.index[batch.usable]
            self.ledger.debit(rows)
            self.denoiser.queries.add(len(rows))
            given = jax.device_put(start_from(call, given, batch.x), self.sharding)
            program = _program(self.denoiser.apply, type(call), self.sharding)  # type: ignore[arg-type]
            return program(*self.constants, *batch[:3], dataclasses.astuple(call), given)

        return dict(walk_trees(unit.roots, self.plan.trees, ask))

    def _ask_in_python(self, call: Call, given: Any, batch: _Batch) -> Answer:
        """Ask about the usable rows only, since each may cost money; the numbers are spread over [B] again."""
        self.first_of_kind |= type(call) not in self.kinds
        self.kinds.add(type(call))
        x, draw_ids, label = batch.usable_part()
        eps_fn = self._patient_eps_fn(label, batch.index[batch.usable])
        batch_draws = draws.Draws(self.key, draw_ids)
        answer = call.ask(eps_fn, self.denoiser.schedule, x, batch_draws, start_from(call, given, x))
        return Answer(answer.state, {name: _spread(values, batch.usable) for name, values in answer.numbers.items()})

    def _patient_eps_fn(self, label: Any, rows: np.ndarray) -> EpsFn:
        """eps(x, t) that enters every attempt in the ledger, and waits and tries again where the model fails."""

        def eps_fn(x: Any, t: Any) -> jax.Array:
            self.ledger.debit(rows)
            return self.denoiser.eps(x, t, label)

        return patient(eps_fn, self.options.retry, self.progress.say)

    def _store(self, number: int, batch: _Batch, numbers: dict[Call, dict[str, Any]]) -> None:
        """Wait for a unit's answers, and keep them for the next shard."""
        unit = self.plan.units[number]
        readings = np.full((len(unit.readings), len(batch.index)), np.nan, np.float32)
        if numbers:
            readings[:] = jax.device_get([numbers[call][name] for call, name in unit.readings])
            readings[:, ~batch.usable] = np.nan
        finite = np.all(np.isfinite(readings), axis=0)
        status = np.where(batch.usable, np.where(finite, OK, NOT_FINITE), UNREADABLE)
        real = batch.index >= 0
        rows = batch.index[real]
        self.writer.add(
            Rows(number, rows, [batch.ids[i] for i in np.flatnonzero(real)], status[real], readings[:, real])
        )
        self.status[number, rows] = status[real]
        # The first call of a kind compiles what the attack does around the model.
        self.progress.advance(unit.queries * int(batch.usable.sum()), unit.name, measured=not self.first_of_kind)
        self.first_of_kind = False
        if time.monotonic() - self.last_flush >= self.options.shard_seconds:
            self._flush()
        if np.any(status[real] != OK):
            self._check_flagged()

    def _flush(self) -> None:
        now = time.monotonic()
        self.writer.flush(now - self.last_flush, self.ledger.state)
        self.last_flush = now

    def _check_flagged(self) -> None:
        worst = self.status.max(axis=0)[self.counted]
        counts = {
            what: int(np.sum(worst == code)) for what, code in (("not finite", NOT_FINITE), ("unreadable", UNREADABLE))
        }

        def why() -> str:
            kinds = " and ".join(f"{count} {what}" for what, count in counts.items() if count)
            example = f", such as {next(iter(self.unreadable.items()))}" if self.unreadable else ""
            return f" so far ({kinds}{example}); stopped"

        refuse_too_many(sum(counts.values()), len(self.counted), "images without an answer", why)

    def _planned(self, index: np.ndarray) -> int:
        return int(np.sum(self.cost[:, None] * (self.status[:, index] < 0)))

    def _allowance(self, index: np.ndarray, processes: int) -> int | None:
        """How many queries this process may make: its plan, and its share of what the plan leaves of the budget."""
        total, per_image = self.options.budget
        if per_image is not None:
            spent = spent_per_image(self.directory, self.status.shape[1])[index]
            needed = self.cost @ (self.status[:, index] < 0)
            most = int(np.max(np.where(needed > 0, spent + needed, 0)))
            if most > per_image:
                raise BudgetExceeded(f"expected at most {per_image} queries per image, the plan takes {most}")
        if total is None:
            return None
        planned, left = self._planned(index), max(0, total - queries_made(self.directory))
        if planned > left:
            raise BudgetExceeded(f"this needs {planned:,} queries, and the budget of {total:,} has {left:,} left")
        return self._planned(self.mine) + (left - planned) // processes


@functools.lru_cache(maxsize=128)
def _program(apply: ApplyFn, kind: type[Call], sharding: jax.sharding.NamedSharding | None) -> Callable[..., Answer]:
    """The compiled call: one program per class of call and batch shape.

    The class is no argument of it. As a registered dataclass it would be part of a pytree structure, and structures of
    different dataclasses compare equal in jax 0.10, so that on equal hashes one class would run another's program.
    """
    return jax.jit(functools.partial(_ask, apply, kind), out_shardings=sharding)


def _ask(
    apply: ApplyFn,
    kind: type[Call],
    params: Any,
    schedule: NoiseSchedule,
    key: jax.Array,
    x: jax.Array,
    draw_ids: jax.Array,
    label: jax.Array | None,
    parameters: tuple[Any, ...],
    given: Any,
) -> Answer:
    def eps_fn(x: jax.Array, t: Any) -> jax.Array:
        return apply(params, x, jnp.asarray(t, jnp.int32), label)

    return kind(*parameters).ask(eps_fn, schedule, x, draws.Draws(key, draw_ids), given)


def _groups(status: np.ndarray, index: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images that miss the same units, in their order: (units, images) by first appearance."""
    missing = status[:, index] < 0
    patterns, first, member = np.unique(missing, axis=1, return_index=True, return_inverse=True)
    groups = [(np.flatnonzero(patterns[:, g]), index[member.reshape(-1) == g]) for g in np.argsort(first)]
    return [(units, rows) for units, rows in groups if len(units)]


def _chunks(status: np.ndarray, index: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The batches of a run. Whole batches are stored, so a resumed run has the batches of an unbroken one."""
    for units, rows in _groups(status, index):
        for start in range(0, len(rows), size):
            yield units, rows[start : start + size]


def _guarded(
    source: data.Source, transform: data.Transform, unreadable: dict[str, str]
) -> tuple[data.Source, data.Transform]:
    """The same images, transformed when they are read; bad ones read as zeros and are noted.

    What `data.batches` tolerates is a share of one pass. Here it must be a share of the whole run, over its resumes.
    """

    def read(index: int) -> np.ndarray:
        try:
            return transform(source.read(index))
        except data.BadImage as error:
            unreadable[source.ids[index]] = str(error)
            return np.zeros(transform.shape, np.float32)

    return dataclasses.replace(source, read=read), transform._replace(resize=lambda image: image)


def _choose_devices(denoiser: Denoiser, devices: Sequence[jax.Device] | None) -> Sequence[jax.Device]:
    """The devices that batches are spread over: one, if the model itself is spread over several or is no JAX."""
    devices = devices or jax.local_devices()
    return devices if denoiser.traceable and not _is_spread(denoiser) else devices[:1]


def _data_sharding(denoiser: Denoiser, devices: Sequence[jax.Device]) -> jax.sharding.NamedSharding | None:
    if not denoiser.traceable or _is_spread(denoiser):
        return None
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


def _is_spread(denoiser: Denoiser) -> bool:
    leaves = jax.tree.leaves(denoiser.params)
    return any(isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 for leaf in leaves)


def _check_labels(denoiser: Denoiser, source: data.Source, index: np.ndarray) -> None:
    if denoiser.num_classes is None:
        return
    if source.labels is None:
        raise ValueError(f"{denoiser.name} is class-conditional: expected class labels in {source.name}, got none")
    wrong = [label for label in source.labels[index] if not 0 <= label < denoiser.num_classes]
    if wrong:
        raise ValueError(f"expected 0 <= label < {denoiser.num_classes} in {source.name}, got label={wrong[0]}")


def _code_version() -> str:
    try:
        return importlib.metadata.version("dime_jax")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "not installed"


def _spread(values: Any, usable: np.ndarray) -> np.ndarray:
    column = np.full(usable.shape, np.nan, np.float32)
    column[usable] = np.asarray(values)
    return column


def _may_pass(error: BaseException) -> bool:
    """Whether asking again may help: not where the input or our own disk is at fault."""
    return isinstance(error, Exception) and not isinstance(error, ValueError | TypeError | LedgerUnwritable)


def _out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _seconds(run: Callable[..., Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
