"""The diffusion transformer (DiT) in flax, class-conditional, in its two public dialects; see `DitSpec`."""

import dataclasses
from typing import Annotated, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dime_jax._util import validate
from dime_jax.models import layers
from dime_jax.models.checks import MAX_IMAGE_SIZE, Channels, Classes, Eps, FewChannels, Hidden, Layers, Range
from dime_jax.models.layers import dense, layer_norm
from dime_jax.models.network_spec import DenoiserSpec, floats, integers

MAX_POSITION_VALUES = 2**26  # of a table of positions
LAYOUTS = ("original", "diffusers")

_NORM_EPS = 1e-6
_TIME_FEATURES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class DitSpec(DenoiserSpec):
    """The diffusion transformer of Peebles & Xie 2023, class-conditional; the defaults are DiT-XL/2 at 256 × 256.

    Attributes:
      layout: "original" (the authors' files) or "diffusers". They differ in more than names: the original has one
        embedding of t and class for all blocks, frequencies 10000^(-i / 128), one map for q, k, v, and stores the
        table of positions; diffusers has an embedding in each block, 10000^(-i / 127), and computes the positions.
      channels: of a latent.
      learned_sigma: whether the output has as many channels again for the variance (not used by attacks).
      latent_size: height and width of a latent.
      patch_size: height and width of a patch.
      width: of a token.
      num_layers: number of blocks.
      num_heads: attention heads.
      mlp_width: hidden width of a block's MLP.
      num_classes: classes; one more, the last, stands for "no class".
      mlp_norm_eps: added to the variance before a block's MLP; elsewhere it is 1e-6.
    """

    kind: ClassVar[str] = "dit"
    resizable: ClassVar[bool] = False

    layout: str = "original"
    channels: FewChannels = 4
    learned_sigma: bool = True
    latent_size: Annotated[int, Range(1, MAX_IMAGE_SIZE)] = 32
    patch_size: Annotated[int, Range(1, MAX_IMAGE_SIZE)] = 2
    width: Channels = 1152
    num_layers: Layers = 28
    num_heads: Channels = 16
    mlp_width: Hidden = 4608
    num_classes: Classes = 1000
    mlp_norm_eps: Eps = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.check_choice(self.layout, LAYOUTS, "layout")
        if self.latent_size % self.patch_size:
            raise ValueError(f"latent_size must be divisible by patch_size={self.patch_size}, got {self.latent_size}")
        if self.width % self.num_heads or self.width % 4:
            raise ValueError(f"width must be divisible by 4 and by num_heads={self.num_heads}, got {self.width}")
        if self.num_tokens * self.width > MAX_POSITION_VALUES:
            raise ValueError(f"the table of positions is too large: {self.num_tokens} × width={self.width}")

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Latents, t and a class."""
        return floats(self.latent_size, self.latent_size, self.channels), integers(), integers()

    @property
    def num_tokens(self) -> int:
        """Patches of a latent."""
        return (self.latent_size // self.patch_size) ** 2

    @property
    def out_channels(self) -> int:
        """Output channels: the prediction, then the learned variance if there is one."""
        return self.channels * (2 if self.learned_sigma else 1)

    @property
    def is_original(self) -> bool:
        """Whether the layout is that of the authors' files."""
        return self.layout == "original"


def position_table(spec: DitSpec) -> jax.Array:
    """[1, tokens, width]: sin and cos of a token's column, then of its row, at frequencies 10000^(-i / (width / 4))."""
    side, quarter = spec.latent_size // spec.patch_size, spec.width // 4
    angle = np.arange(side)[:, None] * 10000.0 ** (-np.arange(quarter) / quarter)
    waves = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    columns, rows = np.tile(waves, (side, 1)), np.repeat(waves, side, axis=0)
    return jnp.asarray(np.concatenate([columns, rows], axis=1)[None], jnp.float32)


