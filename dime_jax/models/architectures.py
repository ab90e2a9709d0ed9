"""The table of architectures: a new one is a file with its spec and its network, and an entry here."""

from collections.abc import Callable

import flax.linen as nn

from dime_jax.models.autoencoder import Autoencoder, AutoencoderSpec
from dime_jax.models.clip_text import ClipText, ClipTextSpec
from dime_jax.models.conditional_unet import ConditionalUnet, ConditionalUnetSpec
from dime_jax.models.ddpm_unet import DdpmUnet, DdpmUnetSpec
from dime_jax.models.dit import Dit, DitSpec
from dime_jax.models.guided_unet import GuidedUnet, GuidedUnetSpec
from dime_jax.models.network_spec import NetworkSpec

NETWORKS: dict[type[NetworkSpec], Callable[..., nn.Module]] = {
    DdpmUnetSpec: DdpmUnet,
    GuidedUnetSpec: GuidedUnet,
    ConditionalUnetSpec: ConditionalUnet,
    DitSpec: Dit,
    AutoencoderSpec: Autoencoder,
    ClipTextSpec: ClipText,
}
