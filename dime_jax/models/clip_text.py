"""The text half of CLIP in flax: a causal transformer over the tokens of a caption; see `ClipTextSpec`."""

import dataclasses
from typing import Annotated, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax._util import validate
from dime_jax.models.checks import Channels, Eps, Hidden, Layers, Range
from dime_jax.models.layers import attend, dense, layer_norm, query_key_value
from dime_jax.models.network_spec import NetworkSpec, integers

_ACTIVATIONS = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipTextSpec(NetworkSpec):
    """The text half of CLIP; the defaults are ViT-L/14's, which Stable Diffusion 1 uses.

    Attributes:
      vocabulary: number of tokens there are.
      max_tokens: in a caption.
      width: of a token's embedding.
      mlp_width: hidden width of a layer's MLP.
      num_layers: number of layers.
      num_heads: attention heads.
      activation: "quick_gelu", x * sigmoid(1.702 x), or "gelu", the exact one.
      norm_eps: added to the variance in every layer norm.
    """

    kind: ClassVar[str] = "clip_text"

    vocabulary: Annotated[int, Range(1, 2**20)] = 49408
    max_tokens: Annotated[int, Range(1, 2**16)] = 77
    width: Channels = 768
    mlp_width: Hidden = 3072
    num_layers: Layers = 12
    num_heads: Channels = 12
    activation: str = "quick_gelu"
    norm_eps: Eps = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.check_choice(self.activation, list(_ACTIVATIONS), "activation")
        if self.width % self.num_heads:
            raise ValueError(f"width must be divisible by num_heads={self.num_heads}, got {self.width}")

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """A caption of one token."""
        return (integers(1),)


class Layer(nn.Module):
    """Attention to the tokens before, and an MLP, each added to x after a layer norm."""

    spec: ClipTextSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Layer over x [B, tokens, width]."""
        spec = self.spec
        h = layer_norm(spec.norm_eps, "norm_1")(x)
        maps = query_key_value(h, h, spec.width, spec.num_heads)
        x = x + dense(spec.width, name="out")(attend(*maps, causal=True).reshape(x.shape))
        h = dense(spec.mlp_width, name="mlp_0")(layer_norm(spec.norm_eps, "norm_2")(x))
        return x + dense(spec.width, name="mlp_1")(_ACTIVATIONS[spec.activation](h))


class ClipText(nn.Module):
    """The text encoder."""

    spec: ClipTextSpec

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The last hidden state [B, N, width] of captions as int tokens [B, N], N <= max_tokens."""
        spec = self.spec
        positions = nn.Embed(spec.max_tokens, spec.width, name="position_embedding")(jnp.arange(tokens.shape[1]))
        x = nn.Embed(spec.vocabulary, spec.width, name="token_embedding")(tokens) + positions[None]
        for layer in range(spec.num_layers):
            x = Layer(spec, name=f"layer_{layer}")(x)
        return layer_norm(spec.norm_eps, "norm_out")(x)
