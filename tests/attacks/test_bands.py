"""Bands of frequency against SciPy and plain loops; what reading them costs; who may decide by them."""

import jax
import numpy as np
import pytest
import scipy.fft

import dime_jax as dj
from dime_jax import evidence
from dime_jax._util import records
from dime_jax.attacks import BUILT_IN, band_energies, bands, dime_bands
from dime_jax.attacks.base import count_queries
from dime_jax.attacks.rules import Discriminant, TermPair
from dime_jax.core import draws
from dime_jax.evidence import metrics
from dime_jax.protocol import calibration
from dime_jax.scoring.planning import Job, make_plan

T = 100
SPECTRAL = ("dime_bands", "dime_bands_all", "level_l4", "level_low")


def images(n=5, shape=(8, 8, 2), seed=0):
    return np.random.default_rng(seed).normal(size=(n, *shape)).astype(np.float32)


def naive_energies(v):
    """Coefficient by coefficient."""
    height, width = v.shape[1:3]
    energies = np.zeros((bands.BANDS, len(v)))
    spectrum = scipy.fft.dctn(v.astype(np.float64), axes=(1, 2), norm="ortho")
    for i in range(height):
        for j in range(width):
            energies[int(6 * max(i / height, j / width))] += (spectrum[:, i, j] ** 2).sum(axis=-1)
    return np.log(energies + 1e-12)


@pytest.mark.parametrize("shape", [(8, 8, 1), (12, 7, 3), (32, 32, 3), (4, 4, 1)])
def test_energies_against_a_loop(shape):
    v = images(3, shape)
    np.testing.assert_allclose(band_energies(v), naive_energies(v), rtol=2e-5, atol=2e-5)


def test_energies_add_up_to_the_squared_norm():
    for v in (images(4, (9, 6, 3)), images(4, (50,))):
        total = np.exp(np.asarray(band_energies(v), np.float64)).sum(axis=0)
        np.testing.assert_allclose(total, (v.astype(np.float64) ** 2).reshape(4, -1).sum(axis=1), rtol=1e-5)


def test_low_pass_norm_against_a_loop():
    v = images(3, (16, 14, 2))
    spectrum = np.fft.fftshift(np.fft.fft2(v, axes=(1, 2), norm="ortho"), axes=(1, 2))
    total = np.zeros(3)
    for i in range(16):
        for j in range(14):
            weight = 1 if abs(i - 8) <= 5 and abs(j - 7) <= 5 else 0.2
            total += weight**2 * (np.abs(spectrum[:, i, j]) ** 2).sum(axis=-1)
    np.testing.assert_allclose(bands.low_pass_norm(v), np.sqrt(total), rtol=1e-5)
    small = images(3, (8, 8, 1))  # has no high frequencies
    np.testing.assert_allclose(bands.low_pass_norm(small), np.linalg.norm(small.reshape(3, -1), axis=1), rtol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.4])
