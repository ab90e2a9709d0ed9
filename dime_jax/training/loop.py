"""The training loop: a Python loop over one jitted update, with states, a log and pictures on disk.

    WORKDIR/train/run.json        what is trained: network, recipe, method, images
    WORKDIR/train/state/          the latest training states
    WORKDIR/train/metrics.jsonl   one line per `log_every` updates: step, loss, images_per_second
    WORKDIR/train/loss.png, samples_STEP.png
    WORKDIR/model                 the model directory, when all updates are made
    WORKDIR/snapshots/STEP        the same after fewer updates, every `snapshot_every`

Where an adapter is trained, WORKDIR/adapter.safetensors and WORKDIR/snapshots/STEP.safetensors are in their place.

Killed anywhere and started again, a run ends with the same weights to the bit on the same devices, and about the same
on others. (The loop is not a `lax.scan`: on CPUs gradients of convolutions are many times slower inside one.)
"""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Sequence

import jax
import numpy as np

from dime_jax import data, models
from dime_jax._util import files, validate
from dime_jax._util.distributed import data_mesh, on_first_process, replicated
from dime_jax._util.typing import JsonObject
from dime_jax.loading import conversion, model_directory
from dime_jax.models.checks import MAX_CHANNELS, check_integer
from dime_jax.training import checkpoints, inputs
from dime_jax.training.keys import update_keys
from dime_jax.training.method import Method, shuffled_method
from dime_jax.training.recipe import TrainingRecipe
from dime_jax.training.records import Log, draw_loss, draw_samples
from dime_jax.training.step import TrainState, initial_state, make_step

