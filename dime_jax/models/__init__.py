"""Diffusion U-Nets in flax.linen: the only place that imports flax."""

from dime_jax.models.build import build, denoise, init, param_shapes
from dime_jax.models.ddpm_unet import DdpmUnet
from dime_jax.models.guided_unet import GuidedUnet
from dime_jax.models.latent_spec import (
    AutoencoderSpec,
    ClipTextSpec,
    ConditionalUnetSpec,
    DitSpec,
    LatentModelSpec,
)
from dime_jax.models.size import num_values
from dime_jax.models.spec import DdpmUnetSpec, GuidedUnetSpec, ModelSpec, ScheduleSpec

__all__ = [
    "AutoencoderSpec",
    "ClipTextSpec",
    "ConditionalUnetSpec",
    "DdpmUnet",
    "DdpmUnetSpec",
    "DitSpec",
    "GuidedUnet",
    "GuidedUnetSpec",
    "LatentModelSpec",
    "ModelSpec",
    "ScheduleSpec",
    "build",
    "denoise",
    "init",
    "num_values",
    "param_shapes",
]
