"""Evidence against closed forms and naive loops; what only simulation can show is in test_evidence_simulation.py."""

import itertools
import time

import numpy as np
import pytest
from scipy import ndimage, special, stats
from sklearn import datasets

from dime_jax import evidence
from dime_jax.evidence import _resampling, metrics, sets


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def digits():
    images = datasets.load_digits().images[..., None] / 8 - 1
    return images[np.random.default_rng(0).permutation(len(images))]


# ----------------------------------------------------------------------------------------------------------- p-values


def test_held_out_images_of_a_group_count_as_one(rng):
    scores, heldout, groups = rng.normal(size=20), rng.normal(size=30), rng.integers(-1, 8, 30)
    scores[3], heldout[:4] = np.nan, scores[:4].round(1)
    heldout[3] = 0.0
    labels = [f"alone {i}" if group < 0 else group for i, group in enumerate(groups.tolist())]
    shares = [
        [np.mean([h <= score for h, label in zip(heldout, labels) if label == one]) for one in set(labels)]
        for score in scores
    ]
    naive = np.where(np.isnan(scores), np.nan, [(1 + sum(row)) / (1 + len(row)) for row in shares])
    np.testing.assert_allclose(evidence.conformal_p_values(scores, heldout, groups), naive)
    alone = evidence.conformal_p_values(scores, heldout, np.full(30, -1))
    np.testing.assert_array_equal(alone, evidence.conformal_p_values(scores, heldout))


def test_copies_of_held_out_images_change_nothing(rng):
    scores, heldout, times = rng.normal(size=20), rng.normal(size=30), rng.integers(1, 7, 30)
    copied, groups = np.repeat(heldout, times), np.repeat(np.arange(30), times)
    p = evidence.conformal_p_values(scores, copied, groups)
    np.testing.assert_allclose(p, evidence.conformal_p_values(scores, heldout), rtol=1e-12)
    assert evidence.count_groups(groups, len(copied)) == 30
    after = rng.normal(size=20)
    once = evidence.deletion_check(scores, after, heldout, heldout, resamples=99)
    check = evidence.deletion_check(scores, after, copied, copied, heldout_groups=groups, resamples=99)
    np.testing.assert_allclose(check.p_before, once.p_before, rtol=1e-12)
    np.testing.assert_array_equal(check.flagged_before, once.flagged_before)


def test_p_values_count_held_out_scores_at_or_below():
    p = evidence.conformal_p_values([-1.0, 0.0, 0.5, 2.0, 9.0], [0.0, 0.0, 1.0, 2.0])
    np.testing.assert_allclose(p, [1 / 5, 3 / 5, 3 / 5, 5 / 5, 5 / 5])


def test_p_values_equal_a_naive_loop_with_ties(rng):
    scores, heldout = rng.integers(0, 20, 50), rng.integers(0, 20, 70)
    naive = [(1 + sum(h <= score for h in heldout)) / 71 for score in scores]
    np.testing.assert_allclose(evidence.conformal_p_values(scores, heldout), naive)


def test_scores_that_are_not_finite_have_no_p_value():
    p = evidence.conformal_p_values([np.nan, np.inf, -np.inf, 0.0], [1.0, 2.0])
    np.testing.assert_array_equal(np.isnan(p), [True, True, True, False])


def test_smallest_p_is_attained():
    assert evidence.conformal_p_values([-5.0], np.arange(99)) == evidence.smallest_p(99) == 0.01


@pytest.mark.parametrize(
    ("scores", "heldout", "message"),
    [
        ([], [1.0], "scores must not be empty"),
        ([1.0], [], "heldout_scores must not be empty"),
        ([1.0], [np.nan, 1.0], "heldout_scores must be finite, got 1 of 2"),
        ([[1.0]], [1.0], r"scores must have shape \[\*\]"),
        (["a"], [1.0], "scores must be numbers, got type <U1"),
    ],
)
def test_bad_scores_are_named(scores, heldout, message):
    for function in (evidence.conformal_p_values, evidence.set_test):
        with pytest.raises(ValueError, match=message):
            function(scores, heldout)


# ----------------------------------------------------------------------------------------------------------- verdicts


def naive_benjamini_hochberg(p, level):
    """The k smallest are rejected, for the largest k with p_(k) <= k level/m."""
    p = np.asarray(p)
    ranked = np.sort(p)
    passing = [k for k in range(1, p.size + 1) if ranked[k - 1] <= k * level / p.size + 1e-12]
    return p <= ranked[max(passing) - 1] if passing else np.zeros(p.size, bool)


@pytest.mark.parametrize("seed", range(20))
def test_rejections_are_benjamini_hochberg(seed):
    rng = np.random.default_rng(seed)
    p = np.concatenate([rng.integers(1, 1001, 40), rng.integers(1, 30, 20)]) / 1000
    verdicts = evidence.candidate_verdicts(p, 999, level=0.1)
    np.testing.assert_array_equal(verdicts.rejected, naive_benjamini_hochberg(p, 0.1))
    np.testing.assert_array_equal(verdicts.rejected, verdicts.q_values <= 0.1 + 1e-12)
    assert 0 < verdicts.rejected.sum() < 60


