"""Simulated audits beside references of every kind: how many innocents are accused, and what it takes to break that."""

import jax
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import attacks, evidence
from dime_jax.attacks.loss_level import BESIDE_NAME, setting_for
from dime_jax.core.draws import Draws, id_numbers
from dime_jax.evidence import Way
from dime_jax.protocol import calibration, stages

SHAPE, LEVEL, COUNT = (6, 6, 1), 0.1, 20  # candidates, of which half are members
SCHEDULE = dj.linear_schedule()
RULE = attacks.get_attack(BESIDE_NAME)


def pictures(rng, count):
    """Noise of more or less contrast and smoothness, which makes some pictures hard."""
    noise = rng.normal(size=(count, 8, 8))
    smooth = sum(np.roll(noise, shift, axis) for shift in (0, 1) for axis in (1, 2)) / 2
    share, contrast = rng.random((count, 1, 1)), rng.uniform(0.1, 0.5, (count, 1, 1))
    return (contrast * (share * noise + (1 - share) * smooth))[:, :6, :6, None].astype(np.float32)


def linear(train):
    """The best linear guess of the noise from pictures of the spread of these."""
    spread = float(np.var(train))

    def eps(flat, scale, sigma):
        return sigma * flat / (scale**2 * spread + sigma**2)

    return eps


def ideal(train):
    """The optimal denoiser of a few pictures: it remembers nothing but these."""
    train = train.reshape(len(train), -1)

    def eps(flat, scale, sigma):
        logits = -np.sum((flat[:, None] - scale * train[None]) ** 2, axis=-1) / (2 * sigma**2)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return (flat - scale * (weights / weights.sum(axis=1, keepdims=True)) @ train) / sigma

    return eps


def remembers(train, strength):
    """As far as `strength` goes, and else a linear guess."""
    guess, memory = linear(train), ideal(train)
    return lambda *asked: (1 - strength) * guess(*asked) + strength * memory(*asked)


def untrained(rng):
    inner, outer = rng.normal(size=(2, 36, 36)) / 6
    return lambda flat, scale, sigma: np.tanh(flat @ inner) @ outer


def terms(eps, x, ids, seed):
    """What the rule beside a reference reads of a model."""

    def of_images(x, t):
        scale, sigma = float(SCHEDULE.sqrt_abar(int(t))), float(SCHEDULE.sigma(int(t)))
        return eps(np.asarray(x, np.float64).reshape(len(x), -1), scale, sigma).reshape(x.shape).astype(np.float32)

    model = dj.Denoiser.from_function(of_images, SCHEDULE, SHAPE)
    draws = Draws(jax.random.key(seed), id_numbers(ids))
    return np.asarray(RULE.run(model.eps_fn(), SCHEDULE, x, draws, setting_for(SCHEDULE)), np.float64)


# Given what the model saw, other pictures, the held-out images and the candidates.
REFERENCES = {
    "base": lambda rng, saw, others, held, asked: remembers(saw[: len(saw) // 2], 0.3),
    "other model": lambda rng, saw, others, held, asked: remembers(others, 0.3),
    "memoriser of other images": lambda rng, saw, others, held, asked: ideal(others),
    "untrained": lambda rng, saw, others, held, asked: untrained(rng),
    "nothing": lambda rng, saw, others, held, asked: lambda flat, scale, sigma: 0 * flat,
    "linear": lambda rng, saw, others, held, asked: linear(others),
    "saw all alike": lambda rng, saw, others, held, asked: remembers(np.concatenate([held, asked]), 0.3),
    "saw members": lambda rng, saw, others, held, asked: remembers(saw, 0.02),
    "saw held-out images": lambda rng, saw, others, held, asked: remembers(np.concatenate([others, held]), 0.3),
}
FAIR = list(REFERENCES)[:-1]


def audit(kind, seed, way=None):
    """The share of the accused that is innocent, and the shares of innocents and of members with p <= 5 %."""
    rng = np.random.default_rng([seed, list(REFERENCES).index(kind)])
    n, strength = int(rng.choice([39, 60, 99])), rng.choice([0, 0.01, 0.05, 0.3])
    base, others, held, asked = (pictures(rng, count) for count in (30, 60, n, COUNT))
    saw = np.concatenate([base, asked[: COUNT // 2]])
    model, reference = remembers(saw, strength), REFERENCES[kind](rng, saw, others, held, asked)
    x, ids = np.concatenate([held, asked]), rng.permutation(n + COUNT).tolist()
    both = np.concatenate([terms(eps, x, ids, seed) for eps in (model, reference)])
    way = way or (Way.BESIDE, Way.BESIDE_ADJUSTED)[seed % 2]
    frozen = calibration.to_adjust(stages.fixed_rule(SCHEDULE, reference=True), way)
    pile = frozen.pile(both, evidence.difficulty_statistics(x))
    of_held, of_asked = pile.take(slice(n)), pile.take(slice(n, None))
    p = evidence.difficulty_p_values(*of_asked[:2], *of_held[:2], None, frozen.combine, seed, pile.unpenalised)
    named = evidence.candidate_verdicts(p, n, LEVEL).rejected
    innocent = np.arange(COUNT) >= COUNT // 2
    return np.sum(named & innocent) / max(1, named.sum()), np.mean(p[innocent] <= 0.05), np.mean(p[~innocent] <= 0.05)


@pytest.mark.parametrize("audits", [24, pytest.param(304, marks=pytest.mark.slow)])
def test_innocents_are_accused_within_the_level_whatever_the_reference_is(audits):
    found = {kind: np.array([audit(kind, seed) for seed in range(audits // len(FAIR))]) for kind in FAIR}
    every = np.concatenate(list(found.values()))
    false, innocents, members = every.T
    error = false.std() / np.sqrt(len(every))
    print(f"{len(every)} audits: false discoveries {false.mean():.4f} ± {error:.4f} at level {LEVEL}, half innocent")
    off = innocents.std() / np.sqrt(len(every))
    print(f"p <= 5 %: innocents {innocents.mean():.4f} ± {off:.4f}, members {members.mean():.3f}")
    for kind, of in found.items():
        print(
            f"{kind}: {of[:, 0].mean():.3f}; p <= 5 %: innocents {of[:, 1].mean():.3f}, members {of[:, 2].mean():.3f}"
        )
    assert len(every) == audits
    assert false.mean() <= LEVEL / 2 + 3 * error
    assert innocents.mean() <= 0.05 + 3 * off
    assert members.mean() > 0.2


def test_a_reference_that_saw_the_held_out_images_breaks_it():
    """The theorem's condition is not idle: beside such a reference most of the accused are innocent."""
    found = np.array([audit("saw held-out images", seed) for seed in range(8)])
    assert found[:, 0].mean() > 3 * LEVEL
