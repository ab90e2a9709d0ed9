"""Candidates of hand-made records: held-out scores are 1 to 19, so that p is (1 + how many are as low) / 20."""

import dataclasses

import handmade
import numpy as np
import pytest
from handmade import record
from scipy import stats

from dime_jax import evidence
from dime_jax.data.role_checks import CandidateCopy, UnusableCandidate
from dime_jax.evidence import NOT_CHECKED, Verdict
from dime_jax.findings import withholding
from dime_jax.findings.candidates import find_candidates, find_fraction
from dime_jax.findings.results import Truth
from dime_jax.scoring.score_table import UNREADABLE

HELDOUT = np.arange(1.0, 20.0)
YES, NO, UNCLEAR = Verdict.EVIDENCE, Verdict.NO_EVIDENCE, Verdict.CANNOT_TELL


def columns(rows, *names):
    return [tuple(getattr(row, name) for name in names) for row in rows]


def test_p_values_q_values_and_verdicts():
    rows, found = find_candidates(record(HELDOUT, [0.5, 30, 3.5, 0.6]), None)
    # Benjamini-Hochberg by hand: 0.05 · 4/2, 0.05 · 4/2, 0.2 · 4/3, 1 · 4/4.
    expected = [(0.5, 0.05, 0.1, YES), (30.0, 1.0, 1.0, NO), (3.5, 0.2, 0.8 / 3, UNCLEAR), (0.6, 0.05, 0.1, YES)]
    assert columns(rows, "score", "p_value", "verdict") == [(s, pytest.approx(p), v) for s, p, _, v in expected]
    assert [row.q_value for row in rows] == pytest.approx([q for _, _, q, _ in expected])
    assert columns(rows, "id", "reason", "note") == [(str(place), "", "") for place in range(19, 23)]
    assert columns(rows, "group", "variation", "member", "p_not_used") == [(None,) * 4] * 4
    assert (found.count, found.evidence, found.no_evidence, found.cannot_tell) == (4, 2, 1, 1)
    assert (found.level, found.heldout, found.smallest_p) == (0.2, 19, 0.05)
    # ceil(4 · 0.05 / 0.2) candidates at the smallest p together; ceil(4 / 0.2) - 1 held-out images for one alone.
    assert (found.candidates_needed, found.heldout_needed, found.can_decide) == (1, 19, True)
    assert (found.withheld, found.set_withheld, found.less_like_members, found.truth) == (None,) * 4
    assert (found.adjusted, found.power) == (False, ())
    # The set is tested by rank sums.
    assert found.set_test.statistic == pytest.approx((19 + 0 + 16 + 19) / (4 * 19))  # pairs with the candidate lower
    exact = stats.mannwhitneyu([0.5, 30, 3.5, 0.6], HELDOUT, alternative="less", method="exact")
    assert found.set_test.p_value == pytest.approx(exact.pvalue)
    assert find_candidates(record(HELDOUT), None) == ([], None)


@pytest.mark.parametrize(("shift", "surely"), [(100, True), (0, False), (-100, False)])
def test_a_set_that_looks_less_like_members_is_said(shift, surely):
    _, found = find_candidates(record(HELDOUT, shift + np.array([9.5, 9.6, 9.7, 9.8])), None)
    assert found.less_like_members == (pytest.approx(24 / (23 * 22 * 21 * 20)) if surely else None)


def test_with_too_few_held_out_images_nothing_can_be_told():
    rows, found = find_candidates(record(HELDOUT, [0.5, 30, 9.5, 9.6], level=0.04), None)
    assert [row.verdict for row in rows] == [UNCLEAR] * 4
    assert not found.can_decide
    assert any("19 independent held-out images give no p-value below 0.05" in warning for warning in found.warnings)


