"""Adjusted p-values: valid whatever the fit is worth, and more powerful where pictures explain scores."""

import numpy as np
import pytest
from scipy import stats

from dime_jax import evidence
from dime_jax.evidence import ScoredPictures, adjusting

COMPLEXITY = np.array([2.0, -1.0, 0.5])


def pictures(rng, n, gap=0.0, scale=False):
    """Statistics [n, 3] and scores [n] that follow them, members lower by `gap`; with `scale`, unevenly scattered."""
    statistics = rng.normal(size=(n, 3))
    spread = np.exp(0.7 * statistics[:, 0]) if scale else 1.0
    return statistics, statistics @ COMPLEXITY + spread * rng.normal(size=n) - gap * spread


def adjusted_p(rng, gap, n_fit, scale=False, n=200, m=5):
    """Plain and adjusted p-values of m images, as an audit has them."""
    fitted_to, images, heldout = (
        ScoredPictures(*reversed(pictures(rng, *which, scale=scale))) for which in ((n_fit,), (m, gap), (n,))
    )
    plain = evidence.conformal_p_values(images.scores, heldout.scores)
    return plain, evidence.adjusted_p_values(images, heldout, fitted_to)


@pytest.mark.parametrize(("n_fit", "n"), [(2, 200), (5, 200), (100, 200), (100, 9)])
def test_p_values_are_uniform_for_images_never_seen(n_fit, n):
    """Even where the fit to two images is worthless; a fit to the nine of the reference would favour them."""
    p = np.concatenate([adjusted_p(np.random.default_rng(seed), 0.0, n_fit, True, n)[1] for seed in range(400)])
    for level in (0.01, 0.05, 0.2, 0.5):
        assert np.mean(p <= level) <= level + 3 * np.sqrt(level * (1 - level) / 400)
    assert np.mean(p) == pytest.approx((n + 2) / (2 * n + 2), abs=0.03)


def test_power_where_the_picture_explains_the_score():
    plain, adjusted = np.concatenate(
        [adjusted_p(np.random.default_rng(seed), 2.5, 200, scale=True) for seed in range(100)], axis=1
    )
    assert np.mean(adjusted <= 0.05) > 2 * np.mean(plain <= 0.05)
    # As if complexity were known: a normal score 2.5 below the others.
    assert np.mean(adjusted <= 0.05) == pytest.approx(stats.norm.cdf(2.5 - stats.norm.isf(0.05)), abs=0.12)


def test_location_and_scale_are_found():
    adjust = evidence.fit_adjustment(*reversed(pictures(np.random.default_rng(0), 20_000, scale=True)))
    statistics, scores = pictures(np.random.default_rng(1), 20_000, scale=True)
    residual = adjust(scores, statistics)
    easy, hard = residual[statistics[:, 0] < -1], residual[statistics[:, 0] > 1]
    assert np.std(hard) / np.std(easy) == pytest.approx(1, abs=0.25)  # e^(0.7 * 3) = 8 as they come
    assert abs(np.corrcoef(residual, statistics[:, 1])[0, 1]) < 0.05


def test_constant_statistics_and_scores_are_harmless():
    adjust = evidence.fit_adjustment(np.ones(5), np.ones((5, 2)))
    assert np.all(np.isfinite(adjust([1.0, 2.0], [[1.0, 1.0], [50.0, 1.0]])))


def test_nan_says_nothing():
    statistics, scores = pictures(np.random.default_rng(0), 50)
    adjust = evidence.fit_adjustment(scores, statistics)
    assert np.isnan(adjust([np.nan, 0.0], [[0.0, 0.0, 0.0], [np.nan, 0.0, 0.0]])).all()


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="statistics"):
        evidence.fit_adjustment([1.0, 2.0], np.zeros((3, 2)))
    with pytest.raises(ValueError, match="statistics"):
        evidence.fit_adjustment([1.0, 2.0], [[0.0], [np.nan]])


