"""Refuse models that the attacks say nothing about, told by the names of their parts, with the reason."""

from collections.abc import Iterable
from pathlib import Path

_LATENT_PARTS = {"vae", "vqvae", "movq", "first_stage_model"}
_TEXT_PARTS = {"text_encoder", "text_encoder_2", "tokenizer", "prior", "cond_stage_model"}

# Pipelines by how the name of their class begins, and parts of pipelines: the first that fits tells the reason.
_OTHER_PIPELINES = {
    "StableDiffusionXL": "it is an SDXL model, whose network also takes the image's size and a second text embedding",
    "StableDiffusion3": "it is a Stable Diffusion 3 model, which is trained by flow matching and has no noise schedule",
    "Flux": "it is a Flux model, which is trained by flow matching and has no noise schedule",
    "StableDiffusionInpaint": "it is an inpainting model, whose network also takes a mask and the masked image",
    "StableDiffusionInstructPix2Pix": "it is an editing model, whose network also takes the image to edit",
    "StableDiffusionUpscale": "it is an upscaler, whose network also takes the small image",
    "StableDiffusionLatentUpscale": "it is an upscaler, whose network also takes the small image",
    "StableUnCLIP": "it is an unCLIP model, whose network also takes an image embedding",
    "StableDiffusionControlNet": "it has a ControlNet, whose outputs are added inside the network",
    "StableDiffusionAdapter": "it has a T2I adapter, whose outputs are added inside the network",
    "StableDiffusionGLIGEN": "it is a GLIGEN model, whose network also takes boxes",
    "LatentConsistencyModel": "it is a consistency model, which predicts the end of a path and not the noise",
    "LDMTextToImage": "its text encoder is LDM's own BERT",
    "LDM": "its autoencoder is a VQ model",
}
_OTHER_PARTS = {
    "text_encoder_2": "it has a second text encoder, as SDXL does",
    "text_encoder_3": "it has a third text encoder, as Stable Diffusion 3 does",
    "image_encoder": "it has an image encoder (an IP-adapter or unCLIP): its network needs a picture as prompt",
    "controlnet": "it has a ControlNet, whose outputs are added inside the network",
    "adapter": "it has an adapter, whose outputs are added inside the network",
    "motion_adapter": "it makes videos",
    "prior": "it needs a prior",
    "vqvae": "its autoencoder is a VQ model",
    "movq": "its autoencoder is a VQ model",
    "bert": "its text encoder is LDM's own BERT",
}


def refuse_other_pipelines(source: Path, class_name: str, parts: Iterable[str]) -> None:
    """Refuse a pipeline that is not one of Stable Diffusion 1 or 2, or of DiT, and say why.

    Args:
      source: the folder, for the error.
      class_name: of the pipeline.
      parts: that it has.
    """
    reasons = [reason for start, reason in _OTHER_PIPELINES.items() if class_name.startswith(start)]
    reasons += [reason for part, reason in _OTHER_PARTS.items() if part in set(parts)]
    if reasons:
        raise ValueError(f"{source} is not supported, because {reasons[0]}")


def refuse_unsupported(path: Path, parts: Iterable[str]) -> None:
    """Refuse a single file with the tensors of a latent-diffusion or text-to-image model, and say why.

    Args:
      path: the file, for the error.
      parts: the first parts of its tensors' names.
    """
    found = set(parts) & (_LATENT_PARTS | _TEXT_PARTS)
    if found:
        raise ValueError(
            f"{path} is not supported, because it is a latent-diffusion model in a single file (it holds {min(found)}"
            "): name the diffusers folder of the same model"
        )


def refuse_parts_of_latent_models(folder: Path, parts: Iterable[str]) -> None:
    """Refuse a network on images that has parts of a latent or text-conditioned model beside it."""
    found = set(parts) & (_LATENT_PARTS | _TEXT_PARTS)
    if found:
        raise ValueError(f"{folder} is not supported, because its network takes images and it holds {min(found)} too")


def is_part(value: object) -> bool:
    """Whether an entry of model_index.json names a part that is there: [library, class], not [null, null]."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
