"""Strangers' files: checkpoints that become model directories, and adapters. The one module that calls their readers.

    CACHE/model-HASH/  a model directory that was converted, by the checkpoint's content, the options and the converter

Nothing slow is imported here before it is needed: `dime-jax --help` shows these options.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_convert.options import CONVERTING as CONVERTING
from checkpoints_convert.options import NO_OPTIONS as NO_OPTIONS
from checkpoints_convert.options import ConversionOptions as ConversionOptions
from dime_jax._util.files import file_digests, locked
from dime_jax._util.flags import changed, check_choices, documented, option

if TYPE_CHECKING:
    from checkpoints_convert.lora import Lora
    from dime_jax.loading.model_directory import StoredModel
    from dime_jax.models import ModelSpec
    from dime_jax.models.low_rank import Factors

LATENT = "LoRAs and latent models"
LATENTS, HELD = ("mean", "sample"), ("float32", "bfloat16", "float16")


@documented
@dataclasses.dataclass(frozen=True)
class UseOptions:
    """How a model is used, however it was converted; all but LoRAs are for latent models."""

    latent: str = option(
        "mean",
        "encode an image as the mean of its latents, or as a sample drawn by its id and the seed",
        LATENT,
        choices=LATENTS,
    )
    latent_weighting: str = option(
        "none",
        "pullback leaves the 40 per cent of latent coordinates that the decoder shows least out of the attacks' norms",
        LATENT,
        choices=("none", "pullback"),
    )
    hold: str = option(
        "float32", "the type of the weights in memory; computations are in float32", LATENT, choices=HELD
    )
    lora: Sequence[str | os.PathLike[str]] = option(
        (),
        "a LoRA to merge when the model is opened, or one that ships with dime_jax; may be given more than once",
        LATENT,
        "FILE",
    )
    lora_scale: Sequence[float] = option(
        (), "the strength of the LoRA, one number for each --lora (default: 1)", LATENT, type=float
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora", tuple(self.lora))
        object.__setattr__(self, "lora_scale", tuple(self.lora_scale))
        check_choices(self)
        if self.lora_scale and len(self.lora_scale) != len(self.lora):
            raise ValueError(f"give one --lora_scale for each --lora, got {len(self.lora_scale)} for {len(self.lora)}")

    def given(self) -> dict[str, str | int]:
        """Return the options that were given, by name, as JSON takes them; of several values, all in one text."""
        return {name: ", ".join(map(str, values)) for name, values in changed(self).items()}

    def loras(self) -> tuple["Lora", ...]:
        """Return the LoRAs to merge; a file that is not there is a ValueError."""
        from checkpoints_convert.lora import Lora
        from dime_jax.loading.model_directory import find_adapter

        scales = self.lora_scale or (1.0,) * len(self.lora)
        return tuple(Lora(find_adapter(file), scale) for file, scale in zip(self.lora, scales, strict=True))


NO_USE_OPTIONS = UseOptions()


def fetch(name: str) -> tuple[Path, str]:
    """Fetch a model from the Hub; returns its folder or single file, and the commit."""
    from checkpoints_convert import hub

    directory, commit, files = hub.fetch(name)
    return directory / files[0] if len(files) == 1 else directory, commit


def convert(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: ConversionOptions = NO_OPTIONS,
    digests: Mapping[Path, str] | None = None,
    about_to_read: Callable[["ModelSpec"], object] = lambda spec: None,
) -> Path:
    """Convert a checkpoint to a model directory, completely or not at all; returns the directory.

    Args:
      path: a checkpoint file or a diffusers folder.
      output: the model directory, which must not exist yet.
      options: what the checkpoint does not say itself.
      digests: `file_digests` of the path, if they are known.
      about_to_read: is called before the weights are read.

    Raises:
      ValueError: in one line, for anything that cannot be converted faithfully; nothing is written then.
    """
    from checkpoints_convert import convert as converter
    from dime_jax.loading.model_directory import save_model

    path, output = Path(path), Path(output)
    if output.exists() or output.is_symlink():
        raise ValueError(f"output {output} exists already; nothing was written")
    checkpoint = converter.open_checkpoint(path, options)
    about_to_read(checkpoint.spec)
    variables = checkpoint.variables()
    hashed = (digests or file_digests(checkpoint.file)).get(checkpoint.file) if checkpoint.file.is_file() else None
    metadata = {**checkpoint.provenance(), "sha256": hashed, "converter_version": converter.CONVERTER_VERSION}
    return save_model(output, checkpoint.spec, variables, metadata, checkpoint.tokenizer_files)


def convert_once(
    path: Path,
    cache: Path,
    options: ConversionOptions,
    about_to_read: Callable[["ModelSpec"], object],
) -> tuple[Path, bool]:
    """Return the model directory of a checkpoint in a cache, and whether it was there before.

    Processes that ask for the same model at the same time convert it once: the others wait.

    Args:
      path: a checkpoint file or a diffusers folder.
      cache: where converted models are kept; made if it is not there.
      options: what the checkpoint does not say itself.
      about_to_read: is called before the weights are read.
    """
    from checkpoints_convert import convert as converter

    digests = file_digests(path)
    content = [[file.relative_to(path.parent).as_posix(), digest] for file, digest in digests.items()]
    key = [content, options.identity(), converter.CONVERTER_VERSION]
    directory = cache / f"model-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}"
    if directory.exists():
        return directory, True
    with locked(cache, "converted model", f".{directory.name}.lock", wait=True):
        if directory.exists():
            return directory, True
        return convert(path, directory, options, digests, about_to_read), False


def with_adapters(model: "StoredModel", loras: Sequence["Lora"]) -> "StoredModel":
    """Return a model with adapters merged, and the fingerprint of what it is then; its own variables are used up.

    Raises:
      ValueError: in one line, if one is damaged or not for this model.
    """
    from checkpoints_convert import adapters
    from dime_jax.loading import model_directory

    if not loras:
        return model
    adapters.merge(model.variables, model.spec, model.fingerprint, loras)
    return model._replace(fingerprint=model_directory.fingerprint_of(model))


def save_adapter(
    file: str | os.PathLike[str], spec: "ModelSpec", adapter: Mapping[str, "Factors"], fingerprint: str
) -> Path:
    """Write an adapter as `--lora` takes it, completely or not at all; returns the file.

    Args:
      file: where, named .safetensors; one of the same content is left alone.
      spec: of the model that it was trained on.
      adapter: factors by the path of the kernel among the model's variables, see `models.low_rank`.
      fingerprint: of that model.
    """
    from checkpoints_convert import adapters

    adapters.save(Path(file), spec, adapter, fingerprint)
    return Path(file)
