"""Metrics against naive loops over pairs and thresholds, hand-worked cases, scikit-learn and simulation."""

import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from dime_jax.evidence import metrics

# Few distinct values, so that ties within and between the classes are common.
tied_scores = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=12)


def naive_kernel(member, heldout):
    return np.array([[1.0 if x < y else 0.5 if x == y else 0.0 for y in heldout] for x in member])


def naive_rates(member, heldout):
    """(tau, TPR, FPR) for every threshold that can matter."""
    taus = [-np.inf, *sorted({*member, *heldout})]
    return [
        (tau, sum(x <= tau for x in member) / len(member), sum(y <= tau for y in heldout) / len(heldout))
        for tau in taus
    ]


def draw(n=60, m=90, gap=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(-gap, 1, n), rng.normal(0, 1, m)


def contains(estimate):
    return estimate.low <= estimate.value <= estimate.high


# ------------------------------------------------------------------------------------------------------- point values


@hypothesis.given(tied_scores, tied_scores, st.sampled_from([0.0, 0.01, 0.25, 1 / 3, 0.5, 0.9]))
@hypothesis.settings(deadline=None, max_examples=150)
def test_values_equal_naive_loops(member, heldout, fpr):
    result = metrics.evaluate(member, heldout, fprs=(fpr,))
    rates = naive_rates(member, heldout)
    allowed = [(t, f) for _, t, f in rates if f <= fpr]
    assert result.auc.value == pytest.approx(naive_kernel(member, heldout).mean(), abs=1e-12)
    assert result.asr.value == pytest.approx(max((t + 1 - f) / 2 for _, t, f in rates), abs=1e-12)
    assert result.tpr_at_fpr[fpr].value == pytest.approx(max(t for t, _ in allowed), abs=1e-12)
    assert result.attained_fpr[fpr] == pytest.approx(allowed[-1][1], abs=1e-12)
    assert result.false_positives[fpr] == round(allowed[-1][1] * len(heldout))
    for estimate in (result.auc, result.asr, result.tpr_at_fpr[fpr]):
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


@hypothesis.given(tied_scores, tied_scores)
@hypothesis.settings(deadline=None, max_examples=100)
def test_properties(member, heldout):
    forward, backward = metrics.evaluate(member, heldout), metrics.evaluate(heldout, member)
    assert forward.auc.value == pytest.approx(1 - backward.auc.value, abs=1e-12)
    assert forward.auc.low == pytest.approx(1 - backward.auc.high, abs=1e-9)
    # Some threshold is at least as good as chance, and as the area under the two-segment curve through it.
    assert forward.asr.value >= max(0.5, (1 + max(t - f for _, t, f in naive_rates(member, heldout))) / 2 - 1e-12)
    # Only the order of the scores matters.
    assert metrics.evaluate(np.exp(member), np.exp(heldout)) == forward


def test_auc_equals_scikit_learn():
    member, heldout = (np.round(x, 1) for x in draw(500, 400))
    labels = np.r_[np.ones(500), np.zeros(400)]
    assert metrics.evaluate(member, heldout).auc.value == pytest.approx(
        roc_auc_score(labels, -np.r_[member, heldout]), abs=1e-12
    )


def test_hand_worked_case():
    # Pairs won by members (lower): 1 beats both, 2 ties and wins, 3 loses and wins -> (2 + 1.5 + 1)/6.
    result = metrics.evaluate([1, 2, 3], [2, 4], fprs=(0.4, 0.5))
    assert result.auc.value == 0.75
    assert result.asr.value == 0.75  # at tau = 3: TPR 1, FPR 1/2
    assert result.tpr_at_fpr[0.4].value == pytest.approx(1 / 3)
    assert result.tpr_at_fpr[0.5].value == 1
    assert result.attained_fpr == {0.4: 0.0, 0.5: 0.5}
    assert result.false_positives == {0.4: 0, 0.5: 1}


def test_fpr_is_compared_as_a_rate_and_not_by_a_rounded_product():
    # 0.29 * 100 = 28.999999999999996, yet 29 false positives of 100 are an FPR of 0.29.
    heldout = np.arange(100.0)
    assert metrics.evaluate([28.5], heldout, fprs=(0.29,)).false_positives[0.29] == 29
    for n in range(1, 200):
        assert all(metrics._allowed_false_positives(n, j / n) == j for j in range(n))


def test_tied_heldout_scores_cannot_be_split():
    # One false positive would be allowed, but the two lowest held-out scores are equal.
    heldout = np.r_[0.0, 0.0, np.arange(1, 99)]
    result = metrics.evaluate([-1.0, 0.0, 0.5], heldout)
    assert result.false_positives[0.01] == 0
    assert result.tpr_at_fpr[0.01].value == pytest.approx(1 / 3)


# ----------------------------------------------------------------------------------------------- curves and thresholds


@hypothesis.given(tied_scores, tied_scores)
@hypothesis.settings(deadline=None, max_examples=100)
def test_roc_curve_equals_naive_loop(member, heldout):
    curve = metrics.roc_curve(member, heldout)
    np.testing.assert_allclose(np.stack([curve.thresholds, curve.tpr, curve.fpr], 1), naive_rates(member, heldout))
    assert (curve.tpr[-1], curve.fpr[-1]) == (1, 1)


@pytest.mark.parametrize(
    ("tau", "expected"),
    [(-np.inf, (0, 0, 0.5)), (1.9, (1 / 3, 0, 2 / 3)), (2, (2 / 3, 0.5, 7 / 12)), (np.inf, (1, 1, 0.5))],
)
def test_rates_at_threshold(tau, expected):
    assert metrics.rates_at_threshold([1, 2, 3], [2, 4], tau) == pytest.approx(expected)


@hypothesis.given(tied_scores, tied_scores)
@hypothesis.settings(deadline=None, max_examples=150)
def test_best_threshold_is_the_lowest_with_the_best_balanced_accuracy(member, heldout):
    tau = metrics.best_threshold(member, heldout)
    asr = metrics.evaluate(member, heldout, fprs=()).asr.value
    assert metrics.rates_at_threshold(member, heldout, tau).accuracy == pytest.approx(asr, abs=1e-12)
    lower = [t for t, tpr, fpr in naive_rates(member, heldout) if t < tau and (tpr + 1 - fpr) / 2 >= asr - 1e-9]
    if tau == -np.inf:
        assert asr == 0.5
    else:
        pooled = np.unique(np.r_[member, heldout])
        assert len(lower) == 1  # only the score just below tau
        assert tau == (lower[0] + pooled[pooled > lower[0]][0]) / 2


def test_best_threshold_is_exact_on_larger_sets():
    for seed in range(20):
        member, heldout = draw(300, 410, seed=seed)
        accuracy = metrics.rates_at_threshold(member, heldout, metrics.best_threshold(member, heldout)).accuracy
        assert accuracy == pytest.approx(max((t + 1 - f) / 2 for _, t, f in naive_rates(member, heldout)), abs=1e-12)


def test_best_threshold_breaks_ties_exactly():
    # TPR - FPR is 2/10 - 0 at tau = 1 and 3/10 - 1/10 at tau = 2, which floating point calls different.
    assert metrics.best_threshold([1, 1, 2, *[9] * 7], [2, *[9] * 9]) == 1.5
    assert metrics.best_threshold([1, 2, 3, *[9] * 7], [1, *[9] * 9]) == 6


def test_best_threshold_edge_cases():
    assert metrics.best_threshold([0.0, 1.0], [4.0, 5.0]) == 2.5
    assert metrics.best_threshold([5.0], [1.0]) == -np.inf
    assert metrics.best_threshold([1.0], [1.0]) == -np.inf


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_best_threshold_between_neighbouring_floats_stays_below_the_upper_one(dtype):
    for low in np.array([1.0, 1.0 + np.finfo(dtype).eps, -3.0, np.finfo(dtype).smallest_subnormal * 3], dtype):
        high = np.nextafter(low, dtype(np.inf))
        assert dtype(metrics.best_threshold(np.array([low]), np.array([high]))) == low


def test_best_threshold_of_huge_scores_does_not_overflow():
    assert metrics.best_threshold([-1.7e308], [1.7e308]) == 0


# ---------------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize("seed", range(3))
def test_auc_interval_is_delong_on_the_logit_scale(seed):
    member, heldout = (np.round(x, 1) for x in draw(seed=seed))
    kernel = naive_kernel(member, heldout)
    auc = kernel.mean()
    variance = kernel.mean(1).var(ddof=1) / member.size + kernel.mean(0).var(ddof=1) / heldout.size
    margin = 1.6448536 * np.sqrt(variance) / (auc * (1 - auc))
    expected = 1 / (1 + np.exp(-(np.log(auc / (1 - auc)) + np.array([-margin, margin]))))
    estimate = metrics.evaluate(member, heldout, confidence=0.9).auc
    np.testing.assert_allclose(estimate[1:], expected, rtol=1e-6)


def test_auc_interval_meets_the_one_without_spread_near_one():
    # One misplaced pair of 250,000: DeLong alone would claim an AUC above 0.99997.
    member, heldout = np.arange(500.0), np.arange(499.5, 999.5)
    heldout[0] = 498.5
    assert metrics.evaluate(member, heldout).auc.low == pytest.approx(0.025 ** (1 / 500), abs=1e-5)


def test_auc_without_spread():
    perfect = metrics.evaluate(np.arange(50.0), np.arange(100.0, 300.0)).auc
    assert perfect == pytest.approx((1, 0.025 ** (1 / 50), 1))  # min(50, 200) disjoint pairs
    assert metrics.evaluate(np.arange(100.0, 300.0), np.arange(50.0)).auc == pytest.approx(
        (0, 0, 1 - 0.025 ** (1 / 50))
    )
    equal = metrics.evaluate(np.ones(50), np.ones(50)).auc
    assert equal == pytest.approx((0.5, 0.5 * 0.025 ** (1 / 50), 1 - 0.5 * 0.025 ** (1 / 50)))


def testinterval_without_spread_is_exact_for_a_coin():
    # The lower limit is the mean at which n successes in a row have probability α/2.
    low = metrics.interval_without_spread(1.0, 30, 0.9).low
    assert stats.binom.pmf(30, 30, low) == pytest.approx(0.05)
    assert metrics.interval_without_spread(0.0, 30, 0.9, least=-1.0).low == pytest.approx(-(1 - 0.05 ** (1 / 30)))


def test_one_image_per_class_says_almost_nothing():
    result = metrics.evaluate([0.0], [1.0])
    assert result.auc == pytest.approx((1, 0.025, 1))
    assert result.asr.low == 0.5
    assert result.tpr_at_fpr[0.01] == pytest.approx((1, 0, 1))
    assert metrics.evaluate([0.0], draw()[1]).auc.low < 0.05


def naive_halves(member, heldout, of_member, of_heldout, seed):
    """The best threshold of each half by trying all, and its advantage there and on the other images."""
    groups = np.unique(np.concatenate([of_member, of_heldout]))
    share = [np.sum(of_member == g) / (np.sum(of_member == g) + np.sum(of_heldout == g)) for g in groups]
    rng, inside, across = np.random.default_rng(seed), [], []
    for _ in range(8):
        order = np.lexsort((rng.random(len(groups)), share))
        for half in (groups[order[1::2]], groups[order[::2]]):
            one, other = np.isin(of_member, half), np.isin(of_heldout, half)
            taus = [-np.inf, *np.unique(np.concatenate([member[one], heldout[other]])), np.inf]
            gains = [np.mean(member[one] <= tau) - np.mean(heldout[other] <= tau) for tau in taus]
            best = int(np.argmax(np.round(gains, 12)))
            inside.append(gains[best])
            low = np.mean(member[~one] <= taus[best]) - np.mean(heldout[~other] <= taus[best])
            high = np.mean(member[~one] < taus[best + 1]) - np.mean(heldout[~other] < taus[best + 1])
            across.append((low + high) / 2 if best else 0)
    return np.mean(inside), np.mean(across)


@pytest.mark.parametrize("decimals", [6, 0], ids=["no ties", "ties"])
@pytest.mark.parametrize("size", [1, 3])
def test_halves_are_those_of_a_naive_loop(decimals, size):
    rng = np.random.default_rng(0)
    member, heldout = np.round(rng.normal(-1, 2, 42), decimals), np.round(rng.normal(0, 2, 60), decimals)
    groups = np.arange(42) // size, 100 + np.arange(60) // size
    numbers = metrics._group_numbers(groups, (42, 60))
    np.testing.assert_allclose(
        metrics._halved_advantages(member, heldout, numbers, seed=3), naive_halves(member, heldout, *numbers, 3)
    )


def test_halves_err_to_both_sides_of_the_truth():
    """On a smooth, a flat and a cornered ROC curve alike; the full sample's maximum less what halving adds does not."""
    rng, n = np.random.default_rng(0), 60
    apart = np.arange(n), n + np.arange(n)

    def corner(share):
        return (rng.random(n) > share) + rng.random(n)

    for truth, draw_member, draw_heldout in (
        (2 * stats.norm.cdf(0.5) - 1, lambda: rng.normal(-1, 1, n), lambda: rng.normal(0, 1, n)),
        (0.4, lambda: rng.uniform(-0.4, 0.6, n), lambda: rng.uniform(0, 1, n)),
        (0.4, lambda: corner(0.7), lambda: corner(0.3)),
    ):
        found = []
        for seed in range(400):
            member, heldout = draw_member(), draw_heldout()
            halves = metrics._halved_advantages(member, heldout, apart, seed)
            advantage = 2 * metrics.evaluate(member, heldout, fprs=()).asr.value - 1 if seed < 40 else None
            found.append((halves.inside, halves.across, advantage))
        noise = 3 * 0.13 / np.sqrt(400)
        inside, across = np.mean([row[:2] for row in found], axis=0)
        assert across < truth + noise
        assert inside > truth - noise
        full = np.mean([row[2] for row in found[:40]])
        assert full - (np.mean([row[0] for row in found[:40]]) - full) > truth - 3 * 0.13 / np.sqrt(40)


def test_without_two_groups_of_a_class_the_asr_is_not_corrected():
    rng = np.random.default_rng(0)
    groups = np.zeros(50, int), 1 + np.arange(50)
    halves = metrics._halved_advantages(rng.normal(size=50), rng.normal(size=50), groups, seed=0)
    assert halves == (0, 0)
    assert metrics._advantage_limits(0.2, halves, 50, 50, 0.025)[1] > 0.35


def test_asr_limits_are_normal_ones_around_their_estimates():
    """Equal classes: the variance (t(1-t) + f(1-f))/n at t - f = d is largest at t = 1 - f, where it is (1 - d²)/2n."""
    low, high = metrics._advantage_limits(0.4, metrics._HalvedAdvantages(0.43, 0.38), 500, 500, 0.025)
    assert (high - 0.37) / np.sqrt((1 - high**2) / 1000) == pytest.approx(1.959964, rel=1e-5)
    assert (0.38 - low) / np.sqrt((1 - low**2) / 1000) == pytest.approx(1.959964, rel=1e-5)


def test_largest_variance_of_unequal_classes():
    _, high = metrics._advantage_limits(0.7, metrics._HalvedAdvantages(0.7, 0.7), 100, 1000, 0.025)
    fpr = np.linspace(0, 1 - high, 100_001)
    tpr = fpr + high
    largest = np.max(tpr * (1 - tpr) / 100 + fpr * (1 - fpr) / 1000)
    assert (high - 0.7) / np.sqrt(largest) == pytest.approx(1.959964, rel=1e-5)


def test_asr_interval_is_narrower_than_the_kolmogorov_band():
    for gap in (0.0, 0.5, 1.0, 3.0):
        asr = metrics.evaluate(*draw(500, 500, gap)).asr
        assert contains(asr)
        assert asr.high - asr.low < 1.358 * np.sqrt(2 / 500)
    assert metrics.evaluate(*draw(500, 500, 0.0)).asr.low == 0.5
    assert metrics.evaluate(*draw(500, 500, 20.0)).asr == pytest.approx((1, 0.994, 1), abs=0.001)


def test_tpr_interval_equals_the_exact_mixture():
    # P(T* <= x) = Σ_j P(J = j) P(Bin(n, c_j/n) <= n x), summed without any drawing.
    member, heldout = draw(400, 500, 1.5)
    below = np.append([np.sum(member < y) for y in np.sort(heldout)], 400)
    weights = stats.binom.pmf(np.arange(501), 500, 0.02)
    cdf = sum(w * stats.binom.cdf(np.arange(401), 400, c / 400) for w, c in zip(weights, below))
    estimate = metrics.evaluate(member, heldout, fprs=(0.02,)).tpr_at_fpr[0.02]
    assert cdf[round(estimate.low * 400)] == pytest.approx(0.025, abs=0.008)
    assert cdf[round(estimate.high * 400)] == pytest.approx(0.975, abs=0.008)


def test_tpr_interval_starts_at_zero_below_three_expected_false_positives():
    member, heldout = draw(500, 2000, 3.0)
    assert metrics.evaluate(member, heldout[:298]).tpr_at_fpr[0.01].low == 0
    assert metrics.evaluate(member, heldout[:299]).tpr_at_fpr[0.01].low > 0.1


def test_no_false_positive_possible():
    member, heldout = draw(500, 60, 2.0)
    result = metrics.evaluate(member, heldout)
    assert result.false_positives[0.01] == 0
    assert result.attained_fpr[0.01] == 0
    assert result.tpr_at_fpr[0.01].value == np.mean(member < heldout.min())
    assert result.tpr_at_fpr[0.01].low == 0
    assert contains(result.tpr_at_fpr[0.01])


def test_tprinterval_without_spread():
    separated = metrics.evaluate(np.arange(500.0), np.arange(1000.0, 1500.0)).tpr_at_fpr[0.01]
    assert separated == pytest.approx((1, 0.025 ** (1 / 500), 1))
    reversed_ = metrics.evaluate(np.arange(1000.0, 1500.0), np.arange(500.0)).tpr_at_fpr[0.01]
    assert reversed_ == pytest.approx((0, 0, 1 - 0.025 ** (1 / 500)))


def test_deterministic_in_seed_and_separate_for_each_fpr():
    scores = draw(500, 500)
    assert metrics.evaluate(*scores, seed=3) == metrics.evaluate(*scores, seed=3)
    assert metrics.evaluate(*scores, seed=3).tpr_at_fpr != metrics.evaluate(*scores, seed=4).tpr_at_fpr
    alone, together = metrics.evaluate(*scores, fprs=(0.05,)), metrics.evaluate(*scores, fprs=(0.01, 0.05))
    assert alone.tpr_at_fpr[0.05] == together.tpr_at_fpr[0.05]


def test_higher_confidence_is_wider():
    narrow, wide = (metrics.evaluate(*draw(500, 500), confidence=c) for c in (0.8, 0.99))
    for a, b in ((narrow.auc, wide.auc), (narrow.asr, wide.asr), (narrow.tpr_at_fpr[0.01], wide.tpr_at_fpr[0.01])):
        assert b.low < a.low < a.high < b.high


def test_paper_sized_sets_take_a_moment():
    scores = draw(12_500, 12_500)
    metrics.evaluate(*scores)
    start = time.perf_counter()
    metrics.evaluate(*scores)
    assert time.perf_counter() - start < 1  # measured: 0.015 s


# --------------------------------------------------------------------------------------------------------- comparison


def paired(n=80, m=70, seed=0):
    rng = np.random.default_rng(seed)
    member, heldout = rng.normal(-1, 1, n), rng.normal(0, 1, m)
    return (member, heldout), (member + rng.normal(0, 0.7, n), heldout + rng.normal(0, 0.7, m))


def test_compare_equals_delong_with_covariances():
    first, second = (tuple(np.round(x, 1) for x in pair) for pair in paired())
    kernels = [naive_kernel(*pair) for pair in (first, second)]
    covariance = np.cov([k.mean(1) for k in kernels]) / 80 + np.cov([k.mean(0) for k in kernels]) / 70
    error = np.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    difference = kernels[0].mean() - kernels[1].mean()
    result = metrics.compare(first, second)
    expected = difference + 1.959964 * error * np.array([0, -1, 1])
    np.testing.assert_allclose(result.auc_difference, expected, rtol=1e-6)
    assert result.p_value == pytest.approx(2 * stats.norm.sf(abs(difference) / error))


def test_compare_is_antisymmetric():
    first, second = paired(500, 500)
    forward, backward = metrics.compare(first, second), metrics.compare(second, first)
    np.testing.assert_allclose(forward.auc_difference, -np.array(backward.auc_difference)[[0, 2, 1]], atol=1e-12)
    assert forward.p_value == pytest.approx(backward.p_value)
    np.testing.assert_allclose(
        forward.tpr_difference_at_fpr[0.01], -np.array(backward.tpr_difference_at_fpr[0.01])[[0, 2, 1]], atol=0.01
    )


def test_compare_value_is_the_difference_of_the_metrics():
    first, second = paired(500, 450)
    a, b = metrics.evaluate(*first, fprs=(0.01, 0.1)), metrics.evaluate(*second, fprs=(0.01, 0.1))
    result = metrics.compare(first, second, fprs=(0.01, 0.1))
    assert result.auc_difference.value == pytest.approx(a.auc.value - b.auc.value)
    for fpr in (0.01, 0.1):
        expected = a.tpr_at_fpr[fpr].value - b.tpr_at_fpr[fpr].value
        assert result.tpr_difference_at_fpr[fpr].value == pytest.approx(expected)
        assert contains(result.tpr_difference_at_fpr[fpr])


def test_pairing_narrows_the_interval():
    first, second = paired(500, 500)
    shuffled = tuple(np.random.default_rng(1).permutation(x) for x in second)
    for width in (
        lambda c: c.auc_difference.high - c.auc_difference.low,
        lambda c: c.tpr_difference_at_fpr[0.1].high - c.tpr_difference_at_fpr[0.1].low,
    ):
        aligned, unaligned = (metrics.compare(first, s, fprs=(0.1,)) for s in (second, shuffled))
        assert width(aligned) < 0.85 * width(unaligned)


def test_compare_equal_rankings():
    first, _ = paired(500, 500)
    result = metrics.compare(first, tuple(np.exp(x) for x in first))
    limit = 1 - 0.025 ** (1 / 500)
    assert result.auc_difference == pytest.approx((0, -limit, limit))
    assert result.p_value == 1
    assert result.tpr_difference_at_fpr[0.01] == pytest.approx((0, -limit, limit))


def test_compare_without_spread():
    low, high = np.arange(20.0), np.arange(50.0, 70.0)
    result = metrics.compare((low, high), (high, low))
    assert result.auc_difference == pytest.approx((1, 2 * 0.025 ** (1 / 20) - 1, 1))
    assert result.p_value == pytest.approx(2 * 0.5**20)  # twenty heads of twenty
    assert metrics.compare(([0.0], [1.0]), ([1.0], [0.0])).p_value == 1


def test_compare_with_too_few_heldout_images():
    first, second = paired(80, 70)
    result = metrics.compare(first, second).tpr_difference_at_fpr[0.01]
    assert result.low == -metrics.evaluate(*second).tpr_at_fpr[0.01].high
    assert result.high == metrics.evaluate(*first).tpr_at_fpr[0.01].high


def test_compare_survives_heavy_ties_at_high_fpr():
    rng = np.random.default_rng(0)
    first, second = ((rng.integers(0, 2, 40) * 1.0, rng.integers(0, 2, 40) * 1.0) for _ in range(2))
    assert contains(metrics.compare(first, second, fprs=(0.9,)).tpr_difference_at_fpr[0.9])


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "call",
    [metrics.evaluate, metrics.roc_curve, metrics.best_threshold, lambda a, b: metrics.rates_at_threshold(a, b, 0)],
)
@pytest.mark.parametrize(
    ("member", "heldout", "message"),
    [
        ([np.nan, 1, np.inf], [1.0], r"member_scores must be finite, got 2 of 3 values"),
        ([1.0], [1, -np.inf], r"heldout_scores must be finite, got 1 of 2 values"),
        ([], [1.0], r"member_scores must not be empty"),
        ([1.0], [], r"heldout_scores must not be empty"),
        ([[1.0]], [1.0], r"member_scores must have shape \[\*\], got \[1, 1\]"),
        ([1.0], ["a"], r"heldout_scores must be numbers, got type <U1"),
    ],
)
def test_bad_scores_are_refused(call, member, heldout, message):
    with pytest.raises(ValueError, match=message) as error:
        call(member, heldout)
    assert "\n" not in str(error.value)


def test_bad_levels_are_refused():
    for fpr in (-0.1, 1.0, np.nan):
        with pytest.raises(ValueError, match=rf"fpr must be in \[0, 1\), got {fpr}"):
            metrics.evaluate([0.0], [1.0], fprs=(fpr,))
    for confidence in (0.0, 1.0, 95):
        with pytest.raises(ValueError, match=rf"confidence must be in \(0, 1\), got {confidence}"):
            metrics.evaluate([0.0], [1.0], confidence=confidence)
    with pytest.raises(ValueError, match="tau must be a number, got nan"):
        metrics.rates_at_threshold([0.0], [1.0], np.nan)


def test_bad_comparisons_are_refused():
    with pytest.raises(ValueError, match="both attacks must score the same held-out images, got 1 and 2 scores"):
        metrics.compare(([0.0], [1.0]), ([0.0], [1.0, 2.0]))
    with pytest.raises(ValueError, match="second member_scores must be finite, got 1 of 1 values"):
        metrics.compare(([0.0], [1.0]), ([np.nan], [1.0]))
