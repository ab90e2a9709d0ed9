"""The conversion itself: a checkpoint in, a model directory out."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import track

from checkpoints_convert import ddim, diffusers, guided, lora, mapping, pipeline_folder, secmi, weights_file
from checkpoints_convert.checkpoint import Checkpoint, check_options
from checkpoints_convert.mapping import Dialect, Entry, StateDict
from checkpoints_convert.options import NO_OPTIONS, ConversionOptions
from checkpoints_convert.unsupported import is_latent_folder, refuse_unsupported
from checkpoints_convert.weights_file import ChosenWeights, about
from dime_jax import models
from dime_jax._util.typing import PyTree
from dime_jax.loading import checkpoints
from dime_jax.models import ModelSpec

CONVERTER_VERSION = 2
_MODULES = (secmi, ddim, diffusers, guided)
DIALECTS = {module.DIALECT.name: module.DIALECT for module in _MODULES}
_OPEN_WEIGHTS: dict[str, Callable[[ChosenWeights, ConversionOptions], Checkpoint]] = {
    module.DIALECT.name: module.open_weights for module in _MODULES
}
_PROGRESS_BYTES = 2**28


def convert(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: ConversionOptions = NO_OPTIONS,
    about_to_read: Callable[[ModelSpec], object] = lambda spec: None,
) -> Path:
    """Convert a checkpoint to a model directory, completely or not at all; returns the directory.

    Args:
      path: a checkpoint file or a diffusers folder.
      output: the model directory, which must not exist yet.
      options: what the checkpoint does not say itself.
      about_to_read: is called before the weights of a latent model are read.

    Raises:
      ValueError: in one line, for anything that cannot be converted faithfully; nothing is written then.
    """
    output = Path(output)
    if output.exists() or output.is_symlink():
        raise ValueError(f"output {output} exists already; nothing was written")
    check_options(options, DIALECTS)
    if options.use():
        raise ValueError(f"expected --{min(options.use())} where the model is used, not where it is converted")
    if is_latent(Path(path)):
        pipeline = open_latent(Path(path), options)
        about_to_read(pipeline.spec)
        return pipeline_folder.convert_pipeline(pipeline, output)
    refuse_latent_options(Path(path), options)
    checkpoint = open_checkpoint(Path(path), options)
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
    spec, metadata = contents["spec"], dict(contents["metadata"])
    architecture = spec["architecture"] if "architecture" in spec else spec["denoiser"]
    facts = metadata.pop("facts", [])
    values = metadata | {
        "architecture": architecture["kind"],
        "image_shape": spec["image_shape"],
        "num_classes": architecture.get("num_classes"),
        "fingerprint": contents["fingerprint"],
    }
    lines = [f"{name}: {value}" for name, value in values.items() if value is not None]
    return "\n  ".join([f"wrote {directory}", *lines, *facts])


def is_latent(path: Path) -> bool:
    """Whether a folder or file is a latent or text-conditioned model, as far as its names tell."""
    if path.is_dir():
        return is_latent_folder(path)
    return path.is_file() and pipeline_folder.is_dit(weights_file.tensor_names(weights_file.read(path)))


def open_latent(path: Path, options: ConversionOptions = NO_OPTIONS) -> pipeline_folder.LatentPipeline:
    """Read the configs of a latent model, with the LoRAs of the options."""
    scales = options.lora_scale or (1.0,) * len(options.lora)
    loras = tuple(lora.Lora(file, scale) for file, scale in zip(options.lora, scales, strict=True))
    return pipeline_folder.open_pipeline(path, options, loras, options.autoencoder)


def refuse_latent_options(path: Path, options: ConversionOptions) -> None:
    """Refuse options that only latent models take."""
    given = [f"--{name}" for name in ("lora", "autoencoder") if name in options.given()]
    if given:
        raise ValueError(f"{path} is no latent model: expected no {given[0]}")


def open_checkpoint(path: Path, options: ConversionOptions = NO_OPTIONS) -> Checkpoint:
    """Read the structure of a checkpoint file or folder; of the tensors, only names, shapes and types."""
    check_options(options, DIALECTS)
    if path.is_dir():
        return diffusers.open_folder(path, options)
    if not path.is_file():
        raise ValueError(f"no file or folder {path}")
    contents = weights_file.read(path)
    refuse_unsupported(path, (name.partition(".")[0] for name in weights_file.tensor_names(contents)))
    with about(path):
        weights = weights_file.choose(path, contents, options.weights)
        dialect = _recognise(weights.state) if options.dialect == "auto" else DIALECTS[options.dialect]
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


def _variables(checkpoint: Checkpoint) -> PyTree:
    """The network's variables; a network far larger than what the file holds is refused before it is made."""
    architecture = checkpoint.spec.denoiser
    assert isinstance(architecture, models.DdpmUnetSpec | models.GuidedUnetSpec)
    needed = models.count_values(models.param_shapes(architecture))
    held = sum(tensor.size for tensor in checkpoint.state.values())
    if needed > 2 * held:
        raise ValueError(f"expected the {needed:,} values of the network that it describes, got {held:,}")
    table = mapping.name_table(checkpoint.dialect, architecture)
    return mapping.to_variables(checkpoint.state, table, _progress("Converting", checkpoint.file.stat().st_size))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _progress(title: str, size: int) -> Callable[[list[Entry]], Iterable[Entry]]:
    """A progress bar on stderr for large files, nothing for small ones."""
    console = Console(stderr=True)
    return lambda items: track(items, title, console=console, transient=True, disable=size < _PROGRESS_BYTES)
