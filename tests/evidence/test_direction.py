"""The witness of direction: its error rate by simulation, and what follows from what it says."""

import numpy as np
import pytest

from dime_jax.evidence import Judgement, WitnessScores, judge_direction


def scores_of_a_witness(rng, shift, halves=("calibration", "test"), times=(30, 70, 120), n=60):
    """Scores that are alike at all timesteps, as a witness's are; members are lower by `shift` standard deviations."""
    scores = []
    for half in halves:
        member, heldout = rng.normal(size=n) - shift, rng.normal(size=n)
        for t in times:
            noise = 0.3 * rng.normal(size=(2, n))
            scores.append(WitnessScores(half, t, member + noise[0], heldout + noise[1]))
    return scores


@pytest.mark.parametrize(
    "times",
    [(70,), *(pytest.param(times, marks=pytest.mark.slow) for times in ((30, 70, 120), tuple(range(50, 231, 20))))],
)
def test_sets_that_are_alike_are_seldom_judged(times):
    rng = np.random.default_rng(0)
    judged = [judge_direction(scores_of_a_witness(rng, 0.0, times=times)).judgement for _ in range(1000)]
    for wrong in (Judgement.BELOW, Judgement.ABOVE):
        assert np.mean([one is wrong for one in judged]) <= 0.01 + 3 * np.sqrt(0.01 * 0.99 / 1000)


def test_it_sees_what_is_there():
    rng = np.random.default_rng(1)
    assert all(judge_direction(scores_of_a_witness(rng, 1.5)).judgement is Judgement.ABOVE for _ in range(100))
    assert all(judge_direction(scores_of_a_witness(rng, -1.5)).judgement is Judgement.BELOW for _ in range(100))


def test_nothing_vetoes_below():
    rng = np.random.default_rng(2)
    above, below = (
        scores_of_a_witness(rng, 3.0, ("calibration",)),
        scores_of_a_witness(rng, -3.0, ("test",), times=(70,)),
    )
    found = judge_direction(above + below)
    assert found.judgement is Judgement.BELOW
    assert not found.may_learn


def test_the_test_half_gives_no_permission_to_learn():
    rng = np.random.default_rng(3)
    unsure, above = scores_of_a_witness(rng, 0.0, ("calibration",)), scores_of_a_witness(rng, 3.0, ("test",))
    assert judge_direction(unsure + above).judgement is Judgement.ABOVE
    assert not judge_direction(unsure + above).may_learn
    assert judge_direction(scores_of_a_witness(rng, 3.0, ("calibration",))).may_learn


def test_one_half_alone_is_judged_as_strictly_as_beside_the_other():
    rng = np.random.default_rng(4)
    both = scores_of_a_witness(rng, 0.6)
    alone = judge_direction(both[:3], looks=6)
    assert alone.aucs == judge_direction(both).aucs[:3]


def test_without_testimony_nothing_is_checked():
    empty = WitnessScores("test", 70, [], [1.0])
    assert judge_direction([]).judgement is judge_direction([empty]).judgement is Judgement.NOT_CHECKED
    assert not judge_direction([]).may_learn


@pytest.mark.parametrize("correlation", [0.5, 0.95])
def test_images_of_one_group_are_no_independent_witnesses(correlation):
    """30 groups of 10 on each side, told apart by nothing: seldom judged, where ten times as many images seem to be."""
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(30), 10)

    def side():
        return np.sqrt(1 - correlation) * rng.normal(size=300) + np.sqrt(correlation) * rng.normal(size=30)[groups]

    def judged(of):
        scores = [WitnessScores("test", t, side(), side(), of) for t in (50, 100, 150)]
        return judge_direction(scores).judgement is not Judgement.UNSURE

    assert np.mean([judged((groups, groups + 30)) for _ in range(200)]) <= 0.06
    assert np.mean([judged((None, None)) for _ in range(50)]) >= 0.2