def test_who_got_no_answer_or_could_not_be_read_has_a_row_with_the_reason():
    facts = {"unusable_candidates": (UnusableCandidate("broken.png", "is truncated"),)}
    made = record(HELDOUT, [0.5, np.nan, np.nan], **facts)
    made.candidates.status[21] = UNREADABLE
    rows, found = find_candidates(made, None)
    assert columns(rows, "id", "p_value", "verdict", "reason") == [
        ("19", 0.05, YES, ""),
        ("20", None, UNCLEAR, "the model gave no finite answer"),
        ("21", None, UNCLEAR, "could no longer be read when it was scored"),
        ("broken.png", None, UNCLEAR, "could not be used: is truncated"),
    ]
    assert rows[0].q_value == pytest.approx(0.05 * 3)  # those without an answer count as p = 1
    assert (found.count, found.evidence, found.cannot_tell) == (4, 1, 3)
    assert found.set_withheld == "1 of 4 candidates could not be used, and the model gave no finite answer for 2"
    assert found.set_test is None
    assert f"the set is not judged: {found.set_withheld}" in found.warnings


@pytest.mark.parametrize(
    ("given", "far", "why"),
    [("swapped", (), "swapped"), (None, range(4), withholding.UNLIKE_SET), (None, (1, 2, 3), withholding.UNLIKE_SET)],
)
def test_where_verdicts_are_withheld_there_is_no_p_value_anywhere(given, far, why):
    rows, found = find_candidates(record(HELDOUT, [0.5, 30, 3.5, 0.6], far=far), given)
    assert columns(rows, "p_value", "q_value", "p_not_used", "verdict", "reason") == [(*[None] * 3, UNCLEAR, why)] * 4
    assert (found.withheld, found.set_withheld, found.set_test, found.can_decide) == (why, why, None, False)
    assert found.power == ()
    assert found.warnings == ()


def test_one_candidate_that_is_another_kind_of_picture_is_left_out():
    rows, found = find_candidates(record(HELDOUT, [0.5, 0.4, 3.5, 0.6], far=[1]), None)
    assert columns(rows, "p_value", "reason")[1] == (None, "as a picture it is unlike the held-out images")
    assert [row.p_value for row in rows if not row.reason] == [0.05, 0.2, 0.05]
    assert (found.likeness.unlike, found.likeness.set_unlike, found.set_test.n) == (1, False, 3)


def test_groups_of_held_out_images_count_once():
    """Scores 1 to 4 are one group, all of it as low as 4.5: p = (1 + 1) / (1 + 15 others + 1)."""
    groups = [7] * 4 + [-1] * 15 + [8, 8, -1]
    rows, found = find_candidates(record(HELDOUT, [4.5, 2.5, 0.5], groups=groups), None)
    assert [row.p_value for row in rows] == pytest.approx([2 / 17, 1.5 / 17, 1 / 17])
    assert (found.heldout, found.set_test.n_groups) == (16, 2)
    assert [row.group for row in rows] == [8, 8, -1]
    said = "only near duplicates and known identities are grouped: other images count as independent"
    assert said in found.warnings
    of_user = record(HELDOUT, [4.5, 2.5, 0.5], groups=groups, settings=handmade.settings(groups="owners.csv"))
    assert said not in find_candidates(of_user, None)[1].warnings


def test_copies_are_noted_and_the_truth_is_counted():
    copies = (CandidateCopy("20", "members", "cat", "near"), CandidateCopy("21", "candidates", "19", "exact"))
    facts = {"duplicates": dataclasses.replace(handmade.COPIES, candidates=copies)}
    rows, found = find_candidates(record(HELDOUT, [0.5, 30, 0.6, 0.7], truth=[1, 1, 0, 1], **facts), None)
    notes = ["", "near copy of cat (members)", "exact copy of another candidate, 19", ""]
    assert [row.note for row in rows] == notes
    assert [row.member for row in rows] == [True, True, False, True]
    assert found.truth == Truth(members=3, members_found=2, others=1, false_alarms=1)


def test_the_power_of_plain_p_values_is_counted_on_known_members():
    _, found = find_candidates(record(HELDOUT, [0.5, 30, 3.5], [0.5, 0.6, 19.5, np.nan]), None)
    assert [(power.level, power.share.value) for power in found.power] == [(0.05, 2 / 3)]  # 1 % is beyond 19 images


