"""Residuals and p-values after what the picture explains: exact by enumeration, equal to naive code, blind to order."""

import zlib

import numpy as np
import pytest
import scipy.fft
from sklearn.linear_model import RidgeCV

from dime_jax.core.schedule import linear_schedule
from dime_jax.evidence import difficulty
from dime_jax.evidence.difficulty import (
    IMAGES_FOR_SCALE,
    difficulty_p_values,
    difficulty_residuals,
    difficulty_statistics,
    fit_difficulty,
)
from dime_jax.protocol import stages

RULE = stages.fixed_rule(linear_schedule()).combine  # three scores of each image


def pile(rng, kind, n=None, k=None):
    """Scores and statistics of a small pile of images that the model never saw."""
    n, k = n or int(rng.integers(6, 24)), k or int(rng.integers(1, 5))
    statistics = rng.standard_normal((n, k))
    scores = statistics @ rng.standard_normal(k) + rng.standard_normal(n)
    if kind == "ties":
        scores, statistics = np.round(scores), np.round(statistics)
    elif kind == "heavy tails":
        scores = scores + rng.standard_t(1, n)
    elif kind == "some alike":
        alike = rng.integers(0, n, n)
        scores, statistics = scores[alike], statistics[alike]
    elif kind == "missing":
        statistics[rng.random((n, k)) < 0.3] = np.nan
    elif kind == "members":
        scores[rng.random(n) < 0.3] -= 10
    return scores, statistics


KINDS = ("normal", "ties", "heavy tails", "some alike", "missing", "members")


def pile_of_three(rng, kind):
    """Three scores of each image, of which the first two have something in common, and a covariate of each score."""
    first, statistics = pile(rng, kind)
    n, noise = len(first), rng.standard_normal((4, len(first)))
    scores, own = np.stack([first, first + noise[0], noise[1]]), np.stack([noise[2], noise[3], 0 * first])[..., None]
    if kind == "ties":
        scores, own = np.round(scores), np.round(own)
    images = rng.integers(0, n, n) if kind == "some alike" else np.arange(n)
    statistics = np.broadcast_to(statistics, (3, *statistics.shape))
    return scores[:, images], np.concatenate([statistics, own], axis=2)[:, images]


def images_with_p_up_to(p_values):
    """How many of n images have p <= k/n, for k = 1 ... n; each p is a whole number of nths."""
    n = len(p_values)
    ranks = np.rint(p_values * n).astype(int)
    np.testing.assert_array_equal(p_values, ranks / n)
    return np.cumsum(np.bincount(ranks, minlength=n + 1))[1:]


