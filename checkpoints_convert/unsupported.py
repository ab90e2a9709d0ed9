"""Models that the attacks say nothing about, told by the names of their parts and refused with the reason."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpoints_convert.json_file import read_json

_LATENT_PARTS = {"vae", "vqvae", "movq", "first_stage_model"}
_TEXT_PARTS = {"text_encoder", "text_encoder_2", "tokenizer", "prior", "cond_stage_model"}
_TEXT_NETWORKS = {"UNet2DConditionModel"}


def refuse_unsupported(source: Path, parts: Iterable[str]) -> None:
    """Say why, if these are parts of a latent-diffusion or text-to-image model.

    Args:
      source: the file or folder, for the error.
      parts: of `folder_parts`, or the first parts of a file's tensor names.
    """
    parts = set(parts)
    latent, text = parts & _LATENT_PARTS, parts & (_TEXT_PARTS | _TEXT_NETWORKS)
    if latent:
        raise ValueError(
            f"{source} is not supported, because it is a latent-diffusion model (it holds {min(latent)}): its network "
            "predicts the noise of an autoencoder's latents, and these attacks compare noise on pixels"
        )
    if text:
        raise ValueError(
            f"{source} is not supported, because it is a text-to-image model (it holds {min(text)}): its network needs "
            "the caption that an image was trained with, and these attacks have none"
        )


def folder_parts(folder: Path) -> set[str]:
    """What a diffusers folder holds, and the names and classes of the pipeline's parts."""
    index, parts = folder / "model_index.json", {entry.name for entry in folder.iterdir()}
    for file in (index, folder / "config.json", folder / "unet" / "config.json"):
        config = read_json(file) if file.is_file() else {}
        parts.add(str(config.get("_class_name")))
        if file == index:
            parts.update(name for name, value in config.items() if _is_part(value))
    return parts


def _is_part(value: Any) -> bool:
    """Whether an entry of model_index.json names a part that is there: [library, class], not [null, null]."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