SNAPSHOTS = "snapshots"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to run; nothing here changes what training ends with.

    Attributes:
      log_every: updates per line of the log.
      save_every: updates between two saved states, a multiple of `log_every`; a kill costs no more than these.
      sample_every: updates between two sheets of samples, a multiple of `log_every`; 0 makes none.
      snapshot_every: updates between two models that are kept in WORKDIR/snapshots, a multiple of `log_every`; 0 keeps
        none but the last.
      num_samples: samples in a sheet.
      devices: to train on; all of all processes if None.
      silent: show no progress.
    """

    log_every: int = 100
    save_every: int = 1000
    sample_every: int = 0
    snapshot_every: int = 0
    num_samples: int = 16
    devices: Sequence[jax.Device] | None = None
    silent: bool = False

    def __post_init__(self) -> None:
        for name, least in (("log_every", 1), ("save_every", 1), ("sample_every", 0), ("snapshot_every", 0)):
            every = getattr(self, name)
            validate.check_at_least(every, least, name)
            if every % self.log_every:
                raise ValueError(f"{name} must be a multiple of log_every={self.log_every}, got {every}")


def train(
    workdir: str | os.PathLike[str],
    spec: models.ModelSpec,
    source: data.Source,
    members: np.ndarray,
    recipe: TrainingRecipe,
    *,
    method: Method | None = None,
    options: TrainingOptions | None = None,
    start: str | os.PathLike[str] | None = None,
    rank: int | None = None,
) -> pathlib.Path:
    """Train a network on the members among a source's images, or continue where an earlier call was stopped.

    Args:
      workdir: where everything goes.
      spec: the network, its schedule and the shape of an image.
      source: images.
      members: indices of the training images.
      recipe: how to train.
      method: see `Method`; plain training by default.
      options: how to run.
      start: a model directory, or a shipped model, of the same network: to start at its weights, not at fresh ones.
      rank: train an adapter of this rank for `start` (see `models.low_rank`), and leave its weights as they are.

    Returns:
      The model directory, with the averaged weights; or the file of the adapter, with the average of its factors.

    Raises:
      ValueError: in one line, if inputs do not fit, if the workdir holds another run, if a state cannot be read or
        written, or if the loss stops being finite. States saved before stay.
    """
    workdir, options = pathlib.Path(workdir), options or TrainingOptions()
    members = np.asarray(members)
    validate.check_not_empty(members, "members")
    model = _start(spec, start, rank)
    method = method or shuffled_method(recipe, len(members))
    mesh = data_mesh(options.devices)
    if len(method.draws[0]) % mesh.size:
        raise ValueError(f"batch_size must be divisible by {mesh.size}, the devices, got {len(method.draws[0])}")
    batches = inputs.read_examples(method.draws, source, members, spec)
    facts = {
        "spec": spec.to_json(),
        "recipe": recipe.identity(),
        "method": method.name,
        "images": {"count": len(members), "fingerprint": data.fingerprint(source, members)},
        "start": None if model is None else model.fingerprint,
        "rank": rank,
    }
    result = workdir / ("model" if rank is None else "adapter.safetensors")
    directory = _begin(workdir, facts, result)
    began = None if model is None else model.variables
    state = jax.device_put(initial_state(spec, recipe, method.optimizer, began, rank), replicated(mesh))
    base = None if rank is None else jax.device_put(began, replicated(mesh))
    update = make_step(spec, recipe, method, mesh, base)
    is_main = jax.process_index() == 0
    with checkpoints.TrainingCheckpoints(directory / "state") as states:
        if states.latest_step is not None:
            state, position = states.restore(state)
            batches.set_state(position)
        first = int(state.step)
        if first > recipe.steps:
            raise ValueError(f"steps must be >= {first}, the updates of the run in {workdir}, got {recipe.steps}")
        with Log(directory, first, recipe.steps, len(method.draws[0]), options.silent) as log:
            for number in range(first + 1, recipe.steps + 1):
                examples = inputs.on_devices(next(batches), mesh)
                state, loss = update(state, examples, update_keys(recipe.seed, number))
                log.add(loss)
                if number % options.log_every == 0 or number == recipe.steps:
                    log.write(number)
                if number % options.save_every == 0 or number == recipe.steps:
                    states.save(number, state, batches.get_state())
                if is_main and options.sample_every and number % options.sample_every == 0:
                    sheet = directory / f"samples_{number:06d}.png"
                    draw_samples(sheet, spec, state.variables(base), options.num_samples)
                if is_main and options.snapshot_every and number % options.snapshot_every == 0:
                    _write(workdir / SNAPSHOTS / f"{number}{result.suffix}", spec, state, facts, number)

    def finish() -> None:
        draw_loss(directory)
        _write(result, spec, state, facts, recipe.steps)

    on_first_process(finish)
    return result


def _start(
    spec: models.ModelSpec, start: str | os.PathLike[str] | None, rank: int | None
) -> model_directory.StoredModel | None:
    """The model to start at; None if fresh weights are trained."""
    if spec.autoencoder is not None:
        raise ValueError("only networks on images are trained here, got one on latents")
    if rank is not None:
        check_integer(rank, 1, MAX_CHANNELS, "rank")
    if start is None and rank is not None:
        raise ValueError(f"rank={rank} needs start: the model that the adapter is for")
    if start is None:
        return None
    model = model_directory.read_model(model_directory.find_model(start))
    if model.spec != spec:
        changes = _changes(model.spec.to_json(), spec.to_json(), "spec")
        raise ValueError(f"the network must be that of {start}, from which it differs: {changes}")
    return model


def _begin(workdir: pathlib.Path, facts: JsonObject, result: pathlib.Path) -> pathlib.Path:
    """The directory of the run, with what is trained written down; another run in it is refused."""
    directory = workdir / "train"
    path = directory / "run.json"
    if path.exists():
        there = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name in facts if there.get(name) != facts[name]]
        if different:
            changes = ", ".join(_changes(there.get(name), facts[name], name) for name in different)
            raise ValueError(f"{directory} holds another run, which differs: {changes}")
    elif result.exists():
        raise ValueError(f"{result} exists already and was not trained here: choose a new workdir")
    elif jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, (json.dumps(facts, indent=1) + "\n").encode())
    return directory


def _changes(there: object, here: object, name: str) -> str:
    """What differs between two JSON values, as "name there -> here" for each leaf."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        return ", ".join(_changes(there.get(key), here.get(key), f"{name}.{key}") for key in keys)
    return f"{name} {there} -> {here}"


def _write(place: pathlib.Path, spec: models.ModelSpec, state: TrainState, facts: JsonObject, steps: int) -> None:
    """Write a model directory, or the file of an adapter; one of this run with fewer updates is replaced."""
    if facts["rank"] is not None:
        conversion.save_adapter(place, spec, jax.device_get(state.ema), facts["start"])
        return
    variables = state.variables()
    if place.exists():
        if model_directory.read_spec_file(place)["fingerprint"] == model_directory.fingerprint(variables, spec):
            return
        shutil.rmtree(place)
    said = {name: facts[name] for name in ("recipe", "method", "images")}
    started = {} if facts["start"] is None else {"start": facts["start"]}
    model_directory.save_model(place, spec, variables, {**said, **started, "steps": steps, "weights": "ema"})
