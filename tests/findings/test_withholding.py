"""Who is not judged, and why, in words."""

import numpy as np
import pytest
from handmade import ABOVE, BELOW, FAILED, KNOWS_HELDOUT, KNOWS_MEMBERS, PASSED, UNSURE

from dime_jax.evidence import NOT_CHECKED, Likeness, Way
from dime_jax.findings import withholding


@pytest.mark.parametrize(
    ("checks", "direction", "why"),
    [
        ([PASSED], ABOVE, None),
        ([None], UNSURE, None),
        ([PASSED], NOT_CHECKED, None),
        ([PASSED], BELOW, "members and held-out images look swapped"),
        ([FAILED], BELOW, "the model does not predict noise the way it was asked to"),
        ([None, FAILED], ABOVE, "a model does not predict noise the way it was asked to"),
    ],
)
def test_nothing_can_be_said_of_no_denoiser_or_of_swapped_sets(checks, direction, why):
    assert withholding.no_denoiser_or_swapped(checks, direction) == why


@pytest.mark.parametrize(
    ("answered", "unanswered", "unreadable", "why"),
    [
        (10, 0, 0, None),
        (9, 1, 0, None),  # a tenth may be missing
        (18, 1, 1, None),
        (8, 1, 1, "1 of 10 candidates could not be used, and the model gave no finite answer for 1"),
        (8, 0, 1, "1 of 9 candidates could not be used"),
        (8, 1, 0, "the model gave no finite answer for 1 of 9 candidates"),
    ],
)
def test_a_set_is_not_judged_by_the_rest_where_more_than_a_tenth_is_missing(answered, unanswered, unreadable, why):
    which = np.arange(answered + unanswered) < answered
    assert withholding.too_few_answers(which, unreadable) == why


@pytest.mark.parametrize(
    ("unlike", "set_unlike", "withheld"), [(0, False, False), (2, False, False), (3, False, True), (0, True, True)]
)
def test_nobody_is_judged_where_most_are_another_kind_of_picture(unlike, set_unlike, withheld):
    found = Likeness(np.ones(4), np.arange(4) < unlike, 0.5, set_unlike, 60)
    assert withholding.unlike_set(found) == ("as pictures they are unlike the held-out images" if withheld else None)


def test_what_holds_for_all_comes_before_ones_own_problem_and_that_before_being_unlike():
    problems, fits = ["", "lost", "", "lost"], np.array([True, True, False, False])
    assert withholding.reasons(None, problems, fits) == ["", "lost", withholding.UNLIKE, "lost"]
    assert withholding.reasons("swapped", problems, fits) == ["swapped"] * 4


def test_failed_checks_are_said_by_the_name_of_the_model():
    said = "does not predict noise: at t = 500 its squared error is 1.50 times that of predicting zero."
    checks = {"The old": FAILED, "The new": PASSED, "The third": None, "The last": FAILED}
    assert withholding.failures(checks) == [f"The old {said}", f"The last {said}"]


@pytest.mark.parametrize(("p_value", "withheld"), [(None, False), (1.0, False), (0.0101, False), (0.01, True)])
def test_nobody_is_judged_where_a_reference_tells_the_sets_apart(p_value, withheld):
    why = "the reference tells them from the held-out images by itself"
    assert withholding.told_apart(p_value) == (why if withheld else None)


@pytest.mark.parametrize("way", list(Way))
def test_nor_beside_one_that_knows_the_held_out_images(way):
    why = "the reference knows the held-out images better than the members" if way.reference else None
    assert withholding.partial(KNOWS_HELDOUT, way) == why
    assert [withholding.partial(other, way) for other in (None, KNOWS_MEMBERS, UNSURE)] == [None] * 3
