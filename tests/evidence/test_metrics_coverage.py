"""Interval coverage and test size by simulation on binormal scores, whose true AUC, ASR and TPR@FPR are known.

Members are N(-gap, 1), held-out N(0, 1): AUC = Φ(gap/√2), ASR = Φ(gap/2), TPR@f = Φ(Φ⁻¹(f) + gap).
Run with `-s` to see the measured figures.
"""

import numpy as np
import pytest
from scipy import stats

from dime_jax.evidence import metrics

REPETITIONS = 2000
# Two standard errors of a simulated 95 % coverage.
NOISE = 2 * np.sqrt(0.95 * 0.05 / REPETITIONS)

pytestmark = pytest.mark.slow


def covers(estimate, truth):
    return estimate.low <= truth <= estimate.high


def coverage(gap, n, metric, truth, fprs=()):
    """Share of simulated data sets of n + n images whose interval holds the truth."""
    rng = np.random.default_rng(0)
    held = [
        covers(metric(metrics.evaluate(rng.normal(-gap, 1, n), rng.normal(0, 1, n), fprs, seed=repetition)), truth)
        for repetition in range(REPETITIONS)
    ]
    print(f"n={n} truth={truth:.4f} coverage={np.mean(held):.4f} ({REPETITIONS} repetitions)")
    return np.mean(held)


def tpr_coverage(tpr, n):
    gap = stats.norm.ppf(tpr) - stats.norm.ppf(0.01)
    return coverage(gap, n, lambda result: result.tpr_at_fpr[0.01], tpr, fprs=(0.01,))


def test_tpr_coverage_at_the_reference_setting():
    assert 0.93 <= tpr_coverage(0.2, 500) <= 0.97


@pytest.mark.parametrize("n", [100, 300, 2000])
@pytest.mark.parametrize("tpr", [0.01, 0.2, 0.6, 0.95])
def test_tpr_covers_at_other_sizes_and_rates(n, tpr):
    assert tpr_coverage(tpr, n) >= 0.95 - NOISE


@pytest.mark.parametrize("n", [100, 500, 2000])
@pytest.mark.parametrize("asr", [0.5, 0.54, 0.69, 0.95])
def test_asr_covers_from_chance_upwards(n, asr):
    assert coverage(2 * stats.norm.ppf(asr), n, lambda result: result.asr, asr) >= 0.95 - NOISE


@pytest.mark.parametrize("d", [0.08, 0.38, 0.9])
def test_asr_covers_on_its_worst_curve(d):
    # Members uniform on [-d, 1 - d] and held-out on [0, 1]: every threshold in between is the best one.
    rng = np.random.default_rng(0)
    held = [
        covers(metrics.evaluate(rng.uniform(-d, 1 - d, 500), rng.uniform(0, 1, 500), fprs=()).asr, (1 + d) / 2)
        for _ in range(REPETITIONS)
    ]
    print(f"worst curve, n=500 truth={(1 + d) / 2:.4f} coverage={np.mean(held):.4f} ({REPETITIONS} repetitions)")
    assert np.mean(held) >= 0.95 - NOISE


@pytest.mark.parametrize("n", [100, 500])
@pytest.mark.parametrize("auc", [0.5, 0.8, 0.99, 0.9999])
def test_auc_coverage(n, auc):
    assert coverage(np.sqrt(2) * stats.norm.ppf(auc), n, lambda result: result.auc, auc) >= 0.95 - NOISE


def paired_scores(rng, n, gaps):
    """Two attacks that share half of their variance on the same images."""
    member, heldout = rng.normal(0, 1, n), rng.normal(0, 1, n)
    return [
        ((member + rng.normal(0, 1, n)) / np.sqrt(2) - gap, (heldout + rng.normal(0, 1, n)) / np.sqrt(2))
        for gap in gaps
    ]


def test_compare_rejects_equal_attacks_as_often_as_it_should():
    rng = np.random.default_rng(0)
    p_values = np.array([metrics.compare(*paired_scores(rng, 200, (1, 1)), fprs=()).p_value for _ in range(4000)])
    for level in (0.01, 0.05, 0.2):
        rate = np.mean(p_values < level)
        print(f"n=200 level={level} rejected={rate:.4f} (4000 repetitions)")
        assert abs(rate - level) < 0.1 * level + 3 * np.sqrt(level * (1 - level) / 4000)


@pytest.mark.parametrize("gaps", [(1.5, 1.5), (2.5, 1.5)])
def test_compare_covers_the_difference(gaps):
    rng = np.random.default_rng(0)
    auc_difference = np.diff(stats.norm.cdf(np.array(gaps[::-1]) / np.sqrt(2))).item()
    tpr_difference = np.diff(stats.norm.cdf(stats.norm.ppf(0.01) + np.array(gaps[::-1]))).item()
    results = [metrics.compare(*paired_scores(rng, 500, gaps), seed=i) for i in range(REPETITIONS)]
    auc_held = np.mean([covers(r.auc_difference, auc_difference) for r in results])
    tpr_held = np.mean([covers(r.tpr_difference_at_fpr[0.01], tpr_difference) for r in results])
    print(f"n=500 gaps={gaps} AUC difference {auc_held:.4f}, TPR difference {tpr_held:.4f} ({REPETITIONS} repetitions)")
    assert auc_held >= 0.95 - NOISE
    assert tpr_held >= 0.95 - NOISE