def test_three_verdicts():
    p = [0.001, 0.002, 0.04, 0.2, np.nan]
    verdicts = evidence.candidate_verdicts(p, 999, level=0.05)
    assert verdicts.verdict == [
        evidence.Verdict.EVIDENCE,
        evidence.Verdict.EVIDENCE,
        evidence.Verdict.CANNOT_TELL,  # flagged alone, but 0.04 > 3 * 0.05 / 5
        evidence.Verdict.NO_EVIDENCE,
        evidence.Verdict.CANNOT_TELL,
    ]
    np.testing.assert_array_equal(verdicts.rejected, [True, True, False, False, False])
    assert np.isnan(verdicts.q_values[4])
    assert verdicts.warnings == ["1 of 5 candidates have no usable score"]


def test_nan_counts_as_a_test():
    # Alone p = 0.04 is rejected at 5 %; with a second, failed test it must pass 2.5 %.
    assert evidence.candidate_verdicts([0.04], 999).rejected[0]
    assert not evidence.candidate_verdicts([0.04, np.nan], 999).rejected[0]


def test_a_tie_with_the_level_is_rejected_whatever_the_rounding():
    # k of m candidates at p = k level/m exactly, for every k and m: products of these that do not round alike.
    for m, k in itertools.product(range(1, 60), range(1, 12)):
        if k <= m:
            p = np.ones(m)
            p[:k] = k / (20 * m)
            assert evidence.candidate_verdicts(p, 20 * m - 1).rejected.sum() == k, (m, k)


def test_too_few_held_out_images_to_decide_anything():
    verdicts = evidence.candidate_verdicts([1 / 11, 0.5], 10, level=0.05)
    assert not verdicts.can_decide
    assert verdicts.verdict == [evidence.Verdict.CANNOT_TELL] * 2
    assert "nothing can be decided" in verdicts.warnings[0]
    # The number that is asked for is enough, and one less is not.
    assert verdicts.heldout_needed == 39
    assert evidence.candidate_verdicts([1 / 40, 1.0], 39).rejected[0]
    assert not evidence.candidate_verdicts([1 / 39, 1.0], 38).rejected[0]


def test_candidates_needed_together_is_exact():
    # FACTS: 100 candidates against 99 held-out images. 20 must reach p = 0.01 together.
    verdicts = evidence.candidate_verdicts(np.ones(100), 99)
    assert verdicts.can_decide
    assert verdicts.candidates_needed == 20
    assert "a lone member among 100 candidates cannot be found, only 20 or more together" in verdicts.warnings[0]
    p = np.ones(100)
    p[:19] = 0.01
    assert not evidence.candidate_verdicts(p, 99).rejected.any()
    p[19] = 0.01
    assert evidence.candidate_verdicts(p, 99).rejected.sum() == 20


def test_enough_held_out_images_give_no_warning():
    verdicts = evidence.candidate_verdicts(np.ones(100), 1999)
    assert verdicts.candidates_needed == 1
    assert verdicts.warnings == []
    assert verdicts.verdict == [evidence.Verdict.NO_EVIDENCE] * 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.001], 99), "got p=0.001"),
        (([1.5], 99), "got p=1.5"),
        (([0.5], 0), "n_heldout must be >= 1, got 0"),
        (([0.5], 99, 0.0), r"level must be in \(0, 1\), got 0"),
    ],
)
def test_bad_verdict_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        evidence.candidate_verdicts(*arguments)


# ---------------------------------------------------------------------------------------------------------- set tests


def test_set_statistic_is_the_auc_without_groups(rng):
    scores, heldout = rng.integers(0, 30, 25), rng.integers(5, 35, 80)
    test = evidence.set_test(scores, heldout, resamples=99)
    assert test.statistic == pytest.approx(metrics.auc(scores, heldout), abs=1e-12)
    assert (test.n, test.n_groups, test.effective_n) == (25, 25, 25)


def test_one_image_gets_its_conformal_p(rng):
    heldout = rng.integers(0, 50, 300)
    for score in (-1, 3, 3.5, 20, 60):
        for resamples in (99, 9_999):
            test = evidence.set_test([score], heldout, resamples=resamples)
            assert test.p_value == pytest.approx(evidence.conformal_p_values([score], heldout)[0])
            assert test.smallest_p == pytest.approx(1 / 301)


def test_small_sets_are_exact(rng):
    scores, heldout = rng.normal(-1, 1, 4), rng.normal(0, 1, 12)
    exact = stats.mannwhitneyu(scores, heldout, alternative="less", method="exact").pvalue
    test = evidence.set_test(scores, heldout)
    assert test.p_value == pytest.approx(exact)
    assert test.smallest_p == pytest.approx(1 / 1820)


@pytest.mark.parametrize("resamples", [5_000, 300])
def test_sets_larger_than_the_held_out_side(rng, resamples):
    scores, heldout = rng.normal(-0.3, 1, 13), rng.normal(0, 1, 4)
    exact = stats.mannwhitneyu(scores, heldout, alternative="less", method="exact").pvalue
    test = evidence.set_test(scores, heldout, resamples=resamples)
    noise = 0 if resamples > 2_380 else 4 * np.sqrt(exact * (1 - exact) / resamples)
    assert test.p_value == pytest.approx(exact, abs=noise)
    assert evidence.set_test(np.arange(9_999), [3.5]).p_value == pytest.approx(9_996 / 10_000)


def test_resampling_agrees_with_the_exact_test(rng):
    scores, heldout = rng.normal(-0.5, 1, 6), rng.normal(0, 1, 14)
    exact = stats.mannwhitneyu(scores, heldout, alternative="less", method="exact").pvalue
    sampled = evidence.set_test(scores, heldout, resamples=5_000).p_value
    assert sampled != exact
    assert sampled == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 5_000))


