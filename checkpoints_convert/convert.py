"""The conversion itself: a checkpoint in, a model directory out."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from checkpoints_convert import ddim, diffusers, guided, mapping, secmi, weights_file
from checkpoints_convert.checkpoint import Checkpoint, check_options
from checkpoints_convert.mapping import Dialect, StateDict
from checkpoints_convert.options import NO_OPTIONS, ConversionOptions
from checkpoints_convert.unsupported import refuse_unsupported
from checkpoints_convert.weights_file import Weights, about
from dime_jax import checkpoints, models

CONVERTER_VERSION = 2
DIALECTS = {module.DIALECT.name: module.DIALECT for module in (secmi, ddim, diffusers, guided)}

_OPEN_WEIGHTS: dict[str, Callable[[Weights, ConversionOptions], Checkpoint]] = {
    module.DIALECT.name: module.open_weights for module in (secmi, ddim, guided)
}
_PROGRESS_BYTES = 2**28


def convert(
    source: str | os.PathLike[str], output: str | os.PathLike[str], options: ConversionOptions = NO_OPTIONS
) -> Path:
    """Convert a checkpoint file or a diffusers folder to a model directory, completely or not at all.

    Raises:
      ValueError: in one line, for anything that cannot be converted faithfully; nothing is written then.
    """
    source, output = Path(source), Path(output)
    if output.exists() or output.is_symlink():
        raise ValueError(f"output {output} exists already; nothing was written")
    checkpoint = open_checkpoint(source, options)
    with about(checkpoint.file):
        variables = _variables(checkpoint)
    metadata = {
        "source": checkpoint.file.name,
        "sha256": _sha256(checkpoint.file),
        "dialect": checkpoint.dialect.name,
        "setting": checkpoint.setting,
        "weights": checkpoint.weights,
        "facts": list(checkpoint.facts),
        "converter_version": CONVERTER_VERSION,
    }
    return checkpoints.save_model(output, checkpoint.spec, variables, metadata)


def describe(directory: str | os.PathLike[str]) -> str:
    """A few lines on a model directory, for people."""
    contents = checkpoints.read_spec_file(directory)
    architecture, metadata = contents["spec"]["architecture"], dict(contents["metadata"])
    facts = metadata.pop("facts", [])
    values = metadata | {
        "architecture": architecture["kind"],
        "image_shape": contents["spec"]["image_shape"],
        "num_classes": architecture["num_classes"],
        "fingerprint": contents["fingerprint"],
    }
    lines = [f"{name}: {value}" for name, value in values.items() if value is not None]
    return "\n  ".join([f"wrote {directory}", *lines, *facts])


def open_checkpoint(source: Path, options: ConversionOptions = NO_OPTIONS) -> Checkpoint:
    """Read a checkpoint's structure; of the tensors, only names, shapes and types."""
    check_options(options, DIALECTS)
    if source.is_dir():
        return diffusers.open_folder(source, options)
    if not source.is_file():
        raise ValueError(f"no file or folder {source}")
    contents = weights_file.read(source)
    refuse_unsupported(source, (name.partition(".")[0] for name in weights_file.tensor_names(contents)))
    with about(source):
        weights = weights_file.choose(source, contents, options.weights)
        dialect = _recognise(weights.state) if options.dialect == "auto" else DIALECTS[options.dialect]
        if dialect.name not in _OPEN_WEIGHTS:
            raise ValueError("diffusers weights without their config: expected the folder that holds config.json")
        if options.model_flags is not None and dialect is not guided.DIALECT:
            raise ValueError(f"--model_flags is for guided-diffusion checkpoints; this one's dialect is {dialect.name}")
        return _OPEN_WEIGHTS[dialect.name](weights, options)


def _recognise(state: StateDict) -> Dialect:
    """The dialect whose names most tensors have."""

    def count(dialect: Dialect) -> int:
        return sum(name.startswith(dialect.prefixes) for name in state)

    best = max(DIALECTS.values(), key=count)
    if 2 * count(best) <= len(state):
        names = ", ".join(sorted(state)[:3])
        raise ValueError(f"unknown network: expected tensors named as in {', '.join(DIALECTS)}, got {names}, …")
    return best


def _variables(checkpoint: Checkpoint) -> dict[str, Any]:
    """The network's variables; a network far larger than what the file holds is refused before it is traced."""
    needed = models.num_values(checkpoint.spec.architecture)
    held = sum(tensor.size for tensor in checkpoint.state.values())
    if needed > 2 * held:
        raise ValueError(f"expected the {needed:,} values of the network that it describes, got {held:,}")
    table = mapping.name_table(checkpoint.dialect, checkpoint.spec.architecture)
    return mapping.to_variables(checkpoint.state, table, _progress("Converting", checkpoint.file.stat().st_size))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _progress(title: str, size: int) -> Callable[[list[Any]], Iterable[Any]]:
    """A progress bar on stderr for large files, nothing for small ones."""
    console = Console(stderr=True)
    return lambda items: track(items, title, console=console, transient=True, disable=size < _PROGRESS_BYTES)
