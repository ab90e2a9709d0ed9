"""What evidence promises about error rates, by simulation. Run with `-s` to see the measured figures.

`repetitions` is small in the everyday tests and large in the slow ones; bounds leave three standard errors.
"""

import numpy as np
import pytest
from sklearn import datasets

from dime_jax import evidence
from dime_jax.evidence import sets

# (repetitions, marks): a quick look every time, a close one with `make test-slow`.
QUICK = 200
CLOSE = pytest.param(3_000, marks=pytest.mark.slow)


def at_most(rate, level, repetitions):
    """Whether a simulated rate is compatible with a true rate of at most `level`."""
    return rate <= level + 3 * np.sqrt(level * (1 - level) / repetitions)


# --------------------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize("n_heldout", [99, 199, 1000])
def test_false_positive_rate_at_one_per_cent_over_calibration_draws(n_heldout):
    rng = np.random.default_rng(0)
    draws = [
        np.mean(evidence.conformal_p_values(rng.normal(size=500), rng.normal(size=n_heldout)) <= 0.01)
        for _ in range(1_000)
    ]
    print(f"n={n_heldout}: FPR at p <= 0.01 is {np.mean(draws):.4f}, sd over calibration sets {np.std(draws):.4f}")
    assert np.mean(draws) == pytest.approx(0.01, abs=0.003)
    # What the docstring says of one calibration set: a Beta law around it (plus the noise of 500 candidates).
    level = np.floor(0.01 * (n_heldout + 1)) / (n_heldout + 1)
    expected = np.sqrt(level * (1 - level) * (1 / (n_heldout + 2) + 1 / 500))
    assert np.std(draws) == pytest.approx(expected, rel=0.15)


def test_null_p_values_are_uniform():
    rng = np.random.default_rng(0)
    p = np.concatenate([evidence.conformal_p_values(rng.normal(size=10), rng.normal(size=99)) for _ in range(5_000)])
    counts = np.bincount(np.rint(p * 100).astype(int), minlength=101)[1:]
    # Candidates of one draw share held-out images; that widens the spread of a count, at most by the ten of them.
    assert counts.sum() == p.size
    assert np.max(np.abs(counts / p.size - 0.01)) < 5 * np.sqrt(0.01 * 0.99 / p.size) * np.sqrt(1.1)
    assert np.mean(p) == pytest.approx(0.505, abs=0.005)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95])
def test_groups_of_held_out_images_keep_the_level(correlation):
    """Counted one by one, ten frames of each of 100 scenes would accuse too often; counted by groups they do not."""
    rng, repetitions = np.random.default_rng(0), 400
    index = np.repeat(np.arange(100), 10)

    def frames(of):
        own, shared = rng.normal(size=of.size), rng.normal(size=of.max() + 1)
        return np.sqrt(1 - correlation) * own + np.sqrt(correlation) * shared[of]

    p = np.concatenate(
        [evidence.conformal_p_values(rng.normal(size=200), frames(index), index) for _ in range(repetitions)]
    )
    for level in (0.002, 0.01, 0.02, 0.05, 0.2):
        assert at_most(np.mean(p <= level), level, 20 * repetitions)


def test_ties_make_p_values_conservative():
    rng = np.random.default_rng(0)
    p = np.concatenate(
        [evidence.conformal_p_values(rng.integers(0, 5, 50), rng.integers(0, 5, 99)) for _ in range(500)]
    )
    for level in (0.01, 0.05, 0.25, 0.5):
        assert np.mean(p <= level) <= level + 0.005


@pytest.mark.parametrize("repetitions", [QUICK, CLOSE])
@pytest.mark.parametrize("members", [0, 5, 40])
def test_false_discovery_rate_is_held(members, repetitions):
    rng = np.random.default_rng(0)
    is_member = np.arange(100) < members
    false_share, found = [], []
    for _ in range(repetitions):
        p = evidence.conformal_p_values(rng.normal(size=100) - 3 * is_member, rng.normal(size=999))
        rejected = evidence.candidate_verdicts(p, 999, level=0.1).rejected
        false_share.append(np.sum(rejected & ~is_member) / max(1, rejected.sum()))
        found.append(np.sum(rejected & is_member))
    print(f"{members} members of 100: FDR {np.mean(false_share):.4f} at level 0.1, found {np.mean(found):.1f}")
    assert np.mean(false_share) <= 0.1 + 3 * np.std(false_share) / np.sqrt(repetitions)
    assert np.mean(found) >= 0.4 * members


# --------------------------------------------------------------------------------------------------------------- sets