def test_one_answer_against_plain_arithmetic(schedule, gamma):
    x, probe = images(), np.sign(images(seed=1))
    asked = []

    def eps_fn(g, t):
        asked.append((np.asarray(g), t))
        return 0.5 * np.asarray(g) ** 2

    terms = dime_bands(eps_fn, schedule, x, probe, T, gamma)
    g = schedule.sqrt_abar(T).item() * x + gamma * schedule.sigma(T).item() * probe
    ((queried, t),) = asked
    assert t == T
    np.testing.assert_allclose(queried, g, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(terms, np.concatenate([naive_energies(0.5 * g**2), naive_energies(x)]), atol=1e-4)


@pytest.mark.parametrize(("gamma", "name"), [(0.0, "dime_bands"), (0.4, "dime_bands")])
def test_the_engine_runs_the_public_function(schedule, gamma, name):
    x, key, ids = images(), jax.random.key(0), np.arange(5, dtype=np.uint32)
    given = draws.Draws(key, ids)
    terms = BUILT_IN[name].run(lambda g, t: 0.3 * g, schedule, x, given, {"t": T, "gamma": gamma})
    probe = draws.rademacher(key, ids, 0, x.shape[1:])
    expected = dime_bands(lambda g, t: 0.3 * g, schedule, x, probe, T, gamma)
    np.testing.assert_array_equal(terms, expected)


def test_all_answers_are_those_of_dime(schedule):
    x, given = images(), draws.Draws(jax.random.key(0), np.arange(5, dtype=np.uint32))
    setting = {"t": T, "gamma": 0.2, "q": 3}

    def eps_fn(g, t):
        return g**2

    terms = BUILT_IN["dime_bands_all"].run(eps_fn, schedule, x, given, setting)
    dime = BUILT_IN["dime"].run(eps_fn, schedule, x, given, setting)
    g = schedule.sqrt_abar(T).item() * x
    step = 0.2 * schedule.sigma(T).item()
    probes = [
        g + step * np.asarray(draws.rademacher(jax.random.key(0), np.arange(5, dtype=np.uint32), k, x.shape[1:]))
        for k in range(3)
    ]
    np.testing.assert_allclose(terms[:6], naive_energies(g**2), atol=1e-4)
    np.testing.assert_allclose(terms[6:12], np.mean([naive_energies(p**2) for p in probes], axis=0), atol=1e-4)
    np.testing.assert_allclose(terms[12], dime[1], rtol=1e-6)
    np.testing.assert_allclose(terms[13:], naive_energies(x), atol=1e-4)


def test_costs():
    cost = {name: count_queries(BUILT_IN[name].recipe({"t": T, "gamma": 0.4, "q": 10})) for name in SPECTRAL}
    assert cost == {"dime_bands": 1, "dime_bands_all": 11, "level_l4": 1, "level_low": 1}
    assert count_queries(BUILT_IN["dime_bands"].recipe({"t": T, "gamma": 0.0})) == 1


def test_they_cost_nothing_beside_dime(schedule):
    dime = [Job(BUILT_IN["dime"], setting) for tier in (1, 10) for setting in BUILT_IN["dime"].settings("paper", tier)]
    more = [
        Job(BUILT_IN[name], setting)
        for name in SPECTRAL
        for setting in BUILT_IN[name].settings("paper", 10 if BUILT_IN[name].tiers else None)
    ]
    assert make_plan([*dime, *more], schedule).queries_per_image == make_plan(dime, schedule).queries_per_image


# ------------------------------------------------------------------------------------------------------ the rule


def clouds(n, gap, seed=0, columns=3):
    """Two sets that differ by `gap` in the first terms, with the same covariance; z explains part of y in both."""
    rng = np.random.default_rng(seed)
    mixing = np.array([[1.0, 0.4, 0.0], [0.0, 1.0, 0.3], [0.2, 0.0, 1.0]])
    sides = []
    for shift in (0.0, gap):
        seen = rng.normal(size=(2, n))
        asked = mixing @ rng.normal(size=(columns, n)) + np.array([[1.0, 0.5]] * columns) @ seen
        asked[0] += shift
        sides.append(np.concatenate([asked, seen]))
    return TermPair(*sides), mixing


def test_weights_are_fishers_direction_in_what_the_image_leaves(schedule):
    terms, mixing = clouds(40_000, gap=1.0)
    weights = np.array(Discriminant(asked=3, ridges=(1e-9,)).weights(schedule, {}, terms)[0].values)
    expected = np.linalg.solve(mixing @ mixing.T, [1.0, 0.0, 0.0])
    np.testing.assert_allclose(weights[:3], expected, atol=0.05)
    np.testing.assert_allclose(weights[3:], -np.array([[1.0, 0.5]] * 3).T @ weights[:3], atol=0.02)


def test_swapped_sets_turn_the_weights_round(schedule):
    terms, _ = clouds(500, gap=1.0)
    one, other = (
        Discriminant(asked=3, ridges=(0.1,)).weights(schedule, {}, pair)[0] for pair in (terms, TermPair(*terms[::-1]))
    )
    assert np.dot(one.values[:3], other.values[:3]) < 0
    assert one.auc > 0.6
    assert other.auc > 0.6


def test_sets_that_differ_only_as_pictures_are_not_told_apart(schedule):
    rng = np.random.default_rng(0)
    sides = []
    for shift in (0.0, 2.0):  # z tells the sets apart nearly perfectly, and y follows z
        seen = rng.normal(size=(2, 4000)) + shift
        sides.append(np.concatenate([np.array([[1.0, 0.5]]) @ seen + rng.normal(size=(1, 4000)), seen]))
    terms = TermPair(*sides)
    (weights,) = Discriminant(asked=1, ridges=(0.1,)).weights(schedule, {}, terms)
    assert metrics.auc(terms.member[0], terms.heldout[0]) > 0.9
    assert weights.auc == pytest.approx(0.5, abs=0.03)


def test_a_cross_validated_auc_is_honest_where_there_is_nothing(schedule):
    aucs = [
        max(w.auc for w in Discriminant(asked=12).weights(schedule, {}, TermPair(*rng.normal(size=(2, 18, 40)))))
        for rng in map(np.random.default_rng, range(100))
    ]
    assert np.mean(aucs) == pytest.approx(0.5, abs=0.04)  # in-sample it would be about 0.8


@pytest.mark.parametrize("sizes", [(1, 5), (5, 1), (2, 2), (1, 1)])
def test_few_images_give_finite_weights(schedule, sizes):
    rng = np.random.default_rng(0)
    pair = TermPair(*(rng.normal(size=(12, n)) for n in sizes))
    for weights in Discriminant(asked=6).weights(schedule, {}, pair):
        assert np.all(np.isfinite(weights.values))
        assert 0 <= weights.auc <= 1


def test_a_calibration_is_frozen_and_read_back(schedule):
    rng = np.random.default_rng(0)
    attack, settings = BUILT_IN["dime_bands"], [{"t": 50, "gamma": 0.0}, {"t": 70, "gamma": 0.4}]
    noise = TermPair(*rng.normal(size=(2, 12, 60)))
    signal = TermPair(noise.member - np.eye(12)[:, 2:3], noise.heldout)
    frozen = calibration.calibrate(attack, schedule, settings, [noise, signal])
    assert frozen.setting == settings[1]
    assert frozen.learned_direction
    assert set(frozen.parameters) == {"ridge"}
    again = records.parse(calibration.Calibration, records.plain(frozen), "here")
    fresh = rng.normal(size=(12, 30))
    np.testing.assert_array_equal(again.score(fresh), frozen.score(fresh))
    assert metrics.auc(frozen.score(fresh - np.eye(12)[:, 2:3]), frozen.score(fresh)) > 0.6


def test_brightness_alone_does_not_make_members(schedule):
    """A model without memory, and dimmed members: the plain level tells the sets apart, bands do so less."""
    digits = dj.data.open_source("digits")
    x = np.stack([digits[i].image for i in range(800)]).astype(np.float32) / 127.5 - 1
    x[:400] = 0.8 * x[:400] - 0.1

    def eps_fn(g, t):
        return 0.5 * np.asarray(g) + 0.1

    given = draws.Draws(jax.random.key(0), np.arange(800, dtype=np.uint32))
    setting = {"t": 70, "gamma": 0.4, "q": 1}
    terms = {
        name: np.asarray(BUILT_IN[name].run(eps_fn, schedule, x, given, setting), np.float64)
        for name in ("level_only", "dime_bands")
    }
    distance = {name: [] for name in terms}
    for seed in range(50):
        order = np.random.default_rng(seed).permutation(400)
        for name, values in terms.items():
            halves = [TermPair(values[:, part], values[:, 400 + part]) for part in (order[:150], order[150:])]
            frozen = calibration.calibrate(BUILT_IN[name], schedule, [setting], halves[:1])
            distance[name].append(abs(calibration.evaluate(frozen, halves[1]).metrics.auc.value - 0.5))
    assert np.mean(distance["level_only"]) > 0.1
    assert np.mean(distance["dime_bands"]) <= np.mean(distance["level_only"])
    blind = evidence.blind_baseline(x[:400], x[400:])
    scores = frozen.score(values)  # bands, as the last of the splits left them
    gap = evidence.gap_over_blind(scores[:400], scores[400:], blind.scores_member, blind.scores_heldout)
    assert gap.blind_fires
    assert gap.explained
