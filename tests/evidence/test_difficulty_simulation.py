"""Error rates of p-values after what the picture explains, by simulation: of one score, and of the rule of three."""

import numpy as np
import pytest

from dime_jax import evidence
from dime_jax.core.schedule import linear_schedule
from dime_jax.protocol import stages

RULE = stages.fixed_rule(linear_schedule()).combine
COMBINES = [pytest.param(None, id="one score"), pytest.param(RULE, id="rule of three")]
NORMAL, T2 = np.inf, 2
SHIFTS = {NORMAL: 5.0, T2: 12.0}  # by which members' scores are lower


def draw(rng, statistics, freedom, shift=0.0, combine=None):
    """Scores that follow from the pictures but for noise; with `combine` three, two of which know their draw."""
    n, k = statistics.shape

    def noise():
        return rng.standard_normal(n) if freedom == NORMAL else rng.standard_t(freedom, n)

    if combine is None:
        return statistics @ rng.standard_normal(k) + noise() - shift, statistics
    hard, luck = statistics @ rng.standard_normal(k) + noise() - shift, rng.standard_normal((3, n, 1))
    scores = np.stack([*(hard + noise() / 2 + luck[i, :, 0] for i in range(2)), statistics[:, 0] + noise() - shift])
    return scores, np.concatenate([np.broadcast_to(statistics, (3, n, k)), luck], axis=2)


def p_values(scores, statistics, n, combine):
    """Of all images but the first n, which are held out."""
    held, asked = slice(0, n), slice(n, None)
    images = scores[..., asked], statistics[..., asked, :], scores[..., held], statistics[..., held, :]
    return evidence.difficulty_p_values(*images, combine=combine)


def quick_and_close(quick, close, audits):
    """(case, few audits) every time, and (case, so many audits) with `make test-slow`."""
    slow = [pytest.param(*case, audits, marks=pytest.mark.slow) for case in close]
    return [*((*case, 30) for case in quick), *slow]


RATES = [(19, 3, NORMAL), (19, 13, T2), (99, 13, NORMAL), (99, 30, T2)]


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize(("n", "k", "freedom", "audits"), quick_and_close(RATES[1:2], RATES, 1500))
def test_rates_are_exact_on_both_sides(n, k, freedom, audits, combine):
    """Without ties, P(p <= a) is a for multiples a of 1/(n + 1): neither more nor less."""
    m, ranks = 4, np.array([1, 2, 5, n // 2])
    rng = np.random.default_rng([n, k, audits])
    at_most = np.empty((audits, len(ranks)))
    for audit in range(audits):
        images = draw(rng, rng.standard_normal((n + m, k)), freedom, combine=combine)
        found = np.rint(p_values(*images, n, combine) * (n + 1))
        at_most[audit] = np.mean(found[:, None] <= ranks, axis=0)
    errors = at_most.std(axis=0) / np.sqrt(audits)
    print(f"n={n} k={k}: {at_most.mean(axis=0)} for {ranks / (n + 1)}, standard errors {errors}")
    assert np.all(np.abs(at_most.mean(axis=0) - ranks / (n + 1)) <= 3 * errors)


def candidates(rng, n, m, k, setting):
    """Pictures of n held-out images and m candidates, of which the first half are members; and shifts of all scores."""
    statistics, members = rng.standard_normal((n + m, k)), slice(n, n + m // 2)
    if setting == "one style":
        statistics[members] += 1
    if setting == "series":
        series = np.arange(m // 2) // 5  # near copies
        statistics[members] = rng.standard_normal((m, k))[series] + 0.01 * rng.standard_normal((m // 2, k))
    return statistics, members


STRESS = [
    *((99, 20, k, freedom, setting) for k, freedom in ((13, NORMAL), (30, T2)) for setting in ("one style", "series")),
    *((99, 20, k, freedom, "odd candidates") for k, freedom in ((13, T2), (30, NORMAL))),
    *((n, m, 13, NORMAL, "plain") for n, m in ((19, 2), (39, 4), (99, 20))),
]


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize(("n", "m", "k", "freedom", "setting", "audits"), quick_and_close(STRESS[-2:-1], STRESS, 400))
def test_the_false_discovery_rate_holds_beside_members(n, m, k, freedom, setting, audits, combine):
    """Members of one style, in series of near copies, or with odd candidates, beside innocents like the held-out.

    Half of the candidates are innocents, beside odd candidates a quarter.
    """
    level, rng = 0.05, np.random.default_rng([n, k, audits])
    proportions, found = [], []
    for _ in range(audits):
        statistics, members = candidates(rng, n, m, k, setting)
        shift = np.zeros(n + m)
        shift[members] = SHIFTS[freedom]
        scores, statistics = draw(rng, statistics, freedom, shift, combine)
        p = p_values(scores, statistics, n, combine)
        if setting == "odd candidates":  # as pictures and by their scores
            odd = 10 * rng.standard_normal((*scores.shape[:-1], m)), 4 * rng.standard_t(2, (*scores.shape[:-1], m, k))
            own = odd[1] if combine is None else np.concatenate([odd[1], odd[0][..., None]], axis=2)
            held = scores[..., :n], statistics[..., :n, :]
            p = np.concatenate([p, evidence.difficulty_p_values(odd[0], own, *held, combine=combine)])
        named = evidence.candidate_verdicts(p, n, level).rejected
        innocents = named[m // 2 : m]
        proportions.append(innocents.sum() / max(1, named.sum()))
        found.append(named[: m // 2].mean())
    share = (m - m // 2) / len(p)
    error = np.std(proportions) / np.sqrt(audits)
    print(f"{setting} n={n} k={k}: {np.mean(proportions):.4f} ± {error:.4f}, members named {np.mean(found):.2f}")
    assert np.mean(proportions) <= level * share + 3 * error
    assert np.mean(found) > 0
