"""The scoring engine: every planned model call on every image, on all devices, into a score table.

Guarantees
- Draws depend on (seed, example id, draw index) only.
- The network is compiled once per batch shape, and what a class of call does around it once too, for the whole
  (t, γ, probe) grid: a call's numbers, the weights and the schedule are arguments of these programs (`call_runner`).
- The host waits for the device once per unit of work, or once in a few seconds of one, with more already under way.
- A run that was killed resumes where it was at most 30 s before (`shard_seconds`), or one call if that takes longer.
  With the same micro-batch it ends in the same table to the bit, with another micro-batch or other devices or processes
  to about 1e-5.
- Every query is entered in the ledger before it is asked; no budget is exceeded.

With several processes (`jax.distributed`) each reads and scores its own images on its local devices and writes its own
shards; the processes meet only at the start and at the end, when the first one merges the shards.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dime_jax import __version__, data
from dime_jax._util import files, validate
from dime_jax._util.distributed import on_first_process, together
from dime_jax._util.progress import Progress
from dime_jax._util.typing import JsonObject
from dime_jax.attacks.base import Whole
from dime_jax.attacks.calls import Call
from dime_jax.core.denoiser import PRECISION, Denoiser
from dime_jax.scoring import query_ledger, score_table, unit_progress
from dime_jax.scoring.call_runner import CallRunner
from dime_jax.scoring.images import Images, images_of_process, missing_groups
from dime_jax.scoring.micro_batch import micro_batch_of, out_of_memory
from dime_jax.scoring.placement import PlacedBatch, Placement, choose_placement
from dime_jax.scoring.planning import Job, Plan, make_plan
from dime_jax.scoring.query_ledger import Budget, Ledger
from dime_jax.scoring.retry import Retry
from dime_jax.scoring.score_table import ScoreTable
from dime_jax.scoring.shards import ShardWriter
from dime_jax.scoring.storing import TableStorage, refuse_unanswered
from dime_jax.scoring.unit_progress import UnitProgress

NO_BUDGET, DEFAULT_RETRY = Budget(), Retry()
_UNITS_UNDER_WAY = 2


@dataclasses.dataclass(frozen=True)
class ScoringOptions:
    """How to run; nothing here changes what the scores mean.

    Attributes:
      micro_batch: images per device and call; a fixed function of image shape and device if None.
      budget: the most queries to make.
      retry: for models that are plain functions.
      shard_seconds: the most seconds of finished work that a kill costs, unless one call takes longer.
      devices: local devices to use; all if None.
      silent: show no progress.
    """

    micro_batch: int | None = None
    budget: Budget = NO_BUDGET
    retry: Retry = DEFAULT_RETRY
    shard_seconds: float = 30.0
    devices: Sequence[jax.Device] | None = None
    silent: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            validate.check_at_least(self.micro_batch, 1, "micro_batch")
        for name, bound in (("total", self.budget.total), ("per_image", self.budget.per_image)):
            if bound is not None:
                validate.check_at_least(bound, 0, f"budget {name}")

    def say(self, text: str) -> None:
        """Show a line on standard error, unless the run is silent."""
        if not self.silent:
            print(text, file=sys.stderr)

    def within(self, directory: pathlib.Path) -> "ScoringOptions":
        """Return the same options with a budget that every score table below this directory shares."""
        return dataclasses.replace(self, budget=self.budget._replace(directory=directory))


class Hooks(NamedTuple):
    """What a run calls while it asks.

    Attributes:
      on_rate: called once with the seconds per query, as soon as they are measured; not if silent.
      before_asking: called by the first process when a table is opened and undamaged, before the first query.
    """

    on_rate: Callable[[float], None] | None = None
    before_asking: Callable[[], None] | None = None


NO_HOOKS: Hooks = Hooks()


class _Request(NamedTuple):
    """What `score` was asked for, checked."""

    denoiser: Denoiser
    source: data.Source
    plan: Plan
    directory: pathlib.Path
    index: np.ndarray  # type: ignore[assignment]  # positions of the images
    counted: np.ndarray  # those of them that count when too many have no answer
    transform: data.Transform
    seed: int
    options: ScoringOptions
    hooks: Hooks
    placement: Placement


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
    options: ScoringOptions | None = None,
    hooks: Hooks = NO_HOOKS,
) -> ScoreTable:
    """Run every job on every image, or finish a run that was interrupted.

    Args:
      denoiser: the model.
      source: the images.
      jobs: attacks and settings, see `planning.grid_jobs`.
      directory: of the score table.
      indices: which images; all if None.
      tolerated: images that may go without an answer: they do not count towards the most that may have none.
      transform: preprocessing; the source's own, or `fit`, if None.
      seed: of all draws.
      options: how to run.
      hooks: what to call during the run.

    Raises:
      ValueError: before any query, if the table there is of something else, the plan exceeds the budget, labels or
        captions are missing, or a call names a condition that the model does not offer; later, with all finished rows
        stored, if the budget is used up or too many images are without an answer (`data.batches.refuse_too_many`).
    """
    directory, options = pathlib.Path(directory), options or ScoringOptions()
    plan = make_plan(jobs, denoiser.schedule)
    index = np.arange(len(source)) if indices is None else np.asarray(indices, np.int64)
    validate.check_not_empty(index, "indices")
    if np.unique(index).size != index.size:
        raise ValueError(f"the {index.size} indices must be unique, got {np.unique(index).size} different ones")
    transform = transform or data.transform_for(source, denoiser.image_shape)
    _check_conditions(denoiser, plan)
    _check_labels(denoiser, source, index)
    if denoiser.takes_text:
        data.require_captions(source)
    counted = index if tolerated is None else np.setdiff1d(index, tolerated)
    placement = choose_placement(denoiser, options.devices)
    request = _Request(denoiser, source, plan, directory, index, counted, transform, seed, options, hooks, placement)
    with contextlib.ExitStack() as stack:

        def open_table() -> None:
            stack.enter_context(files.locked(directory, "score table"))
            _open_table(request)
            if hooks.before_asking is not None:
                score_table.rows_done(directory, len(plan.units), len(source))  # raises if something is damaged
                hooks.before_asking()

        def merge() -> None:
            score_table.merge(directory, len(plan.units), index)
            score_table.store_own_terms(directory, jobs)

        on_first_process(open_table)
        # All processes must have read the table before one of them adds to it, or they would share the work unevenly.
        run = together(lambda: _Run(request))
        together(run.finish)
        on_first_process(merge)
    return score_table.read_table(directory)


def _open_table(request: _Request) -> None:
    """Begin the table, or check that the one there is of the same."""
    denoiser = request.denoiser
    facts: JsonObject = {
        "model": denoiser.fingerprint,
        "data": data.fingerprint(request.source, request.index, captions=denoiser.takes_text),
        "images": len(request.index),
        "transform": request.transform.name,
        "seed": request.seed,
        "precision": PRECISION,
        "code": __version__,
    }
    micro_batch = request.options.micro_batch or micro_batch_of(denoiser, request.placement.devices[0].platform)
    identity = score_table.identity(request.plan, facts)
    score_table.open_manifest(request.directory, identity, micro_batch, denoiser.schedule)


class _Run:
    """What one process does to finish the table: first it reads what the table has."""

    def __init__(self, request: _Request):
        directory, plan, index, options = request.directory, request.plan, request.index, request.options
        process, processes = jax.process_index(), jax.process_count()
        status = score_table.rows_done(directory, len(plan.units), len(request.source))
        self.request = request
        self.micro_batch = options.micro_batch or score_table.read_manifest(directory)["micro_batch"]
        self.mine = images_of_process(status, index, self._batch_size, process, processes)
        needed = np.array([unit.queries for unit in plan.units]) @ (status < 0)
        partials = score_table.partials(directory)
        for partial in partials:  # with another micro-batch their units are asked from the start
            if len(partial.index) == self._batch_size:
                rows = partial.index[partial.usable]
                needed[rows] -= unit_progress.queries_stored(partial, plan) * (status[partial.unit, rows] < 0)
        allowance = query_ledger.allowance(directory, options.budget, needed, index, self.mine, processes)
        writer = ShardWriter(directory, process)
        self.progress = Progress(
            int(needed[self.mine].sum()), options.silent or process > 0, on_rate=request.hooks.on_rate
        )
        self.ledger = Ledger(directory, process, len(request.source), allowance, options.budget)
        say = self.progress.say
        self.runner = CallRunner(
            request.denoiser, request.placement, self.ledger, seed=request.seed, retry=options.retry, say=say
        )
        self.storage = TableStorage(plan, status, writer, self.ledger, self.progress, options.shard_seconds, partials)
        self.images = Images(request.source, request.transform)

    @property
    def _batch_size(self) -> int:
        return self.micro_batch * len(self.request.placement.devices)

    def finish(self) -> None:
        """Score what is missing among this process's images, in smaller batches if memory runs out."""
        with contextlib.closing(self.ledger):
            if not len(self.mine):
                return
            with self.progress, jax.default_matmul_precision(PRECISION):
                self.storage.flush()
                self.progress.say(self.request.plan.describe(len(self.request.index)))
                while not self._fits():
                    self._halve_micro_batch()

    def _fits(self) -> bool:
        """Score what is missing; return False if that ran out of memory and a smaller micro-batch may help."""
        try:
            self._score_missing()
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error) or self.micro_batch == 1:
                raise
            return False
        return True

    def _halve_micro_batch(self) -> None:
        self.micro_batch //= 2
        if jax.process_index() == 0:  # others that run out of memory too would write the same file
            manifest = score_table.read_manifest(self.request.directory)
            score_table.write_manifest(self.request.directory, {**manifest, "micro_batch": self.micro_batch})
        self.progress.say(f"out of memory: continuing with a micro-batch of {self.micro_batch}")

    def _score_missing(self) -> None:
        """Ask for and store every missing row. If that fails, what was answered until then is stored."""
        under_way: collections.deque[UnitProgress] = collections.deque()
        # A plain function has answered when it returns, and does not compile.
        most_under_way, first_measured = (_UNITS_UNDER_WAY, 1) if self.request.denoiser.traceable else (0, 0)

        def store(leave: int) -> None:
            while len(under_way) > leave:
                if not self.storage.add(under_way.popleft()):
                    refuse_unanswered(self.storage.status, self.request.counted, self.images.unreadable)

        try:
            for number, (units, batch) in enumerate(self._batches()):
                if number == first_measured:
                    store(leave=0)
                    self.progress.compiled()
                for unit in units:
                    under_way.append(self._ask(unit, batch, before_noting=lambda: store(leave=0)))
                    store(leave=most_under_way)
            store(leave=0)
        except Exception:
            with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError, OSError):  # the first error is raised
                store(leave=0)
            raise
        finally:  # also when interrupted
            with contextlib.suppress(OSError) if sys.exc_info()[0] else contextlib.nullcontext():
                self.storage.flush()

    def _ask(self, number: int, batch: PlacedBatch, before_noting: Callable[[], None]) -> UnitProgress:
        """Make all calls of a unit on a batch that were not stored before; answers are noted now and then.

        Args:
          number: of the unit.
          batch: the images.
          before_noting: called before an unfinished unit is noted.
        """
        plan, storage = self.request.plan, self.storage
        self.progress.what = plan.units[number].name
        unit = unit_progress.begin(number, plan, batch, storage.find(number, batch))
        # A network answers while more is asked: note what was asked before. A function may fail at any call.
        traceable, recent = self.request.denoiser.traceable, collections.deque([unit])
        while unit.stack:
            unit = self.runner.advance(unit, plan.trees, storage.calls_at_once if traceable else 1)
            recent.append(unit)
            if unit.stack and len(recent) > 1 + traceable:
                before_noting()
                before, after = recent.popleft(), recent[0]
                storage.note(after, len(after.numbers) - len(before.numbers))
        return unit

    def _batches(self) -> Iterator[tuple[np.ndarray, PlacedBatch]]:
        """Yield batches of images that miss the same units, with those units."""
        conditions = {call.condition for call in _calls(self.request.plan)}
        for units, rows in missing_groups(self.storage.status, self.mine):
            for batch in self.images.batches(rows, self._batch_size):
                yield units, self.runner.prepare(batch, conditions)


def _calls(plan: Plan) -> Iterator[Call]:
    return itertools.chain.from_iterable(plan.trees.values())


def _check_conditions(denoiser: Denoiser, plan: Plan) -> None:
    for call in _calls(plan):
        if call.condition not in denoiser.conditions:
            offered = ", ".join(denoiser.conditions)
            raise ValueError(f"{call} needs the condition {call.condition!r}; {denoiser.name} offers only {offered}")
        if denoiser.mask_fn is not None and isinstance(call, Whole):
            raise ValueError(f"attack {call.attack} computes its own norms: --latent_weighting does not apply to it")


def _check_labels(denoiser: Denoiser, source: data.Source, index: np.ndarray) -> None:
    if denoiser.num_classes is None:
        return
    if source.labels is None:
        raise ValueError(f"{denoiser.name} is class-conditional, but {source.name} has no class labels")
    wrong = [label for label in source.labels[index] if not 0 <= label < denoiser.num_classes]
    if wrong:
        raise ValueError(f"labels in {source.name} must be >= 0 and < {denoiser.num_classes}, got {wrong[0]}")
