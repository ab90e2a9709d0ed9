"""How often a reference that is fair seems to tell candidates from held-out images, and one that is not does."""

import dataclasses

import numpy as np
import pytest
from handmade import SIMA, record, table

from dime_jax.core.schedule import linear_schedule
from dime_jax.evidence import Way
from dime_jax.findings import ranking
from dime_jax.protocol import calibration

HELDOUT, CANDIDATES = 60, 25
FIRST = np.arange(HELDOUT + CANDIDATES) < HELDOUT


def audited(rng, shift=0.0, members=0.0, way=Way.BESIDE, **changes):
    """An audit of random pictures; the reference's scores of candidates are shifted, and those of the model besides."""
    pictures = rng.normal(size=(len(FIRST), 2))
    answers = np.exp(pictures[:, 0] + 0.5 * rng.normal(size=len(FIRST)) + shift * ~FIRST)
    scores = np.exp(np.log(answers) + 0.1 * rng.normal(size=len(FIRST)) + members * ~FIRST)
    made = record(scores[FIRST], scores[~FIRST], statistics=pictures, **changes)
    own, other = table(scores), table(answers)
    for one in (own, other):
        one.__dict__["schedule"] = linear_schedule()
    both = dataclasses.replace(own, reference=other)
    both.__dict__["schedule"] = linear_schedule()
    made.__dict__.update(tables=[both], decider=calibration.to_adjust(SIMA, way))
    return made, both


@pytest.mark.parametrize("way", [Way.BESIDE, Way.BESIDE_ADJUSTED])
def test_a_fair_reference_seems_to_tell_them_apart_no_oftener_than_it_may(way, monkeypatch):
    """Whatever the model remembers of the candidates."""
    monkeypatch.setattr(ranking, "_RESAMPLES", 199)
    rng = np.random.default_rng(0)
    found = [ranking.told_apart_by_reference(*audited(rng, members=-3.0, way=way)) for _ in range(120)]
    assert 0 < np.mean(np.array(found) <= 0.1) <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / len(found))


@pytest.mark.parametrize("shift", [-0.8, 0.8])
def test_one_that_knows_either_set_is_seen_minus_what_the_picture_explains(shift):
    rng = np.random.default_rng(1)
    assert max(ranking.told_apart_by_reference(*audited(rng, shift)) for _ in range(4)) <= 0.01


def test_groups_count_once_and_images_without_an_answer_do_not():
    rng = np.random.default_rng(2)
    made, both = audited(rng, 0.9)
    assert ranking.told_apart_by_reference(made, both) <= 0.01
    grouped, _ = audited(np.random.default_rng(2), 0.9, groups=np.where(FIRST, -1, 3))
    assert ranking.told_apart_by_reference(grouped, both) > 0.05  # one picture, many times over
    both.reference.readings["Raw(t=70).l4"][~FIRST] = np.nan
    assert ranking.told_apart_by_reference(made, both) is None


def test_it_is_looked_at_only_where_a_reference_is_taken_out():
    made, both = audited(np.random.default_rng(3))
    for way in (Way.ADJUSTED, Way.PLAIN):
        made.__dict__["decider"] = calibration.to_adjust(SIMA, way) if way is Way.ADJUSTED else SIMA
        assert ranking.told_apart_by_reference(made, both) is None
