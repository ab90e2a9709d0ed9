"""What hand-made records show of the known images: six members at positions 6 to 11, six held-out images before."""

import numpy as np
import pytest
from handmade import SIMA, record, table

from dime_jax.data.role_checks import RoleCounts
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings import known_images
from dime_jax.protocol.arrays import BlindScores
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.record import KnownImages

PROBE = {"t": 70, "gamma": 0.1, "q": 1}
READINGS = {
    "Probe(t=70, gamma=0.1, index=0).norm": np.sqrt([6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]),
    "Probe(t=70, gamma=0.1, index=0).trace": np.array([0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0]),
    "Noisy(t=70, index=0).loss": np.array([0, 1, 2, 3, 4, 5, 2.5, 1.5, 6, 7, 8, 9]),
}
SCORES = np.array([3, 4, 5, 6, 7, 8, 1, 2, 4.5, 5.5, 9, 10])
DIME = Calibration("dime", PROBE, (1.0, 0.0), {}, None, 0.0, 0.9, 2)
LEVEL = Calibration("level_only", PROBE, (-1.0,), {}, None, 0.0, 0.9, 1)  # every held-out image is lower
LOSS = Calibration("loss", {"t": 70}, (1.0,), {}, None, 0.0, 0.7, 1)
# Pairs in which the member is lower: SimA 6 + 6 + 4 + 3; loss 3 + 4.
SIMA_AUC, LOSS_AUC = 19 / 36, 7 / 36


def known(*frozen, groups=None):
    made = record(SCORES[:6], (), SCORES[6:], groups=groups)
    made.__dict__.update(calibrations=list(frozen), known=KnownImages(table(SCORES, readings=READINGS), made.split))
    return made


@pytest.mark.parametrize(
    ("rivals", "best", "difference"),
    [
        ((SIMA, LOSS), "sima_l4@1", 1 - SIMA_AUC),
        ((SIMA, LOSS._replace(auc=0.85)), "loss@1", 1 - LOSS_AUC),
        ((SIMA, LOSS._replace(auc=0.85, queries=3)), "sima_l4@1", 1 - SIMA_AUC),  # too many queries
        ((SIMA._replace(queries=2), LOSS._replace(auc=SIMA.auc)), "loss@1", 1 - LOSS_AUC),  # of equals the cheaper
    ],
)
def test_dime_is_compared_with_the_baseline_that_calibration_found_best(rivals, best, difference):
    (found,) = known_images.find_comparisons(known(DIME, LEVEL, *rivals))
    assert (found.budget, found.dime, found.baseline) == (2, "dime@2", best)
    assert found.auc_difference.value == pytest.approx(difference)


def test_without_a_baseline_or_without_dime_nothing_is_compared():
    assert known_images.find_comparisons(known(DIME, LEVEL)) == ()
    assert known_images.find_comparisons(known(SIMA, LOSS)) == known_images.find_crowding(known(SIMA)) == ()


def test_crowding_is_compared_with_the_level_at_the_same_setting_and_at_its_own():
    crowding_alone = DIME._replace(weights=(0.0, 1.0))  # ties and as many either way: AUC 1/2
    (found,) = known_images.find_crowding(known(crowding_alone, LEVEL, SIMA))
    assert (found.dime, found.level, found.weight) == ("dime@2", "level_only@1", pytest.approx(1))
    assert found.same_setting.value == pytest.approx(1 / 2 - 1)
    assert found.own_setting.value == pytest.approx(1 / 2 - 0)
    (alone,) = known_images.find_crowding(known(crowding_alone, SIMA))
    assert (alone.level, alone.own_setting, alone.own_setting_p) == (None, None, None)


@pytest.mark.parametrize(("apart", "fires", "explained"), [(100, True, True), (0, False, False)])
def test_the_blind_baseline_is_set_beside_the_attack_on_the_images_that_have_both(apart, fires, explained):
    rng, n = np.random.default_rng(0), 100
    attack = np.concatenate([np.arange(n) + 0.5, np.arange(n) + 30.0])  # held-out images first
    attack[n] = np.nan
    positions, blind = np.arange(2 * n), rng.normal(size=2 * n)
    blind[:n] += apart
    scores = BlindScores(positions[n:], positions[:n], blind[n:], blind[:n])
    auc = Estimate(0.5, 0.4, 0.6)
    found = known_images.beside(KnownImages(table(attack), None), SIMA, scores, auc, None)
    lower = np.mean(attack[n + 1 :, None] < attack[:n]) - np.mean(blind[n + 1 :, None] < blind[:n])
    assert found.gap.value == pytest.approx(lower)
    assert (found.auc, found.images) == (auc, (n - 1, n))
    assert (found.fires, found.explained) == (fires, explained)


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ([-1] * 12, None),
        ([1, 2, *[-1] * 10], None),  # of one image each
        ([*[-1] * 9, 4, 4, 4], "25%"),
        ([1, 1, *[-1] * 6, 4, 4, 4, 4], "50%"),
    ],
)
def test_many_images_in_groups_are_said(groups, share):
    warnings = known_images.dependence_warning(known(SIMA, groups=groups))
    assert [warning.partition(" ")[0] for warning in warnings] == ([share] if share else [])


def test_images_without_an_answer_are_counted_by_role_and_said():
    counts = known_images.count_unanswered(record([1, np.nan, 3], [np.nan, np.inf, 0.5]))
    assert counts == RoleCounts(0, 1, 2)
    none = RoleCounts(0, 0, 0)
    (said,) = known_images.unanswered_warnings(counts, none)
    assert said == "the model gave no finite answer for 1 held-out images, 2 candidates: they were left out"
    assert known_images.unanswered_warnings(none, none) == []
    assert known_images.unanswered_warnings(counts, RoleCounts(3, 0, 0)) == [
        said,
        "the reference gave no finite answer for 3 members: nothing is read beside it",
    ]


def test_the_gap_over_the_blind_baseline_allows_for_groups():
    groups, of_group = np.arange(80) // 4, np.random.default_rng(1).normal(size=20)
    # One number for each group: far fewer independent images than it seems.
    blind = of_group[groups] + 1.3 * (np.arange(80) < 40)
    scores = BlindScores(np.arange(40, 80), np.arange(40), blind[40:], blind[:40])
    attack, auc = table(np.random.default_rng(9).normal(size=80)), Estimate(0.5, 0.4, 0.6)
    plain = known_images.beside(KnownImages(attack, None), SIMA, scores, auc, None)
    assert plain.fires
    assert not known_images.beside(KnownImages(attack, None), SIMA, scores, auc, groups).fires
    assert known_images.beside(KnownImages(attack, None), SIMA, scores, auc, np.full(80, -1)) == plain
