"""The level in other norms against plain loops, and what reading it costs."""

import jax
import numpy as np

from dime_jax.attacks import BUILT_IN, level
from dime_jax.attacks.base import count_queries
from dime_jax.core import draws
from dime_jax.scoring.planning import Job, make_plan

T = 100
NAMES = ("level_l4", "level_low")


def images(n=5, shape=(8, 8, 2), seed=0):
    return np.random.default_rng(seed).normal(size=(n, *shape)).astype(np.float32)


def test_low_pass_norm_against_a_loop():
    v = images(3, (16, 14, 2))
    spectrum = np.fft.fftshift(np.fft.fft2(v, axes=(1, 2), norm="ortho"), axes=(1, 2))
    total = np.zeros(3)
    for i in range(16):
        for j in range(14):
            weight = 1 if abs(i - 8) <= 5 and abs(j - 7) <= 5 else 0.2
            total += weight**2 * (np.abs(spectrum[:, i, j]) ** 2).sum(axis=-1)
    np.testing.assert_allclose(level.low_pass_norm(v), np.sqrt(total), rtol=1e-5)
    small = images(3, (8, 8, 1))  # has no high frequencies
    np.testing.assert_allclose(level.low_pass_norm(small), np.linalg.norm(small.reshape(3, -1), axis=1), rtol=1e-5)


def test_one_answer_against_plain_arithmetic(schedule):
    x, key, ids = images(), jax.random.key(0), np.arange(5, dtype=np.uint32)
    probe = np.asarray(draws.rademacher(key, ids, 0, x.shape[1:]))
    answer = (0.3 * (schedule.sqrt_abar(T).item() * x + 0.4 * schedule.sigma(T).item() * probe)).reshape(5, -1)
    terms = {
        name: BUILT_IN[name].run(lambda g, t: 0.3 * g, schedule, x, draws.Draws(key, ids), {"t": T, "gamma": 0.4})
        for name in NAMES
    }
    np.testing.assert_allclose(terms["level_l4"], [np.sum(answer**4, axis=1) ** 0.25], rtol=1e-5)
    # images of 8 x 8 have no high frequencies
    np.testing.assert_allclose(terms["level_low"], [np.linalg.norm(answer, axis=1)], rtol=1e-5)


def test_they_cost_nothing_beside_dime(schedule):
    dime = [Job(BUILT_IN["dime"], setting) for tier in (1, 10) for setting in BUILT_IN["dime"].settings("paper", tier)]
    more = [Job(BUILT_IN[name], setting) for name in NAMES for setting in BUILT_IN[name].settings("paper", None)]
    assert [count_queries(BUILT_IN[name].recipe({"t": T, "gamma": 0.4})) for name in NAMES] == [1, 1]
    assert make_plan([*dime, *more], schedule).queries_per_image == make_plan(dime, schedule).queries_per_image
