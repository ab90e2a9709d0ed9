import numpy as np
import pytest

from dime_jax import attacks, metrics
from dime_jax.calibration import Calibration, TermPair, calibrate, evaluate, standardization

DIME = attacks.get_attack("dime")
LOSS = attacks.get_attack("loss")


def dime_terms(rng, n, signal=(0.0, 0.0)):
    """Terms [2, n] of members (shifted down by `signal`) and of held-out images."""
    member = rng.normal(size=(2, n)) * np.array([[3.0], [50.0]]) + np.array([[100.0], [900.0]])
    heldout = rng.normal(size=(2, n)) * np.array([[3.0], [50.0]]) + np.array([[100.0], [900.0]])
    return TermPair(member - np.array(signal)[:, None] * np.array([[3.0], [50.0]]), heldout)


def test_the_best_setting_angle_and_threshold_are_found(schedule):
    rng = np.random.default_rng(0)
    settings = [{"t": t, "gamma": 0.1, "q": 1} for t in (50, 70, 90)]
    # Signal only at t = 70, and only in a *large* trace of members: the angle must be 3 pi / 2.
    terms = [dime_terms(rng, 400), dime_terms(rng, 400, (0, -2.5)), dime_terms(rng, 400)]
    frozen = calibrate(DIME, schedule, settings, terms)
    assert frozen.setting == settings[1]
    assert frozen.phi == pytest.approx(3 * np.pi / 2)
    pooled = np.concatenate(terms[1], axis=1)
    np.testing.assert_allclose(frozen.stats, [pooled[0].mean(), pooled[0].std(), pooled[1].mean(), pooled[1].std()])
    member, heldout = (frozen.score(side) for side in terms[1])
    expected = (
        np.cos(frozen.phi) * (terms[1].member[0] - pooled[0].mean()) / pooled[0].std()
        + np.sin(frozen.phi) * (terms[1].member[1] - pooled[1].mean()) / pooled[1].std()
    )
    np.testing.assert_allclose(member, expected)
    assert frozen.auc == metrics.auc(member, heldout) > 0.95
    best = metrics.rates_at_threshold(member, heldout, frozen.tau).accuracy
    assert best == max(
        metrics.rates_at_threshold(member, heldout, tau).accuracy for tau in np.concatenate([member, heldout])
    )


def test_of_equal_settings_the_first_wins(schedule):
    same = TermPair(np.array([[0.0, 1.0]]), np.array([[2.0, 3.0]]))
    assert calibrate(LOSS, schedule, [{"t": 30}, {"t": 10}], [same, same]).setting == {"t": 30}


def test_the_outcome_is_read_at_the_frozen_threshold(schedule):
    frozen = Calibration("loss", {"t": 30}, None, None, tau=1.5, auc=1.0)
    outcome = evaluate(frozen, TermPair(np.array([[1.0, 1.2, 2.0, 0.1]]), np.array([[1.4, 3.0, 4.0, 5.0]])))
    assert outcome.at_threshold == metrics.Rates(tpr=0.75, fpr=0.25, accuracy=0.75)
    assert outcome.metrics.asr.value == 0.875  # best threshold on the test half itself: 1.3


def test_calibration_never_reads_the_test_half(schedule):
    """Permuting test labels changes no hyper-parameter, only the outcome."""
    rng = np.random.default_rng(1)
    settings = [{"t": t, "gamma": 0.1, "q": 1} for t in (50, 70)]
    calibration_half = [dime_terms(rng, 100, (0.5, 0)), dime_terms(rng, 100, (1.0, -0.5))]
    test_half = [dime_terms(rng, 100, (0.5, 0)), dime_terms(rng, 100, (1.0, -0.5))]

    def protocol(test):
        frozen = calibrate(DIME, schedule, settings, calibration_half)
        return frozen, evaluate(frozen, test[settings.index(frozen.setting)])

    def permuted(pair):
        order = rng.permutation(200)
        both = np.concatenate(pair, axis=1)[:, order]
        return TermPair(both[:, :100], both[:, 100:])

    frozen, outcome = protocol(test_half)
    for _ in range(5):
        other, other_outcome = protocol([permuted(pair) for pair in test_half])
        assert other == frozen
        assert other_outcome.metrics.auc.value < outcome.metrics.auc.value - 0.1


def test_null_data_through_the_whole_search_stays_at_chance(schedule):
    """250 + 250 images without any signal, 12 settings x 16 angles, 200 repetitions."""
    rng = np.random.default_rng(2)
    settings = [{"t": t, "gamma": 0.1, "q": 1} for t in range(12)]
    test_aucs, calibration_aucs = [], []
    for _ in range(200):
        halves = [[dime_terms(rng, 125) for _ in settings] for _ in range(2)]
        frozen = calibrate(DIME, schedule, settings, halves[0])
        test = halves[1][settings.index(frozen.setting)]
        test_aucs.append(metrics.auc(*(frozen.score(side) for side in test)))
        calibration_aucs.append(frozen.auc)
    assert np.mean(calibration_aucs) > 0.55  # the search did overfit, so the halves matter
    assert np.mean(test_aucs) == pytest.approx(0.5, abs=0.01)


def test_a_constant_term_does_not_divide_by_zero():
    assert standardization(np.ones(3), np.zeros(3)).std_sq == 1e-8


@pytest.mark.parametrize(
    ("settings", "terms", "message"),
    [
        ([], [], "at least one, got 0 and 0"),
        ([{"t": 1}], [], "got 1 and 0"),
        (
            [{"t": 1}],
            [TermPair(np.array([[1.0, np.nan]]), np.array([[1.0]]))],
            "expected finite member terms of loss at {'t': 1}, got 1 of 2 values NaN or infinite",
        ),
        ([{"t": 1}], [TermPair(np.zeros((1, 0)), np.array([[1.0]]))], "expected at least one"),
    ],
)
def test_bad_input_is_named(schedule, settings, terms, message):
    with pytest.raises(ValueError, match=message):
        calibrate(LOSS, schedule, settings, terms)
