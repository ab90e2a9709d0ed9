"""The text half of CLIP in flax: a causal transformer over the tokens of a caption; see `ClipTextSpec`."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dime_jax.models.latent_spec import ClipTextSpec
from dime_jax.models.layers import dense, layer_norm, split_heads

_ACTIVATIONS = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


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
