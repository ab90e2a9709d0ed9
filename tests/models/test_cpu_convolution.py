"""The CPU's convolution against XLA's, in value and in both modes of differentiation, and where it is used."""

import jax
import numpy as np
import pytest

from dime_jax.models import cpu_convolution, layers, winograd


def direct(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (5, 4), (16, 16), (17, 16)], ids=str)
def test_value_and_derivatives_are_those_of_the_convolution(size):
    rng = np.random.default_rng(0)
    x, x_dot = rng.standard_normal((2, 2, *size, 3), np.float32)
    kernel, kernel_dot = rng.standard_normal((2, 3, 3, 3, 6), np.float32)
    y_bar = rng.standard_normal((2, *size, 6), np.float32)
    both = (cpu_convolution.convolve, direct)

    def derivatives(f):
        value, forward = jax.jvp(f, (x, kernel), (x_dot, kernel_dot))
        backward = jax.vjp(f, x, kernel)[1](y_bar)
        per_example = jax.vmap(lambda x, y: jax.vjp(lambda k: f(x[None], k), kernel)[1](y[None])[0])(x, y_bar)
        return value, forward, backward, per_example

    close(*(jax.jit(derivatives, static_argnums=0)(f) for f in both))


# Products in the gradient of the kernel alone: none in XLA's own, nine taps, or Winograd's sixteen.
@pytest.mark.parametrize(("channels", "size", "products"), [(16, 16, 0), (64, 8, 0), (128, 8, 9), (32, 16, 16)])
def test_wide_layers_get_it(channels, size, products):
    layer = layers.conv3x3(channels, "conv", np.float32)
    x = np.zeros((1, size, size, channels), np.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    gradient = jax.grad(lambda v, x: layer.apply(v, x).sum())
    hlo = jax.jit(gradient).lower(variables, x).as_text()
    assert hlo.count("dot_general") == products


@pytest.mark.parametrize(("channels", "size", "products"), [(32, 2, 9), (32, 3, 0), (16, 2, 0)])
def test_images_smaller_than_the_kernel_are_matrix_products(channels, size, products):
    """XLA would take such an image for the kernel, and run a plain loop."""
    layer, x = layers.conv3x3(channels, "conv", np.float32), np.zeros((1, size, size, channels), np.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert jax.jit(layer.apply).lower(variables, x).as_text().count("dot_general") == products


@pytest.mark.parametrize(
    ("images", "channels", "expected"),
    [
        ((8, 16, 16), 64, True),
        ((8, 16, 16), 32, False),  # too few channels
        ((8, 8, 8), 128, True),
        ((8, 8, 8), 64, False),  # too few for small images
        ((1, 16, 16), 1024, False),  # too few blocks for the kernel's transform
        ((8, 15, 16), 128, False),  # an odd row
        ((1, 256, 256), 256, True),
        ((1, 512, 512), 256, False),  # too much memory
    ],
)
def test_winograds_form_is_taken_where_it_pays(images, channels, expected):
    x = jax.ShapeDtypeStruct((*images, channels), np.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, channels, channels), np.float32)
    assert winograd.is_faster(x, kernel) == expected
