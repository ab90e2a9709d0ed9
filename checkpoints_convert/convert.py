"""Opens checkpoints: a file or a folder in, the networks in it and all that is known about them out.

A new family of files is a module with its `DIALECT`, and an entry in `DIALECTS`.
"""

import dataclasses
from pathlib import Path

from checkpoints_convert import ddim, diffusers, dit, guided, secmi, weights_file
from checkpoints_convert.checkpoint import Checkpoint, Dialect, check_options
from checkpoints_convert.mapping import StateDict
from checkpoints_convert.options import NO_OPTIONS, ConversionOptions
from checkpoints_convert.unsupported import refuse_unsupported
from checkpoints_convert.weights_file import about

CONVERTER_VERSION = 2
DIALECTS = {module.DIALECT.name: module.DIALECT for module in (secmi, ddim, diffusers, guided, dit)}


def open_checkpoint(path: Path, options: ConversionOptions = NO_OPTIONS) -> Checkpoint:
    """Read the structure of a checkpoint file or a diffusers folder; its tensors are read when they are asked for.

    Args:
      path: of the file or folder.
      options: what the checkpoint does not say itself.

    Raises:
      ValueError: in one line, for anything that cannot be converted faithfully.
    """
    check_options(options, DIALECTS)
    if path.is_dir():
        checkpoint = diffusers.open_folder(path, options)
    elif path.is_file():
        checkpoint = _open_file(path, options)
    else:
        raise ValueError(f"no file or folder {path}")
    if checkpoint.spec.autoencoder is None and options.autoencoder is not None:
        raise ValueError(f"--autoencoder applies only to latent models; {path} is not one")
    return checkpoint


def _open_file(path: Path, options: ConversionOptions) -> Checkpoint:
    contents = weights_file.read(path)
    refuse_unsupported(path, (name.partition(".")[0] for name in weights_file.tensor_names(contents)))
    with about(path):
        weights = weights_file.choose(path, contents, options.weights)
        dialect = _recognise(weights.state) if options.dialect == "auto" else DIALECTS[options.dialect]
        if options.model_flags is not None and not dialect.takes_model_flags:
            raise ValueError(f"--model_flags is for guided-diffusion checkpoints; this one's dialect is {dialect.name}")
        return dataclasses.replace(dialect.open_weights(weights, options), dialect=dialect.name)


def _recognise(state: StateDict) -> Dialect:
    """The dialect whose names most tensors have."""

    def count(dialect: Dialect) -> int:
        return sum(name.startswith(dialect.prefixes) for name in state)

    best = max(DIALECTS.values(), key=count)
    if 2 * count(best) <= len(state):
        names = ", ".join(sorted(state)[:3])
        raise ValueError(f"unknown network: its tensors must be named as in {', '.join(DIALECTS)}, got {names}, …")
    return best
