"""Calls as compiled programs around the network: the same answers as in one piece, with the draws that they name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import GRID, SCHEDULE, SHAPE, floats, function, network, quiet, source

import dime_jax as dj
from dime_jax import attacks, scoring
from dime_jax.attacks.calls import Answer, Call, Query, norm
from dime_jax.core import draws
from dime_jax.core.draws import Draw
from dime_jax.scoring import call_runner, planning

KEY, IDS = jax.random.key(3), draws.id_numbers(["a", "b", "c"])
DRAWS = draws.Draws(KEY, IDS)
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, *SHAPE)), jnp.float32)
EPS = network().eps_fn()
CALLS = {type(reading.call): reading.call for job in GRID for reading in job.recipe.readings}


def asked_directly(call):
    return call.ask(EPS, SCHEDULE, X, DRAWS, given_to(call))


def given_to(call):
    return call.start(X) if call.source is None else asked_directly(call.source).state


def drawn_for(call):
    return {name: draw.take(DRAWS, X) for name, draw in call.draws().items()}


def in_programs(call, drawn):
    inputs = call.arguments, SCHEDULE, X, drawn, given_to(call)
    asked = call_runner.query_program(call.template, None)(*inputs)
    return call_runner.reduce_program(call.template, None)(*inputs, asked, EPS(*asked), None)


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_the_programs_are_the_call(kind):
    call = CALLS[kind]
    got, want = in_programs(call, drawn_for(call)), asked_directly(call)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_what_is_drawn_beforehand_is_used():
    call = CALLS[attacks.dime.Probe]
    assert call.draws() == {"probe": Draw("rademacher", call.index)}
    zeros = in_programs(call, {"probe": jnp.zeros_like(X)})
    np.testing.assert_allclose(zeros.numbers["norm"], norm(EPS(SCHEDULE.scaled(X, call.t), call.t)), rtol=1e-5)


@dataclasses.dataclass(frozen=True, order=True)
class NextProbe(Call):
    """Draws at an index that is none of its numbers."""

    index: int

    def draws(self):
        return {"probe": Draw("rademacher", self.index + 1)}

    def query(self, schedule, x, drawn, given):
        return Query(x + drawn["probe"], 0)

    def reduce(self, schedule, x, drawn, given, asked, eps, mask):
        return Answer(None, {"norm": norm(eps)})


class Silent(NextProbe):
    def query(self, schedule, x, drawn, given):
        return None


def job_of(call, name):
    recipe = attacks.base.one_number(call, name)
    return planning.Job(attacks.Attack("mine", "Mine", "", recipe=lambda setting: recipe), {"t": 0})


@pytest.mark.parametrize("model", [network(), function()])
def test_an_index_may_be_computed(tmp_path, model):
    job, images = job_of(NextProbe(4), "norm"), source(3)
    table = scoring.score(model, images, [job], tmp_path, seed=3, options=quiet())
    x = jnp.asarray(floats(images))
    probe = draws.Draws(KEY, draws.id_numbers(images.ids)).rademacher(5, x)
    np.testing.assert_allclose(table.terms(job)[0], norm(model.eps(x + probe, 0)), rtol=1e-5)


def test_an_attack_that_asks_twice_gets_two_answers(tmp_path):
    def run(eps_fn, schedule, x, draws, setting):
        return norm(eps_fn(x, 10) - eps_fn(x, 900))[None]

    attack = attacks.Attack("two", "Two", "", run=run, queries=lambda setting: 2, traceable=True)
    job = planning.Job(attack, {"t": 0})
    table = scoring.score(network(), source(3), [job], tmp_path, options=quiet())
    x = floats(source(3))
    np.testing.assert_allclose(table.terms(job)[0], norm(EPS(x, 10) - EPS(x, 900)), rtol=1e-5)
    assert table.queries_made == 6


def test_an_attack_that_asks_more_than_it_says_is_refused(tmp_path):
    def twice(eps_fn, schedule, x, draws, setting):
        return norm(eps_fn(eps_fn(x, setting["t"]), setting["t"]))[None]

    attack = attacks.Attack("twice", "Twice", "", run=twice, queries=lambda setting: 1, traceable=True)
    with pytest.raises(ValueError, match="twice must make 1 queries per image, as it declares, got 2"):
        scoring.score(network(), source(3), [planning.Job(attack, {"t": 7})], tmp_path, options=quiet())


def test_so_is_one_that_a_plain_function_is_asked_for(tmp_path):
    asked = []

    def eps(x, t):
        asked.append(len(x))
        return np.asarray(x)

    def twice(eps_fn, schedule, x, draws, setting):
        return norm(eps_fn(eps_fn(x, setting["t"]), setting["t"]))[None]

    job = planning.Job(attacks.Attack("twice", "Twice", "", run=twice, queries=lambda setting: 1), {"t": 7})
    model = dj.Denoiser.from_function(eps, dj.linear_schedule(), X.shape[1:])
    with pytest.raises(ValueError, match="twice must make 1 queries per image, as it declares, got 2"):
        scoring.score(model, source(3), [job], tmp_path, options=quiet())
    assert sum(asked) == 3  # the second query was not made


@pytest.mark.parametrize("traceable", [False, True])
@pytest.mark.parametrize(("shape", "got"), [(lambda v: v, r"\[\d+\]"), (lambda v: jnp.stack([v, v]), r"\[2, \d+\]")])
def test_terms_of_another_shape_are_refused(tmp_path, traceable, shape, got):
    """A score [B] would be read as the terms of B attacks, and its first number given to all images."""

    def run(eps_fn, schedule, x, draws, setting):
        return shape(norm(eps_fn(x, setting["t"])))

    attack = attacks.Attack("flat", "Flat", "", run=run, queries=lambda setting: 1, traceable=traceable)
    with pytest.raises(ValueError, match=rf"terms of attack 'flat' must have shape \[1, \d+\], got {got}") as error:
        scoring.score(network(), source(2), [planning.Job(attack, {"t": 7})], tmp_path, options=quiet())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", [network(), function()])
def test_a_call_that_does_not_ask_is_refused(tmp_path, model):
    with pytest.raises(ValueError, match="Silent must make 1 query per image, as it declares, got none"):
        scoring.score(model, source(3), [job_of(Silent(4), "norm")], tmp_path, options=quiet())
    assert model.queries.count <= 3


def test_a_network_that_answers_in_another_shape_is_refused(tmp_path):
    model = network(apply=lambda params, x, t, label: x[:, :2])
    message = r"eps_fn must return shape \[\d+, 4, 4, 1\], got \[\d+, 2, 4, 1\]"
    with pytest.raises(ValueError, match=message):
        scoring.score(model, source(3), [job_of(NextProbe(4), "norm")], tmp_path, options=quiet())
