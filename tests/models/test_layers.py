"""Layers against naive NumPy loops and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dime_jax.models import layers, winograd

RNG = np.random.default_rng(0)


def naive_conv(x, kernel, bias):
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    y = np.zeros((*x.shape[:3], kernel.shape[-1]))
    for i in range(x.shape[1]):
        for j in range(x.shape[2]):
            y[:, i, j] = np.einsum("bhwi,hwio->bo", padded[:, i : i + 3, j : j + 3], kernel) + bias
    return y


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_group_norm_is_the_naive_one_even_far_from_zero(mean):
    x = (RNG.normal(size=(2, 3, 5, 12)) + mean).astype(np.float32)
    scale, bias = RNG.normal(size=(2, 12)).astype(np.float32)
    got = layers.GroupNorm(4, 1e-5).apply({"params": {"scale": scale, "bias": bias}}, x)
    groups = x.astype(np.float64).reshape(2, 15, 4, 3)
    mean = groups.mean((1, 3), keepdims=True)
    normed = ((groups - mean) / np.sqrt(groups.var((1, 3), keepdims=True) + 1e-5)).reshape(x.shape)
    np.testing.assert_allclose(got, normed * scale + bias, atol=3e-4 if mean.max() > 100 else 2e-6)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 1, 1, 4)])
def test_upsample_conv_is_the_convolution_of_the_repeated_image(shape):
    x = RNG.normal(size=shape)
    kernel, bias = RNG.normal(size=(3, 3, 4, 6)), RNG.normal(size=6)
    params = {"params": {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}}
    got = layers.upsample_conv3x3(6, None, jnp.float32).apply(params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, naive_conv(x.repeat(2, 1).repeat(2, 2), kernel, bias), atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 1, 1, 4)])
def test_winograd_of_a_repeated_image_is_its_convolution(shape):
    x, kernel = RNG.normal(size=shape), RNG.normal(size=(3, 3, 4, 6))
    got = winograd.convolve_upsampled(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    np.testing.assert_allclose(got, naive_conv(x.repeat(2, 1).repeat(2, 2), kernel, 0), atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 4, 6, 5), (1, 2, 2, 5)])
def test_winograd_is_the_convolution(shape):
    x, kernel = RNG.normal(size=shape), RNG.normal(size=(3, 3, 5, 7))
    got = winograd.convolve(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    np.testing.assert_allclose(got, naive_conv(x, kernel, 0), atol=1e-4)


def test_wide_convolutions_take_winograds_way_on_a_cpu_and_the_direct_one_elsewhere():
    def lowered(channels, platform, make=layers.conv3x3, **options):
        layer = make(channels, None, jnp.float32, **options)
        x = jax.ShapeDtypeStruct((8, 16, 16, channels), jnp.float32)
        params = jax.eval_shape(layer.init, jax.random.key(0), x)
        return jax.jit(layer.apply).trace(params, x).lower(lowering_platforms=(platform,)).as_text()

    assert lowered(128, "cpu").count("dot_general") == 16
    assert lowered(128, "cpu", layers.upsample_conv3x3).count("dot_general") == 9
    assert lowered(128, "cuda", layers.upsample_conv3x3).count("stablehlo.convolution") == 4
    assert "stablehlo.convolution" not in lowered(128, "cpu")
    assert all(
        text.count("stablehlo.convolution") == 1 and "dot_general" not in text
        for text in (lowered(128, "cuda"), lowered(16, "cpu"), lowered(128, "cpu", strides=2))
    )


def test_resampling():
    x = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    np.testing.assert_array_equal(layers.average_pool(x)[0, ..., 0], [[2.5, 4.5], [10.5, 12.5]])
    np.testing.assert_array_equal(layers.upsample_nearest(x), x.repeat(2, 1).repeat(2, 2))


def test_attention_is_the_naive_one():
    query, key, value = RNG.normal(size=(3, 2, 5, 2, 4)).astype(np.float32)
    expected = np.zeros(query.shape)
    for b, q, h in np.ndindex(2, 5, 2):
        logits = key[b, :, h] @ query[b, q, h] / 2
        weights = np.exp(logits) / np.exp(logits).sum()
        expected[b, q, h] = weights @ value[b, :, h]
    np.testing.assert_allclose(layers.attend(query, key, value), expected, atol=1e-6)


@pytest.mark.parametrize(("cos_first", "shift"), [(False, 1), (True, 0)])
def test_timestep_embedding(cos_first, shift):
    t = np.array([0, 1, 37, 999])
    angle = t[:, None] * 10000.0 ** (-np.arange(8) / (8 - shift))
    waves = [np.cos(angle), np.sin(angle)] if cos_first else [np.sin(angle), np.cos(angle)]
    got = layers.timestep_embedding(jnp.asarray(t), 16, cos_first=cos_first, frequency_shift=shift)
    np.testing.assert_allclose(got, np.concatenate(waves, 1), atol=1e-4)


def test_time_table_interleaves_sine_and_cosine():
    table = layers.interleaved_time_table(5, 8)
    angle = 3 * 10000.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(table[3], np.stack([np.sin(angle), np.cos(angle)], 1).reshape(-1), atol=1e-6)


def test_bfloat16_keeps_statistics_in_float32():
    x = jnp.asarray(RNG.normal(size=(1, 8, 8, 4)) + 100, jnp.bfloat16)
    norm = layers.GroupNorm(2, 1e-5, jnp.bfloat16)
    y = norm.apply(norm.init(jax.random.key(0), x), x)
    assert y.dtype == jnp.bfloat16
    groups = np.asarray(x, np.float64).reshape(1, 64, 2, 2)
    expected = (groups - groups.mean((1, 3), keepdims=True)) / groups.std((1, 3), keepdims=True)
    np.testing.assert_allclose(np.asarray(y, np.float64).reshape(expected.shape), expected, atol=0.02)
