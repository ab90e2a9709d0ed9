"""The paper's questions over the models of a study: against placements counted one by one, and Student's t."""

import numpy as np
import pytest
from scipy import stats
from small_runs import make_run, pretend

from dime_jax.evidence import metrics
from dime_jax.scoring import planning, score_table
from experiments import cross_fit, questions, runs
from experiments.questions import Difference
from experiments.rendering import difference_cells, render

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Three models of one study, at two timesteps and two step sizes."""
    folder = tmp_path_factory.mktemp("study")
    settings = [{"t": t, "gamma": gamma} for t in (90, 120) for gamma in (0.1, 0.4)]
    names = ["loss", "sima_l4", "pia_l2", "secmi", "dime", "level_only", "level_low"]
    jobs = planning.grid_jobs(names, "quick", [2, 11], settings)
    for seed in SEEDS:
        directory = folder / f"seed_{seed}"
        make_run(directory, jobs, size=60, member_scale=0.4, heldout_scale=0.65 + 0.02 * seed, seed=seed)
        pretend(directory, "digits", "laptop", seed=seed, data__split_seed=seed, train__recipe__seed=seed)
    return [folder / f"seed_{seed}" for seed in SEEDS]


@pytest.fixture(scope="module")
def study(directories):
    (study,) = runs.group_runs([runs.read_run(directory) for directory in directories])
    return study


def placements(member, heldout):
    """How each image is placed: the share of the other side that it is right about."""
    wins = (member[:, None] < heldout[None]) + 0.5 * (member[:, None] == heldout[None])
    return wins.mean(axis=1), wins.mean(axis=0)


def naive(first, second):
    """The difference of two AUCs and its 95 % margin, from placements."""
    differences = [one - two for one, two in zip(placements(*first), placements(*second))]
    margin = 1.959964 * np.sqrt(sum(np.var(side, ddof=1) / len(side) for side in differences))
    return np.mean(differences[0]), margin


def to_markdown(study):
    return render("questions.md", study=study, answers=questions.answers(study))


def sides(run, scores):
    return scores[run.member], scores[~run.member]


class TestStudy:
    def test_runs_that_differ_in_their_seeds_are_one(self, study):
        assert study.labels == ["seed 0", "seed 1", "seed 2"]
        train, attack = study.commands()
        assert train == (
            "python -m experiments.train --config=experiments/configs/digits.py:laptop --workdir=W --seeds=0,1,2"
        )
        assert attack == train.replace("train", "attack")

    def test_those_that_differ_in_more_are_not(self, study, directories):
        pretend(directories[1], "digits", "laptop", seed=1, data__split_seed=1, attack__calibration_size=9)
        other = runs.read_run(directories[1])
        assert [len(one.runs) for one in runs.group_runs([study.runs[0], other, study.runs[2]])] == [2, 1]

    def test_models_that_other_flags_made_are_named_one_by_one(self, study, directories):
        pretend(directories[2], "digits", "laptop", train__recipe__seed=2)
        (mixed,) = runs.group_runs([study.runs[0], runs.read_run(directories[2])])
        assert [command.split("--workdir=W")[1] for command in mixed.commands()] == [
            "",
            "",
            " --config.train.recipe.seed=2",
            " --config.train.recipe.seed=2",
        ]


def test_rows_at_an_end_of_their_grid_are_named(study):
    run = study.first
    chosen = {row.title: row.calibration.setting["t"] for row in run.rows}
    assert set(run.at_edge()) == {title for title, t in chosen.items() if t in (90, 120)}
    alone = run._replace(rows=tuple(row for row in run.rows if row.attack == "loss"))
    moved = alone.rows[0]._replace(calibration=alone.rows[0].calibration._replace(setting={"t": 100}))
    assert alone._replace(rows=(moved,)).at_edge() == []


class TestCrowding:
    def test_the_same_setting_is_dimes_own_level(self, study):
        found = {one.same.first: one for one in questions.crowding(study)}
        assert set(found) == {"DIME 1+1", "DIME 10+1"}
        for number, run in enumerate(study.runs):
            row, table = run.row("dime", 10), score_table.read_table(run.directory / "test")
            terms = table.terms(planning.Job(planning.get_attack("dime"), row.calibration.setting))
            np.testing.assert_allclose(row.level, terms[0, np.argsort(table.index)])  # B̂², the first of DIME's terms
            value, margin = naive(sides(run, row.scores), sides(run, row.level))
            same = found["DIME 10+1"].same.models[number]
            assert same.value == pytest.approx(value, abs=1e-12)
            if margin > 0:
                assert same.high - same.value == pytest.approx(margin, rel=1e-5)
            assert found["DIME 10+1"].weights[number] == row.calibration.weights[1]

    def test_each_at_its_own_is_the_row_of_level_only(self, study):
        (one,) = [one for one in questions.crowding(study) if one.same.first == "DIME 1+1"]
        assert one.own.second == "Level only (B²) 1"
        for estimate, run in zip(one.own.models, study.runs):
            value, _ = naive(sides(run, run.row("dime", 1).scores), sides(run, run.row("level_only", 1).scores))
            assert estimate.value == pytest.approx(value, abs=1e-12)


def test_dime_meets_every_baseline_at_no_more_queries(study):
    found = {(one.first, one.second): one for one in questions.against_baselines(study)}
    baselines = [row.attack for row in study.first.rows if row.is_baseline]
    costs = {run.row(one, None).title: 0 for one in baselines for run in study.runs}
    for run in study.runs:  # SecMI's cost depends on the timestep that was chosen for the model
        for one in baselines:
            row = run.row(one, None)
            costs[row.title] = max(costs[row.title], row.queries)
    expected = {("DIME 1+1", name) for name, queries in costs.items() if queries <= 2}
    assert set(found) == expected | {("DIME 10+1", name) for name, queries in costs.items() if queries <= 11}
    assert ("DIME 1+1", "SecMI_stat") not in found
    run = study.runs[1]
    value, margin = naive(sides(run, run.row("dime", 10).scores), sides(run, run.row("loss", None).scores))
    assert found["DIME 10+1", "Loss"].models[1] == pytest.approx((value, value - margin, value + margin), rel=1e-5)


class TestSettings:
    def test_every_timestep_and_step_size_has_its_line(self, study):
        times, steps = questions.at_settings(study, "t"), questions.at_settings(study, "gamma")
        assert [one.setting for one in times + steps] == ["t = 90", "t = 120", "γ = 0.1", "γ = 0.4"]
        assert all(one.rival is not None for one in times)
        assert all(one.rival is None for one in steps)
        assert times[1].auc[0] > times[0].auc[0] + 0.1  # before t = 100 the model knows nothing

    def test_differences_are_those_of_the_parts(self, study):
        parts = cross_fit.cut(study.runs[0])
        jobs = {
            name: [job for job in parts.jobs if job.attack.name == name and job.setting["t"] == 120]
            for name in ("pia_l2", "sima_l4")
        }
        first, second = (cross_fit.scores(parts, jobs[name]) for name in jobs)
        expected = []
        for part in (parts.first, ~parts.first):
            cut = [(s[part & parts.member], s[part & ~parts.member]) for s in (first, second)]
            expected.append(naive(*cut))
        found = cross_fit.difference(parts, first, second)
        assert found.value == pytest.approx(np.mean([value for value, _ in expected]))
        margin = np.sqrt(sum(margin**2 for _, margin in expected)) / 2
        assert found.high - found.value == pytest.approx(margin, rel=1e-5)

    def test_tiers_are_compared_in_turn(self, study):
        (one,) = questions.between_tiers(study)
        assert (one.first, one.second) == ("DIME 10+1", "DIME 1+1")


class TestOverModels:
    def test_the_interval_is_students(self):
        values = [0.01, 0.03, -0.02, 0.04]
        found = questions.over_models(values)
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert found == pytest.approx((np.mean(values), expected.low, expected.high))

    def test_no_interval_leaves_the_range_of_its_rates(self):
        assert questions.over_models([0.1, 0.9], least=0.0)[1:] == (0.0, 1.0)
        assert questions.over_models([0.1, 0.9])[1:] == (-1.0, 1.0)

    def test_one_model_says_nothing_about_others(self):
        assert questions.over_models([0.3]) is None

    @pytest.mark.parametrize(("models", "marked"), [(4, False), (5, True)])
    def test_nothing_is_claimed_below_five_models(self, models, marked):
        estimates = tuple(metrics.Estimate(0.1 + 0.001 * i, 0.0, 0.2) for i in range(models))
        *_, cell = difference_cells(Difference("a", "b", estimates))
        assert cell.endswith("*") == marked
        assert ("no significance is claimed" in render("claim.md", models=models)) != marked
        *_, unsure = difference_cells(Difference("a", "b", tuple(metrics.Estimate(x / 9, x, x) for x in range(-3, 4))))
        assert not unsure.endswith("*")

    def test_it_covers_the_mean_of_the_models(self):
        rng = np.random.default_rng(0)
        covered = []
        for _ in range(2000):
            found = questions.over_models(rng.normal(0.02, 0.05, 3))
            covered.append(found.low <= 0.02 <= found.high)
        assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_the_tables_hold_every_models_difference_and_their_mean(study):
    text = to_markdown(study)
    (line,) = [line for line in text.splitlines() if line.startswith("| DIME 10+1 | Loss |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == 2 + len(SEEDS) + 1
    (difference,) = [o for o in questions.against_baselines(study) if (o.first, o.second) == ("DIME 10+1", "Loss")]
    values = [one.value for one in difference.models]
    assert [float(cell.split()[0]) for cell in cells[2:]] == [
        round(100 * value, 1) for value in [*values, np.mean(values)]
    ]
    assert "3 models: no significance is claimed below 5" in text
    (line,) = [line for line in text.split("Differences")[0].splitlines() if line.startswith("| DIME 10+1 | 11 |")]
    aucs = [metrics.auc(*sides(run, run.row("dime", 10).scores)) for run in study.runs]
    assert [float(cell.split()[0]) for cell in line.split("|")[3:-1]] == [
        round(100 * value, 1) for value in [*aucs, np.mean(aucs)]
    ]
