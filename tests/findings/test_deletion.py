"""Deletion checks of hand-made records: 39 held-out images score 1 to 39 under both models, candidates as given."""

import numpy as np
import pytest
from handmade import BELOW, FAILED, PASSED, compare_record

from dime_jax.data.role_checks import UnusableCandidate
from dime_jax.evidence import DeletionVerdict
from dime_jax.findings.deletion import find_deletion
from dime_jax.protocol.facts import BeforeAfter

BROKEN = UnusableCandidate("broken", "is empty")
HELDOUT = np.tile(np.arange(1.0, 40.0), (2, 1))
LOW = np.linspace(0.1, 0.8, 8)
MIDDLE = np.array([3.5, 8.5, 13.5, 18.5, 21.5, 26.5, 31.5, 36.5])  # half of 8 · 39 pairs


def scores(before=LOW, after=MIDDLE):
    return np.stack([before, after])


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (LOW, MIDDLE, DeletionVerdict.GONE),
        (LOW, LOW + 0.01, DeletionVerdict.REMAINS),
        (MIDDLE, MIDDLE[::-1], DeletionVerdict.NOTHING_BEFORE),
        (MIDDLE, LOW, DeletionVerdict.NOTHING_BEFORE),
        # Three rise and two fall: less evidence, by no more than chance.
        (np.append(LOW[:5], [39.5, 39.6, 39.7]), np.append(LOW[:3], MIDDLE[3:]), DeletionVerdict.MAY_BE_CHANCE),
    ],
)
def test_verdicts(before, after, verdict):
    found, rows = find_deletion(compare_record(HELDOUT, scores(before, after)))
    assert (found.verdict, found.withheld) == (verdict, None)
    for test, of in ((found.set_before, before), (found.set_after, after)):
        lower = np.mean(np.asarray(of)[:, None] < HELDOUT[0])
        assert test.statistic == pytest.approx(lower)
    assert found.change.difference.value == pytest.approx(found.set_before.statistic - found.set_after.statistic)
    expected = (1 + np.sum(HELDOUT[0] <= np.asarray(after)[:, None], axis=1)) / 40
    assert [row.p_after for row in rows] == pytest.approx(expected.tolist())


def test_flags_use_the_cutoff_of_the_model_before():
    """Before: p = 1/40 eight times, all rejected, so that the cutoff is 1/40. After: only scores below 1 have that."""
    after = np.append(LOW[:2], MIDDLE[2:])
    found, rows = find_deletion(compare_record(HELDOUT, scores(after=after)), ["warned"])
    assert found.p_cutoff == pytest.approx(1 / 40)
    assert [row.flagged_before for row in rows] == [True] * 8
    assert [row.flagged_after for row in rows] == [True, True] + [False] * 6
    assert found.flagged == BeforeAfter(8, 2)
    assert [row.id for row in rows] == [str(place) for place in range(39, 47)]
    assert found.fingerprints == BeforeAfter("old", "new")
    assert found.queries_made == 100 + 100 + 32 + 32  # two tables and two checks
    assert found.warnings[:2] == ("warned", "blurred")
    assert found.headline.answer


@pytest.mark.parametrize(
    ("changes", "after", "why"),
    [
        ({"checks": (PASSED, FAILED)}, MIDDLE, "a model does not predict noise the way it was asked to"),
        ({"direction": BELOW}, MIDDLE, "members and held-out images look swapped"),
        ({"far": range(8)}, MIDDLE, "as pictures they are unlike the held-out images"),
        ({}, np.append(MIDDLE[:7], np.nan), "the model gave no finite answer for 1 of 8 candidates"),
        ({"unusable_candidates": (BROKEN,)}, MIDDLE, "1 of 9 candidates could not be used"),
    ],
)
def test_where_the_verdict_is_withheld_so_is_every_number(changes, after, why):
    found, rows = find_deletion(compare_record(HELDOUT, scores(after=after), **changes))
    assert (found.verdict, found.withheld, found.verdict_in_words) == (None, why, f"cannot tell: {why}")
    assert (found.set_before, found.set_after, found.change, found.undecided) == (None, None, None, True)
    assert found.flagged == BeforeAfter(0, 0)
    assert all((row.p_before, row.p_after, row.flagged_before, row.flagged_after) == (None, None, 0, 0) for row in rows)
    assert {row.reason for row in rows[:8]} == {why}
    unread = [(row.id, row.reason) for row in rows[8:]]
    assert unread == [("broken", "could not be used: is empty")] * len(changes.get("unusable_candidates", ()))
    assert found.to_json()["verdict"] == f"cannot tell: {why}"


def test_one_that_is_unlike_and_held_out_images_without_an_answer_are_left_out():
    heldout = HELDOUT.copy()
    heldout[1, 4] = np.nan
    found, rows = find_deletion(compare_record(heldout, scores(), far=[2]))
    assert (rows[2].p_before, rows[2].reason) == (None, "as a picture it is unlike the held-out images")
    assert found.set_before.n == 7
    assert rows[0].p_before == pytest.approx(1 / 39)
    assert "the model gave no finite answer for 1 held-out images: they were left out" in found.warnings
