"""Are candidates pictures of the same kind as held-out images? Digits, altered and not."""

import numpy as np
import pytest
from scipy import ndimage

import dime_jax as dj
from dime_jax import evidence
from dime_jax.evidence.likeness import ERROR_RATE


@pytest.fixture(scope="module")
def digits():
    source = dj.data.open_source("digits")
    return np.stack([source[i].image for i in range(len(source))]).astype(np.float32) / 127.5 - 1


def eight_bit(images):
    return (np.round((np.clip(images, -1, 1) + 1) * 127.5) / 127.5 - 1).astype(np.float32)


def draw(images, seed, alter=lambda x: x, candidates=48, heldout=300):
    order = np.random.default_rng(seed).permutation(len(images))
    chosen, others = images[order[:candidates]], images[order[candidates : candidates + heldout]]
    statistics = [evidence.image_statistics(eight_bit(each)) for each in (alter(chosen), others)]
    return evidence.likeness(*statistics, seed=seed)


ALTERATIONS = {
    "blurred": lambda x: ndimage.gaussian_filter(x, (0, 0.7, 0.7, 0)),
    "flattened": lambda x: 0.8 * x,
    "dimmed": lambda x: 0.9 * (x + 1) - 1,
    "enlarged": lambda x: ndimage.zoom(x, (1, 1.25, 1.25, 1), order=1)[:, 1:9, 1:9],
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_altered_pictures_give_the_alarm(digits, name):
    assert all(draw(digits, seed, ALTERATIONS[name]).set_unlike for seed in range(5))


@pytest.mark.parametrize(("draws", "alarms"), [(20, 2), pytest.param(100, 5, marks=pytest.mark.slow)])
def test_unaltered_pictures_do_not(digits, draws, alarms):
    found = [draw(digits, seed) for seed in range(draws)]
    assert sum(one.set_unlike for one in found) <= alarms
    # One by one: about 1 in 100, with the spread of that many draws of 48.
    assert np.mean([one.unlike.mean() for one in found]) <= ERROR_RATE + 4 * np.sqrt(ERROR_RATE / (draws * 48))


def test_copies_of_held_out_pictures_change_nothing(digits):
    candidates, heldout = (evidence.image_statistics(digits[part]) for part in (slice(20), slice(20, 140)))
    once = evidence.likeness(candidates, heldout)
    copied = evidence.likeness(candidates, np.repeat(heldout, 3, axis=0), heldout_groups=np.repeat(np.arange(120), 3))
    np.testing.assert_array_equal(copied.p_values, once.p_values)
    assert copied.set_p == once.set_p
    assert copied.heldout == 120


def test_greyed_pictures_give_the_alarm():
    """Colour is seen by saturation alone where the mean of every channel is the same."""
    rng = np.random.default_rng(0)
    smooth = ndimage.gaussian_filter(rng.normal(size=(348, 16, 16, 3)), (0, 2, 2, 0))
    colour = np.clip(4 * smooth, -1, 1).astype(np.float32)

    def grey(x):
        return np.repeat(x.mean(axis=-1, keepdims=True) * np.sqrt(3), 3, axis=-1)

    assert draw(colour, 0, grey).set_unlike
    assert not draw(colour, 0).set_unlike


def test_one_odd_picture_is_named_and_stops_no_other(digits):
    order = np.random.default_rng(0).permutation(len(digits))
    candidates = digits[order[:20]].copy()
    candidates[7] = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8, 1)
    statistics = [evidence.image_statistics(each) for each in (candidates, digits[order[20:320]])]
    found = evidence.likeness(*statistics)
    assert found.unlike[7]
    assert found.p_values[7] == 1 / 301
    assert found.unlike.sum() <= 2


def test_pictures_without_statistics_are_passed_over():
    rng = np.random.default_rng(0)
    statistics = rng.normal(size=(5, 3))
    statistics[2] = np.nan
    found = evidence.likeness(statistics, rng.normal(size=(150, 3)))
    assert np.isnan(found.p_values[2])
    assert not found.unlike[2]
    assert np.all(np.isfinite(np.delete(found.p_values, 2)))
    assert evidence.likeness(np.full((2, 3), np.nan), rng.normal(size=(150, 3))).set_p == 1


def test_pictures_of_one_owner_count_once():
    """Forty pictures of one owner that resemble each other are one draw, not forty."""
    rng = np.random.default_rng(0)
    heldout = rng.normal(size=(200, 4))
    alarms = {False: 0, True: 0}
    for seed in range(12):
        owner = rng.normal(size=4) + 0.2 * rng.normal(size=(40, 4))
        for grouped in alarms:
            groups = np.zeros(40, int) if grouped else None
            alarms[grouped] += evidence.likeness(owner, heldout, groups, seed=seed).set_unlike
    assert alarms[True] <= 1
    assert alarms[False] >= 10


def test_among_few_pictures_the_farthest_of_all_is_unlike(digits):
    """With 60 held-out images no p reaches 1 %, and plain pictures, all copies of each other, are one group."""
    order = np.random.default_rng(0).permutation(len(digits))
    heldout = evidence.image_statistics(digits[order[:60]])
    flat = evidence.image_statistics(np.full((20, 8, 8, 1), -0.3, np.float32))
    found = evidence.likeness(flat, heldout, groups=np.zeros(20, int))
    assert found.unlike.all()
    assert found.set_unlike
    like = evidence.likeness(evidence.image_statistics(digits[order[60:80]]), heldout)
    assert like.unlike.sum() <= 2
