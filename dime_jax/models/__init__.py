"""Diffusion models: specs and networks in flax.linen. A new architecture is one file and one entry in `NETWORKS`."""

from dime_jax.models.architectures import NETWORKS as NETWORKS
from dime_jax.models.autoencoder import AutoencoderSpec as AutoencoderSpec
from dime_jax.models.build import build as build
from dime_jax.models.build import count_values as count_values
from dime_jax.models.build import decode as decode
from dime_jax.models.build import denoise as denoise
from dime_jax.models.build import embed_tokens as embed_tokens
from dime_jax.models.build import encode as encode
from dime_jax.models.build import image_denoiser as image_denoiser
from dime_jax.models.build import init as init
from dime_jax.models.build import model_shapes as model_shapes
from dime_jax.models.build import param_shapes as param_shapes
from dime_jax.models.clip_text import ClipTextSpec as ClipTextSpec
from dime_jax.models.conditional_unet import ConditionalUnetSpec as ConditionalUnetSpec
from dime_jax.models.ddpm_unet import DdpmUnetSpec as DdpmUnetSpec
from dime_jax.models.dit import DitSpec as DitSpec
from dime_jax.models.guided_unet import GuidedUnetSpec as GuidedUnetSpec
from dime_jax.models.network_spec import DenoiserSpec as DenoiserSpec
from dime_jax.models.network_spec import NetworkSpec as NetworkSpec
from dime_jax.models.spec import ModelSpec as ModelSpec
from dime_jax.models.spec import ScheduleSpec as ScheduleSpec
