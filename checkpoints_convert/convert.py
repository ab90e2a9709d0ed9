"""The conversion itself: a checkpoint in, a model directory out."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from checkpoints_convert import ddim, diffusers, guided, mapping, secmi, torch_file
from checkpoints_convert.mapping import Dialect, StateDict
from dime_jax import _validate, checkpoints
from dime_jax.models import ModelSpec, ScheduleSpec

CONVERTER_VERSION = 1
DEFAULT_IMAGE_SIZE = 32
DIALECTS = {module.DIALECT.name: module.DIALECT for module in (secmi, ddim, diffusers, guided)}

_PROGRESS_BYTES = 2**28


class Options(NamedTuple):
    """What the user may say about a checkpoint; None: what the checkpoint says, or the default.

    Attributes:
      dialect: one of `DIALECTS`, or "auto".
      weights: "ema" or "raw"; None takes the EMA if there is one.
      model_flags: JSON file with the constructor arguments of a guided-diffusion network.
      image_size: height and width of the images.
      schedule: "linear", "scaled_linear" or "cosine", optionally with its numbers ("linear:1000:0.0001:0.02",
        "cosine:1000"), or a JSON file with the list of betas.
    """

    dialect: str = "auto"
    weights: str | None = None
    model_flags: str | os.PathLike[str] | None = None
    image_size: int | None = None
    schedule: str | None = None


_NO_OPTIONS = Options()


class Checkpoint(NamedTuple):
    """A checkpoint, opened: tensors by name, how they are called, and the model they make."""

    file: Path
    state: StateDict
    dialect: Dialect
    weights: str
    spec: ModelSpec
    setting: str | None = None


def convert(source: str | os.PathLike[str], output: str | os.PathLike[str], options: Options = _NO_OPTIONS) -> Path:
    """Convert a checkpoint file or a diffusers folder to a model directory, completely or not at all.

    Raises:
      ValueError: in one line, for anything that cannot be converted faithfully; nothing is written then.
    """
    source, output = Path(source), Path(output)
    if output.exists() or output.is_symlink():
        raise ValueError(f"output {output} exists already; nothing was written")
    checkpoint = open_checkpoint(source, options)
    table = mapping.name_table(checkpoint.dialect, checkpoint.spec.architecture)
    size = checkpoint.file.stat().st_size
    try:
        variables = mapping.to_variables(checkpoint.state, table, _progress("Converting", size))
    except ValueError as error:
        raise ValueError(f"{checkpoint.file}: {error}") from None
    metadata = {
        "source": checkpoint.file.name,
        "sha256": _sha256(checkpoint.file),
        "dialect": checkpoint.dialect.name,
        "setting": checkpoint.setting,
        "weights": checkpoint.weights,
        "converter_version": CONVERTER_VERSION,
    }
    return checkpoints.save_model(output, checkpoint.spec, variables, metadata)


def describe(directory: str | os.PathLike[str]) -> str:
    """A few lines on a model directory, for people."""
    contents = checkpoints.read_spec_file(directory)
    architecture = contents["spec"]["architecture"]
    facts = contents["metadata"] | {
        "architecture": architecture["kind"],
        "image_shape": contents["spec"]["image_shape"],
        "num_classes": architecture["num_classes"],
        "fingerprint": contents["fingerprint"],
    }
    lines = [f"  {name}: {value}" for name, value in facts.items() if value is not None]
    return "\n".join([f"wrote {directory}", *lines])


def open_checkpoint(source: Path, options: Options) -> Checkpoint:
    """Read a checkpoint's structure; of the tensors, only names, shapes and types."""
    _validate.check_choice(options.dialect, ["auto", *DIALECTS], "dialect")
    if options.weights is not None:
        _validate.check_choice(options.weights, ["ema", "raw"], "weights")
    if source.is_dir():
        return _open_folder(source, options)
    if not source.is_file():
        raise ValueError(f"no file or folder {source}")
    try:
        return _open_file(source, options)
    except torch_file.CheckpointError:
        raise  # names the file already
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _open_folder(folder: Path, options: Options) -> Checkpoint:
    if options.dialect not in ("auto", "diffusers"):
        raise ValueError(f"{folder} is a folder: expected the dialect diffusers, got {options.dialect}")
    if options.model_flags is not None:
        raise ValueError(f"{folder} has its own config: expected no --model_flags")
    found = diffusers.read_folder(folder, options.weights)
    state = _state_dict(diffusers.read_weights(found.weights_file))
    if state is None:
        raise ValueError(f"{found.weights_file}: expected a state dict: tensors by name")
    is_old = any(name.endswith(".proj_attn.weight") for name in state)
    spec = ModelSpec(
        architecture=found.architecture,
        image_shape=_image_shape(options.image_size or found.image_size, found.architecture.image_channels),
        schedule=_schedule(options.schedule) or found.schedule or ScheduleSpec(),
        prediction=found.prediction,
    )
    dialect = diffusers.OLD_DIALECT if is_old else diffusers.DIALECT
    return Checkpoint(found.weights_file, state, dialect, found.weights, spec)