def clustered(rng, sizes, correlation):
    """Scores of N(0, 1) with the given correlation inside groups, and their groups."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    shared, own = rng.normal(size=len(sizes))[groups], rng.normal(size=groups.size)
    return np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own, groups


@pytest.mark.parametrize("repetitions", [QUICK, CLOSE])
@pytest.mark.parametrize(
    ("sizes", "heldout_sizes", "correlation"),
    [
        ([1] * 20, [1] * 100, 0.0),
        ([5] * 8, [5] * 40, 0.5),
        ([5] * 8, [1] * 100, 0.5),
        ([1] * 20, [5] * 100, 0.1),
        ([1, 1, 2, 3, 5, 8, 10], [5] * 40, 0.5),
        ([5] * 2, [5] * 30, 0.5),
    ],
    ids=["no groups", "equal groups", "held-out alone", "set alone", "mixed sizes", "two groups"],
)
def test_false_alarms_of_the_set_test(sizes, heldout_sizes, correlation, repetitions):
    rng = np.random.default_rng(1)
    p = []
    for repetition in range(repetitions):
        scores, groups = clustered(rng, sizes, correlation)
        heldout, heldout_groups = clustered(rng, heldout_sizes, correlation)
        test = evidence.set_test(scores, heldout, groups, repetition, heldout_groups=heldout_groups, resamples=99)
        p.append(test.p_value)
    rates = {level: float(np.mean(np.array(p) <= level)) for level in (0.01, 0.05, 0.2)}
    print(f"set of {len(sizes)} groups against {len(heldout_sizes)}: false alarms {rates}")
    assert all(at_most(rate, level, repetitions) for level, rate in rates.items())


@pytest.mark.parametrize("repetitions", [QUICK, CLOSE])
def test_exchangeable_sets_reach_the_nominal_level(repetitions):
    """Not only at most: without ties and with equal groups the test spends its whole level."""
    rng = np.random.default_rng(2)
    p = np.array(
        [
            evidence.set_test(rng.normal(size=10), rng.normal(size=60), seed=i, resamples=99).p_value
            for i in range(repetitions)
        ]
    )
    for level in (0.05, 0.2, 0.5):
        assert np.mean(p <= level) == pytest.approx(level, abs=3.5 * np.sqrt(level * (1 - level) / repetitions))


@pytest.mark.parametrize("correlation", [0.05, 0.2])
def test_ungrouped_correlated_images_raise_the_false_alarms_the_warning_states(correlation):
    rng = np.random.default_rng(3)
    heldout = rng.normal(size=2_000)
    p = np.array(
        [
            evidence.set_test(clustered(rng, [50], correlation)[0], heldout, seed=i, resamples=99).p_value
            for i in range(QUICK)
        ]
    )
    stated = sets.false_alarm_rate(50, correlation, 0.01)
    print(f"correlation {correlation}: {np.mean(p <= 0.01):.3f} false alarms at nominal 0.01, stated {stated:.3f}")
    assert np.mean(p <= 0.01) == pytest.approx(stated, abs=0.06)
    assert np.mean(p <= 0.01) > 0.04


def test_set_test_finds_a_weak_common_signal():
    rng = np.random.default_rng(4)
    p = [
        evidence.set_test(rng.normal(-0.5, 1, 40), rng.normal(size=300), seed=i, resamples=99).p_value
        for i in range(50)
    ]
    assert np.mean(np.array(p) <= 0.05) > 0.8


# ----------------------------------------------------------------------------------------------------------- deletion


@pytest.mark.parametrize("repetitions", [QUICK, CLOSE])
@pytest.mark.parametrize(
    ("sizes", "n_heldout", "gap", "noise"),
    [
        ([1] * 10, 200, 2.0, 0.5),
        ([1] * 10, 200, 0.0, 0.5),
        # Sign flips alone, blind to the noise of few held-out images, raise 21 % false alarms at 5 % here.
        ([1] * 120, 30, 0.5, 1.5),
        ([4] * 8, 200, 1.0, 0.5),
    ],
    ids=["ten members", "ten others", "few held-out", "groups"],
)
def test_false_alarms_of_the_paired_change(sizes, n_heldout, gap, noise, repetitions):
    """Two models that treat the candidates alike: each adds its own noise, partly shared inside groups."""
    rng = np.random.default_rng(5)
    p, covered = [], []
    for repetition in range(repetitions):
        base, groups = clustered(rng, sizes, 0.5)
        before, after = (base - gap + noise * clustered(rng, sizes, 0.5)[0] for _ in range(2))
        heldout = rng.normal(size=n_heldout)
        heldout_before, heldout_after = (heldout + noise * rng.normal(size=n_heldout) for _ in range(2))
        change = evidence.deletion_check(
            before, after, heldout_before, heldout_after, groups, seed=repetition, resamples=99
        ).change
        p.append(change.p_value)
        covered.append(change.difference.low <= 0 <= change.difference.high)
    rates = {level: float(np.mean(np.array(p) <= level)) for level in (0.01, 0.05, 0.2)}
    print(f"{len(sizes)} groups, {n_heldout} held-out, gap {gap}: false alarms {rates}, covered {np.mean(covered):.3f}")
    assert all(at_most(rate, level, repetitions) for level, rate in rates.items())
    assert at_most(1 - np.mean(covered), 0.05, repetitions)


# ------------------------------------------------------------------------------------------------------------ epsilon


@pytest.mark.parametrize("repetitions", [QUICK, CLOSE])
@pytest.mark.parametrize("n", [20, 100, 500, 5000])
def test_epsilon_is_zero_on_null_scores(n, repetitions):
    rng = np.random.default_rng(6)
    epsilons = [
        evidence.epsilon_lower_bound(rng.normal(size=n), rng.normal(size=n)).epsilon for _ in range(repetitions)
    ]
    print(f"n={n}: epsilon > 0 on {np.mean(np.array(epsilons) > 0):.4f} of null sets, at most {max(epsilons):.3f}")
    assert np.median(epsilons) == 0
    assert at_most(np.mean(np.array(epsilons) > 0), 0.05, repetitions)


def randomised_response(rng, n, epsilon):
    """Two scores only, with ties everywhere: members 0 with probability e^ε/(1 + e^ε), others 1 as often."""
    truth = 1 / (1 + np.exp(-epsilon))
    return (rng.random(n) >= truth).astype(float), (rng.random(n) < truth).astype(float)


def tight_curve(rng, n, epsilon):
    """Uniform held-out scores, and members that meet TPR = dp_tpr_bound(FPR) everywhere: the worst case of all.

    The curve is two lines that meet at FPR = 1/(1 + e^ε); an inverse transform of it draws the members.
    """
    corner = 1 / (1 + np.exp(epsilon))
    u = rng.random(n)
    return np.interp(u, [0, 1 - corner, 1], [0, corner, 1]), rng.random(n)


@pytest.mark.parametrize("repetitions", [QUICK, CLOSE])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("n", [50, 1000])
@pytest.mark.parametrize("draw", [randomised_response, tight_curve])
def test_epsilon_bound_covers_a_known_epsilon(draw, n, epsilon, repetitions):
    rng = np.random.default_rng(7)
    bounds = np.array([evidence.epsilon_lower_bound(*draw(rng, n, epsilon)).epsilon for _ in range(repetitions)])
    above = np.mean(bounds > epsilon)
    print(f"{draw.__name__} n={n} epsilon={epsilon}: above it {above:.4f}, median {np.median(bounds):.2f}")
    assert at_most(above, 0.05, repetitions)
    # Two scores leave no threshold at a low FPR; a curve has one, and the bound must then see a good part of epsilon.
    if draw is tight_curve and n == 1000:
        assert np.median(bounds) > 0.3 * epsilon


# -------------------------------------------------------------------------------------------------------------- blind


@pytest.mark.parametrize("repetitions", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_blind_baseline_is_at_chance_on_iid_splits(repetitions):
    images = datasets.load_digits().images[..., None] / 8 - 1
    rng = np.random.default_rng(8)
    aucs, fires, not_explained = [], [], []
    for repetition in range(repetitions):
        chosen = images[rng.permutation(len(images))[:300]]
        result = evidence.blind_baseline(chosen[:150], chosen[150:], seed=repetition)
        scores = result.scores_member, result.scores_heldout
        aucs.append(result.auc.value)
        fires.append(result.auc.low > 0.5 or result.auc.high < 0.5)
        not_explained.append(not evidence.gap_over_blind(rng.normal(size=150), rng.normal(size=150), *scores).explained)
    print(
        f"blind AUC {np.mean(aucs):.4f} ± {np.std(aucs):.4f}; outside its 95 % interval {np.mean(fires):.3f}; "
        f"attack at chance 'not explained' {np.mean(not_explained):.3f}"
    )
    assert np.mean(aucs) == pytest.approx(0.5, abs=3 * np.std(aucs) / np.sqrt(repetitions))
    assert at_most(np.mean(fires), 0.05, repetitions)
    assert at_most(np.mean(not_explained), 0.025, repetitions)
