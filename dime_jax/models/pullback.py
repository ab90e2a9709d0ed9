"""Which coordinates of a latent can be seen in the image: the pull-back metric of a decoder (VAE2Diffusion, CVPR 2026).

With J the decoder's Jacobian at a latent, moving coordinate k by h changes the image by about h √(JᵀJ)_kk. The paper
weighs coordinates by ½ log (JᵀJ)_kk and leaves the lowest out of an attack's norms. That ranks them as the diagonal
itself does, so the logarithm is never taken.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

PROBES = 16  # vector-Jacobian products per image
DROPPED = 0.4  # share of the coordinates that does not count


def pullback_diagonal(
    decode: Callable[[jax.Array], jax.Array], x: jax.Array, probe: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Hutchinson's estimate of (JᵀJ)_kk: the mean of (Jᵀv)_k² over `PROBES` vectors v, unbiased for random signs.

    Args:
      decode: of any function of an array; the estimate costs one evaluation and `PROBES` products with Jᵀ.
      x: where, of any shape, which the estimate has too.
      probe: index -> v, of the shape of decode(x).
    """
    _, pull = jax.vjp(decode, x)
    return jnp.mean(jax.lax.map(lambda index: pull(probe(index))[0] ** 2, jnp.arange(PROBES)), axis=0)


def most_visible(diagonal: jax.Array, dropped: float = DROPPED) -> jax.Array:
    """True for all but the smallest values of an array; exactly ⌊dropped · size⌋ are False, of equal ones the first."""
    ranks = jnp.argsort(jnp.argsort(diagonal.ravel(), stable=True))
    return (ranks >= int(dropped * diagonal.size)).reshape(diagonal.shape)
