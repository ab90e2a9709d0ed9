"""Residuals and p-values after what the picture explains: exact by enumeration, equal to naive code, blind to order."""

import zlib

import numpy as np
import pytest
import scipy.fft
from sklearn.linear_model import RidgeCV

from dime_jax.attacks.rules import FirstIfSharp
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
BESIDE_RULE = stages.fixed_rule(linear_schedule(), reference=True).combine  # two, each beside a reference's


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


REFERENCES = {  # what another model may answer, given the model's scores
    "unrelated": lambda rng, scores: rng.standard_normal(len(scores)),
    "like the model": lambda rng, scores: scores + 0.3 * rng.standard_normal(len(scores)),
    "the model itself": lambda rng, scores: scores.copy(),
    "the other way round": lambda rng, scores: 3 - 2 * scores,
    "constant": lambda rng, scores: np.full(len(scores), 0.1),
    "constant but for rounding": lambda rng, scores: 0.1 + 1e-16 * rng.standard_normal(len(scores)),
    "heavy tails": lambda rng, scores: rng.standard_t(1, len(scores)),
    "ties": lambda rng, scores: rng.integers(0, 3, len(scores)).astype(float),
    "far from zero": lambda rng, scores: 1e9 + np.round(scores, 1),
    "the log of nothing": lambda rng, scores: np.where(np.arange(len(scores)) == 0, -87.3, scores),
}


def beside(rng, kind, of_reference, k=None):
    """A pile of scores, with statistics of the pictures whose last column is what a reference answers."""
    scores, statistics = pile(rng, kind)
    if kind == "some alike":  # alike for the reference, too
        statistics = np.round(statistics, 12)
        _, alike = np.unique(statistics, axis=0, return_inverse=True)
        scores = scores[[np.flatnonzero(alike == one)[0] for one in alike]]
        answers = REFERENCES[of_reference](rng, scores)[[np.flatnonzero(alike == one)[0] for one in alike]]
    else:
        answers = REFERENCES[of_reference](rng, scores)
    return scores, np.column_stack([statistics[:, :k], answers])


def images_with_p_up_to(p_values):
    """How many of n images have p <= k/n, for k = 1 ... n; each p is a whole number of nths."""
    n = len(p_values)
    ranks = np.rint(p_values * n).astype(int)
    np.testing.assert_array_equal(p_values, ranks / n)
    return np.cumsum(np.bincount(ranks, minlength=n + 1))[1:]


