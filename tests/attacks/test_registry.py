"""Every registered attack over a plain NumPy model: its cost, its terms, and no recompilation over a grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import attacks
from dime_jax.attacks import dime, registry
from dime_jax.core.draws import Draws

X = np.random.default_rng(0).normal(size=(5, 4, 4, 1)).astype(np.float32)
DRAWS = Draws(jax.random.key(0), jnp.arange(5, dtype=jnp.uint32))
SETTING = {"t": 100, "gamma": 0.2, "k": 10, "q": 3, "t_loss": 150, "t_level": 50, "gamma_level": 0.1}
# Every attack by family, and its queries per image at this setting. CLiD asks a model with captions (test_clid.py).
FAMILIES = {
    "Loss": {"loss": 1, "loss_mc": 3},
    "PIA": {"pia_l2": 2, "pia_l4": 2, "pian": 2},
    "SecMI": {"secmi": 11},
    "SimA": {"sima_l4": 1, "sima_mc_norms": 3, "sima_mc_vector": 3},
    "DIME": {
        **{"dime": 4, "dime_central": 6, "dime_theory": 4, "level_only": 3, "crowding_only": 4},
        **{"level_l4": 1, "level_low": 1, "loss_level": 3, "loss_level_beside": 2},
    },
}
COST = {name: cost for attacks_of in FAMILIES.values() for name, cost in attacks_of.items()}
NAMES = list(COST)


def test_every_attack_is_tested_here():
    assert {*NAMES, "clid"} == set(attacks.BUILT_IN)


@pytest.mark.parametrize("name", NAMES)
def test_runs_over_a_numpy_function_and_costs_what_it_says(schedule, name):
    model = dj.Denoiser.from_function(lambda x, t: np.tanh(np.asarray(x)), schedule, (4, 4, 1))
    attack = attacks.get_attack(name)
    terms = attack.run(model.eps_fn(), schedule, X, DRAWS, SETTING)
    assert terms.shape == (len(attack.signs), 5)
    assert model.queries.count == 5 * COST[name]
    assert attack.queries(SETTING) == COST[name]
    assert attack.citation
    assert attack.title


def test_secmi_cost_follows_its_trajectory(schedule):
    for t_sec, k in ((100, 10), (95, 10), (10, 10), (20, 15)):
        model = dj.Denoiser.from_function(lambda x, t: np.asarray(x), schedule, (4, 4, 1))
        dj.secmi(model.eps_fn(), schedule, X, t_sec, k)
        assert model.queries.count == 5 * attacks.get_attack("secmi").queries({"t": t_sec, "k": k})


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_grid_compiles_the_model_once(schedule, name):
    traces = []

    def apply(params, x, t, label):
        traces.append(x.shape)
        return params * x * schedule.sigma(t)

    model = dj.Denoiser(apply, jnp.float32(0.5), schedule, (4, 4, 1))
    for t in (40, 100):
        for gamma in (0.1, 0.3):
            attacks.get_attack(name).run(model.eps_fn(), schedule, X, DRAWS, {**SETTING, "t": t, "gamma": gamma})
    assert len(traces) == 1


def test_grids_are_the_papers(schedule):
    settings = attacks.get_attack("dime").settings("paper", tier=10)
    assert sorted({s["t"] for s in settings}) == [50, 70, 90, 110, 130, 150, 170, 190, 210, 230]
    assert sorted({s["gamma"] for s in settings}) == [0.05, 0.1, 0.2, 0.4, 0.6]
    assert {s["q"] for s in settings} == {10}
    assert len(settings) == 50
    loss = attacks.get_attack("loss").settings("paper")
    assert [s["t"] for s in loss] == [*range(10, 300, 20), 300]
    assert len(attacks.get_attack("dime").settings("quick", tier=1)) == 6
    assert len(dime.search_angles(schedule, {})) == 16
    assert attacks.get_attack("dime_theory").rule.angles(schedule, {"t": 100}) == [
        pytest.approx(-np.arctan(0.323818), rel=1e-5)
    ]


def test_crowding_only_scores_members_lower():
    """V-hat falls as crowding rises, so its weight must be -1."""
    (weights,) = attacks.get_attack("crowding_only").rule.weights(None, {}, None)
    assert weights.values == pytest.approx((0, -1))
    assert weights.parameters == {"phi": -np.pi / 2}


def test_families():
    for family, attacks_of in FAMILIES.items():
        assert {attacks.get_attack(name).family for name in attacks_of} == {family}


def test_a_users_attack_joins_the_registry(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    mine = attacks.Attack("mine", "Mine", "me", lambda e, s, x, z, c: e(x, 0)[None], lambda c: 1, {"quick": [{}]})
    assert dj.register_attack(mine) is attacks.get_attack("mine")
    assert mine.family == "mine"
    with pytest.raises(ValueError, match="an attack named 'mine' is registered already"):
        dj.register_attack(mine)


@pytest.mark.parametrize("given", [{}, {"run": lambda *all: None}, {"queries": lambda setting: 1}])
def test_an_attack_needs_a_recipe_or_run_and_queries(given):
    with pytest.raises(ValueError, match="attack 'mine' must have a recipe, or run and queries"):
        attacks.Attack("mine", "Mine", "me", grids={"quick": [{}]}, **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attacks.get_attack("dimes"), "unknown attack 'dimes'; expected one of loss, loss_mc, pia_l2"),
        (
            lambda: attacks.get_attack("dime").settings("huge", 1),
            "unknown profile 'huge'; expected one of paper, quick",
        ),
        (lambda: attacks.get_attack("dime").settings("quick"), "the query tier of dime must be >= 1, got None"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
