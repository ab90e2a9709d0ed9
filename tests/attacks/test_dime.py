"""DIME against enumerated probes, linear denoisers where everything is known, and the paper's lemmas."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj

T = 200


@pytest.fixture(scope="module")
def linear(schedule):
    """eps(g) = A g + b: B and the trace are known, and finite differences are exact."""
    rng = np.random.default_rng(0)
    matrix, shift = rng.normal(size=(6, 6)).astype(np.float32), rng.normal(size=6).astype(np.float32)
    return matrix, shift, lambda g, t: np.asarray(g) @ matrix.T + shift


def probes(q, batch, d, seed=0):
    return np.random.default_rng(seed).choice([-1.0, 1.0], size=(q, batch, d)).astype(np.float32)


def test_terms_against_a_naive_loop(schedule, linear):
    matrix, shift, eps_fn = linear
    x, z, gamma = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32), probes(4, 3, 6), 0.3
    terms = dj.dime_terms(eps_fn, schedule, x, z, T, gamma)
    central = dj.dime_central_terms(eps_fn, schedule, x, z, T, gamma)
    a, sigma = schedule.sqrt_abar(T).item(), schedule.sigma(T).item()
    for k, i in itertools.product(range(4), range(3)):
        g = a * x[i]
        plus, minus = (matrix @ (g + sign * gamma * sigma * z[k, i]) + shift for sign in (1, -1))
        assert terms.norm[k, i].item() == pytest.approx(np.linalg.norm(plus), rel=1e-5)
        assert terms.trace[k, i].item() == pytest.approx(z[k, i] @ matrix @ z[k, i], rel=1e-3, abs=1e-3)
        mean_norm = (np.linalg.norm(plus) + np.linalg.norm(minus)) / 2
        assert central.norm[k, i].item() == pytest.approx(mean_norm, rel=1e-5)
        assert central.trace[k, i].item() == pytest.approx(z[k, i] @ matrix @ z[k, i], rel=1e-3, abs=1e-3)


def test_trace_averages_to_the_trace_of_a_linear_denoiser(schedule, linear):
    matrix, _, eps_fn = linear
    every = np.array(list(itertools.product([-1, 1], repeat=6)), np.float32)[:, None]
    terms = dj.dime_terms(eps_fn, schedule, np.ones((1, 6), np.float32), every, T, 0.5)
    assert terms.trace.mean().item() == pytest.approx(np.trace(matrix), rel=1e-4)


def test_score_is_the_paper_formula(linear):
    terms = dj.DimeTerms(jnp.float32([[1, 2], [3, 6]]), jnp.float32([[5, 0], [7, 2]]))
    np.testing.assert_allclose(
        dj.dime_score(terms, 0.3), np.cos(0.3) * np.array([4, 16]) + np.sin(0.3) * np.array([6, 1]), rtol=1e-6
    )
    stats = dj.DimeStats(mean_sq=2.0, std_sq=4.0, mean_trace=1.0, std_trace=5.0)
    expected = np.cos(0.3) * np.array([0.5, 3.5]) + np.sin(0.3) * np.array([1, 0])
    np.testing.assert_allclose(dj.dime_score(terms, 0.3, stats), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(dj.dime_score)(terms, 0.3), dj.dime_score(terms, 0.3), rtol=1e-6)


def test_decide_is_lower_than_or_equal():
    np.testing.assert_array_equal(dj.decide(np.array([0.1, 0.2, 0.3]), 0.2), [True, True, False])


def test_probes_nest_in_q(schedule, linear):
    x, z = np.ones((2, 6), np.float32), probes(5, 2, 6)
    whole, part = (dj.dime_terms(linear[2], schedule, x, z[:q], T, 0.1) for q in (5, 2))
    np.testing.assert_array_equal(whole.norm[:2], part.norm)
    np.testing.assert_array_equal(whole.trace[:2], part.trace)


def test_theory_weights_rank_by_the_exact_error(schedule):
    """With the exact trace in place of V-hat, the theory angle gives M/sigma^2 - d up to the angle's own scale."""
    rng = np.random.default_rng(0)
    denoiser = dj.IdealDenoiser(rng.normal(size=(40, 5)).astype(np.float32), schedule)
    x, sigma = rng.normal(size=(30, 5)).astype(np.float32), schedule.sigma(T).item()
    g = schedule.sqrt_abar(T) * x
    eps = denoiser.eps(g, T)
    exact = dj.DimeTerms(jnp.linalg.norm(eps, axis=1)[None], denoiser.jacobian_trace(g, T)[None])
    phi = dj.theory_phi(schedule.sigma(T)).item()
    score = dj.dime_score(exact, phi) / np.cos(phi) + 5
    np.testing.assert_allclose(score * sigma**2, denoiser.decompose(x, T).error, rtol=1e-4)