def test_little_is_lost_where_the_picture_explains_nothing():
    """36 statistics of 60 images: a penalty that does not follow from them would find more noise than anything."""

    def p_values(seed):
        rng = np.random.default_rng(seed)
        fitted_to, members, heldout = (
            ScoredPictures(rng.normal(size=n) - gap, rng.normal(size=(n, 36)))
            for n, gap in ((60, 0), (50, 2), (200, 0))
        )
        plain = evidence.conformal_p_values(members.scores, heldout.scores)
        return plain, evidence.adjusted_p_values(members, heldout, fitted_to)

    plain, adjusted = np.concatenate([p_values(seed) for seed in range(20)], axis=1)
    assert np.mean(adjusted <= 0.05) > np.mean(plain <= 0.05) - 0.06


def test_penalties_are_those_that_predict_left_out_images_best():
    """Against a regression without each image in turn."""
    rng = np.random.default_rng(0)
    statistics = rng.normal(size=(20, 4))
    statistics -= statistics.mean(axis=0)
    target = statistics[:, 0] + rng.normal(size=20)
    design = np.concatenate([statistics, np.ones((20, 1))], axis=1)

    def solve(rows, penalty):
        held_back = 20 * penalty * np.diag([1, 1, 1, 1, 0])
        return np.linalg.solve(design[rows].T @ design[rows] + held_back, design[rows].T @ target[rows])

    def off(penalty):
        return np.array([target[i] - design[i] @ solve(np.arange(20) != i, penalty) for i in range(20)])

    best = min(adjusting._PENALTIES, key=lambda penalty: np.sum(off(penalty) ** 2))
    assert best not in (adjusting._PENALTIES[0], adjusting._PENALTIES[-1])
    coefficients, left = adjusting._ridge(statistics, target)
    np.testing.assert_allclose(coefficients, solve(np.full(20, True), best), atol=1e-10)
    np.testing.assert_allclose(left, off(best), atol=1e-10)


def test_images_without_score_or_statistics_are_left_out():
    rng = np.random.default_rng(0)
    fitted_to, images, heldout = (ScoredPictures(*reversed(pictures(rng, n))) for n in (50, 3, 40))
    expected = evidence.adjusted_p_values(images, heldout, fitted_to)
    broken = [ScoredPictures(np.array([np.nan, 9.0]), np.array([[0.0] * 3, [np.nan] * 3]))] * 2
    more = (ScoredPictures(*map(np.concatenate, zip(side, extra))) for side, extra in zip((heldout, fitted_to), broken))
    np.testing.assert_array_equal(evidence.adjusted_p_values(images, *more), expected)
    assert np.isnan(evidence.adjusted_p_values(broken[0], heldout, fitted_to)).all()


def test_nothing_is_extrapolated():
    """A statistic that hardly varies among the images of the fit, and does elsewhere, would overflow."""
    rng = np.random.default_rng(0)
    statistics = np.stack([1e-7 * rng.normal(size=200), rng.normal(size=200)], axis=1)
    scores = np.exp(statistics[:, 0] * 1e7) * rng.normal(size=200)
    adjust = evidence.fit_adjustment(scores, statistics)
    far, very_far = adjust([1.0, 1.0], [[1.0, 0.0], [1e6, 0.0]])
    assert np.isfinite(far)
    assert far == very_far


def test_power_is_the_share_below_the_level_with_its_exact_interval():
    p_values = np.array([0.01] * 7 + [0.05] * 3 + [0.051] * 30)
    found = evidence.power(p_values, 0.05)
    exact = stats.binomtest(10, 40).proportion_ci(0.95, "exact")
    assert tuple(found) == pytest.approx((0.25, exact.low, exact.high))
    assert evidence.power([1.0] * 10, 0.05)[:2] == (0.0, 0.0)
    assert evidence.power([0.01] * 10, 0.05)[::2] == (1.0, 1.0)
    # Four copies of each image are worth one.
    copies = evidence.power(np.repeat(p_values, 4), 0.05, np.repeat(np.arange(40), 4))
    assert copies.value == 0.25
    assert copies.high - copies.low == pytest.approx(found.high - found.low, rel=0.05)
