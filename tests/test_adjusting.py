"""Adjusted p-values: valid whatever the fit is worth, and more powerful where pictures explain scores."""

import numpy as np
import pytest
from scipy import stats

from dime_jax import evidence

COMPLEXITY = np.array([2.0, -1.0, 0.5])


def pictures(rng, n, gap=0.0, scale=False):
    """Statistics [n, 3] and scores [n] that follow them, members lower by `gap`; with `scale`, unevenly scattered."""
    statistics = rng.normal(size=(n, 3))
    spread = np.exp(0.7 * statistics[:, 0]) if scale else 1.0
    return statistics, statistics @ COMPLEXITY + spread * rng.normal(size=n) - gap * spread


def adjusted_p(rng, gap, n_fit, scale=False, n=200, m=5):
    adjust = evidence.fit_adjustment(*reversed(pictures(rng, n_fit, scale=scale)))
    (seen, scores), (compared, reference) = pictures(rng, m, gap, scale), pictures(rng, n, scale=scale)
    plain = evidence.conformal_p_values(scores, reference)
    return plain, evidence.conformal_p_values(adjust(scores, seen), adjust(reference, compared))


@pytest.mark.parametrize("n_fit", [2, 5, 100])
def test_p_values_are_uniform_for_images_never_seen(n_fit):
    """Even where the fit to two images is worthless."""
    p = np.concatenate([adjusted_p(np.random.default_rng(seed), 0.0, n_fit, scale=True)[1] for seed in range(400)])
    for level in (0.01, 0.05, 0.2, 0.5):
        assert np.mean(p <= level) <= level + 3 * np.sqrt(level * (1 - level) / 400)
    assert np.mean(p) == pytest.approx(0.5, abs=0.03)


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
