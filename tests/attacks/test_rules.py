"""What is made of several residuals of each image."""

import numpy as np
import pytest

from dime_jax.attacks.rules import Agreement, FirstIfSharp

RNG = np.random.default_rng(0)
RULE = FirstIfSharp(0.06)


def naive(residuals):
    """Image by image, with the weights of the formula."""
    first, second = (np.sqrt(np.mean((row - np.mean(row)) ** 2)) for row in residuals)
    share = 1 / (1 + (first / 0.06) ** 2)
    return [share * image[0] / first + (1 - share) * image[1] / second for image in residuals.T]


@pytest.mark.parametrize(("spread", "share"), [(0.006, 0.99), (0.06, 0.5), (0.6, 0.01)])
def test_the_first_reading_decides_where_it_is_sharp(spread, share):
    residuals = RNG.normal(size=(2, 30))
    residuals *= np.array([[spread], [3.0]]) / residuals.std(axis=1, keepdims=True)
    weights = RULE.mix(residuals)
    np.testing.assert_allclose(weights @ residuals, naive(residuals), rtol=1e-12)
    assert weights[0] * spread == pytest.approx(share, abs=0.001)
    assert weights @ residuals.std(axis=1) == pytest.approx(1)


@pytest.mark.parametrize(("rule", "rows"), [(RULE, 2), (Agreement(), 3)])
def test_the_order_of_images_does_not_matter_to_the_bit(rule, rows):
    residuals = RNG.standard_t(2, size=(rows, 57))
    order = RNG.permutation(57)
    np.testing.assert_array_equal(rule.mix(residuals), rule.mix(residuals[:, order]))


def test_a_reading_that_does_not_vary_says_nothing():
    flat, varied = np.full(20, 0.7), RNG.normal(size=20)
    np.testing.assert_allclose(RULE.mix(np.stack([flat, varied])), [0.0, 1 / np.std(varied)])
    assert RULE.mix(np.stack([varied, flat]))[1] == 0.0
    assert np.array_equal(RULE.mix(np.stack([flat, flat])), [0.0, 0.0])
    assert np.all(np.isfinite(RULE.mix(np.zeros((2, 0)))))  # of nobody