def _open_file(file: Path, options: Options) -> Checkpoint:
    contents = diffusers.read_weights(file)
    state, weights = _choose_weights(contents, options.weights)
    dialect = _recognise(state) if options.dialect == "auto" else DIALECTS[options.dialect]
    if dialect.name == "diffusers":
        raise ValueError("diffusers weights without their config: expected the folder that holds config.json")
    if options.model_flags is not None and dialect.name != "guided":
        raise ValueError(f"--model_flags is for guided-diffusion checkpoints; this one's dialect is {dialect.name}")
    schedule = _schedule(options.schedule)
    if dialect.name == "guided":
        setting = _guided_setting(state, options)
        shape = _image_shape(options.image_size or setting.image_size, setting.architecture.image_channels)
        spec = ModelSpec(architecture=setting.architecture, image_shape=shape, schedule=schedule or setting.schedule)
        return Checkpoint(file, state, dialect, weights, spec, setting.name)
    architecture = (secmi if dialect.name == "secmi" else ddim).infer_spec(state)
    shape = _image_shape(options.image_size or _sample_size(contents), architecture.image_channels)
    steps = architecture.time_table_steps or ScheduleSpec.num_steps
    spec = ModelSpec(architecture=architecture, image_shape=shape, schedule=schedule or ScheduleSpec(num_steps=steps))
    return Checkpoint(file, state, dialect, weights, spec)


def _guided_setting(state: StateDict, options: Options) -> guided.Setting:
    if options.model_flags is None:
        return guided.recognise(state)
    flags_file = Path(options.model_flags)
    if not flags_file.is_file():
        raise ValueError(f"no file {flags_file} for --model_flags")
    return guided.setting_from_flags(diffusers.read_json(flags_file))


def _choose_weights(contents: Any, wanted: str | None) -> tuple[StateDict, str]:
    """One state dict out of a checkpoint, and whether it is the EMA ("ema"), not ("raw"), or the file's only one."""
    found = _all_weights(contents)
    if not found:
        raise ValueError("no weights: expected a state dict, a dict with ema_model or net_model, or ddim's list")
    if set(found) == {"only"}:
        if wanted is not None:
            raise ValueError(f"holds one set of weights, not marked as EMA or raw: expected no --weights={wanted}")
        return found["only"], "only"
    which = wanted or ("ema" if "ema" in found else "raw")
    if which not in found:
        raise ValueError(f"has no {which} weights, only {', '.join(found)}")
    return found[which], which


def _all_weights(contents: Any) -> dict[str, StateDict]:
    if isinstance(contents, (list, tuple)):  # ddim: [model, optimiser, epoch, step] and, if it was kept, the EMA
        named = {"raw": contents[0] if contents else None, "ema": contents[4] if len(contents) == 5 else None}
    elif not isinstance(contents, Mapping):
        named = {}
    elif _state_dict(contents) is not None:
        named = {"only": contents}
    else:  # pytorch-ddpm: net_model; dime-mia: model
        named = {"raw": contents.get("net_model", contents.get("model")), "ema": contents.get("ema_model")}
    states = {which: _state_dict(state) for which, state in named.items()}
    return {which: state for which, state in states.items() if state is not None}


def _state_dict(contents: Any) -> StateDict | None:
    """`contents` if it is tensors by name, without the prefix of torch's DataParallel; else None."""
    if not isinstance(contents, Mapping) or not contents:
        return None
    if not all(isinstance(name, str) and isinstance(tensor, np.ndarray) for name, tensor in contents.items()):
        return None
    if all(name.startswith("module.") for name in contents):
        return {name.removeprefix("module."): tensor for name, tensor in contents.items()}
    return contents


def _recognise(state: StateDict) -> Dialect:
    """The dialect whose names most tensors have."""

    def count(dialect: Dialect) -> int:
        return sum(name.startswith(dialect.prefixes) for name in state)

    best = max(DIALECTS.values(), key=count)
    if 2 * count(best) <= len(state):
        names = ", ".join(sorted(state)[:3])
        raise ValueError(f"unknown network: expected tensors named as in {', '.join(DIALECTS)}, got {names}, …")
    return best


def _sample_size(contents: Any) -> tuple[int, int] | None:
    """Height and width of x_T, the noise from which pytorch-ddpm draws its sample sheet."""
    x_t = contents.get("x_T") if isinstance(contents, Mapping) else None
    return x_t.shape[2:] if isinstance(x_t, np.ndarray) and x_t.ndim == 4 else None


def _image_shape(size: int | tuple[int, int] | None, channels: int) -> tuple[int, int, int]:
    height, width = size if isinstance(size, tuple) else (size or DEFAULT_IMAGE_SIZE,) * 2
    return height, width, channels


def _schedule(text: str | None) -> ScheduleSpec | None:
    """The schedule of `--schedule`; see `Options`."""
    if text is None:
        return None
    if text.endswith(".json"):
        if not os.path.isfile(text):
            raise ValueError(f"no file {text} for --schedule")
        try:
            betas = json.loads(Path(text).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            betas = None
        if not isinstance(betas, list):
            raise ValueError(f"{text}: expected a JSON list of betas")
        return ScheduleSpec(kind="betas", num_steps=len(betas), betas=tuple(betas))
    kind, *values = text.split(":")
    _validate.check_choice(kind, ["linear", "scaled_linear", "cosine"], "schedule")
    try:
        if not values:
            return ScheduleSpec(kind=kind)
        if kind == "cosine":
            (steps,) = values
            return ScheduleSpec(kind=kind, num_steps=int(steps))
        steps, start, end = values
        return ScheduleSpec(kind=kind, num_steps=int(steps), beta_start=float(start), beta_end=float(end))
    except ValueError as error:
        raise ValueError(f"--schedule={text}: {error}") from None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _progress(title: str, size: int) -> Callable[[list[Any]], Iterable[Any]]:
    """A progress bar on stderr for large files, nothing for small ones."""
    console = Console(stderr=True)
    return lambda items: track(items, title, console=console, transient=True, disable=size < _PROGRESS_BYTES)
