"""The convolution with its own kernel gradient against XLA's, in value and in both modes of differentiation."""

import jax
import numpy as np
import pytest

from dime_jax import models
from dime_jax.models import kernel_gradient

RNG = np.random.default_rng(0)
X, X_DOT = RNG.standard_normal((2, 2, 5, 4, 3)).astype(np.float32)
KERNEL, KERNEL_DOT = RNG.standard_normal((2, 3, 3, 3, 6)).astype(np.float32)
Y_BAR = RNG.standard_normal((2, 5, 4, 6)).astype(np.float32)


def direct(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_value_and_derivatives_are_those_of_the_convolution():
    close(kernel_gradient.convolve(X, KERNEL), direct(X, KERNEL))
    close(*(jax.vjp(f, X, KERNEL)[1](Y_BAR) for f in (kernel_gradient.convolve, direct)))
    close(*(jax.jvp(f, (X, KERNEL), (X_DOT, KERNEL_DOT))[1] for f in (kernel_gradient.convolve, direct)))


def test_per_example_gradients():
    def per_example(f):
        return jax.vmap(lambda x, y: jax.vjp(lambda k: f(x[None], k), KERNEL)[1](y[None])[0])(X, Y_BAR)

    close(per_example(kernel_gradient.convolve), per_example(direct))


@pytest.mark.parametrize(("channels", "products"), [(64, 0), (128, 9)])
def test_wide_layers_get_it(channels, products):
    layer = models.layers.conv3x3(channels, "conv", np.float32)
    x = np.zeros((1, 18, 18, channels), np.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    gradient = jax.grad(lambda v, x: layer.apply(v, x).sum())
    hlo = jax.jit(gradient).lower(variables, x).as_text()
    assert hlo.count("dot_general") == products