def test_resampled_p_is_never_zero():
    test = evidence.set_test(np.arange(30) - 1e6, np.arange(100), resamples=99)
    assert test.statistic == pytest.approx(1)
    assert test.p_value == test.smallest_p == 0.01


def test_groups_of_copies_count_once(rng):
    """Copying every image of the set must leave the p-value as it was, once the copies are labelled."""
    scores, heldout = rng.normal(-1, 1, 3), rng.normal(0, 1, 15)
    once = evidence.set_test(scores, heldout)
    copies = evidence.set_test(np.repeat(scores, 6), heldout, np.repeat(["a", "b", "c"], 6))
    assert copies.p_value == pytest.approx(once.p_value)
    assert copies.n_groups == 3
    assert copies.effective_n == pytest.approx(3)
    assert evidence.set_test(np.repeat(scores, 6), heldout).p_value < once.p_value / 4


def test_groups_of_unrelated_images_keep_their_effective_number(rng):
    test = evidence.set_test(rng.normal(size=3000), rng.normal(size=50), np.repeat(np.arange(600), 5), resamples=1)
    assert 2_500 < test.effective_n <= 3_000


def test_grouping_is_by_label_not_by_order(rng):
    scores, heldout = rng.normal(-1, 1, 12), rng.normal(0, 1, 40)
    groups, order = np.repeat([7, 3, 9], 4), rng.permutation(12)
    one = evidence.set_test(scores, heldout, groups)
    other = evidence.set_test(scores[order], heldout, groups[order])
    assert one.statistic == pytest.approx(other.statistic)
    assert one.n_groups == other.n_groups == 3


def test_minus_one_is_a_group_of_its_own(rng):
    scores, heldout = rng.normal(size=5), rng.normal(size=20)
    assert evidence.set_test(scores, heldout, [-1, -1, 4, 4, -1]).n_groups == 4
    assert evidence.set_test(scores, heldout, [-1] * 5).p_value == evidence.set_test(scores, heldout).p_value


def test_held_out_groups_are_cut_to_the_sizes_of_the_set(rng):
    index = np.repeat(np.arange(4), [1, 5, 3, 10])
    kept = sets._cut_to_sizes(index, np.array([2, 3]), rng)
    counts = np.bincount(index[kept])
    assert counts[0] == 1
    assert all(count in (2, 3) for count in counts[1:])
    assert len(set(kept)) == len(kept)
    draws = np.concatenate([sets._cut_to_sizes(index, np.array([1]), rng) for _ in range(2_000)])
    share = np.bincount(draws, minlength=19)[9:] / 2_000  # the ten images of the last group, each kept as often
    np.testing.assert_allclose(share, 0.1, atol=0.03)


def test_a_score_that_failed_counts_against_the_set(rng):
    scores, heldout = rng.normal(-2, 1, 5), rng.normal(0, 1, 20)
    failed = evidence.set_test([*scores, np.nan], heldout)
    last = evidence.set_test([*scores, 1e9], heldout)
    assert failed.p_value == last.p_value > evidence.set_test(scores, heldout).p_value
    assert "1 of 6 images have no usable score" in failed.warnings[-1]


def test_warnings_of_the_set_test(rng):
    heldout = rng.normal(size=500)
    ungrouped = evidence.set_test(rng.normal(size=50), heldout, resamples=99)
    assert "should raise 1 % false alarms raises about 11 % (24 %)" in ungrouped.warnings[0]
    assert evidence.set_test([0.0], heldout).warnings == []
    few = evidence.set_test([0.0, 0.1], rng.normal(size=3), ["a", "b"])
    assert few.smallest_p == pytest.approx(0.1)
    assert few.warnings == ["too few groups (2) to decide anything: the smallest attainable p is 0.1 > 0.05"]


def test_set_test_repeats_and_needs_matching_groups(rng):
    scores, heldout = rng.normal(size=30), rng.normal(size=100)
    assert evidence.set_test(scores, heldout, seed=3) == evidence.set_test(scores, heldout, seed=3)
    with pytest.raises(ValueError, match=r"groups must have shape \[30\], got \[2\]"):
        evidence.set_test(scores, heldout, [1, 2])
    with pytest.raises(ValueError, match=r"heldout_groups must have shape \[100\], got \[2\]"):
        evidence.set_test(scores, heldout, heldout_groups=[1, 2])


# ----------------------------------------------------------------------------------------------------------- deletion


def two_models(rng, m=20, n=200, after=0.0):
    """Candidates that were members (mean -3), and their scores after; the second model's scale is another one."""
    return (
        rng.normal(-3, 1, m),
        10 + 5 * rng.normal(after, 1, m),
        rng.normal(0, 1, n),
        10 + 5 * rng.normal(0, 1, n),
    )


def test_deletion_that_worked(rng):
    check = evidence.deletion_check(*two_models(rng))
    assert check.verdict == "no evidence of membership after"
    assert check.set_before.p_value < 0.01 < 0.05 < check.set_after.p_value
    assert check.change.p_value < 0.01
    assert 0.3 < check.change.difference.low < check.change.difference.value < check.change.difference.high
    assert check.flagged_before.sum() >= 15
    assert check.flagged_after.sum() <= 3