def enumerated(denoiser, schedule, x, t, gamma):
    """Terms averaged over all 2^d probes, in float64."""
    d = x.shape[1]
    every = np.array(list(itertools.product([-1.0, 1.0], repeat=d)))[:, None]
    tiled, z = np.repeat(x, len(every), axis=0), every[:, 0][None]
    terms = dj.dime_terms(denoiser.eps_fn(), schedule, tiled, z, t, gamma)
    return float(np.mean(terms.norm) ** 2), float(np.mean(terms.norm**2)), float(np.mean(terms.trace))


def test_trace_bias_is_second_order_in_gamma(schedule):
    """Lemma V-error-bias, sharper: averaged over all probes the odd orders cancel."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        denoiser = dj.IdealDenoiser(rng.normal(size=(12, 4)), schedule)
        x, t = rng.normal(size=(1, 4)), 400
        exact = denoiser.jacobian_trace(schedule.sqrt_abar(t).astype(jnp.float64) * x, t).item()
        gammas = np.array([0.02, 0.04, 0.08, 0.16])
        errors = [abs(enumerated(denoiser, schedule, x, t, gamma)[2] - exact) for gamma in gammas]
        slope = np.polyfit(np.log(gammas), np.log(errors), 1)[0]
    assert slope == pytest.approx(2, abs=0.05)


def test_squared_bias_lemma_bounds_the_level_term(schedule):
    """-B H gamma^2 sigma^2 d <= E[B_hat^2] - B^2 <= (B H + L^2) gamma^2 sigma^2 d, for q = 1 and q = infinity."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        denoiser = dj.IdealDenoiser(rng.normal(size=(8, 3)), schedule)
        x, t, d = rng.normal(size=(1, 3)), 500, 3
        sigma = float(schedule.sigma(t))
        g = np.float64(schedule.sqrt_abar(t)) * x

        def f(v):
            return denoiser.eps(v[None], t)[0]

        level = np.linalg.norm(f(jnp.asarray(g[0])))
        every = np.array(list(itertools.product([-1.0, 1.0], repeat=d)))
        for gamma in (0.05, 0.2):
            # L and H over the neighbourhood, from the Jacobian and the second differences along the probes.
            jacobian = jax.jacfwd(f)
            points = [g[0] + s * gamma * sigma * z for s in np.linspace(0, 1, 6) for z in every]
            lipschitz = max(np.linalg.norm(jacobian(jnp.asarray(p)), 2) for p in points)
            at_g, here = jacobian(jnp.asarray(g[0])), f(jnp.asarray(g[0]))
            curvature = max(
                2 * np.linalg.norm(f(jnp.asarray(p)) - here - at_g @ (p - g[0])) / np.sum((p - g[0]) ** 2)
                for p in points
                if np.sum((p - g[0]) ** 2) > 0
            )
            step = gamma**2 * sigma**2 * d
            many, one, _ = enumerated(denoiser, schedule, x, t, gamma)
            for mean_square in (many, one):
                assert -level * curvature * step <= mean_square - level**2 + 1e-12
                assert mean_square - level**2 <= (level * curvature + lipschitz**2) * step + 1e-12


def test_level_bias_is_first_order_where_eps_vanishes(schedule):
    """The lemma's remark: f(u) = u/sigma at g = 0 gives B = 0 and B_hat = gamma exactly."""
    sigma = schedule.sigma(T)
    terms = dj.dime_terms(lambda g, t: g / sigma, schedule, np.zeros((1, 1), np.float32), np.ones((1, 1, 1)), T, 0.25)
    assert terms.norm.item() == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 0.0}, r"gamma must be finite and > 0, got 0.0"),
        ({"gamma": -0.1}, r"gamma must be finite and > 0, got -0.1"),
        ({"t": 1000}, "t must be >= 0 and < 1000, got 1000"),
        ({"probes": np.ones((2, 3, 5), np.float32)}, r"probes must have shape \[\*, 3, 6\], got \[2, 3, 5\]"),
        ({"probes": np.ones((0, 3, 6), np.float32)}, "probes must not be empty"),
        (
            {"x": np.ones((3, 6), np.int32)},
            r"images must have shape \[B, ...\] and a floating type, got int32 \[3, 6\]",
        ),
        ({"x": np.ones((0, 6), np.float32), "probes": np.ones((1, 0, 6))}, "images must not be empty"),
        ({"eps_fn": lambda g, t: g[:, :2]}, r"eps_fn must return shape \[3, 6\], got \[3, 2\]"),
    ],
)
@pytest.mark.parametrize("terms", [dj.dime_terms, dj.dime_central_terms])
def test_bad_input_is_named(schedule, linear, terms, change, message):
    call = {
        "eps_fn": linear[2],
        "x": np.ones((3, 6), np.float32),
        "probes": probes(2, 3, 6),
        "t": T,
        "gamma": 0.1,
        **change,
    }
    with pytest.raises(ValueError, match=message) as error:
        terms(call["eps_fn"], schedule, call["x"], call["probes"], call["t"], call["gamma"])
    assert "\n" not in str(error.value)
