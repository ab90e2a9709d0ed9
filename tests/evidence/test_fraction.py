"""The fraction of a set that was used: against what was built in."""

import numpy as np
import pytest

from dime_jax import evidence
from dime_jax.evidence import KnownScores, fraction
from dime_jax.evidence.fraction import _Fit, _Means


def scores(rng, members, others, separation):
    return np.concatenate([rng.normal(-separation, 1, members), rng.normal(0, 1, others)])


def known(rng, n, separation):
    return KnownScores(rng.normal(-separation, 1, n), rng.normal(0, 1, n))


def estimate(members, others, separation=2.0, seed=0, n=200, resamples=499):
    rng = np.random.default_rng([1, seed])  # not the stream that is resampled with
    own = scores(rng, members, others, separation)
    return evidence.fraction_used(
        own, known(rng, n, separation), known(rng, n, separation), seed=seed, resamples=resamples
    )


@pytest.mark.parametrize(("members", "others"), [(0, 60), (6, 54), (30, 30), (60, 0)])
def test_it_is_near_the_truth_and_inside_its_interval(members, others):
    found = estimate(members, others, separation=3.0)
    truth = members / (members + others)
    assert found.low <= truth <= found.high
    assert found.low <= found.value <= found.high
    assert abs(found.value - truth) < 0.1
    assert found.high - found.low < 0.35
    assert (found.n, found.n_members, found.n_heldout) == (60, 200, 200)


def test_where_members_do_not_stand_out_nothing_is_told():
    found = estimate(30, 30, separation=0.0)
    assert (found.low, found.high) == (0, 1)


def test_any_order_preserving_scale_of_the_scores_gives_the_same():
    rng = np.random.default_rng(1)
    own, first, second = scores(rng, 10, 30, 2.0), known(rng, 100, 2.0), known(rng, 100, 2.0)
    plain = evidence.fraction_used(own, first, second)
    scaled = evidence.fraction_used(
        7 + 1e4 * own, *(KnownScores(*(7 + 1e4 * side for side in one)) for one in (first, second))
    )
    np.testing.assert_allclose(scaled[:3], plain[:3], atol=1e-6)
    assert evidence.fraction_used(np.append(own, [np.nan, np.inf]), first, second) == plain


def test_the_misfit_is_that_of_a_search_for_the_best_fraction():
    fit = _Fit(30, 50, 70, 0.04, 0.02)
    fractions = np.linspace(0, 1, 4001)
    for own in (0.05, 0.2, 0.5, 0.79, 0.95):
        means = _Means(own, 0.8, 0.1)
        squared = fit.squared_z(means, fractions)
        np.testing.assert_allclose(fit.misfit(means, fractions), squared - np.min(squared), atol=1e-4)


def test_constant_scores_are_no_error():
    found = evidence.fraction_used(np.ones(5), KnownScores(np.ones(9), np.ones(9)), KnownScores(np.ones(9), np.ones(9)))
    assert (found.low, found.high) == (0, 1)


def test_bad_input_is_one_line():
    fine = KnownScores(np.arange(5.0), np.arange(5.0))
    with pytest.raises(ValueError, match=r"confidence must be in \(0, 1\), got 2"):
        evidence.fraction_used([1.0], fine, fine, confidence=2)
    with pytest.raises(ValueError, match="scores must not be empty"):
        evidence.fraction_used([np.nan], fine, fine)
    with pytest.raises(ValueError, match="members must be finite"):
        evidence.fraction_used([1.0], KnownScores([np.nan], [1.0]), fine)


@pytest.mark.slow
@pytest.mark.parametrize("separation", [1.0, 3.0])
@pytest.mark.parametrize("members", [0, 5, 25, 50])
def test_intervals_hold_the_truth_as_often_as_they_say(separation, members, monkeypatch):
    """0, 10, 50 and 100 % of 50 candidates; 1,000 sets each, so that the rate is known to 0.7 points.

    Fractions are tried in steps of a tenth, which is quicker: whether the truth is refused does not depend on them.
    """
    monkeypatch.setattr(fraction, "_MAX_FRACTIONS", 10)
    trials = 1_000
    found = [estimate(members, 50 - members, separation, seed=seed) for seed in range(trials)]
    rate = np.mean([one.low <= members / 50 <= one.high for one in found])
    print(f"separation {separation}, {members} of 50: {rate:.3f}")
    assert 0.93 <= rate <= 0.97