def test_deletion_that_did_nothing(rng):
    check = evidence.deletion_check(*two_models(rng, after=-3.0))
    assert check.verdict == "evidence of membership remains"
    assert check.change.p_value > 0.05
    assert check.change.difference.low <= 0 <= check.change.difference.high


def test_deletion_of_what_was_no_member(rng):
    _, after, heldout_before, heldout_after = two_models(rng)
    check = evidence.deletion_check(rng.normal(0, 1, 20), after, heldout_before, heldout_after)
    assert check.verdict == "cannot tell: no evidence of membership before"
    assert check.p_cutoff == 0
    assert not check.flagged_before.any()
    assert not check.flagged_after.any()


def test_a_change_that_may_be_chance():
    # Two candidates: sign flips cannot say more than p = 1/4.
    heldout = np.arange(100.0)
    check = evidence.deletion_check([-1.0, -2.0], [40.0, 60.0], heldout, heldout)
    assert check.verdict == "cannot tell: the change may be chance"
    assert check.change.p_value == pytest.approx(0.25, abs=0.02)
    assert "too few groups (2) for a paired test" in check.warnings[-1]


def test_the_cutoff_is_frozen_before(rng):
    before, after, heldout_before, heldout_after = two_models(rng)
    check = evidence.deletion_check(before, after, heldout_before, heldout_after)
    expected = evidence.candidate_verdicts(evidence.conformal_p_values(before, heldout_before), 200)
    np.testing.assert_array_equal(check.flagged_before, expected.rejected)
    assert check.p_cutoff == check.p_before[expected.rejected].max()
    np.testing.assert_array_equal(
        check.flagged_after, evidence.conformal_p_values(after, heldout_after) <= check.p_cutoff
    )
    # Scores after do not move it.
    assert evidence.deletion_check(before, before, heldout_before, heldout_before).p_cutoff == check.p_cutoff
    assert f"{check.p_cutoff:.3g}" in check.rule


def test_flags_after_use_the_cutoff_and_not_the_level():
    heldout = np.arange(199.0)
    check = evidence.deletion_check([-1.0] * 10, [3.5] * 10, heldout, heldout)
    assert check.p_cutoff == 1 / 200
    np.testing.assert_allclose(check.p_after, 5 / 200)
    assert check.flagged_before.all()
    assert not check.flagged_after.any()


def test_change_is_delongs_paired_difference_with_students_quantile(rng):
    base, heldout = rng.normal(-1, 1, 30), rng.normal(0, 1, 50)
    before, after = base + rng.normal(0, 0.5, 30), base + 0.7 + rng.normal(0, 0.5, 30)
    heldout_after = heldout + rng.normal(0, 0.5, 50)
    ours = evidence.deletion_check(before, after, heldout, heldout_after).change.difference
    delong = metrics.compare((before, heldout), (after, heldout_after), ()).auc_difference
    assert ours.value == pytest.approx(delong.value, abs=1e-12)
    student = stats.t.isf(0.025, 29) / stats.norm.isf(0.025)
    assert ours.high - ours.value == pytest.approx((delong.high - delong.value) * student)


def test_change_by_groups_equals_one_value_for_each_group_of_copies(rng):
    before, after = rng.normal(-2, 1, 8), rng.normal(-0.5, 1, 8)
    heldout_before, heldout_after = rng.normal(0, 1, 60), rng.normal(0, 1, 60)
    once = evidence.deletion_check(before, after, heldout_before, heldout_after)
    sizes = np.arange(1, 9)
    copies = evidence.deletion_check(
        np.repeat(before, sizes),
        np.repeat(after, sizes),
        np.repeat(heldout_before, 3),
        np.repeat(heldout_after, 3),
        np.repeat(np.arange(8), sizes),
        heldout_groups=np.repeat(np.arange(60), 3),
    )
    np.testing.assert_allclose(copies.change.difference, once.change.difference, atol=1e-12)
    assert copies.change.p_value == pytest.approx(once.change.p_value, abs=1e-3)


def test_sign_flips_against_enumeration(rng):
    """With a huge held-out set its own noise vanishes, and p is the share of the 2^8 sign vectors."""
    heldout = np.sort(rng.normal(size=200_000))
    before, after = rng.normal(-0.5, 1, 8), rng.normal(0, 1, 8)
    falls = [np.mean(heldout > b) - np.mean(heldout > a) for b, a in zip(before, after)]
    flips = np.array(list(itertools.product([-1, 1], repeat=8)))
    exact = np.mean(flips @ falls >= np.sum(falls) - 1e-9)
    check = evidence.deletion_check(before, after, heldout, heldout, resamples=5_000)
    assert check.change.p_value == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 5_000))


@pytest.mark.parametrize("at_once", [1, 333])
def test_flips_drawn_in_portions_are_the_same(rng, monkeypatch, at_once):
    before, after, heldout_before, heldout_after = two_models(rng)
    whole = evidence.deletion_check(before, after, heldout_before, heldout_after, resamples=999)
    monkeypatch.setattr(_resampling, "_NUMBERS_AT_ONCE", at_once)
    portions = evidence.deletion_check(before, after, heldout_before, heldout_after, resamples=999)
    assert portions.change == whole.change
    assert sum(_resampling.portions(999, 7)) == 999


