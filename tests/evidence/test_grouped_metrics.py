"""Intervals for images that come in groups: equal to the plain ones where groups do not matter, and covering."""

import numpy as np
import pytest
from scipy import stats

from dime_jax import evidence
from dime_jax.evidence import metrics


def correlated(rng, groups, size, correlation, shift):
    """Normal scores in groups of one size, with their group numbers."""
    common, own = rng.normal(size=(groups, 1)), rng.normal(size=(groups, size))
    scores = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own + shift
    return scores.ravel(), np.repeat(np.arange(groups), size)


def intervals(result):
    return np.array([result.auc, result.asr, result.tpr_at_fpr[0.1]])


def test_groups_of_one_give_the_plain_intervals():
    rng = np.random.default_rng(0)
    member, heldout = rng.normal(size=150) - 0.8, rng.normal(size=200)
    plain = metrics.evaluate(member, heldout, fprs=(0.1,))
    for groups in ((np.arange(150), 150 + np.arange(200)), (np.full(150, -1), None)):
        assert metrics.evaluate(member, heldout, fprs=(0.1,), groups=groups) == plain
        assert evidence.epsilon_lower_bound(member, heldout, groups=groups) == evidence.epsilon_lower_bound(
            member, heldout
        )


def test_images_counted_twice_give_the_intervals_of_each_once():
    rng = np.random.default_rng(1)
    member, heldout = rng.normal(size=200) - 0.8, rng.normal(size=300)
    once = metrics.evaluate(member, heldout, fprs=(0.1,))
    groups = np.repeat(np.arange(200), 2), np.repeat(np.arange(1000, 1300), 2)
    twice = metrics.evaluate(np.repeat(member, 2), np.repeat(heldout, 2), fprs=(0.1,), groups=groups)
    np.testing.assert_allclose(intervals(twice), intervals(once), atol=0.01)
    naive = metrics.evaluate(np.repeat(member, 2), np.repeat(heldout, 2), fprs=(0.1,))
    assert np.all(np.diff(intervals(naive)[:, 1:]) < 0.85 * np.diff(intervals(twice)[:, 1:]))
    assert evidence.epsilon_lower_bound(
        np.repeat(member, 2), np.repeat(heldout, 2), groups=groups
    ) == evidence.epsilon_lower_bound(member, heldout)


def test_a_group_of_members_and_held_out_images_moves_both_together():
    """A member and a held-out image of one shoot rise and fall together, so their AUC varies less."""
    rng = np.random.default_rng(2)
    shoot = 3 * rng.normal(size=200)
    member, heldout = shoot + rng.normal(size=200) - 0.5, shoot + rng.normal(size=200)
    apart = metrics.evaluate(member, heldout).auc
    together = metrics.evaluate(member, heldout, groups=(np.arange(200), np.arange(200))).auc
    assert together.high - together.low < 0.6 * (apart.high - apart.low)


def test_groups_of_the_wrong_length_are_named():
    with pytest.raises(ValueError, match=r"held-out groups must have shape \[3\], got \[2\]"):
        metrics.evaluate([1.0, 2.0], [1.0, 2.0, 3.0], groups=(None, [0, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.3, 0.7])
def test_coverage_with_correlated_groups(correlation):
    """AUC, ASR and TPR cover 93 to 97 %."""
    rng, runs, shift = np.random.default_rng(0), 1000, -1.0
    truth = {"auc": stats.norm.cdf(1 / np.sqrt(2)), "asr": stats.norm.cdf(0.5)}
    truth["tpr"] = stats.norm.cdf(stats.norm.ppf(0.05) + 1)
    covered, naive = dict.fromkeys(truth, 0), 0
    for _ in range(runs):
        member, of_member = correlated(rng, 120, 5, correlation, shift)
        heldout, of_heldout = correlated(rng, 120, 5, correlation, 0.0)
        found = metrics.evaluate(member, heldout, fprs=(0.05,), groups=(of_member, 1000 + of_heldout))
        for name, estimate in (("auc", found.auc), ("asr", found.asr), ("tpr", found.tpr_at_fpr[0.05])):
            covered[name] += estimate.low <= truth[name] <= estimate.high
        plain = metrics.auc_interval(member, heldout)
        naive += plain.low <= truth["auc"] <= plain.high
    shares = {name: count / runs for name, count in covered.items()}
    print(shares, naive / runs)
    assert all(0.93 <= share <= 0.97 for share in shares.values())
    assert naive / runs < 0.9  # images counted as independent: the simulation would notice
