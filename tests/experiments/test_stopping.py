"""The rule by which the shipped model was trained."""

import numpy as np
import pytest

from experiments import stopping


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], None),
        ([0.7], None),
        ([0.7, 0.5, 0.9], None),  # each crossing was followed by a fall, or by nothing yet
        ([0.1, 0.6, 0.6, 0.9], 1),
        ([0.7, 0.5, 0.61, 0.62, 0.1], 2),
    ],
)
def test_two_checks_running_must_reach_it_and_the_first_of_them_counts(found, expected):
    assert stopping.enough(found) == expected


def test_one_false_alarm_is_allowed():
    heldout = np.array([3.0, 1.0, 2.0, 9.0])
    members = np.array([0.5, 1.5, 1.99, 2.0, 2.5])
    assert stopping.found_below_all_but_one(members, heldout) == 3 / 5  # below 2, where only one held-out image is
