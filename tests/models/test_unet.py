"""Whole networks: sizes, what training changes, and how predictions become noise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dime_jax import models
from dime_jax.models import DdpmUnetSpec, GuidedUnetSpec, ModelSpec, ScheduleSpec
from dime_jax.models.spec import PREDICTIONS

SMALL = {
    "stem_channels": 8,
    "time_features": 8,
    "time_channels": 16,
    "level_channels": (8, 16),
    "num_res_blocks": 1,
    "norm_groups": 4,
}
DDPM = DdpmUnetSpec(**SMALL, dropout=0.5, time_table_steps=20, num_classes=3, head_channels=4)
GUIDED = GuidedUnetSpec(**SMALL, dropout=0.5, num_heads=2, learned_sigma=True)
TINY_DDPM, TINY_GUIDED = (
    dataclasses.replace(spec, level_channels=(8,), attention_levels=()) for spec in (DDPM, GUIDED)
)
GUIDED_256 = GuidedUnetSpec(
    learned_sigma=True,
    stem_channels=256,
    time_features=256,
    time_channels=1024,
    level_channels=(256, 256, 512, 512, 1024, 1024),
    attention_levels=(3, 4, 5),
    head_channels=64,
    num_classes=1000,
)


def random_variables(spec, seed=0):
    """Every parameter nonzero: fresh networks end in zeros."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.float32), models.param_shapes(spec)
    )


@functools.cache
def forward(spec, dtype=jnp.float32):
    return jax.jit(models.build(spec, dtype=dtype).apply)


def inputs(spec, batch=3, size=4):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(batch, size, size, spec.image_channels)), jnp.float32)
    return x, jnp.arange(batch), None if spec.num_classes is None else jnp.arange(batch) % spec.num_classes


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (DdpmUnetSpec(), 35_746_307),
        (DdpmUnetSpec(time_table_steps=1000), 35_746_307),
        (GUIDED_256, 553_838_086),
        (dataclasses.replace(GUIDED_256, num_classes=None), 552_814_086),
    ],
)
def test_published_sizes(spec, count):
    shapes = models.param_shapes(spec)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == count
    table = jax.tree.leaves(shapes.get("constants", {}))
    assert [leaf.shape for leaf in table] == ([(1000, 128)] if getattr(spec, "time_table_steps", None) else [])


def test_dropout_is_for_training():
    variables, args = random_variables(TINY_DDPM), inputs(TINY_DDPM, size=2)
    train = jax.jit(lambda key: models.build(TINY_DDPM).apply(variables, *args, train=True, rngs={"dropout": key}))
    first, again, other = (train(jax.random.key(seed, impl="rbg")) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    plain = forward(TINY_DDPM)(variables, *args)
    assert min(float(jnp.abs(a - b).max()) for a, b in [(first, other), (first, plain)]) > 1e-3


def test_remat_changes_nothing():
    spec = dataclasses.replace(TINY_GUIDED, dropout=0.0)
    variables, args = random_variables(spec), inputs(spec, size=2)

    def loss(variables, remat):
        return jnp.mean(models.build(spec, remat=remat).apply(variables, *args, train=True) ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    wanted, got = gradient(variables, False), gradient(variables, True)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got)):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(a).max()) + 1e-7)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(wanted["params"]))


@pytest.mark.parametrize("spec", [DDPM, GUIDED])
def test_images_of_a_batch_do_not_mix(spec):
    variables, (x, t, label) = random_variables(spec), inputs(spec)
    whole = forward(spec)(variables, x, t, label)
    assert whole.shape == (3, 4, 4, spec.out_channels)
    assert whole.dtype == jnp.float32
    mixed = forward(spec)(variables, x.at[1].set(0), jnp.full_like(t, 2).at[0].set(0), label)
    np.testing.assert_allclose(mixed[jnp.array([0, 2])], whole[jnp.array([0, 2])], atol=2e-5)
    later = forward(spec)(variables, x, t + 5, label)
    assert float(jnp.abs(later - whole).max()) > 1e-4  # t is read


def test_bfloat16_compute_returns_float32_near_the_float32_result():
    variables, args = random_variables(GUIDED), inputs(GUIDED)
    exact, rough = (forward(GUIDED, dtype)(variables, *args) for dtype in (jnp.float32, jnp.bfloat16))
    assert rough.dtype == jnp.float32
    assert 1e-5 < float(jnp.abs(rough - exact).max() / exact.std()) < 0.3


def test_fresh_networks_predict_zero_from_nonzero_weights():
    variables = models.init(TINY_DDPM, jax.random.key(0))
    np.testing.assert_array_equal(forward(TINY_DDPM)(variables, *inputs(TINY_DDPM, size=2)), 0)
    stem = np.asarray(variables["params"]["conv_in"]["kernel"])
    bound = np.sqrt(6 / (9 * (3 + 8)))  # of the uniform distribution with variance 2 / (fan in + fan out)
    assert 0.9 * bound < np.abs(stem).max() <= bound


def test_predictions_become_noise():
    """A network's output read as x₀ or as v gives the ε with which x_t = √ᾱ x₀ + σ ε."""
    schedule = ScheduleSpec(num_steps=20, zero_terminal_snr=True)
    spec = ModelSpec(denoiser=TINY_GUIDED, image_shape=(4, 4, 3), schedule=schedule)
    variables, (x, _, _) = random_variables(TINY_GUIDED), inputs(TINY_GUIDED)
    tables = schedule.build()
    applies = {kind: models.denoise(dataclasses.replace(spec, prediction=kind)) for kind in PREDICTIONS}
    every = jax.jit(lambda t: {kind: apply(variables, x, t, None) for kind, apply in applies.items()})
    for t in (3, 19):
        output = np.asarray(forward(TINY_GUIDED)(variables, x, jnp.asarray(t)))[..., :3]
        alpha, sigma = float(tables.sqrt_abar(t)), float(tables.sigma(t))
        eps = {kind: np.asarray(answer) for kind, answer in every(jnp.asarray(t)).items()}
        np.testing.assert_allclose(eps["epsilon"], output, atol=1e-5)
        np.testing.assert_allclose(alpha * output + sigma * eps["sample"], x, atol=1e-4)
        x0 = alpha * np.asarray(x) - sigma * output  # from v
        np.testing.assert_allclose(alpha * x0 + sigma * eps["v_prediction"], x, atol=1e-4)
