"""The text half of CLIP in flax: a causal transformer over the tokens of a caption; see `ClipTextSpec`."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax._util import validate
from dime_jax.models.checks import MAX_CHANNELS, MAX_LAYERS, check_integer, check_integers, check_number
from dime_jax.models.layers import dense, layer_norm, split_heads
from dime_jax.models.network_spec import NetworkSpec, integers

MAX_VOCABULARY = 2**20
MAX_TOKENS = 2**16

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

    vocabulary: int = 49408
    max_tokens: int = 77
    width: int = 768
    mlp_width: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    activation: str = "quick_gelu"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_integer(self.vocabulary, 1, MAX_VOCABULARY, "vocabulary")
        check_integer(self.max_tokens, 1, MAX_TOKENS, "max_tokens")
        check_integers(self, 1, MAX_CHANNELS, "width", "num_heads")
        check_integer(self.mlp_width, 1, 8 * MAX_CHANNELS, "mlp_width")
        check_integer(self.num_layers, 1, MAX_LAYERS, "num_layers")
        validate.check_choice(self.activation, list(_ACTIVATIONS), "activation")
        check_number(self.norm_eps, 1e-12, 1.0, "norm_eps")
        if self.width % self.num_heads:
            raise ValueError(f"expected width divisible by num_heads={self.num_heads}, got width={self.width}")

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """A caption of one token."""
        return (integers(1),)


def attend_causally(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """softmax(q kᵀ / √d) v, where no position sees a later one; all [B, positions, heads, d]."""
    positions, _, size = query.shape[1:]
    logits = jnp.einsum("bqhd,bkhd->bhqk", query * size**-0.5, key)
    seen = jnp.tril(jnp.ones((positions, positions), bool))[None, None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), value)


class Layer(nn.Module):
    """Attention to the tokens before, and an MLP, each added to x after a layer norm."""

    spec: ClipTextSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Layer over x [B, tokens, width]."""
        spec = self.spec
        h = layer_norm(spec.norm_eps, "norm_1")(x)
        query = split_heads(dense(spec.width, name="query")(h), spec.num_heads)
        key = split_heads(dense(spec.width, name="key")(h), spec.num_heads)
        value = split_heads(dense(spec.width, name="value")(h), spec.num_heads)
        x = x + dense(spec.width, name="out")(attend_causally(query, key, value).reshape(x.shape))
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
