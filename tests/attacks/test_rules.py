"""What is made of several residuals of each image."""

import numpy as np
import pytest

from dime_jax.attacks.rules import Agreement, Either
from dime_jax.evidence import metrics

RNG = np.random.default_rng(0)


def naive(residuals):
    """-log mean exp(-2 r / s)/2, image by image."""
    spread = [np.sqrt(np.mean((row - np.mean(row)) ** 2)) for row in residuals]
    return [-np.log(np.mean([np.exp(-2 * r / s) for r, s in zip(image, spread)])) / 2 for image in residuals.T]


def test_any_reading_may_show_a_member():
    residuals, rule = RNG.normal(size=(2, 30)) * [[3.0], [0.1]], Either()
    np.testing.assert_allclose(rule.join(rule.mix(residuals)[:, None] * residuals), naive(residuals), rtol=1e-12)


@pytest.mark.parametrize("shown", [0, 1])
def test_it_is_nearly_as_good_as_to_know_which_reading_shows_members(shown):
    member, heldout = RNG.normal(size=(2, 4000)), RNG.normal(size=(2, 4000))
    member[shown] -= 2.0
    known, added, either = (
        metrics.evaluate(rule(member), rule(heldout))
        for rule in (lambda r: r[shown], lambda r: r.sum(axis=0), Either().join)
    )
    assert added.auc.value < either.auc.value < known.auc.value < either.auc.value + 0.04
    assert added.tpr_at_fpr[0.01].value < either.tpr_at_fpr[0.01].value


@pytest.mark.parametrize("rule", [Either(), Agreement()])
def test_the_order_of_images_does_not_matter_to_the_bit(rule):
    residuals = RNG.standard_t(2, size=(3, 57))
    order = RNG.permutation(57)
    np.testing.assert_array_equal(rule.mix(residuals), rule.mix(residuals[:, order]))


def test_a_reading_that_does_not_vary_says_nothing():
    residuals = np.stack([np.full(20, 0.7), RNG.normal(size=20)])
    weighed = Either().mix(residuals)[:, None] * residuals
    assert np.all(weighed[0] == 0)
    np.testing.assert_array_equal(np.argsort(Either().join(weighed)), np.argsort(residuals[1]))