def p_of_each(scores, statistics, combine=None, unpenalised=0):
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
                unpenalised=unpenalised,
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_reference", REFERENCES)
def test_beside_a_reference_they_are_exact_as_well(kind, of_reference):
    """Whatever it answers: with and without statistics of the pictures."""
    for k in (None, 0):
        rng = np.random.default_rng([KINDS.index(kind), list(REFERENCES).index(of_reference)])
        at_most = images_with_p_up_to(p_of_each(*beside(rng, kind, of_reference, k), unpenalised=1))
        assert np.all(at_most <= 1 + np.arange(len(at_most)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_scores_combined_by_the_rule_beside_a_reference_are_exact_as_well(kind, seed):
    rng = np.random.default_rng([seed, 200 + KINDS.index(kind)])
    scores, statistics = pile_of_three(rng, kind)
    others = np.round(2 * scores[:2] + statistics[:2, :, -1], 1)[..., None]
    p_values = p_of_each(scores[:2], np.concatenate([statistics[:2, :, :-1], others], axis=2), BESIDE_RULE, 1)
    at_most = images_with_p_up_to(p_values)
    assert np.all(at_most <= 1 + np.arange(len(at_most)))
    assert len(np.unique(p_values)) > 1


@pytest.mark.parametrize("unpenalised", [0, 1])
@pytest.mark.parametrize("seed", range(40))
def test_of_groups_too_at_most_k_choices_have_a_p_of_k(seed, unpenalised):
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
        p_values.append(difficulty_p_values(*images, groups[others], unpenalised=unpenalised)[0])
    assert np.all(images_with_p_up_to(np.array(p_values)) <= 1 + np.arange(10))


@pytest.mark.parametrize("of_reference", [None, "unrelated", "like the model", "far from zero", "ties"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_images_changes_nothing_to_the_bit(kind, of_reference):
    rng = np.random.default_rng(KINDS.index(kind))
    scores, statistics = pile(rng, kind, 120, 4)
    if of_reference is not None:
        statistics = np.column_stack([statistics, REFERENCES[of_reference](rng, scores)])
    groups, j = rng.integers(-1, 20, 100), int(of_reference is not None)
    held, asked = slice(0, 100), slice(100, 120)

    def found(scores, statistics, *heldout):
        return difficulty_p_values(scores, statistics, *heldout, unpenalised=j)

    p_values = found(scores[asked], statistics[asked], scores[held], statistics[held], groups)
    for _ in range(5 if of_reference is None else 2):
        order, turn = rng.permutation(100), rng.permutation(20)
        again = found(
            scores[asked][turn], statistics[asked][turn], scores[held][order], statistics[held][order], groups[order]
        )
        np.testing.assert_array_equal(again, p_values[turn])
    alone = [found(scores[[i]], statistics[[i]], scores[held], statistics[held], groups)[0] for i in range(100, 120)]
    np.testing.assert_array_equal(alone, p_values)  # who else is asked about does not matter
    turn = rng.permutation(120)
    assert fit_difficulty(scores[turn], statistics[turn], j) == fit_difficulty(scores, statistics, j)


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


def dense(columns, others, scores, penalty):
    """Coefficients of columns, others and the constant by one dense solve; only columns are penalised."""
    design = np.column_stack([columns, others, np.ones(len(scores))])
    free = np.zeros(others.shape[1] + 1)
    penalties = np.concatenate([np.full(columns.shape[1], penalty), free])
    return np.linalg.solve(design.T @ design + np.diag(penalties), design.T @ scores)


def left_out(columns, others, scores, penalty):
    """What is left of each score when it is predicted from a fit without it."""
    left = []
    for i, score in enumerate(scores):
        rest = np.arange(len(scores)) != i
        found = dense(columns[rest], others[rest], scores[rest], penalty)
        left.append(score - np.concatenate([columns[i], others[i], [1.0]]) @ found)
    return np.array(left)


@pytest.mark.parametrize("n", [8, 60])
@pytest.mark.parametrize("unpenalised", [1, 2])
def test_scores_of_other_models_alone_are_fitted_by_least_squares(n, unpenalised):
    rng = np.random.default_rng(n)
    others = 5 + 3 * rng.standard_normal((n, unpenalised))
    scores = others.sum(axis=1) + rng.standard_normal(n)
    design = np.column_stack([others, np.ones(n)])
    found, *_ = np.linalg.lstsq(design, scores, rcond=None)
    np.testing.assert_allclose(fit_difficulty(scores, others, unpenalised).expected(others), design @ found, rtol=1e-12)
    residuals = difficulty_residuals(scores, others, unpenalised)
    np.testing.assert_allclose(residuals, scores - design @ found, atol=1e-8)
    other = rng.standard_normal((4, unpenalised))  # far from what was fitted: a line goes on
    expected = np.column_stack([other, np.ones(4)]) @ found
    np.testing.assert_allclose(fit_difficulty(scores, others, unpenalised).expected(other), expected, rtol=1e-12)


@pytest.mark.parametrize(("n", "noise", "unpenalised"), [(12, 1.0, 1), (40, 0.1, 1), (40, 10.0, 2), (200, 1.0, 1)])
def test_beside_them_only_the_pictures_are_penalised(n, noise, unpenalised):
    """As a dense solve has it, at the penalty that refits without each image in turn choose."""
    rng = np.random.default_rng(n + unpenalised)
    statistics = rng.standard_normal((n, 3)) * (1, 10, 0.1) + 5
    others = statistics[:, :1] + 1e3 + rng.standard_normal((n, unpenalised))
    scores = statistics @ (1, 0.1, -2) + others.sum(axis=1) + noise * rng.standard_normal(n)
    standardised = (statistics - statistics.mean(0)) / statistics.std(0)
    own = (others - others.mean(0)) / others.std(0)
    penalties = n * difficulty._PENALTIES
    errors = [np.sum(left_out(standardised, own, scores, penalty) ** 2) for penalty in penalties]
    oracle = dense(standardised, own, scores, penalties[int(np.argmin(errors))])
    fit = fit_difficulty(scores, np.column_stack([statistics, others]), unpenalised)
    np.testing.assert_allclose(fit.location, oracle, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("k", [0, 3])
def test_what_leaving_one_out_leaves_is_that_of_refits(k, monkeypatch):
    """The errors by which the penalty is chosen, each anew from n fits without one image."""
    rng = np.random.default_rng(k)
    columns, others = rng.standard_normal((25, k)), rng.standard_normal((25, 1))
    columns -= columns.mean(axis=0)
    scores = columns.sum(axis=1) + others[:, 0] + rng.standard_normal(25)
    found = []

    def least(fits, key):
        found.extend(key(fit) for fit in fits)
        return fits[0]

    monkeypatch.setattr(difficulty, "min", least, raising=False)
    difficulty._ridge(columns, scores, others)
    expected = [np.sum(left_out(columns, others, scores, 25 * penalty) ** 2) for penalty in difficulty._PENALTIES]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("answers", ["constant", "constant but for rounding"])
@pytest.mark.parametrize("k", [0, 2])
def test_a_reference_that_says_nothing_has_no_weight_and_stays_without_one(answers, k):
    rng = np.random.default_rng(k)
    scores, statistics = pile(rng, "normal", 30, 2)
    others = REFERENCES[answers](rng, scores)
    fit = fit_difficulty(scores, np.column_stack([statistics[:, :k], others]), 1)
    expected = fit_difficulty(scores, statistics[:, :k]).expected(statistics[:, :k])
    for shift in (0.0, 1.0, 1e6):  # where images that are judged later have other answers
        found = fit.expected(np.column_stack([statistics[:, :k], others + shift]))
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_references_that_say_the_same_share_the_weight_of_one():
    rng = np.random.default_rng(0)
    scores, statistics = pile(rng, "normal", 15, 3)
    other = statistics[:, 2] + 0.5 * rng.standard_normal(15)
    one = difficulty_residuals(scores, np.column_stack([statistics[:, :2], other]), 1)
    two = difficulty_residuals(scores, np.column_stack([statistics[:, :2], other, 7 - 3 * other]), 2)
    np.testing.assert_allclose(two, one, atol=1e-8)
    # And one that says what a statistic of the picture says leaves nothing for that to explain.
    same = difficulty_residuals(scores, np.column_stack([statistics[:, :1], statistics[:, 0]]), 1)
    design = np.column_stack([statistics[:, 0], np.ones(15)])
    alone = scores - design @ np.linalg.lstsq(design, scores, rcond=None)[0]
    np.testing.assert_allclose(same, alone, atol=1e-8)


def test_a_reference_that_answers_as_the_model_does_leaves_nothing():
    scores, statistics = pile(np.random.default_rng(0), "heavy tails", 60, 2)
    left = difficulty_residuals(scores, np.column_stack([statistics, scores]), 1)
    np.testing.assert_array_equal(left, np.zeros(60))
    left = difficulty_residuals(np.stack([scores, -scores]), np.column_stack([statistics, scores]), 1)
    assert np.array_equal(FirstIfSharp(0.06).mix(left), [0.0, 0.0])


def test_no_scale_follows_from_what_a_reference_says():
    rng = np.random.default_rng(0)
    n = 2 * IMAGES_FOR_SCALE
    statistics, other = rng.standard_normal((n, 2)), rng.standard_normal(n)
    scores = np.exp(2 * other) * rng.standard_normal(n)
    fit = fit_difficulty(scores, np.column_stack([statistics, other]), 1)
    assert len(fit.scale) == 3
    assert fit_difficulty(scores, other[:, None], 1).scale is None  # though there are more than enough images


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
        ({"unpenalised": 2}, "the number of statistics that are penalised must be >= 0, got -1"),
        ({"unpenalised": 1, "heldout_statistics": [[1.0], [np.nan], [2.0]]}, "unpenalised statistics"),
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


def test_residuals_are_in_the_units_of_the_score_however_many_images_there_are():
    rng = np.random.default_rng(1)
    n = 4 * IMAGES_FOR_SCALE
    statistics = rng.standard_normal((n, 2))
    scores = 0.03 * np.exp(statistics[:, 0] / 4) * rng.standard_normal(n) + statistics @ [1.0, -1.0]
    few, many = (difficulty_residuals(scores[:m], statistics[:m]) for m in (2 * IMAGES_FOR_SCALE - 1, n))
    assert fit_difficulty(scores, statistics).scale is not None
    assert np.std(many) == pytest.approx(np.std(few), rel=0.25)
    assert np.median(np.abs(many)) == pytest.approx(0.03 * 0.6745, rel=0.25)