class Embedder(nn.Module):
    """Embedding of t and class, [B, width]."""

    spec: DitSpec

    @nn.compact
    def __call__(self, t: jax.Array, label: jax.Array) -> jax.Array:
        """Two-layer MLP of the sinusoid of t [B], plus the row of label [B]."""
        spec = self.spec
        shift = 0 if spec.is_original else 1
        features = layers.timestep_embedding(t, _TIME_FEATURES, cos_first=True, frequency_shift=shift)
        hidden = nn.silu(dense(spec.width, name="time_dense_0")(features))
        classes = nn.Embed(spec.num_classes + 1, spec.width, name="label_embedding")(label)
        return dense(spec.width, name="time_dense_1")(hidden) + classes


class Block(nn.Module):
    """Attention and an MLP, each after a norm that is shifted and scaled, and through a gate, by the embedding."""

    spec: DitSpec

    @nn.compact
    def __call__(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        """Block over x [B, tokens, width] and embedding [B, width]."""
        spec = self.spec
        modulation = dense(6 * spec.width, name="modulation")(nn.silu(embedding))[:, None]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = jnp.split(modulation, 6, axis=-1)
        h = layer_norm(_NORM_EPS, "norm_1", affine=False)(x) * (1 + scale) + shift
        x = x + gate * self._attend(h)
        h = layer_norm(spec.mlp_norm_eps, "norm_2", affine=False)(x) * (1 + mlp_scale) + mlp_shift
        h = jax.nn.gelu(dense(spec.mlp_width, name="mlp_0")(h), approximate=True)
        return x + mlp_gate * dense(spec.width, name="mlp_1")(h)

    def _attend(self, h: jax.Array) -> jax.Array:
        width, heads = self.spec.width, self.spec.num_heads
        if self.spec.is_original:
            qkv = jnp.split(dense(3 * width, name="qkv")(h), 3, axis=-1)
            query, key, value = (layers.split_heads(part, heads) for part in qkv)
        else:
            query, key, value = layers.query_key_value(h, h, width, heads)
        return dense(width, name="out")(layers.attend_bounded(query, key, value).reshape(h.shape))


class Dit(nn.Module):
    """The transformer. A stored table of positions is in the collection "constants"."""

    spec: DitSpec

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array, label: jax.Array) -> jax.Array:
        """The prediction, and the variance if it is learned, [B, H, W, out_channels].

        Args:
          x: latents [B, latent_size, latent_size, channels].
          t: int timesteps, a scalar or [B].
          label: int classes [B]; num_classes means none.
        """
        spec, patch = self.spec, self.spec.patch_size
        t = jnp.broadcast_to(t, x.shape[:1])
        h = nn.Conv(spec.width, (patch, patch), strides=patch, padding="VALID", name="patches")(x)
        h = h.reshape(x.shape[0], spec.num_tokens, spec.width) + self._positions()
        embeddings = self._embed(t, label)
        for layer, embedding in enumerate(embeddings):
            h = Block(spec, name=f"block_{layer}")(h, embedding)
        modulation = dense(2 * spec.width, name="modulation_out")(nn.silu(embeddings[0]))[:, None]
        shift, scale = jnp.split(modulation, 2, axis=-1)
        h = layer_norm(_NORM_EPS, "norm_out", affine=False)(h) * (1 + scale) + shift
        h = dense(patch * patch * spec.out_channels, name="dense_out")(h)
        side = spec.latent_size // patch
        return h.reshape(-1, side, side, patch, patch, spec.out_channels).swapaxes(2, 3).reshape(*x.shape[:3], -1)

    def _embed(self, t: jax.Array, label: jax.Array) -> list[jax.Array]:
        """The embedding for each block; the output takes the first."""
        spec = self.spec
        if spec.is_original:
            return [Embedder(spec, name="embedder")(t, label)] * spec.num_layers
        return [Embedder(spec, name=f"block_{layer}_embedder")(t, label) for layer in range(spec.num_layers)]

    def _positions(self) -> jax.Array:
        if not self.spec.is_original:
            return position_table(self.spec)
        return self.variable("constants", "positions", position_table, self.spec).value
