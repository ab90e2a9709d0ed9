"""The closed form against float64 definitions, closed-form examples, and itself on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj
from dime_jax.core import ideal

BETAS = np.linspace(1e-4, 0.02, 1000)
ABAR = np.cumprod(1 - BETAS)


def reference(train, g, t):
    """eps*, V and the responsibilities in float64, where expanded squares are good to 1e-12."""
    train, g, a, sigma = (
        np.asarray(train, np.float64),
        np.asarray(g, np.float64),
        np.sqrt(ABAR[t]),
        np.sqrt(1 - ABAR[t]),
    )
    squares = np.einsum("nd,nd->n", train, train)
    logits = (a * g @ train.T - a**2 * squares / 2) / sigma**2
    r = np.exp(logits - logits.max(axis=1, keepdims=True))
    r /= r.sum(axis=1, keepdims=True)
    mean = a * r @ train
    return (g - mean) / sigma, a**2 * r @ squares - np.sum(mean**2, axis=1), r


def crowding_at(denoiser, g, t):
    """V at g itself, from the trace that the denoiser reports."""
    return denoiser._cloud(g, t).spread


def clustered_images(sd, rng, n=1500, bases=5):
    """A few smooth 32x32x3 images, each many times with a little noise: the hard case at low noise."""
    y, x = np.mgrid[0:32, 0:32] / 31
    waves = [
        np.clip(
            0.4
            * sum(
                rng.normal() * np.sin(2 * np.pi * (i * x + j * y) + rng.uniform(0, 6))[..., None] * rng.normal(size=3)
                for i in range(3)
                for j in range(3)
            ),
            -1,
            1,
        ).ravel()
        for _ in range(bases)
    ]
    which = rng.integers(bases, size=n)
    train = (np.array(waves)[which] + sd * rng.normal(size=(n, 3072))).astype(np.float32)
    fresh = (np.array(waves)[which[:4]] + sd * rng.normal(size=(4, 3072))).astype(np.float32)
    return train, np.concatenate([train[:4], fresh])


def assert_right_to_rounding(denoiser, train, queries, t, tolerance=2e-4):
    """eps within 2e-4 of max(‖eps‖, 0.01 √d), and the crowding within 1e-2, of the float64 definitions."""
    g = (np.float32(np.sqrt(ABAR[t])) * queries).astype(np.float32)
    eps, crowding, _ = reference(train, g, t)
    dimension = train.shape[1]
    error = np.linalg.norm(np.asarray(denoiser.eps(g, t), np.float64) - eps, axis=1)
    assert np.all(error <= tolerance * np.maximum(np.linalg.norm(eps, axis=1), 0.01 * np.sqrt(dimension))), t
    error = np.abs(np.asarray(crowding_at(denoiser, g, t), np.float64) - crowding)
    assert np.all(error <= 1e-2 * (crowding + 1e-4 * (1 - ABAR[t]) * dimension)), t


@pytest.mark.parametrize("sd", [3e-4, 3e-3, 0.05])
def test_float32_is_right_at_every_noise_level(schedule, sd):
    train, queries = clustered_images(sd, np.random.default_rng(int(1 / sd)))
    denoiser = dj.IdealDenoiser(train, schedule)
    for t in (0, 5, 100, 500, 999):
        assert_right_to_rounding(denoiser, train, queries, t)


def nested_clusters(rng, n=3000, bases=40):
    """Smooth images, each many times with noise of sizes from 3e-4 to 0.05: ties at every scale, around one point."""
    smooth = rng.normal(size=(bases, 32, 32, 3)).cumsum(axis=1).cumsum(axis=2).reshape(bases, -1)
    smooth *= 0.8 / np.abs(smooth).max(axis=1, keepdims=True)
    sd = rng.choice([3e-4, 1e-3, 3e-3, 0.01, 0.05], size=(n, 1))
    train = smooth[rng.integers(bases, size=n)] + sd * rng.normal(size=(n, 3072))
    fresh = smooth[:16] + 3e-4 * rng.normal(size=(16, 3072))
    return train.astype(np.float32), np.concatenate([train[:24], fresh]).astype(np.float32)


def near_ties(rng, size, n=1600):
    """Three sets of `size` points 2e-4 off a point among unrelated ones; queries of all kinds."""
    train = rng.uniform(-1, 1, (n, 3072))
    centers = train[:3].copy()
    train[10 : 10 + 3 * size] = np.repeat(centers, size, axis=0) + 2e-4 * rng.normal(size=(3 * size, 3072))
    fresh = centers + 2e-4 * rng.normal(size=centers.shape)
    return train.astype(np.float32), np.concatenate([train[8:14], fresh, train[-2:]]).astype(np.float32)


def test_ties_at_every_scale(schedule):
    train, queries = nested_clusters(np.random.default_rng(0))
    denoiser = dj.IdealDenoiser(train, schedule)
    for t in (0, 1, 3, 100):
        assert_right_to_rounding(denoiser, train, queries, t)


@pytest.mark.parametrize(
    ("size", "landmarks"),
    [(5, None), (500, 1), pytest.param(500, None, marks=pytest.mark.slow), pytest.param(30, 1, marks=pytest.mark.slow)],
)
def test_near_ties_among_unrelated_images(schedule, monkeypatch, size, landmarks):
    """With a landmark in every set of ties, and with none near them, so that all ties must be evaluated directly."""
    train, queries = near_ties(np.random.default_rng(size), size)
    if landmarks:
        monkeypatch.setattr(ideal, "choose_landmarks", lambda points: np.zeros_like(points[:landmarks]))
    denoiser = dj.IdealDenoiser(train, schedule)
    for t in (0, 3):
        assert_right_to_rounding(denoiser, train, queries, t)
    g = np.float32(np.sqrt(ABAR[0])) * queries
    np.testing.assert_allclose(denoiser.responsibilities(g, 0), reference(train, g, 0)[2], atol=2e-4)


def test_landmarks_lie_in_the_densest_parts_and_few_suffice():
    rng = np.random.default_rng(0)
    unrelated = rng.uniform(-1, 1, (300, 100)).astype(np.float32)
    assert len(ideal.choose_landmarks(unrelated)) == 2  # the origin and one point
    nucleus = unrelated[0] + 1e-3 * rng.normal(size=(10, 100)).astype(np.float32)
    found = ideal.choose_landmarks(np.concatenate([unrelated, nucleus]))
    assert np.abs(found - unrelated[0]).max(axis=1).min() < 5e-3
    assert len(ideal.choose_landmarks(np.repeat(unrelated, 5, axis=0), most=7)) == 8


@pytest.mark.parametrize("t", [0, 3])
def test_near_duplicates_among_unrelated_images_are_told_apart(schedule, t):
    """Pairs 1e-2 apart in a set whose points lie 30 apart: no landmark helps, direct evaluation must."""
    rng = np.random.default_rng(1)
    train = rng.uniform(-1, 1, (2000, 3072)).astype(np.float32)
    train[1000:] = train[:1000] + rng.normal(size=(1000, 3072)).astype(np.float32) * 2e-4
    g = np.float32(np.sqrt(ABAR[t])) * train[:8]
    eps, crowding, weights = reference(train, g, t)
    denoiser = dj.IdealDenoiser(train, schedule)
    assert 0.05 < weights[0][1000] < 0.95  # the pair really shares the responsibility
    np.testing.assert_allclose(denoiser.responsibilities(g, t), weights, atol=2e-3)
    error = np.linalg.norm(np.asarray(denoiser.eps(g, t)) - eps, axis=1)
    assert np.all(error <= 5e-4 * np.maximum(np.linalg.norm(eps, axis=1), 0.01 * np.sqrt(3072)))
    np.testing.assert_allclose(crowding_at(denoiser, g, t), crowding, rtol=1e-2)


def test_identities_hold_in_float64(schedule):
    """M = sigma^2 B^2 + V with V summed directly, and tr J = d/sigma - V/sigma^3 with J by differentiation."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        for n, d, t in ((1, 3, 100), (40, 6, 500)):
            train, g = rng.normal(size=(n, d)), rng.normal(size=(3, d))
            denoiser = dj.IdealDenoiser(train, schedule)
            a, sigma = (np.float64(f(t)) for f in (schedule.sqrt_abar, schedule.sigma))
            r = np.asarray(denoiser.responsibilities(g, t))
            assert r.dtype == np.float64
            y = a * train
            mean = r @ y
            error = np.sum(r * np.sum((g[:, None] - y) ** 2, axis=-1), axis=1)
            crowding = np.sum(r * np.sum((y - mean[:, None]) ** 2, axis=-1), axis=1)
            eps = np.asarray(denoiser.eps(g, t))
            bias = sigma**2 * np.sum(eps**2, axis=1)
            np.testing.assert_allclose(bias + crowding, error, rtol=1e-12)
            jacobian = jax.vmap(jax.jacfwd(lambda v, f=denoiser, t=t: f.eps(v[None], t)[0]))(jnp.asarray(g))
            trace = np.trace(jacobian, axis1=1, axis2=2)
            np.testing.assert_allclose(trace, d / sigma - crowding / sigma**3, rtol=1e-12, atol=1e-12 * d / sigma**3)
            np.testing.assert_allclose(denoiser.jacobian_trace(g, t), trace, rtol=1e-12, atol=1e-12 * d / sigma**3)
            decomposed = denoiser.decompose(g / a, t)
            np.testing.assert_allclose(decomposed.error, error, rtol=1e-10)
            np.testing.assert_allclose(decomposed.bias, bias, rtol=1e-10)
            np.testing.assert_allclose(decomposed.crowding, crowding, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("t", [10, 200, 900])
def test_two_points_have_no_bias_between_them_but_crowding(schedule, t):
    """The paper's example {-1, +1} at 0."""
    bias, crowding = dj.IdealDenoiser(np.array([[-1.0], [1.0]], np.float32), schedule).decompose([[0.0]], t)[1:]
    assert bias.item() < 1e-11
    assert crowding.item() == pytest.approx(ABAR[t], rel=1e-6)


def test_two_points_in_closed_form(schedule):
    """eps* = (g - a tanh(a g / sigma^2)) / sigma for {-1, +1}."""
    g, t = np.linspace(-2, 2, 9, dtype=np.float32)[:, None], 300
    a, sigma = np.sqrt(ABAR[t]), np.sqrt(1 - ABAR[t])
    denoiser = dj.IdealDenoiser(np.array([[-1.0], [1.0]], np.float32), schedule)
    np.testing.assert_allclose(denoiser.eps(g, t), (g - a * np.tanh(a * g / sigma**2)) / sigma, atol=2e-6)


def test_low_noise_responsibilities_are_the_nearest_neighbour():
    rng = np.random.default_rng(3)
    train, g = rng.normal(size=(50, 2)).astype(np.float32), rng.normal(size=(20, 2)).astype(np.float32)
    nearest = np.argmin(np.sum((g[:, None] - train) ** 2, axis=-1), axis=1)
    indicator = np.eye(50)[nearest]
    distances = [
        np.abs(
            np.asarray(dj.IdealDenoiser(train, dj.schedule_from_betas([beta])).responsibilities(g, 0)) - indicator
        ).max()
        for beta in (1e-1, 1e-2, 1e-3, 1e-6)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-6


def test_chunks_and_padding_do_not_change_the_numbers(schedule, monkeypatch):
    rng = np.random.default_rng(0)
    train, g = rng.normal(size=(103, 12)).astype(np.float32), rng.normal(size=(23, 12)).astype(np.float32)
    t = rng.integers(0, 1000, size=23)
    whole = dj.IdealDenoiser(train, schedule)
    monkeypatch.setattr(ideal, "QUERY_CHUNK", 5)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    small = dj.IdealDenoiser(train, schedule, mesh=mesh)
    assert small.params[0].residual.shape[0] == 104
    eps, crowding, weights = zip(*(reference(train, g[i : i + 1], t[i]) for i in range(23)))
    for denoiser in (whole, small):
        np.testing.assert_allclose(denoiser.eps(g, t), np.concatenate(eps), rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(denoiser.responsibilities(g, t), np.concatenate(weights), atol=1e-5)
        np.testing.assert_allclose(crowding_at(denoiser, g, t), np.concatenate(crowding), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n", [103, 6])
def test_sharded_over_four_devices(schedule, n):
    rng = np.random.default_rng(0)
    train, g = rng.normal(size=(n, 4, 3)).astype(np.float32), rng.normal(size=(9, 4, 3)).astype(np.float32)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    one, four = dj.IdealDenoiser(train, schedule), dj.IdealDenoiser(train, schedule, mesh=mesh)
    assert len(four.params[0].residual.sharding.device_set) == 4
    for t in (0, 100, 700):
        np.testing.assert_allclose(four.eps(g, t), one.eps(g, t), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(four.jacobian_trace(g, t), one.jacobian_trace(g, t), rtol=1e-5)
        np.testing.assert_allclose(four.responsibilities(g, t), one.responsibilities(g, t), atol=1e-5)


def test_one_compilation_for_all_times_and_all_training_sets_of_one_shape(schedule):
    ideal._mixture.clear_cache()
    for train in (np.eye(4, dtype=np.float32), 2 * np.eye(4, dtype=np.float32)):
        denoiser = dj.IdealDenoiser(train, schedule)
        for t in (0, 10, 999):
            denoiser.decompose(np.ones((2, 4), np.float32), t)
    assert ideal._mixture._cache_size() == 1
    before = denoiser._call._cache_size()
    for t in (0, 10, 999):
        denoiser.eps(np.ones((3, 4), np.float32), t)
    assert denoiser._call._cache_size() == before + 1


def test_repeated_points_count_with_their_multiplicity(schedule):
    train = np.array([[0.0], [1.0], [1.0], [1.0]], np.float32)
    r = np.asarray(dj.IdealDenoiser(train, schedule).responsibilities([[0.2]], 500))
    np.testing.assert_allclose(r, reference(train, [[0.2]], 500)[2], rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: dj.IdealDenoiser(np.zeros((0, 4)), s), "train must not be empty"),
        (lambda s: dj.IdealDenoiser(np.zeros(4), s), r"train must have shape \[n, ...\] with n > 0, got \[4\]"),
        (lambda s: dj.IdealDenoiser([[np.nan, 1.0]], s), "train must be finite, got 1 of 2 values NaN or infinite"),
        (
            lambda s: dj.IdealDenoiser(np.eye(3), s).eps(np.zeros((2, 4)), 0),
            r"x must have shape \[\*, 3\], got \[2, 4\]",
        ),
        (
            lambda s: ideal.index_points(np.eye(3), 4),
            "there must be a training point for each device, got 3 points for 4",
        ),
        (lambda s: dj.IdealDenoiser(np.eye(3), s).decompose(np.eye(3), 1000), "t must be >= 0 and < 1000, got 1000"),
    ],
)
def test_bad_input_is_named(schedule, call, message):
    with pytest.raises(ValueError, match=message):
        call(schedule)
