import json

import numpy as np
import pytest

from dime_jax import attacks, data
from dime_jax._util.records import parse, plain
from dime_jax.attacks import registry
from dime_jax.attacks.rules import Weights, at_angle
from dime_jax.evidence import Way, metrics
from dime_jax.protocol.calibration import Calibration, TermPair, calibrate, evaluate, fixed_rule, standardization

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
    assert frozen.parameters == {"phi": pytest.approx(3 * np.pi / 2)}
    assert frozen.weights == pytest.approx((0, -1))
    assert (frozen.queries, frozen.label) == (2, "dime@2")
    pooled = np.concatenate(terms[1], axis=1)
    np.testing.assert_allclose(frozen.stats, [pooled.mean(axis=1), pooled.std(axis=1)])
    member, heldout = frozen.score(terms[1].member), frozen.score(terms[1].heldout)
    expected = (
        frozen.weights[0] * (terms[1].member[0] - pooled[0].mean()) / pooled[0].std()
        + frozen.weights[1] * (terms[1].member[1] - pooled[1].mean()) / pooled[1].std()
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
    frozen = Calibration("loss", {"t": 30}, (1.0,), {}, None, tau=1.5, auc=1.0, queries=1)
    outcome = evaluate(frozen, TermPair(np.array([[1.0, 1.2, 2.0, 0.1]]), np.array([[1.4, 3.0, 4.0, 5.0]])))
    assert outcome.at_threshold == metrics.Rates(tpr=0.75, fpr=0.25, accuracy=0.75)
    assert outcome.metrics.asr.value == 0.875  # best threshold on the test half itself: 1.3


def test_the_test_half_is_only_scored(schedule):
    """Moving the whole test half moves its scores by the frozen angle and standard deviations; swapping its sides turns
    its AUC around. Neither would happen if anything were chosen or standardised anew."""
    rng = np.random.default_rng(1)
    settings = [{"t": t, "gamma": 0.1, "q": 1} for t in (50, 70)]
    frozen = calibrate(DIME, schedule, settings, [dime_terms(rng, 100, (0.5, 0)), dime_terms(rng, 100, (1.0, -0.5))])
    test = dime_terms(rng, 100, (1.0, -0.5))
    outcome, swapped = evaluate(frozen, test), evaluate(frozen, TermPair(test.heldout, test.member))
    assert swapped.metrics.auc.value == pytest.approx(1 - outcome.metrics.auc.value)
    assert (swapped.at_threshold.tpr, swapped.at_threshold.fpr) == (outcome.at_threshold.fpr, outcome.at_threshold.tpr)

    step = np.array([[2.0], [30.0]])
    moved = evaluate(frozen, TermPair(test.member + step, test.heldout + step))
    shift = np.dot(frozen.weights, step[:, 0] / np.array(frozen.stats.std))
    assert moved.metrics.auc.value == pytest.approx(outcome.metrics.auc.value)
    assert moved.at_threshold.tpr == np.mean(frozen.score(test.member) + shift <= frozen.tau)
    assert moved.at_threshold.fpr == np.mean(frozen.score(test.heldout) + shift <= frozen.tau)
    assert moved.at_threshold.tpr != outcome.at_threshold.tpr


@pytest.mark.parametrize(("repetitions", "spread"), [(25, 0.03), pytest.param(200, 0.01, marks=pytest.mark.slow)])
def test_null_data_through_the_whole_search_stays_at_chance(schedule, repetitions, spread):
    """250 + 250 images without any signal, 12 settings x 16 angles; one test AUC has a standard error of 0.037."""
    rng = np.random.default_rng(2)
    settings = [{"t": t, "gamma": 0.1, "q": 1} for t in range(12)]
    test_aucs, calibration_aucs = [], []
    for _ in range(repetitions):
        halves = [[dime_terms(rng, 125) for _ in settings] for _ in range(2)]
        frozen = calibrate(DIME, schedule, settings, halves[0])
        test = halves[1][settings.index(frozen.setting)]
        test_aucs.append(metrics.auc(frozen.score(test.member), frozen.score(test.heldout)))
        calibration_aucs.append(frozen.auc)
    assert np.mean(calibration_aucs) > 0.55  # the search did overfit, so the halves matter
    assert np.mean(test_aucs) == pytest.approx(0.5, abs=spread)


def test_a_constant_term_does_not_divide_by_zero():
    assert standardization(np.stack([np.ones(3), np.zeros(3)])) == ((1.0, 0.0), (1e-8, 1e-8))


class Fitted:
    """A rule that asks the labels: the difference of the sides' means."""

    standardize, fitted = True, True

    def weights(self, schedule, setting, terms):
        assert np.concatenate(terms, axis=1).mean() == pytest.approx(0, abs=1e-9)  # standardised
        return [Weights(tuple(terms.heldout.mean(axis=1) - terms.member.mean(axis=1)), {})]


def test_any_number_of_terms_with_weights_of_any_rule(schedule, monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    mine = attacks.Attack("mine", "", "", lambda *all: None, lambda c: 5, {}, signs=(1, 1, 1), rule=Fitted())
    attacks.register_attack(mine)
    rng = np.random.default_rng(3)
    pair = TermPair(rng.normal(size=(3, 200)) - [[2.0], [0.0], [-1.0]], rng.normal(size=(3, 200)))
    frozen = calibrate(mine, schedule, [{"t": 1}], [pair])
    assert frozen.weights[0] > 0.5
    assert frozen.weights[2] < -0.3
    assert frozen.auc > metrics.auc(pair.member[0], pair.heldout[0])
    np.testing.assert_allclose(
        frozen.score(pair.member), frozen.weights @ ((pair.member.T - frozen.stats.mean) / frozen.stats.std).T
    )
    assert frozen.learned_direction
    assert frozen.label == "mine@5"


def test_weights_of_theory_need_no_images(schedule):
    frozen = fixed_rule(attacks.get_attack("dime_theory"), schedule, {"t": 100, "gamma": 0.1, "q": 10})
    sigma = schedule.sigma(100).item()
    assert frozen.weights == pytest.approx(np.array([1, -sigma]) / np.hypot(1, sigma))
    assert (frozen.stats, frozen.threshold, frozen.queries) == (None, None, 11)
    assert not frozen.learned_direction


def test_what_the_picture_explains_is_taken_out_of_a_calibrated_score(schedule):
    rng = np.random.default_rng(5)
    pictures = data.Pair(rng.normal(size=(80, 2)), rng.normal(size=(80, 2)))
    gap = data.Pair(-0.3, 0.0)  # far below what pictures differ by
    noise = data.Pair(*(0.2 * rng.normal(size=80) for _ in range(2)))
    terms = TermPair(*(np.exp(of @ [2.0, -1.0] + g + e)[None] for of, g, e in zip(pictures, gap, noise)))
    as_it_is = calibrate(LOSS, schedule, [{"t": 50}], [terms])
    adjusted = calibrate(LOSS, schedule, [{"t": 50}], [terms], [pictures], Way.ADJUSTED)
    assert as_it_is.auc < 0.65 < 0.8 < adjusted.auc
    left = [adjusted.score(*of) for of in zip(terms, pictures)]
    assert adjusted.auc == metrics.auc(*left)
    truth = np.concatenate([g + e for g, e in zip(gap, noise)])
    assert np.corrcoef(np.concatenate(left), truth)[0, 1] > 0.95
    assert parse(Calibration, json.loads(json.dumps(plain(adjusted))), "here") == adjusted
    with pytest.raises(ValueError, match="loss@1 is adjusted for the difficulty of pictures: statistics must be given"):
        adjusted.score(terms.member)


class TestJson:
    def test_it_comes_back(self, schedule):
        rng = np.random.default_rng(4)
        dime = calibrate(DIME, schedule, [{"t": 50, "gamma": 0.1, "q": 1}], [dime_terms(rng, 50, (1, 0))])
        loss = Calibration("loss", {"t": 30}, (1.0,), {}, None, -np.inf, 0.5, 1)
        for frozen in (dime, loss):
            assert parse(Calibration, json.loads(json.dumps(plain(frozen))), "here") == frozen
        assert plain(loss)["tau"] is None

    def test_entries_without_weights_are_refused_in_one_line(self):
        entry = {"attack": "loss", "setting": {"t": 3}, "phi": None, "stats": None, "tau": 1.0, "auc": 0.7}
        with pytest.raises(ValueError, match="here must have 'weights', got attack, setting, phi") as error:
            parse(Calibration, entry, "here")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "terms", "message"),
    [
        ([], [], "must be one or more, each with a pair of terms, got 0 and 0"),
        ([{"t": 1}], [], "got 1 and 0"),
        (
            [{"t": 1}],
            [TermPair(np.array([[1.0, np.nan]]), np.array([[1.0]]))],
            "member terms of loss at {'t': 1} must be finite, got 1 of 2 values NaN or infinite",
        ),
        ([{"t": 1}], [TermPair(np.zeros((1, 0)), np.array([[1.0]]))], "member_scores must not be empty"),
    ],
)
def test_bad_input_is_named(schedule, settings, terms, message):
    with pytest.raises(ValueError, match=message):
        calibrate(LOSS, schedule, settings, terms)


def weighing(weights, attack="dime"):
    return Calibration(attack, {"t": 70, "gamma": 0.1, "q": 1}, weights, {}, None, 0.0, 0.9, 2)


@pytest.mark.parametrize("sixteenth", range(16))
def test_angles_outside_the_quadrant_of_theory_are_learned(sixteenth):
    assert weighing(at_angle(2 * np.pi * sixteenth / 16).values).learned_direction == (
        sixteenth not in (0, 12, 13, 14, 15)
    )


def test_scores_that_theory_weighs_are_not_learned():
    assert not weighing((1.0,), "loss").learned_direction
    assert not weighing(at_angle(-np.pi / 2).values, "crowding_only").learned_direction
