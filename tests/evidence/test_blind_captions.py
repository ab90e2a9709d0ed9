import numpy as np
import pytest
from scipy import stats

from dime_jax import evidence
from dime_jax.evidence import blind, metrics

WORDS = [a + b + c for a in "bcdfghklmnprst" for b in "aeiou" for c in ("n", "r", "st", "ly", "mo", "ck", "sh", "x")]
ZIPF = 1 / np.arange(1, len(WORDS) + 1)


def captions(rng, n, weights=ZIPF):
    chance = weights / weights.sum()
    return [" ".join(rng.choice(WORDS, rng.integers(4, 13), p=chance)) for _ in range(n)]


def fires(result):
    return result.auc.low > 0.5


# --- captions that tell ---


def test_other_words_fire():
    rng = np.random.default_rng(0)
    weights = ZIPF.copy()
    weights[:10] *= 3
    result = evidence.caption_baseline(captions(rng, 200), captions(rng, 200, weights))
    assert fires(result)
    assert 0.6 < result.auc.value < 0.95


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda caption: caption + ".",
        lambda caption: caption.replace(" ", ", "),
        lambda caption: f"a photo of {caption}",
        lambda caption: caption.replace("a", "á"),
        lambda caption: "",
        lambda caption: caption * 2,
    ],
)
def test_the_same_words_written_otherwise_fire(change):
    rng = np.random.default_rng(1)
    result = evidence.caption_baseline(captions(rng, 80), [change(caption) for caption in captions(rng, 80)])
    assert result.auc.low > 0.8


def test_a_few_captions_of_many_words_in_one_language_fire():
    rng = np.random.default_rng(2)
    chinese = ["".join(rng.choice(list("猫狗红色的垫子上一只坐在"), 8)) for _ in range(60)]
    assert evidence.caption_baseline(captions(rng, 60), chinese).auc.value == 1


# --- captions that do not ---


def test_captions_of_one_origin_rarely_fire():
    """The two-sided interval is at 95 %, so at most 1 in 40 should fire."""
    fired = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        fired += fires(evidence.caption_baseline(captions(rng, 40), captions(rng, 40), seed=seed))
    assert fired <= 3


@pytest.mark.slow
@pytest.mark.parametrize("n", [25, 150])
def test_captions_of_one_origin_fire_at_their_level(n):
    draws, values = 400, []
    fired = 0
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        result = evidence.caption_baseline(captions(rng, n), captions(rng, n), seed=seed)
        fired += fires(result)
        values.append(result.auc.value)
    assert stats.binomtest(fired, draws, 0.025, alternative="greater").pvalue > 0.01
    assert fired / draws <= 0.05
    assert abs(np.mean(values) - 0.5) < 4 * np.std(values) / np.sqrt(draws)


@pytest.mark.parametrize("caption", ["", " ", "!!", "a cat", "猫", "x" * 10_000])
def test_constant_captions_say_nothing(caption):
    result = evidence.caption_baseline([caption] * 30, [caption] * 25)
    assert result.auc.value == 0.5
    assert not fires(result)


