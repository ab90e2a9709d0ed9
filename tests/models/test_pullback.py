"""The pull-back metric of a decoder, against closed forms and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax.models.pullback import PROBES, most_visible, pullback_diagonal

RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(4, 6)).astype(np.float32)


def every_sign_vector(index):
    """All 2⁴ of them: their mean is the expectation over random signs."""
    return 1 - 2 * ((index >> jnp.arange(4)) & 1).astype(jnp.float32)


def test_over_all_signs_it_is_the_diagonal_of_a_linear_decoders_metric():
    assert PROBES == 2**4
    got = pullback_diagonal(lambda x: jnp.asarray(WEIGHTS) @ x, jnp.zeros(6), every_sign_vector)
    np.testing.assert_allclose(got, np.diag(WEIGHTS.T @ WEIGHTS), rtol=1e-5)


def test_it_is_that_of_the_tangent_where_the_decoder_bends():
    x = RNG.normal(size=(2, 3)).astype(np.float32)
    got = pullback_diagonal(lambda x: jnp.tanh(jnp.asarray(WEIGHTS) @ x.ravel()), jnp.asarray(x), every_sign_vector)
    jacobian = (1 - np.tanh(WEIGHTS @ x.ravel()) ** 2)[:, None] * WEIGHTS
    np.testing.assert_allclose(got, (jacobian**2).sum(axis=0).reshape(2, 3), rtol=1e-4)


def test_the_least_visible_are_dropped_ties_included():
    values = RNG.normal(size=(3, 5)).astype(np.float32)
    assert most_visible(jnp.asarray(values)).tolist() == (values > np.sort(values.ravel())[5]).tolist()  # 40 % of 15: 6
    assert most_visible(jnp.ones(5)).tolist() == [False, False, True, True, True]
    assert jax.jit(most_visible)(jnp.ones(2)).all()  # 40 % of two is none
