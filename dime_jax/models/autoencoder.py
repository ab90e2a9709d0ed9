"""The autoencoder of latent diffusion in flax: images to the moments of a latent, and latents to images.

See `AutoencoderSpec`.
"""

import dataclasses
from typing import Annotated, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models import layers
from dime_jax.models.checks import Blocks, Channels, FewChannels, Range, check_levels, check_norm_groups
from dime_jax.models.layers import GroupNorm, conv3x3, dense
from dime_jax.models.network_spec import NetworkSpec, floats

_NORM_EPS = 1e-6
_LOG_VARIANCE = (-30.0, 20.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoencoderSpec(NetworkSpec):
    """The autoencoder of latent diffusion (diffusers' AutoencoderKL); the defaults are those of Stable Diffusion.

    A latent is (mean of the posterior - shift_factor) * scaling_factor.

    Attributes:
      image_channels: channels of an image.
      latent_channels: channels of a latent.
      level_channels: widths; every level but the last halves the resolution.
      num_res_blocks: in a level of the encoder; the decoder has one more.
      middle_attention: whether the middle has attention.
      quant_conv: whether a 1×1 convolution follows the encoder.
      post_quant_conv: whether one precedes the decoder.
      norm_groups: groups of every GroupNorm; their eps is 1e-6.
      scaling_factor: see above.
      shift_factor: see above.
    """

    kind: ClassVar[str] = "autoencoder"

    image_channels: FewChannels = 3
    latent_channels: FewChannels = 4
    level_channels: tuple[Channels, ...] = (128, 256, 512, 512)
    num_res_blocks: Blocks = 2
    middle_attention: bool = True
    quant_conv: bool = True
    post_quant_conv: bool = True
    norm_groups: Channels = 32
    scaling_factor: Annotated[float, Range(1e-6, 1e6)] = 0.18215
    shift_factor: Annotated[float, Range(-1e6, 1e6)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.level_channels, self.num_res_blocks)
        check_norm_groups(self.norm_groups, *self.level_channels)

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Images of one latent."""
        return (floats(self.reduction, self.reduction, self.image_channels),)

    @property
    def reduction(self) -> int:
        """How many pixels in a row make one latent."""
        return 2 ** (len(self.level_channels) - 1)


class AutoencoderBlock(nn.Module):
    """x + conv(silu(GN(conv(silu(GN(x)))))), with a 1×1 shortcut where the width changes."""

    channels: int
    groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Block over x [B, H, W, C]."""
        h = nn.silu(GroupNorm(self.groups, _NORM_EPS, name="norm_1")(x))
        h = conv3x3(self.channels, "conv_1", jnp.float32)(h)
        h = nn.silu(GroupNorm(self.groups, _NORM_EPS, name="norm_2")(h))
        h = conv3x3(self.channels, "conv_2", jnp.float32)(h)
        return layers.add_residual(x, h)


class AutoencoderAttention(nn.Module):
    """x + out(softmax(q kᵀ / √C) v), with q, k, v three maps of GN(x) and one head."""

    groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Attend over the H·W positions of x [B, H, W, C]."""
        batch, height, width, channels = x.shape
        h = GroupNorm(self.groups, _NORM_EPS, name="norm")(x).reshape(batch, height * width, channels)
        h = layers.attend_bounded(*layers.query_key_value(h, h, channels, heads=1)).reshape(x.shape)
        return x + dense(channels, name="out")(h)


class Middle(nn.Module):
    """Two residual blocks around attention."""

    spec: AutoencoderSpec

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        """Blocks over h [B, H, W, C]."""
        groups = self.spec.norm_groups
        h = AutoencoderBlock(h.shape[-1], groups, name="block_0")(h)
        if self.spec.middle_attention:
            h = AutoencoderAttention(groups, name="attention")(h)
        return AutoencoderBlock(h.shape[-1], groups, name="block_1")(h)


class Encoder(nn.Module):
    """Images [B, H, W, C] to features [B, H / r, W / r, 2 latent_channels]."""

    spec: AutoencoderSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Encode images on the [-1, 1] scale."""
        spec = self.spec
        h = conv3x3(spec.level_channels[0], "conv_in", jnp.float32)(x)
        for level, channels in enumerate(spec.level_channels):
            for block in range(spec.num_res_blocks):
                h = AutoencoderBlock(channels, spec.norm_groups, name=f"down_{level}_block_{block}")(h)
            if level != len(spec.level_channels) - 1:
                padding = ((0, 1), (0, 1))
                h = conv3x3(channels, f"down_{level}_downsample", jnp.float32, strides=2, padding=padding)(h)
        h = Middle(spec, name="middle")(h)
        h = nn.silu(GroupNorm(spec.norm_groups, _NORM_EPS, name="norm_out")(h))
        return conv3x3(2 * spec.latent_channels, "conv_out", jnp.float32)(h)


class Decoder(nn.Module):
    """Latents [B, h, w, latent_channels] to images [B, r h, r w, C]."""

    spec: AutoencoderSpec

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        """Decode latents."""
        spec = self.spec
        h = conv3x3(spec.level_channels[-1], "conv_in", jnp.float32)(z)
        h = Middle(spec, name="middle")(h)
        for level, channels in reversed(list(enumerate(spec.level_channels))):
            for block in range(spec.num_res_blocks + 1):
                h = AutoencoderBlock(channels, spec.norm_groups, name=f"up_{level}_block_{block}")(h)
            if level:
                h = layers.upsample_conv3x3(channels, f"up_{level}_upsample", jnp.float32)(h)
        h = nn.silu(GroupNorm(spec.norm_groups, _NORM_EPS, name="norm_out")(h))
        return conv3x3(spec.image_channels, "conv_out", jnp.float32)(h)


class Autoencoder(nn.Module):
    """Encoder and decoder; each works without the other's variables (`apply(..., method="encode")`)."""

    spec: AutoencoderSpec

    def setup(self) -> None:
        """Name the two halves."""
        spec = self.spec
        self.encoder, self.decoder = Encoder(spec), Decoder(spec)
        if spec.quant_conv:
            self.quant_conv = dense(2 * spec.latent_channels)
        if spec.post_quant_conv:
            self.post_quant_conv = dense(spec.latent_channels)

    def encode(self, images: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """Latents [B, h, w, latent_channels] of images on the [-1, 1] scale: (z - shift_factor) * scaling_factor.

        z is the posterior's mean, or mean + std * noise if standard normal noise of the latents' shape is given.
        """
        h = self.encoder(images)
        z, log_variance = jnp.split(self.quant_conv(h) if self.spec.quant_conv else h, 2, axis=-1)
        if noise is not None:
            z = z + jnp.exp(0.5 * jnp.clip(log_variance, *_LOG_VARIANCE)) * noise
        return (z - self.spec.shift_factor) * self.spec.scaling_factor

    def decode(self, latents: jax.Array) -> jax.Array:
        """Images [B, H, W, C], about in [-1, 1]: the way back from `encode`."""
        z = latents / self.spec.scaling_factor + self.spec.shift_factor
        return self.decoder(self.post_quant_conv(z) if self.spec.post_quant_conv else z)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images through both halves, by the posterior's mean."""
        return self.decode(self.encode(images))