def p_of_each(scores, statistics, combine=None):
    """The p-value of each image of a pile as the candidate, with the others held out."""
    n = scores.shape[-1]
    rest = [np.delete(np.arange(n), i) for i in range(n)]
    return np.array(
        [
            difficulty_p_values(
                scores[..., [i]],
                statistics[..., [i], :],
                scores[..., others],
                statistics[..., others, :],
                combine=combine,
            )[0]
            for i, others in enumerate(rest)
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_at_most_k_of_n_choices_of_the_candidate_have_a_p_of_k_over_n(kind, seed):
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    at_most = images_with_p_up_to(p_of_each(*pile(rng, kind)))
    assert np.all(at_most <= 1 + np.arange(len(at_most)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_scores_combined_by_the_rule_without_members_are_exact_as_well(kind, seed):
    rng = np.random.default_rng([seed, 50 + KINDS.index(kind)])
    p_values = p_of_each(*pile_of_three(rng, kind), RULE)
    at_most = images_with_p_up_to(p_values)
    assert np.all(at_most <= 1 + np.arange(len(at_most)))
    assert len(np.unique(p_values)) > 1


@pytest.mark.parametrize("seed", range(40))
def test_of_groups_too_at_most_k_choices_have_a_p_of_k(seed):
    """The candidate is an image of a group like those of the held-out images: the one that would be drawn of it."""
    rng = np.random.default_rng([seed, 100])
    groups = np.repeat(np.arange(10), rng.integers(1, 5, 10))
    scores, statistics = pile(rng, ("normal", "ties", "heavy tails", "some alike")[seed % 4], len(groups), 2)
    scores = scores + 3 * rng.standard_normal(10)[groups]
    drawn = difficulty._one_of_each_group(difficulty.Pile.of(scores, statistics), groups, 0)
    p_values = []
    for candidate in drawn:
        others = groups != groups[candidate]
        images = scores[[candidate]], statistics[[candidate]], scores[others], statistics[others]
        p_values.append(difficulty_p_values(*images, groups[others])[0])
    assert np.all(images_with_p_up_to(np.array(p_values)) <= 1 + np.arange(10))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_images_changes_nothing_to_the_bit(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    scores, statistics = pile(rng, kind, 120, 4)
    groups = rng.integers(-1, 20, 100)
    held, asked = slice(0, 100), slice(100, 120)
    p_values = difficulty_p_values(scores[asked], statistics[asked], scores[held], statistics[held], groups)
    for _ in range(5):
        order, turn = rng.permutation(100), rng.permutation(20)
        again = difficulty_p_values(
            scores[asked][turn], statistics[asked][turn], scores[held][order], statistics[held][order], groups[order]
        )
        np.testing.assert_array_equal(again, p_values[turn])
    alone = [
        difficulty_p_values(scores[[i]], statistics[[i]], scores[held], statistics[held], groups)[0]
        for i in range(100, 120)
    ]
    np.testing.assert_array_equal(alone, p_values)  # who else is asked about does not matter


@pytest.mark.parametrize(("n", "noise"), [(40, 0.3), (40, 30.0), (200, 1.0)])
def test_the_fit_is_ridge_regression_with_the_penalty_that_leaving_one_out_chooses(n, noise):
    rng = np.random.default_rng(n)
    statistics = rng.standard_normal((n, 3)) * (1, 10, 0.1) + 5
    scores = statistics @ (1, 0.1, -2) + noise * rng.standard_normal(n)
    standardised = (statistics - statistics.mean(0)) / statistics.std(0)
    oracle = RidgeCV(n * 10.0 ** np.arange(-3, 4)).fit(standardised, scores)
    fit = fit_difficulty(scores, statistics)
    np.testing.assert_allclose(fit.location[:-1], oracle.coef_, rtol=1e-6, atol=1e-9)
    if fit.scale is None:
        residuals = difficulty_residuals(scores, statistics)
        np.testing.assert_allclose(residuals, scores - oracle.predict(standardised), atol=1e-7)


def test_a_scale_is_fitted_from_so_many_images_on():
    rng = np.random.default_rng(0)
    n = 2 * IMAGES_FOR_SCALE
    statistics = rng.standard_normal((n, 2))
    scores = np.exp(statistics[:, 0]) * rng.standard_normal(n)
    assert fit_difficulty(scores[1:], statistics[1:]).scale is None
    fit = fit_difficulty(scores, statistics)
    assert fit.scale is not None
    assert fit.scale[0] > 0.3  # the first statistic says how far scores stray


@pytest.mark.parametrize("n", [40, 2 * IMAGES_FOR_SCALE])
def test_the_unit_of_the_scores_changes_no_rank(n):
    rng = np.random.default_rng(4)
    statistics = rng.standard_normal((n, 2))
    scores = statistics.sum(axis=1) + rng.standard_normal(n)
    ranks = np.argsort(difficulty_residuals(scores, statistics))
    for unit in (1e-15, 1e12):
        np.testing.assert_array_equal(np.argsort(difficulty_residuals(unit * scores, statistics)), ranks)


def test_statistics_beyond_five_deviations_and_those_that_do_not_vary_count_no_more():
    rng = np.random.default_rng(1)
    statistics = np.column_stack([rng.standard_normal(30), np.full(30, 7.0)])
    scores = statistics[:, 0] + 0.1 * rng.standard_normal(30)
    fit = fit_difficulty(scores, statistics)
    far, farther = fit([0.0, 0.0], [[1e3, 7.0], [1e6, 9.0]])
    assert far == farther


def test_what_the_picture_explains_is_taken_out():
    rng = np.random.default_rng(2)
    statistics = rng.standard_normal((540, 5))
    scores = 3 * statistics.sum(axis=1) + rng.standard_normal(540)
    scores[500:520] -= 3  # members
    plain = (1 + np.sum(scores[:500] <= scores[500:, None], axis=1)) / 501
    adjusted = difficulty_p_values(scores[500:], statistics[500:], scores[:500], statistics[:500])
    assert np.mean(plain[:20] <= 0.05) < 0.3
    assert np.mean(adjusted[:20] <= 0.05) > 0.8
    assert np.mean(adjusted[20:] <= 0.05) < 0.2


@pytest.mark.parametrize("seed", range(20))
def test_the_lowest_of_several_versions_is_exact_as_well(seed):
    """Versions of an image enter the fit with statistics of their own; one without a score is passed over."""
    rng = np.random.default_rng(seed)
    n, versions, k = int(rng.integers(6, 16)), 3, 2
    statistics = rng.standard_normal((1, n, versions, k))
    scores = statistics @ rng.standard_normal(k) + rng.standard_normal((1, n, versions))
    scores[0, rng.random(n) < 0.3, 2] = np.nan
    p_values = []
    for candidate in range(n):
        rest = np.delete(np.arange(n), candidate)
        one = difficulty_p_values(
            scores[:, [candidate]], statistics[:, [candidate]], scores[:, rest], statistics[:, rest]
        )
        usable = np.isfinite(scores[0])
        left = np.full((n, versions), np.inf)
        left[usable] = difficulty_residuals(scores[0][usable], statistics[0][usable])
        lowest = left.min(axis=1)
        assert one[0] == np.mean(lowest <= lowest[candidate])
        p_values.append(one[0])
    for k in range(1, n + 1):
        assert np.sum(np.array(p_values) <= k / n + 1e-12) <= k


def test_frozen_residuals_are_those_of_the_fits_weighed():
    rng = np.random.default_rng(3)
    (first, statistics), (second, _) = pile(rng, "normal", 40, 3), pile(rng, "normal", 40, 3)
    frozen = difficulty.freeze_difficulty(
        difficulty.Pile.of([first, second], statistics), lambda residuals: np.array([0.25, 2.0])
    )
    both = np.stack([statistics, statistics])
    expected = sum(
        weight * (scores - fit_difficulty(scores, statistics).expected(statistics))
        for weight, scores in ((0.25, first), (2.0, second))
    )
    np.testing.assert_allclose(frozen(np.stack([first, second]), both), expected)
    np.testing.assert_allclose(frozen.expected(both) + expected, 0.25 * first + 2 * second)


def test_one_image_of_each_group_is_counted():
    rng = np.random.default_rng(3)
    scores, statistics = pile(rng, "normal", 61, 2)
    groups = np.repeat([0, 1, 2, -1], 15)
    (p_value,) = difficulty_p_values([-1e3], statistics[60:], scores[:60], statistics[:60], groups)
    assert p_value == 1 / (3 + 15 + 1)
    drawn = {
        tuple(difficulty._one_of_each_group(difficulty.Pile.of(scores[:60], statistics[:60]), groups, seed).tolist())
        for seed in range(8)
    }
    assert len(drawn) == 8  # another seed draws others
    assert all(np.isin(np.arange(45, 60), list(one)).all() for one in drawn)


def test_a_candidate_without_a_score_has_no_p_value():
    scores, statistics = pile(np.random.default_rng(4), "normal", 32, 2)
    p_values = difficulty_p_values([np.nan, scores[31]], statistics[30:], scores[:30], statistics[:30])
    assert np.isnan(p_values[0])
    assert np.isfinite(p_values[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heldout_scores": [np.nan, 1.0, 2.0]}, "heldout_scores"),
        ({"statistics": [[1.0, 2.0]]}, "heldout_statistics"),
        ({"scores": [1.0, 2.0]}, "statistics of scores"),
        ({"heldout_statistics": [[1.0], [np.inf], [2.0]]}, "finite or NaN"),
        ({"combine": lambda residuals: residuals[0]}, "combine"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, message):
    good = {
        "scores": [1.0],
        "statistics": [[1.0]],
        "heldout_scores": [1.0, 2.0, 3.0],
        "heldout_statistics": [[1.0], [2.0], [3.0]],
    }
    assert difficulty_p_values(**good) <= 1
    with pytest.raises(ValueError, match=message):
        difficulty_p_values(**good | change)


def naive_statistics(image):
    """The statistics of one image, by plain loops."""
    height, width, _ = image.shape
    found = []
    for side in (4, 8):
        tops, lefts = (range(0, max(1, length - side + 1), side // 2) for length in (height, width))
        blocks = [image[top : top + side, left : left + side] for top in tops for left in lefts]
        energies = np.concatenate([scipy.fft.dctn(block, norm="ortho").ravel() ** 2 for block in blocks])
        found += [np.log(np.mean(np.minimum(energies, level**2)) + 1e-7) for level in (0.08, 0.16, 0.31, 0.63)]
    pixels = np.clip(np.rint((image + 1) * 127.5), 0, 255).astype(np.uint8)
    found.append(np.log(len(zlib.compress(pixels.tobytes(), 6)) / image.size))
    grey = image.mean(axis=-1)
    found.append(
        np.log(np.mean([abs(grey[i + 1, j] - grey[i, j]) for i in range(height - 1) for j in range(width)]) + 1e-3)
    )
    found.append(
        np.log(np.mean([abs(grey[i, j + 1] - grey[i, j]) for i in range(height) for j in range(width - 1)]) + 1e-3)
    )
    return [*found, grey.mean(), grey.std()]


@pytest.mark.parametrize("shape", [(8, 8, 1), (32, 32, 3), (20, 13, 4), (3, 5, 3)])
def test_statistics_are_those_of_a_plain_loop(shape):
    images = np.random.default_rng(5).uniform(-1, 1, (3, *shape)).astype(np.float32)
    images[1] = np.round(images[1])
    images[2] = 0.5
    np.testing.assert_allclose(
        difficulty_statistics(images), [naive_statistics(image) for image in images], rtol=2e-5, atol=2e-5
    )


def test_statistics_do_not_depend_on_what_is_read_together(monkeypatch):
    images = np.random.default_rng(6).uniform(-1, 1, (5, 8, 8, 3)).astype(np.float32)
    together = difficulty_statistics(images)
    monkeypatch.setattr(difficulty, "_PIXELS_AT_ONCE", 1)
    np.testing.assert_array_equal(difficulty_statistics(images), together)