class TestAdjusted:
    """The score of image i is e^(its statistic + noise): plain ranks are those of the pictures."""

    @pytest.fixture
    def made(self):
        rng = np.random.default_rng(0)
        statistics, noise = rng.normal(size=(50, 1)), 0.1 * rng.normal(size=50)
        noise[[30, 40, 41]] -= 2  # a candidate and two known members that lie low for such pictures
        scores = np.exp(3 * statistics[:, 0] + noise)
        groups = [7, 7, *[-1] * 48]
        return record(scores[:30], scores[30:40], scores[40:], statistics=statistics, groups=groups), statistics

    def naive(self, made, statistics, image):
        """The rank of one image in a fit over it and one held-out image of each group."""
        scores = np.log(made.known.table.readings["Raw(t=70).l4"])
        p_values = set()
        for left_out in (0, 1):  # whichever of the group is drawn
            pile = [*(i for i in range(30) if i != left_out), image]
            residuals = evidence.difficulty_residuals(scores[pile], statistics[pile])
            p_values.add(float(np.mean(residuals <= residuals[-1])))
        return p_values

    def test_p_values_are_ranks_in_a_fit_with_each_candidate_alone(self, made):
        made, statistics = made
        rows, found = find_candidates(made, None)
        assert all(row.p_value in self.naive(made, statistics, 30 + place) for place, row in enumerate(rows))
        assert rows[0].p_value == 1 / 30
        assert (found.adjusted, found.heldout) == (True, 29)
        known = made.known.table.readings["Raw(t=70).l4"]
        ranks = evidence.conformal_p_values(known[30:40], known[:30], [7, 7, *[-1] * 28])
        assert [row.p_not_used for row in rows] == pytest.approx(ranks.tolist())

    def test_power_adds_each_known_member_by_itself(self, made):
        made, statistics = made
        (power,) = find_candidates(made, None)[1].power
        low = [min(self.naive(made, statistics, image)) <= 0.05 for image in range(40, 50)]
        assert (power.level, power.share.value) == (0.05, np.mean(low))
        assert low[:2] == [True, True]

    def test_the_set_is_tested_in_one_pile(self, made):
        made, statistics = made
        found = find_candidates(made, None)[1]
        scores = np.log(made.known.table.readings["Raw(t=70).l4"])
        left = evidence.difficulty_residuals(scores[:40], statistics[:40])
        expected = evidence.set_test(left[30:], left[:30], heldout_groups=[7, 7, *[-1] * 28], level=0.2)
        assert found.set_test.p_value == expected.p_value


class TestFraction:
    """Known members score about 0, held-out images 100 and more: candidates are 6 of the one and 2 of the other."""

    MEMBERS, OTHERS = np.linspace(0, 1, 60), 100 + np.arange(60.0)

    @pytest.fixture
    def made(self):
        return record(self.OTHERS, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 110.5, 120.5], self.MEMBERS)

    def test_it_is_that_of_candidates_that_have_p_values(self, made):
        rows, found = find_candidates(made, None)
        used = find_fraction(made, rows, handmade.audit(candidates=found))
        assert used.value == pytest.approx(6 / 8, abs=0.01)
        assert (used.n, used.n_members, used.n_heldout) == (8, 60, 60)
        without = [dataclasses.replace(row, p_value=None) if row.score > 100 else row for row in rows]
        assert find_fraction(made, without, handmade.audit(candidates=found)).value == pytest.approx(1, abs=0.01)

    @pytest.mark.parametrize(
        "changes",
        [
            {"candidates": None},
            {"candidates": handmade.found(set_withheld="too few answers")},
            {"direction": NOT_CHECKED},
            {"blind_baseline": handmade.blind(fires=True, explained=True)},
            {"caption_baseline": handmade.blind(fires=True, explained=True)},
        ],
    )
    def test_it_is_not_estimated_where_the_set_may_not_be_judged(self, made, changes):
        rows, found = find_candidates(made, None)
        assert find_fraction(made, rows, handmade.audit(**{"candidates": found, **changes})) is None

    def test_nor_with_few_known_images_or_none(self, made):
        for members in (self.MEMBERS[:49], ()):
            few = record(self.OTHERS, [0.1, 110.5], members)
            rows, found = find_candidates(few, None)
            assert find_fraction(few, rows, handmade.audit(candidates=found)) is None
        rows, found = find_candidates(made, "swapped")
        assert find_fraction(made, rows, handmade.audit(candidates=handmade.found())) is None