def test_no_change_at_all(rng):
    heldout = rng.normal(size=100)
    check = evidence.deletion_check([-9.0] * 10, [-9.0] * 10, heldout, heldout, np.arange(10))
    assert check.change.p_value == 1
    # All ten placements fell by 0: (0.025)^(1/10) ≈ 0.69, so falls of up to 1 - 0.69 cannot be excluded.
    np.testing.assert_allclose(check.change.difference, (0.0, 0.025**0.1 - 1, 1 - 0.025**0.1))


def test_candidates_without_a_score_are_left_out(rng):
    before, after, heldout_before, heldout_after = two_models(rng)
    groups = np.arange(20) // 2
    before[3], after[8] = np.nan, np.inf
    keep = np.delete(np.arange(20), [3, 8])
    check = evidence.deletion_check(before, after, heldout_before, heldout_after, groups)
    without = evidence.deletion_check(before[keep], after[keep], heldout_before, heldout_after, groups[keep])
    assert check.change == without.change
    assert check.set_before == without.set_before
    assert np.isnan(check.p_after[3])
    assert not check.flagged_before[[3, 8]].any()
    assert any("2 of 20 candidates have no usable score" in warning for warning in check.warnings)


def test_deletion_needs_pairs():
    with pytest.raises(ValueError, match=r"after must have shape \[2\], got \[3\]"):
        evidence.deletion_check([1.0, 2.0], [1.0, 2.0, 3.0], [1.0], [1.0])
    with pytest.raises(ValueError, match=r"heldout_after must have shape \[2\], got \[1\]"):
        evidence.deletion_check([1.0], [1.0], [1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="none of 2 candidates has a finite score both before and after"):
        evidence.deletion_check([np.nan, 1.0], [1.0, np.nan], [1.0], [1.0])


# ------------------------------------------------------------------------------------------------------------ epsilon


def clopper_pearson_low(count, n, tail):
    return stats.binomtest(count, n, alternative="greater").proportion_ci(1 - tail).low


@pytest.mark.parametrize(
    ("n", "thresholds", "plain"), [(20, 6, 1.60), (100, 8, 3.28), (500, 8, 4.91), (1500, 10, 6.01), (12500, 10, 8.13)]
)
def test_ceiling(n, thresholds, plain):
    """n of n and 0 of n, with the error shared by the thresholds; without that correction it would be `plain`."""
    bound = evidence.epsilon_lower_bound(np.arange(n) - 1e6, np.arange(n))
    low = clopper_pearson_low(n, n, 0.05 / (2 * thresholds))
    assert bound.epsilon == bound.ceiling == pytest.approx(np.log(low / (1 - low)))
    assert bound.thresholds_tried == thresholds
    uncorrected = clopper_pearson_low(n, n, 0.025)
    assert np.log(uncorrected / (1 - uncorrected)) == pytest.approx(plain, abs=0.005)
    assert plain - 0.6 < bound.ceiling < plain
    assert evidence.epsilon_lower_bound([0.0] * n, [0.0] * n).ceiling == bound.ceiling


def naive_epsilon(member, heldout, delta):
    """Every threshold of the grid in both directions, each tail at 0.05 / (2 r)."""
    member, heldout = np.asarray(member, float), np.asarray(heldout, float)

    def counts(n):
        return sorted({int(n * fpr) for fpr in (0, 0.001, 0.01, 0.05, 0.2)})

    tail = 0.05 / (2 * (len(counts(heldout.size)) + len(counts(member.size))))
    bounds = [0.0]
    for x in counts(heldout.size):
        hits = int(np.sum(member < np.sort(heldout)[x]))
        tpr = clopper_pearson_low(hits, member.size, tail)
        fpr = stats.binomtest(x, heldout.size, alternative="less").proportion_ci(1 - tail).high
        bounds.append(np.log((tpr - delta) / fpr) if tpr > delta else 0)
    for x in counts(member.size):
        cleared = int(np.sum(heldout > np.sort(member)[::-1][x]))
        tnr = clopper_pearson_low(cleared, heldout.size, tail)
        fnr = stats.binomtest(x, member.size, alternative="less").proportion_ci(1 - tail).high
        bounds.append(np.log((tnr - delta) / fnr) if tnr > delta else 0)
    return max(bounds)


@pytest.mark.parametrize("delta", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(5))
def test_epsilon_equals_a_naive_loop(seed, delta):
    rng = np.random.default_rng(seed)
    member, heldout = np.round(rng.normal(-2, 1, 300), 1), np.round(rng.normal(0, 1, 410), 1)
    bound = evidence.epsilon_lower_bound(member, heldout, delta)
    assert bound.epsilon == pytest.approx(naive_epsilon(member, heldout, delta))
    assert 0 < bound.epsilon < bound.ceiling


def test_both_directions_find_their_case(rng):
    half = rng.random(1000) < 0.5
    # Half of the members far below every held-out image: few are flagged wrongly.
    some_members_stand_out = np.where(half, -100, 0) + rng.normal(size=1000), rng.normal(size=1000)
    # Half of the held-out images far above every member: few are cleared wrongly.
    some_others_stand_out = rng.normal(size=1000), np.where(half, 100, 0) + rng.normal(size=1000)
    flagged, cleared = (
        evidence.epsilon_lower_bound(*some_members_stand_out),
        evidence.epsilon_lower_bound(*some_others_stand_out),
    )
    assert flagged.direction == "members flagged"
    assert cleared.direction == "non-members cleared"
    for bound, (member, heldout) in ((flagged, some_members_stand_out), (cleared, some_others_stand_out)):
        assert bound.epsilon > 3
        rates = metrics.rates_at_threshold(member, heldout, bound.threshold)
        assert rates.tpr >= bound.tpr_low
        assert rates.fpr <= bound.fpr_high
    assert flagged.epsilon == pytest.approx(np.log(flagged.tpr_low / flagged.fpr_high))
    assert cleared.epsilon == pytest.approx(np.log((1 - cleared.fpr_high) / (1 - cleared.tpr_low)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_threshold_flags_exactly_what_was_counted(rng, dtype):
    member = (np.where(rng.random(200) < 0.5, -100, 0) + rng.normal(size=200)).astype(dtype)
    heldout = rng.normal(size=200).astype(dtype)
    bound = evidence.epsilon_lower_bound(member, heldout)
    assert bound.direction == "members flagged"
    rates, tail = metrics.rates_at_threshold(member, heldout, bound.threshold), 0.05 / (2 * bound.thresholds_tried)
    assert bound.tpr_low == pytest.approx(clopper_pearson_low(round(rates.tpr * 200), 200, tail))
    assert 1 - bound.fpr_high == pytest.approx(clopper_pearson_low(round((1 - rates.fpr) * 200), 200, tail))


def test_swapped_classes_show_nothing(rng):
    bound = evidence.epsilon_lower_bound(rng.normal(3, 1, 100), rng.normal(0, 1, 100))
    assert bound.epsilon == 0
    assert bound.ceiling > 2


def test_label_says_whether_it_is_an_audit():
    assert evidence.epsilon_lower_bound([0.0], [1.0]).label.startswith("not a DP audit")
    assert not evidence.epsilon_lower_bound([0.0], [1.0], randomised=True).label.startswith("not")


def test_bad_epsilon_arguments():
    with pytest.raises(ValueError, match=r"delta must be in \[0, 1\), got 1\.0"):
        evidence.epsilon_lower_bound([0.0], [1.0], delta=1.0)
    with pytest.raises(ValueError, match=r"confidence must be in \(0, 1\), got 95"):
        evidence.epsilon_lower_bound([0.0], [1.0], confidence=95)
    with pytest.raises(ValueError, match="member_scores must be finite"):
        evidence.epsilon_lower_bound([np.nan], [1.0])


def test_dp_tpr_bound_is_the_gap_of_the_optimal_attack():
    """For δ = 0 the bound is attained by randomised response: with probability 1/(1 + e^ε) the bit is flipped."""
    epsilon = 1.3
    flip = 1 / (1 + np.exp(epsilon))
    assert evidence.dp_tpr_bound(flip, epsilon) == pytest.approx(1 - flip)
    np.testing.assert_allclose(evidence.dp_tpr_bound([0, flip / 2, 1], epsilon), [0, (1 - flip) / 2, 1])


def test_dp_tpr_bound_satisfies_both_inequalities_and_no_less():
    fpr = np.linspace(0, 1, 201)
    for epsilon, delta in ((0, 0), (0, 0.1), (0.5, 0), (2, 1e-5), (2, 0.3)):
        tpr = evidence.dp_tpr_bound(fpr, epsilon, delta)
        growth = np.exp(epsilon)
        slack = np.minimum(growth * fpr + delta - tpr, growth * (1 - tpr) + delta - (1 - fpr))
        assert np.all(slack >= -1e-9)
        np.testing.assert_allclose(np.minimum(slack, 1 - tpr), 0, atol=1e-9)
        assert np.all((tpr >= fpr - 1e-12) & (tpr <= 1))
    np.testing.assert_array_equal(evidence.dp_tpr_bound([0, 0.1], 1e4), [0, 1])


def test_epsilon_bound_and_dp_curve_agree():
    """The point (fpr_high, tpr_low) lies on the curve of the epsilon it proves."""
    bound = evidence.epsilon_lower_bound(np.arange(500) - 450, np.arange(500), delta=1e-3)
    assert evidence.dp_tpr_bound(bound.fpr_high, bound.epsilon, 1e-3) == pytest.approx(bound.tpr_low)


@pytest.mark.parametrize("arguments", [(-0.1, 1.0), (1.1, 1.0), (np.nan, 1.0), (0.1, -1.0), (0.1, np.inf), (0.1, 1, 2)])
def test_bad_dp_arguments(arguments):
    with pytest.raises(ValueError, match=r"expected|must be"):
        evidence.dp_tpr_bound(*arguments)


# -------------------------------------------------------------------------------------------------------------- blind


def test_blind_baseline_fires_on_a_brightness_shift_and_is_quick(digits):
    start = time.process_time()  # of all threads: a busy machine does not count
    result = evidence.blind_baseline(digits[:750], np.clip(digits[750:1500] + 0.05, -1, 1))
    assert time.process_time() - start < 3
    assert result.auc.low > 0.9
    assert result.scores_member.shape == result.scores_heldout.shape == (750,)
    assert result.scores_member.mean() < result.scores_heldout.mean()


def test_blind_interval_is_delongs_at_root_two_times_its_error(digits):
    result = evidence.blind_baseline(digits[:200], digits[200:400])
    delong = metrics.evaluate(result.scores_member, result.scores_heldout, ()).auc
    ours, plain = (special.logit(auc.high) - special.logit(auc.value) for auc in (result.auc, delong))
    assert ours == pytest.approx(np.sqrt(2) * plain)


def test_blind_scores_are_ranks_within_their_fold(digits):
    result = evidence.blind_baseline(digits[:100], digits[100:200], folds=4)
    scores = np.sort(np.concatenate([result.scores_member, result.scores_heldout]))
    np.testing.assert_allclose(scores, np.repeat((np.arange(50) + 0.5) / 50, 4))


@pytest.mark.parametrize(
    "process",
    [
        lambda x: x * 0.97,
        lambda x: ndimage.gaussian_filter(x, (0, 0.4, 0.4, 0)),
        lambda x: x + np.random.default_rng(1).normal(0, 0.02, x.shape),
        lambda x: np.clip(x, -1, 0.8),
    ],
    ids=["contrast", "blur", "noise", "clipping"],
)
def test_blind_baseline_fires_on_other_processing(digits, process):
    assert evidence.blind_baseline(digits[:200], process(digits[200:400])).auc.low > 0.6


def test_blind_baseline_is_quiet_on_an_iid_split(digits):
    auc = evidence.blind_baseline(digits[:400], digits[400:800]).auc
    assert auc.low < 0.5 < auc.high


def test_duplicates_leak_across_folds_unless_grouped(digits):
    """Each image twice in its own class: ungrouped, a copy is scored by a classifier that has seen it."""
    images = np.repeat(digits[:80], 6, axis=0)
    groups = np.repeat(np.arange(80), 6)
    leaking = evidence.blind_baseline(images[:240], images[240:]).auc
    grouped = evidence.blind_baseline(images[:240], images[240:], groups).auc
    assert leaking.value > 0.8
    assert grouped.value < 0.65


def test_groups_are_never_cut(digits, folds):
    groups = np.random.default_rng(0).integers(-1, 30, 120)
    evidence.blind_baseline(digits[:60], digits[60:120], groups)
    assert len(folds) == 5
    for train, test in folds:
        assert set(groups[train]) & set(groups[test]) <= {-1}
    np.testing.assert_array_equal(np.sort(np.concatenate([test for _, test in folds])), np.arange(120))


@pytest.mark.parametrize("shape", [(8, 8, 1), (9, 13, 2), (6, 17, 1), (32, 32, 3), (256, 256, 3)])
def test_statistics_of_any_shape(rng, shape):
    images = rng.uniform(-1, 1, (6, *shape)).astype(np.float32)
    features = evidence.image_statistics(images)
    assert features.shape == (6, 2 * shape[-1] + 34 + 2 * (shape[-1] > 1))
    assert np.all(np.isfinite(features))
    np.testing.assert_array_equal(features[2:4], evidence.image_statistics(images[2:4]))
    assert evidence.blind_baseline(images[:3], images[3:]).folds == 3


def test_tiny_images_reach_fewer_bands(rng):
    assert evidence.image_statistics(rng.uniform(-1, 1, (6, 4, 4, 1))).shape == (6, 2 + 32)


def test_a_class_in_one_group_is_refused(digits):
    groups = np.repeat([0, -1], 30)
    with pytest.raises(evidence.GroupsTooLarge, match="both classes must be left outside every fold"):
        evidence.blind_baseline(digits[:30], digits[30:60], groups)


def test_statistics_by_hand():
    ramp = (np.arange(16) / 8 - 0.95)[None, :, None, None] * np.ones((1, 16, 16, 2))
    ramp[..., 1] *= 0.5
    features = evidence.image_statistics(ramp)[0]
    grey = ramp[0].mean(axis=-1)
    np.testing.assert_allclose(features[:4], [*ramp.mean((0, 1, 2)), *ramp.std((0, 1, 2))], atol=1e-6)
    np.testing.assert_allclose(features[4:12], np.histogram(grey, 8, (-1, 1))[0] / 256)
    np.testing.assert_allclose(features[13:15], [0.09375, 0.0], atol=1e-6)
    np.testing.assert_allclose(features[15:17], 0, atol=1e-6)
    low = features[17:32]  # row by row without the mean; a ramp down the image has no frequency across
    assert low[3] == pytest.approx(np.mean(grey * np.cos(np.pi * (np.arange(16) + 0.5) / 16)[:, None]) * np.sqrt(2))
    np.testing.assert_allclose(np.delete(low, [3, 7, 11]), 0, atol=1e-6)


def test_eight_bit_images_are_recognised(rng):
    pixels = rng.integers(0, 256, (2, 8, 8, 3))
    assert evidence.image_statistics(pixels / 127.5 - 1)[0, 14] == 0
    assert evidence.image_statistics((pixels + 0.3) / 127.5 - 1)[0, 14] == 1


def test_block_edges_are_recognised(rng):
    smooth = ndimage.gaussian_filter(rng.uniform(-1, 1, (4, 64, 64, 1)), (0, 3, 3, 0))
    blocks = smooth + np.kron(rng.uniform(-0.2, 0.2, (4, 8, 8, 1)), np.ones((1, 8, 8, 1)))
    edges = slice(13, 15)
    assert np.all(np.abs(evidence.image_statistics(smooth)[:, edges]) < 0.3)
    assert np.all(evidence.image_statistics(blocks)[:, edges] > 1)


def test_constant_images(digits):
    black, white = -np.ones((20, 8, 8, 1)), np.ones((20, 8, 8, 1))
    assert evidence.blind_baseline(black, white).auc.value == 1
    assert evidence.blind_baseline(black, black).auc.value == 0.5


def test_bad_images_are_named(digits):
    with pytest.raises(ValueError, match=r"heldout_images must have shape \[\*, 8, 8, 1\], got \[3, 9, 8, 1\]"):
        evidence.blind_baseline(digits[:3], np.zeros((3, 9, 8, 1)))
    with pytest.raises(ValueError, match=r"member_images must have shape \[\*, \*, \*, \*\]"):
        evidence.blind_baseline(digits[0], digits[:3])
    with pytest.raises(ValueError, match="number of heldout_images must be >= 2, got 1"):
        evidence.blind_baseline(digits[:3], digits[:1])
    with pytest.raises(ValueError, match="folds must be >= 2, got 1"):
        evidence.blind_baseline(digits[:3], digits[:3], folds=1)
    with pytest.raises(ValueError, match="groups too large"):
        evidence.blind_baseline(digits[:3], digits[3:6], [0, 0, 0, 1, 1, 1], folds=2)
    with pytest.raises(ValueError, match="number of groups must be >= 2, got 1"):
        evidence.blind_baseline(digits[:3], digits[3:6], [4] * 6)
    with pytest.raises(ValueError, match="floating type"):
        evidence.blind_baseline(np.zeros((3, 8, 8, 1), np.uint8), np.zeros((3, 8, 8, 1), np.uint8))
    with pytest.raises(ValueError, match="images must be finite, got 192"):
        evidence.blind_baseline(digits[:3] * np.nan, digits[:3])


# ---------------------------------------------------------------------------------------------------------------- gap


def test_gap_over_a_blind_baseline_that_explains_all(rng):
    signal_member, signal_heldout = rng.normal(-1, 1, 300), rng.normal(0, 1, 300)
    attack = [scores + rng.normal(0, 0.3, 300) for scores in (signal_member, signal_heldout)]
    gap = evidence.gap_over_blind(*attack, signal_member, signal_heldout)
    assert gap.explained
    assert gap.blind_fires
    assert gap.difference.low < gap.difference.value < gap.difference.high


def test_gap_over_a_blind_baseline_at_chance(rng):
    attack = rng.normal(-1, 1, 300), rng.normal(0, 1, 300)
    noise = rng.normal(0, 1, 300), rng.normal(0, 1, 300)
    gap = evidence.gap_over_blind(*attack, *noise)
    assert not gap.explained
    assert not gap.blind_fires
    assert gap.p_value < 1e-4
    assert gap.difference.value == pytest.approx(metrics.auc(*attack) - metrics.auc(*noise))


def test_gap_interval_adds_the_blind_variance_once_more(rng):
    attack = rng.normal(-0.5, 1, 500), rng.normal(0, 1, 500)
    noise = rng.normal(0, 1, 500), rng.normal(0, 1, 500)
    gap = evidence.gap_over_blind(*attack, *noise)
    paired = metrics.compare(attack, noise, ()).auc_difference
    blind_error = np.sqrt((500 + 500 + 1) / (12 * 500 * 500))  # of an AUC at chance
    expected = np.hypot(paired.high - paired.value, 1.96 * blind_error)
    assert gap.difference.high - gap.difference.value == pytest.approx(expected, rel=0.02)
    assert gap.difference.value - gap.difference.low == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("shift", [1.0, 4.0])
def test_gap_p_value_uses_the_side_of_the_interval_towards_zero(rng, shift):
    attack = rng.normal(-shift, 1, 60), rng.normal(0, 1, 60)
    lopsided = rng.normal(-2, 1, 60), rng.normal(0, 1, 60)  # an AUC near 1 has a longer lower side
    gap = evidence.gap_over_blind(*attack, *lopsided)
    value, low, high = gap.difference
    margin = value - low if value > 0 else high - value
    assert abs((value - low) / (high - value) - 1) > 0.05
    assert gap.p_value == pytest.approx(2 * stats.norm.sf(1.959964 * abs(value) / margin), rel=1e-4)


@pytest.mark.parametrize("shift", [-0.3, -0.1, 0.0, 0.1, 0.2, 0.3])
def test_gap_p_value_belongs_to_the_interval(rng, shift):
    attack = rng.normal(-shift, 1, 200), rng.normal(0, 1, 200)
    noise = rng.normal(0, 1, 200), rng.normal(0, 1, 200)
    p = evidence.gap_over_blind(*attack, *noise).p_value
    sharp = evidence.gap_over_blind(*attack, *noise, confidence=1 - p).difference
    assert min(abs(sharp.low), abs(sharp.high)) == pytest.approx(0, abs=0.01)


def test_equal_scores_have_no_gap(rng):
    member, heldout = rng.normal(-1, 1, 50), rng.normal(0, 1, 50)
    gap = evidence.gap_over_blind(member, heldout, member, heldout)
    assert gap.difference.value == 0
    assert gap.p_value == 1
    assert gap.explained


@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_candidate_without_a_score_changes_nothing_for_the_others(place):
    rng = np.random.default_rng(7)
    before, after = rng.normal(-1.5, 1, 20), rng.normal(-0.5, 1, 20)
    heldout_before, heldout_after = rng.normal(0, 1, (2, 60))
    alone = evidence.deletion_check(before, after, heldout_before, heldout_after, resamples=499)
    added = [np.insert(side, place, np.nan) for side in (before, after)]
    found = evidence.deletion_check(*added, heldout_before, heldout_after, resamples=499)
    assert (found.verdict, found.change, found.set_after) == (alone.verdict, alone.change, alone.set_after)
    assert np.isfinite(found.change.difference.value)
