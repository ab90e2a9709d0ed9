"""Opening the model of an audit, whatever it is given as; what cannot be audited is refused with the reason."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from dime_jax.checkpoints import load_denoiser
from dime_jax.denoiser import Denoiser

_LATENT_PARTS = {"vae", "vqvae", "movq", "first_stage_model"}
_TEXT_PARTS = {"text_encoder", "text_encoder_2", "tokenizer", "prior", "cond_stage_model"}
_TEXT_NETWORKS = {"UNet2DConditionModel"}


class OpenedModel(NamedTuple):
    """A model, and where it came from, in words."""

    denoiser: Denoiser
    origin: str


def open_model(model: str | os.PathLike[str] | Denoiser, cache: pathlib.Path) -> OpenedModel:
    """Open a Denoiser, a model directory, a shipped model by its name, or a checkpoint or diffusers folder.

    The last are converted to `cache`/model-HASH, with a hash of their bytes: once, and again if they change.

    Raises:
      ValueError: for what is none of these, and for latent-diffusion and text-to-image models.
    """
    if isinstance(model, Denoiser):
        return OpenedModel(model, "a Python object")
    path = pathlib.Path(model)
    if not path.exists():
        return OpenedModel(load_denoiser(model), "shipped with dime_jax")
    if (path / "spec.json").is_file():
        return OpenedModel(load_denoiser(path), "a model directory")
    refuse_unsupported(path)
    from checkpoints_convert.convert import convert

    directory = cache / f"model-{_content_hash(path)[:12]}"
    if directory.exists():
        return OpenedModel(load_denoiser(directory), f"converted from {path.name} before, kept in {directory.name}")
    cache.mkdir(parents=True, exist_ok=True)
    convert(path, directory)
    return OpenedModel(load_denoiser(directory), f"converted from {path.name}, kept in {directory.name}")


def refuse_unsupported(path: pathlib.Path) -> None:
    """Say why, if `path` holds a latent-diffusion or text-to-image model."""
    parts = _parts(path)
    latent, text = parts & _LATENT_PARTS, parts & (_TEXT_PARTS | _TEXT_NETWORKS)
    if latent:
        raise ValueError(
            f"{path} is not supported, because it is a latent-diffusion model (it holds {min(latent)}): its network "
            "predicts the noise of an autoencoder's latents, and these attacks compare noise on pixels"
        )
    if text:
        raise ValueError(
            f"{path} is not supported, because it is a text-to-image model (it holds {min(text)}): its network needs "
            "the caption that an image was trained with, and these attacks have none"
        )


def _parts(path: pathlib.Path) -> set[str]:
    """Names of a pipeline's parts and classes, or the first parts of a checkpoint's tensor names."""
    from checkpoints_convert import diffusers

    if path.is_file():
        contents = diffusers.read_weights(path)
        state = contents.get("state_dict", contents) if isinstance(contents, dict) else {}
        return {str(name).partition(".")[0] for name in state}
    index, parts = path / "model_index.json", {entry.name for entry in path.iterdir()}
    configs = [file for file in (index, path / "config.json", path / "unet" / "config.json") if file.is_file()]
    for file in configs:
        config = diffusers.read_json(file)
        parts.add(str(config.get("_class_name")))
        if file == index:
            parts.update(name for name, value in config.items() if _is_part(value))
    return parts


def _is_part(value: Any) -> bool:
    """Whether an entry of model_index.json names a part that is there: [library, class], not [null, null]."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _content_hash(path: pathlib.Path) -> str:
    """SHA-256 over the names and bytes of a checkpoint file, or of everything in a folder."""
    digest = hashlib.sha256()
    for file in _files(path):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(json.dumps([file.relative_to(path.parent).as_posix(), content]).encode())
    return digest.hexdigest()


def _files(path: pathlib.Path) -> Iterable[pathlib.Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
