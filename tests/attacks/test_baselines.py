"""The baselines against naive NumPy versions of their official definitions."""

import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import attacks
from dime_jax.core.draws import Given

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4, 4, 2)).astype(np.float32)
NOISE = RNG.normal(size=(5, 3, 4, 4, 2)).astype(np.float32)


def eps_fn(x, t):
    """A nonlinear model that knows its timestep and returns NumPy."""
    x = np.asarray(x)
    return np.sin(x * (1 + t / 100)) + 0.1 * x[:, ::-1]


@pytest.fixture
def levels(schedule):
    def level(t):
        return schedule.sqrt_abar(t).item(), schedule.sigma(t).item()

    return level


def p_norm(v, p):
    return np.array([np.sum(np.abs(row) ** p) ** (1 / p) for row in v.reshape(len(v), -1).astype(np.float64)])


def test_loss(schedule, levels):
    a, sigma = levels(70)
    expected = p_norm(NOISE[0] - eps_fn(a * X + sigma * NOISE[0], 70), 2)
    np.testing.assert_allclose(dj.loss(eps_fn, schedule, X, NOISE[0], 70), expected, rtol=1e-5)


def test_the_mean_loss_is_that_of_its_draws_and_one_draw_stays_as_it_is(schedule):
    each = np.stack([dj.loss(eps_fn, schedule, X, noise, 70) for noise in NOISE])
    run = attacks.get_attack("loss_mc").run
    mean = run(eps_fn, schedule, X, Given(jnp.asarray(NOISE)), {"t": 70, "q": len(NOISE)})
    np.testing.assert_allclose(mean[0], each.mean(axis=0), rtol=1e-6)
    one = attacks.get_attack("loss").run(eps_fn, schedule, X, Given(jnp.asarray(NOISE)), {"t": 70})
    np.testing.assert_array_equal(one[0], each[0])


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("normalize", [False, True])
def test_pia(schedule, levels, p, normalize):
    a, sigma = levels(70)
    eps0 = eps_fn(X, 0)  # on the image itself, not on sqrt(abar_0) x
    if normalize:
        eps0 = np.stack([e / np.mean(np.abs(e)) * np.sqrt(2 / np.pi) for e in eps0])
    expected = p_norm(eps0 - eps_fn(a * X + sigma * eps0, 70), p)
    np.testing.assert_allclose(dj.pia(eps_fn, schedule, X, 70, p=p, normalize=normalize), expected, rtol=1e-5)


@pytest.mark.parametrize("p", [2, 4])
def test_sima_sees_the_raw_image(schedule, p):
    np.testing.assert_allclose(dj.sima(eps_fn, schedule, X, 70, p=p), p_norm(eps_fn(X, 70), p), rtol=1e-5)


def test_sima_mc_averages(schedule, levels):
    a, sigma = levels(70)
    responses = [eps_fn(a * X + sigma * z, 70) for z in NOISE]
    norms = np.mean([p_norm(e, 4) for e in responses], axis=0)
    vector = p_norm(np.mean(responses, axis=0), 4)
    np.testing.assert_allclose(dj.sima_mc(eps_fn, schedule, X, NOISE, 70), norms, rtol=1e-5)
    np.testing.assert_allclose(dj.sima_mc(eps_fn, schedule, X, NOISE, 70, average="vector"), vector, rtol=1e-5)
    assert not np.allclose(norms, vector)


@pytest.mark.parametrize(("t_sec", "k"), [(100, 10), (60, 15), (95, 10), (10, 10), (1, 10)])
def test_secmi_walks_the_official_trajectory(schedule, levels, t_sec, k):
    def hop(x, t_from, t_to):
        (a, sigma), (b, tau) = levels(t_from), levels(t_to)
        eps = eps_fn(x, t_from)
        return b * (x - sigma * eps) / a + tau * eps

    x, last = X.astype(np.float64), 0
    for t in range(0, t_sec, k)[1:]:
        x, last = hop(x, last, t), t
    expected = np.sum((hop(hop(x, last, last + k), last + k, last) - x) ** 2, axis=(1, 2, 3))
    np.testing.assert_allclose(dj.secmi(eps_fn, schedule, X, t_sec, k), expected, rtol=2e-3)


def test_secmi_as_the_paper_prints_it(schedule, levels):
    (_, sigma), (a_next, sigma_next) = levels(70), levels(71)
    expected = p_norm(sigma * (eps_fn(X, 70) - eps_fn(a_next * X + sigma_next * NOISE[0], 71)), 2)
    actual = dj.secmi(eps_fn, schedule, X, t_sec=70, variant="paper", noise=NOISE[0])
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: dj.secmi(eps_fn, s, X, variant="other"), "unknown variant 'other'; expected one of official, paper"),
        (lambda s: dj.secmi(eps_fn, s, X, variant="paper"), "needs noise of the images' shape, got noise=None"),
        (lambda s: dj.secmi(eps_fn, s, X, k=0), "k must be >= 1, got 0"),
        (lambda s: dj.secmi(eps_fn, s, X, t_sec=1000), "t_sec must be >= 0 and < 1000, got 1000"),
        (lambda s: dj.secmi(eps_fn, s, X, t_sec=999, k=20), "the step after t_sec's last must be >= 0 and < 1000"),
        (lambda s: dj.sima(eps_fn, s, X, 5, p=0.5), "p must be >= 1, got 0.5"),
        (lambda s: dj.sima_mc(eps_fn, s, X, NOISE, 5, average="sum"), "unknown average 'sum'"),
        (lambda s: dj.sima_mc(eps_fn, s, X, NOISE[0], 5), r"noise must have shape \[\*, 3, 4, 4, 2\]"),
        (lambda s: dj.loss(eps_fn, s, X, NOISE, 5), r"noise must have shape \[3, 4, 4, 2\], got \[5, 3, 4, 4, 2\]"),
        (lambda s: dj.loss(eps_fn, s, X, NOISE[0], -1), "t must be >= 0 and < 1000, got -1"),
        (lambda s: dj.pia(eps_fn, s, X[0, 0, 0], 5), r"images must have shape \[B, ...\]"),
    ],
)
def test_bad_input_is_named(schedule, call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(schedule)
    assert "\n" not in str(error.value)