def test_groups_of_constant_captions_say_nothing():
    result = evidence.caption_baseline([""] * 30, [""] * 30, np.arange(60) // 2)
    assert result.auc.value == 0.5


def test_few_kinds_of_captions_do_not_fire_by_themselves():
    fired = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        draw = [f"a photo of a {animal}" for animal in rng.choice(["cat", "dog", "cow"], 120)]
        fired += fires(evidence.caption_baseline(draw[:60], draw[60:], seed=seed))
    assert fired <= 1


# --- groups ---


def albums(seed, size=3, count=100):
    """Albums of one caption each, half of them members."""
    drawn = captions(np.random.default_rng(seed), count)
    return [caption for caption in drawn for _ in range(size)], np.repeat(np.arange(count), size)


def test_copies_of_a_caption_are_not_cut_between_folds():
    drawn, groups = albums(0)
    leaking = evidence.caption_baseline(drawn[:150], drawn[150:])
    grouped = evidence.caption_baseline(drawn[:150], drawn[150:], groups)
    assert leaking.auc.value > 0.95
    assert not fires(grouped)


@pytest.mark.slow
def test_albums_of_one_origin_rarely_fire():
    """Without allowing for copies, the interval would be √3 times too narrow, and 1 in 8 would fire."""
    fired = 0
    for seed in range(60):
        drawn, groups = albums(seed, count=60)
        fired += fires(evidence.caption_baseline(drawn[:90], drawn[90:], groups, seed=seed))
    assert fired <= 3


def test_no_group_is_in_two_folds(folds):
    drawn, groups = albums(1, size=2, count=40)
    evidence.caption_baseline(drawn[:40], drawn[40:], groups)
    assert len(folds) == 5
    for train, test in folds:
        assert not set(groups[train]) & set(groups[test])


def test_errors_of_groups_of_one_score():
    rng = np.random.default_rng(3)
    member, heldout = np.repeat(rng.normal(size=50), 4), np.repeat(rng.normal(size=60), 4)
    groups = np.repeat(np.arange(110), 4)
    assert blind.error_within_groups(member, heldout, groups) == pytest.approx(2)
    assert blind.error_within_groups(member, heldout, np.full(440, -1)) == pytest.approx(1)
    assert blind.error_within_groups(np.zeros(4), np.zeros(4), np.zeros(8, int)) == 1


def test_errors_of_groups_against_simulation():
    """Groups of three scores that vary together, on both sides."""
    rng = np.random.default_rng(4)

    def side():
        return (rng.normal(size=(40, 1)) + 0.5 * rng.normal(size=(40, 3))).ravel()

    draws = [(side(), side()) for _ in range(500)]
    groups = np.arange(240) // 3
    spread = np.std([metrics.auc(*draw) for draw in draws])
    independent = np.sqrt(241 / (12 * 120 * 120))
    factor = np.mean([blind.error_within_groups(*draw, groups) for draw in draws])
    assert factor == pytest.approx(spread / independent, rel=0.1)


# --- the record, and bad input ---


def test_the_record_is_that_of_the_picture_baseline():
    rng = np.random.default_rng(5)
    member, heldout = captions(rng, 40), captions(rng, 50)
    result = evidence.caption_baseline(member, heldout, folds=4)
    assert isinstance(result, evidence.BlindBaseline)
    assert (result.scores_member.shape, result.scores_heldout.shape, result.folds) == ((40,), (50,), 4)
    assert result.auc.value == metrics.auc(result.scores_member, result.scores_heldout)
    gap = evidence.gap_over_blind(
        rng.normal(-3, 1, 40), rng.normal(0, 1, 50), result.scores_member, result.scores_heldout
    )
    assert not gap.explained
    again = evidence.caption_baseline(member, heldout, folds=4)
    np.testing.assert_array_equal(again.scores_member, result.scores_member)
    other = evidence.caption_baseline(member, heldout, folds=4, seed=1)
    assert not np.array_equal(other.scores_member, result.scores_member)


def test_the_gap_allows_for_groups():
    rng = np.random.default_rng(6)
    member, heldout = np.repeat(rng.normal(-0.6, 1, 30), 9), np.repeat(rng.normal(0, 1, 30), 9)
    attack = rng.normal(-1, 1, 270), rng.normal(0, 1, 270)
    assert evidence.gap_over_blind(*attack, member, heldout).blind_fires
    assert not evidence.gap_over_blind(*attack, member, heldout, groups=np.arange(540) // 9).blind_fires


def test_form_of_captions():
    found = evidence.caption_form(["", "Ab 1!", "é"])
    np.testing.assert_allclose(found[0], 0)
    np.testing.assert_allclose(found[1], [np.log(6), np.log(3), 0.2, 0.2, 0.2, 0])
    np.testing.assert_allclose(found[2], [np.log(2), np.log(2), 0, 0, 0, 1])


def test_bad_input_is_named():
    some = ["a", "b", "c"]
    for wrong in ("abc", ["a", None, "c"], [b"a"] * 3):
        with pytest.raises(ValueError, match="member_captions must be a list of strings"):
            evidence.caption_baseline(wrong, some)
    with pytest.raises(ValueError, match="number of heldout_captions must be >= 2, got 1"):
        evidence.caption_baseline(some, some[:1])
    with pytest.raises(ValueError, match="folds must be >= 2, got 1"):
        evidence.caption_baseline(some, some, folds=1)
    with pytest.raises(ValueError, match=r"groups must have shape \[6\]"):
        evidence.caption_baseline(some, some, [0, 1])
    with pytest.raises(evidence.GroupsTooLarge):
        evidence.caption_baseline(some, some, [0, 0, 0, 1, 1, 1], folds=2)
