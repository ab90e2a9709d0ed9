"""What is made of several residuals of each image."""

import numpy as np
import pytest

from dime_jax.attacks.rules import Agreement, Sharpest

RNG = np.random.default_rng(0)


def naive(residuals, sharpness):
    """Image by image, with the weights of the formula."""
    spread = [np.sqrt(np.mean((row - np.mean(row)) ** 2)) for row in residuals]
    shares = [(c / s) ** 4 for c, s in zip(sharpness, spread)]
    return [sum(u / sum(shares) * r / s for u, r, s in zip(shares, image, spread)) for image in residuals.T]


def test_the_sharper_reading_speaks_louder():
    residuals, rule = RNG.normal(size=(2, 30)) * [[3.0], [2.0]], Sharpest((0.8, 1.0))
    weights = rule.mix(residuals)
    np.testing.assert_allclose(weights @ residuals, naive(residuals, (0.8, 1.0)), rtol=1e-12)
    assert weights[1] > 5 * weights[0]
    np.testing.assert_allclose(rule.mix(1e-6 * residuals), 1e6 * weights)  # a change of unit changes no share
    far = rule.mix(residuals * [[1e-3], [1.0]])
    np.testing.assert_allclose(far * [1e-3, 1.0] * np.std(residuals, axis=1), [1.0, 0.0], atol=1e-9)


@pytest.mark.parametrize("rule", [Sharpest((0.8, 1.0, 1.0)), Agreement()])
def test_the_order_of_images_does_not_matter_to_the_bit(rule):
    residuals = RNG.standard_t(2, size=(3, 57))
    order = RNG.permutation(57)
    np.testing.assert_array_equal(rule.mix(residuals), rule.mix(residuals[:, order]))


def test_a_reading_that_does_not_vary_says_nothing():
    residuals, rule = np.stack([np.full(20, 0.7), RNG.normal(size=20)]), Sharpest((0.8, 1.0))
    np.testing.assert_allclose(rule.mix(residuals), [0.0, 1 / np.std(residuals[1])])
    assert np.array_equal(rule.mix(residuals[:1].repeat(2, axis=0)), [0.0, 0.0])
    assert np.all(np.isfinite(rule.mix(np.zeros((2, 0)))))  # of nobody
