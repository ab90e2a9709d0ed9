"""The plan against counts by hand, and its independence of the order of jobs."""

import random

import numpy as np
import pytest
from tiny_model import SCHEDULE

import dime_jax as dj
from dime_jax import attacks
from dime_jax.attacks import registry
from dime_jax.core.denoiser import BESIDE, OWN
from dime_jax.scoring import planning

BASELINES = ["loss", "pia_l2", "pia_l4", "pian", "secmi", "sima_l4", "sima_mc_norms", "sima_mc_vector"]


def plan(*args, **kwargs):
    return planning.make_plan(planning.grid_jobs(*args, **kwargs), SCHEDULE)


@pytest.mark.parametrize(
    ("names", "shared", "naive"),
    [
        # 10 t, 5 gamma, tiers 1 + 10 + 30: one base response per t, one nested set of probes per (t, gamma).
        (["dime"], 10 * (1 + 5 * 30), 50 * (2 + 11 + 31)),
        (["dime", "dime_theory", "crowding_only"], 10 * (1 + 5 * 30), 3 * 50 * (2 + 11 + 31)),
        (["level_only"], 10 * 5 * 30, 50 * (1 + 10 + 30)),
        (["dime_central"], 10 * 5 * 30, 50 * (2 + 10 + 30)),
        (["dime", "dime_central"], 10 * (1 + 5 * 30 + 5 * 15), 50 * (44 + 42)),
        (["loss"], 16, 16),
        (["loss", "sima_mc_norms", "sima_mc_vector"], 16 * 30, 16 + 2 * 16 * 40),
        (["loss", "loss_mc", "sima_mc_norms"], 16 * 30, 16 + 2 * 16 * 40),
        (["pia_l2", "pia_l4"], 1 + 16, 4 * 16),
        (["pia_l2", "pian"], 1 + 32, 4 * 16),
        # t_sec 10, 30, ..., 290, 300: the answers at 0, 10, ..., 300; alone, ceil(t_sec / 10) + 1 each.
        (["secmi"], 31, sum(-(-t // 10) + 1 for t in [*range(10, 300, 20), 300])),
        (["secmi", "pia_l2"], 31 + 16, sum(-(-t // 10) + 1 for t in [*range(10, 300, 20), 300]) + 32),
    ],
)
def test_queries_are_shared(names, shared, naive):
    made = plan(names)
    assert made.queries_per_image == shared
    assert made.naive_queries_per_image == naive


def test_the_response_at_time_zero_is_asked_once():
    jobs = [
        planning.Job(attacks.get_attack(name), setting)
        for name, setting in (("sima_l4", {"t": 0}), ("pia_l2", {"t": 50}), ("secmi", {"t": 20, "k": 10}))
    ]
    made = planning.make_plan(jobs, SCHEDULE)
    assert made.queries_per_image == 1 + 1 + 2
    assert len(made.units) == 1


def test_the_papers_grid_costs_at_most_seven_tenths():
    made = plan([*BASELINES, "dime"])
    assert made.queries_per_image <= 0.70 * made.naive_queries_per_image


def test_the_order_of_jobs_does_not_matter():
    jobs = planning.grid_jobs(profile="quick")
    shuffled = random.Random(0).sample(jobs, len(jobs))
    first, second = (planning.make_plan(order, SCHEDULE) for order in (jobs, shuffled))
    assert first.units == second.units
    assert first.trees == second.trees


def test_every_reading_of_every_job_is_kept_once():
    made = plan(profile="quick")
    kept = [reading for unit in made.units for reading in unit.readings]
    assert len(kept) == len(set(kept))
    assert set(kept) == {reading for job in made.jobs for reading in job.recipe.readings}
    assert len({unit.name for unit in made.units}) == len(made.units)


def test_an_attack_without_recipe_is_a_call_of_its_own(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    mine = attacks.Attack("mine", "Mine", "me", lambda e, s, x, z, c: e(x, 0)[None], lambda c: 7, {"quick": [{"t": 3}]})
    attacks.register_attack(mine)
    made = plan(["mine", "loss"], "quick")
    assert made.queries_per_image == 7 + 3
    assert "mine(t=3)" in [unit.name for unit in made.units]


def test_the_cost_in_one_line():
    assert plan(["dime"], "quick", [2, 11]).describe(200) == (
        "12 attack settings, 63 queries per image x 200 images = 12,600 queries; "
        "one by one they would take 15,600 (0.81x)"
    )


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("loss", {"t": 1000}, "t must be >= 0 and < 1000, got 1000"),
        ("sima_l4", {"t": -1}, "t must be >= 0 and < 1000, got -1"),
        ("dime", {"t": 10, "gamma": 0.0, "q": 1}, "gamma must be finite and > 0, got 0.0"),
        ("dime", {"t": 10, "gamma": 0.1, "q": 0}, "q must be >= 1, got 0"),
        ("secmi", {"t": 995, "k": 10}, "the step after t_sec's last must be >= 0 and < 1000"),
        ("secmi", {"t": 100, "k": 0}, "k must be >= 1, got 0"),
        ("pia_l2", {"t": 1000}, "t must be >= 0 and < 1000, got 1000"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_asked(name, setting, message):
    with pytest.raises(ValueError, match=message) as error:
        planning.make_plan([planning.Job(attacks.get_attack(name), setting)], SCHEDULE)
    assert "\n" not in str(error.value)


def test_no_jobs_are_refused():
    with pytest.raises(ValueError, match="there must be at least one attack setting to run, got none"):
        planning.make_plan([], SCHEDULE)


def costs(*args, **kwargs):
    found = {}
    for job in planning.grid_jobs(*args, **kwargs):
        found.setdefault(job.attack.name, set()).add(job.queries)
    return {name: sorted(queries) for name, queries in found.items()}


@pytest.mark.parametrize(
    ("budgets", "dime", "central", "level", "monte_carlo"),
    [
        (None, [2, 11, 31], [2, 10, 30], [1, 10, 30], [10, 30]),
        ([2], [2], [2], [1], None),
        ([1], None, None, [1], None),
        ([10], [2], [10], [10], [10]),
        ([11], [11], [10], [10], [10]),
        ([1, 10], [2], [10], [1, 10], [10]),
        ([2, 11], [2, 11], [2, 10], [1, 10], [10]),
        ([3, 2, 11, 30], [2, 11], [2, 10, 30], [1, 10, 30], [10, 30]),
        ([1000], [31], [30], [30], [30]),
    ],
)
def test_a_budget_takes_the_largest_tier_that_costs_no_more(budgets, dime, central, level, monte_carlo):
    expected = {"dime": dime, "dime_central": central, "level_only": level, "sima_mc_norms": monte_carlo}
    assert costs(list(expected), "quick", budgets) == {name: found for name, found in expected.items() if found}


def test_attacks_of_fixed_cost_are_bounded_only_where_asked_for():
    assert costs(["secmi", "loss", "dime"], "quick", [5]) == {"secmi": [4, 8, 13], "loss": [1], "dime": [2]}
    assert costs(["secmi", "loss", "dime"], "quick", [5], most=5) == {"secmi": [4], "loss": [1], "dime": [2]}
    assert costs(["secmi", "loss", "dime"], "quick", [1], most=1) == {"loss": [1]}


def test_what_is_left_out_is_said():
    assert planning.left_out(["loss", "secmi", "dime"], "quick", [13], most=13) == []
    assert planning.left_out(["loss", "secmi", "dime", "pia_l2"], "quick", [5], most=5) == [
        "secmi is asked at 1 of its 3 settings: the others cost more queries"
    ]
    assert planning.left_out(["loss", "secmi", "dime", "pia_l2"], "quick", [1], most=1) == [
        "secmi is left out: it costs at least 4 queries per image",
        "dime is left out: it costs at least 2 queries per image",
        "pia_l2 is left out: it costs at least 2 queries per image",
    ]
    assert planning.left_out(None, "quick", [2, 11]) == []  # the default audit


def test_a_budget_that_leaves_nothing_is_refused():
    message = r"queries per image must be >= 2, the cost of dime, got 1"
    with pytest.raises(ValueError, match=message):
        planning.grid_jobs(["dime", "secmi"], "quick", [1], most=1)
    with pytest.raises(ValueError, match=message):
        planning.grid_jobs(["dime"], "quick", [1])


@pytest.mark.parametrize(
    ("attacks", "times", "gamma", "extra"),
    [
        (None, [30, 70, 120], 0.1, 0),
        (["dime"], [30, 70, 120], 0.1, 0),
        (["pia_l2"], [30, 70, 120], 0.1, 3),
        (["dime_central", "loss"], [30, 70, 120], 0.1, 0),
    ],
)
def test_the_witness_is_free_beside_dime(attacks, times, gamma, extra):
    jobs = planning.grid_jobs(attacks, "quick", (2, 11))
    witness = planning.witness_jobs(jobs)
    assert [job.setting for job in witness] == [{"t": t, "gamma": gamma, "q": 1} for t in times]
    plans = [planning.make_plan(each, SCHEDULE).queries_per_image for each in (jobs, jobs + witness)]
    assert plans[1] - plans[0] == extra


@pytest.mark.parametrize("other", [dj.cosine_schedule(), dj.linear_schedule(500, 2e-4, 0.04), dj.linear_schedule(10)])
def test_a_job_for_another_schedule_is_at_the_nearest_noise_levels(other):
    levels, theirs = (np.asarray(one.sigma_table, np.float64) for one in (SCHEDULE, other))
    for job in planning.grid_jobs(None, "quick", conditions=(OWN, BESIDE)):
        there = planning.at_same_noise(job, SCHEDULE, other)
        assert there.attack is job.attack
        far = []
        for name, value in job.setting.items():
            if name.startswith("t"):
                at = int(np.argmin(np.abs(theirs - levels[value])))
                assert there.setting[name] == at
                ratio = theirs[at] / levels[value]
                far += [(levels[value], theirs[at])] if ratio > 1.25 or ratio < 0.8 else []
            else:
                assert there.setting[name] == value
        assert planning.far_apart(job, SCHEDULE, other) == [pytest.approx(pair) for pair in far]
        same = dj.linear_schedule()
        assert planning.at_same_noise(job, SCHEDULE, same) is job
        assert planning.far_apart(job, SCHEDULE, same) == []


def test_what_asks_a_second_model_is_offered_beside_one_only():
    assert "loss_level_beside" not in {job.attack.name for job in planning.grid_jobs()}
    assert "loss_level_beside" in {job.attack.name for job in planning.grid_jobs(conditions=(OWN, BESIDE))}
    with pytest.raises(ValueError, match="attack loss_level_beside asks a second model besides: name one with --refer"):
        planning.grid_jobs(["loss_level_beside"])
    with pytest.raises(ValueError, match="attack clid is for text-conditioned models"):
        planning.grid_jobs(["clid"], conditions=(OWN, BESIDE))
