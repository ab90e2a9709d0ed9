"""What is read off a record: the best score of each image and its variations."""

import numpy as np
import pytest

from dime_jax import evidence
from dime_jax.protocol.record import best_of


def test_the_best_of_variations_is_the_lowest_and_needs_a_score_of_its_own():
    own = np.array([1.0, 1.0, np.nan, 3.0])
    others = np.array([[2.0, 0.5], [2.0, np.nan], [0.0, 0.0], [np.nan, np.nan]])
    best, which = best_of(own, others)
    np.testing.assert_array_equal(best, [0.5, 1.0, np.nan, 3.0])
    np.testing.assert_array_equal(which, [2, 0, 0, 0])


@pytest.mark.slow
def test_the_best_of_variations_is_flagged_at_most_at_the_level_when_none_was_used():
    """Scores of an image and its variations resemble each other; candidates and held-out images are alike."""
    rng, level, flagged, single = np.random.default_rng(0), 0.05, [], []
    for _ in range(4_000):
        image, spread = rng.normal(size=(130, 1)), rng.normal(size=(130, 8))
        heldout, candidates = np.split(image + 0.7 * spread + np.linspace(-0.5, 0.5, 8), [100])
        best = [best_of(side[:, 0], side[:, 1:]).best for side in (candidates, heldout)]
        p = evidence.conformal_p_values(*best)
        single.append(np.mean(p <= level))
        flagged.append(np.any(evidence.candidate_verdicts(p, 100, level).rejected))
    print(f"one image flagged {np.mean(single):.4f}, any of 30 after Benjamini-Hochberg {np.mean(flagged):.4f}")
    assert np.mean(single) <= level + 3 * np.std(single) / np.sqrt(len(single))
    assert np.mean(single) > 0.03  # and not because nothing is ever flagged
    assert np.mean(flagged) <= level + 3 * np.sqrt(level * (1 - level) / 4_000)
