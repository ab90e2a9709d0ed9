"""Calls cut in two around the network: the same answers as in one piece, and draws as they are drawn inside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import GRID, SCHEDULE, SHAPE, floats, network, quiet, source

import dime_jax as dj
from dime_jax import attacks, scoring
from dime_jax.attacks.base import Answer, Call, norm, query, start_from
from dime_jax.core import draws
from dime_jax.scoring import planning, programs

KEY, IDS = jax.random.key(3), draws.id_numbers(["a", "b", "c"])
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, *SHAPE)), jnp.float32)
EPS = network().eps_fn()
CALLS = {type(reading.call): reading.call for job in GRID for reading in job.recipe.readings}


def asked_directly(call):
    return call.ask(EPS, SCHEDULE, X, draws.Draws(KEY, IDS), given_to(call))


def given_to(call):
    return start_from(call, None if call.source is None else asked_directly(call.source).state, X)


def about(call, drawn):
    return programs.About(SCHEDULE, KEY, X, IDS, call.arguments, given_to(call), drawn, None)


def drawn_beforehand(call):
    batch = draws.Draws(KEY, IDS)
    return {
        drawn: getattr(batch, drawn.kind)(call.arguments[drawn.position], X)
        for drawn in programs.drawn_by(call.template)(about(call, {}))
    }


def in_halves(call, drawn):
    x, t = programs.query(call.template, None)(about(call, drawn))
    return programs.answer(call.template, None)(about(call, drawn), EPS(x, t))


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_two_halves_are_the_call(kind):
    call = CALLS[kind]
    whole = asked_directly(call)
    for drawn in ({}, drawn_beforehand(call)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), in_halves(call, drawn), whole)


def test_what_is_drawn_beforehand_is_used():
    call = CALLS[attacks.dime.Probe]
    (drawn,) = drawn_beforehand(call)
    assert (drawn.kind, call.arguments[drawn.position]) == ("rademacher", call.index)
    zeros = in_halves(call, {drawn: jnp.zeros_like(X)})
    np.testing.assert_allclose(zeros.numbers["norm"], norm(EPS(SCHEDULE.scaled(X, call.t), call.t)), rtol=1e-5)


@dataclasses.dataclass(frozen=True, order=True)
class NextProbe(Call):
    """Draws at an index that is none of its numbers."""

    index: int

    def ask(self, eps_fn, schedule, x, draws, given):
        del schedule, given
        return Answer(None, {"norm": norm(query(eps_fn, x + draws.rademacher(self.index + 1, x), 0))})


class AsksTwice(NextProbe):
    def ask(self, *arguments):
        super().ask(*arguments)
        return super().ask(*arguments)


class Silent(NextProbe):
    def ask(self, *arguments):
        return Answer(None, {})


class TwoTimes(NextProbe):
    """Asks at t = 10 and at t = 900."""

    queries = 2

    def check(self, schedule):
        pass

    def ask(self, eps_fn, schedule, x, draws, given):
        return Answer(None, {"difference": norm(query(eps_fn, x, 10) - query(eps_fn, x, 900))})


def test_a_call_that_asks_twice_gets_two_answers(tmp_path):
    recipe = attacks.base.one_number(TwoTimes(0), "difference")
    job = planning.Job(attacks.Attack("two_times", "Two times", "", recipe=lambda setting: recipe), {"t": 0})
    table = scoring.score(network(), source(3), [job], tmp_path, options=quiet())
    x = floats(source(3))
    np.testing.assert_allclose(table.terms(job)[0], norm(EPS(x, 10) - EPS(x, 900)), rtol=1e-5)
    assert table.queries_made == 6


def test_an_index_that_is_computed_is_drawn_inside():
    call = NextProbe(4)
    assert programs.drawn_by(NextProbe)(about(call, {})) == frozenset()
    x, _ = programs.query(NextProbe, None)(about(call, {}))
    np.testing.assert_array_equal(x, X + draws.Draws(KEY, IDS).rademacher(5, X))


def test_a_call_that_asks_more_than_it_says_is_refused():
    with pytest.raises(ValueError, match="expected AsksTwice to ask 1 times per image, as it says it does, got 2"):
        programs.answer(AsksTwice, None)(about(AsksTwice(4), {}), X)


def test_so_is_one_that_a_plain_function_is_asked_for(tmp_path):
    asked = []

    def eps(x, t):
        asked.append(len(x))
        return np.asarray(x)

    def twice(eps_fn, schedule, x, draws, setting):
        return norm(eps_fn(eps_fn(x, setting["t"]), setting["t"]))[None]

    job = planning.Job(attacks.Attack("twice", "Twice", "", run=twice, queries=lambda setting: 1), {"t": 7})
    model = dj.Denoiser.from_function(eps, dj.linear_schedule(), X.shape[1:])
    with pytest.raises(ValueError, match="expected twice to ask 1 times per image, as it says it does, got 2"):
        scoring.score(model, source(3), [job], tmp_path, options=quiet())
    assert sum(asked) == 3  # the second query was not made


@pytest.mark.parametrize("traceable", [False, True])
@pytest.mark.parametrize(("shape", "got"), [(lambda v: v, r"\[\d+\]"), (lambda v: jnp.stack([v, v]), r"\[2, \d+\]")])
def test_terms_of_another_shape_are_refused(tmp_path, traceable, shape, got):
    """A score [B] would be read as the terms of B attacks, and its first number given to all images."""

    def run(eps_fn, schedule, x, draws, setting):
        return shape(norm(eps_fn(x, setting["t"])))

    attack = attacks.Attack("flat", "Flat", "", run=run, queries=lambda setting: 1, traceable=traceable)
    with pytest.raises(ValueError, match=rf"expected terms of attack 'flat' of shape \[1, \d+\], got {got}") as error:
        scoring.score(network(), source(2), [planning.Job(attack, {"t": 7})], tmp_path, options=quiet())
    assert "\n" not in str(error.value)


def test_a_call_that_does_not_ask_is_refused():
    with pytest.raises(ValueError, match="expected Silent to ask the model, got an answer without"):
        programs.query(Silent, None)(about(Silent(4), {}))
