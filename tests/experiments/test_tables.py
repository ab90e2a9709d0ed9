"""Tables from score tables: against the metrics of plain arrays, and what may stand beside the paper's values."""

import csv
import json
import pathlib
import re

import numpy as np
import pytest
from scipy import stats
from small_runs import make_run, pretend

import dime_jax as dj
from dime_jax._util.csv import write_csv
from dime_jax.attacks import registry
from dime_jax.protocol import stages
from dime_jax.scoring import planning
from experiments import paper_values, questions, results_page, run_table, runs, tables
from experiments.rendering import render

BASELINES = ("loss", "loss_mc", "pia_l2", "pia_l4", "pian", "secmi", "sima_l4", "sima_mc_norms", "sima_mc_vector")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run of every attack at one timestep."""
    directory = tmp_path_factory.mktemp("run") / "attack"
    jobs = planning.grid_jobs(None, "quick", settings=[{"t": 120, "gamma": 0.4}])
    make_run(directory, jobs, size=120, member_scale=0.5, heldout_scale=0.6, seed=3)
    return directory


@pytest.fixture
def run(directory):
    pretend(directory, "cifar10", "paper")
    return runs.read_run(directory)


def row_of(run, attack, q=None):
    (row,) = [row for row in run.rows if (row.attack, row.q) == (attack, q)]
    return row


def naive_delong(run, first, second):
    """The p-value for equal AUC: placements of every image by both attacks, and the spread of their differences."""

    def placements(row):
        wins = np.sign(row.scores[~run.member][None] - row.scores[run.member][:, None]) / 2 + 0.5
        return wins.mean(axis=1), wins.mean(axis=0)

    (first_member, first_heldout), (second_member, second_heldout) = placements(first), placements(second)
    member, heldout = first_member - second_member, first_heldout - second_heldout
    error = np.sqrt(np.var(member, ddof=1) / len(member) + np.var(heldout, ddof=1) / len(heldout))
    return 2 * stats.norm.sf(abs(np.mean(member)) / error)


class TestRun:
    def test_numbers_are_those_of_the_scores(self, run):
        for attack, q in (("loss", None), ("sima_mc_vector", 10), ("dime", 30)):
            row = row_of(run, attack, q)
            member, heldout = row.scores[run.member], row.scores[~run.member]
            naive = np.mean(np.sign(heldout[None] - member[:, None])) / 2 + 0.5
            assert row.result.auc.value == pytest.approx(naive, abs=1e-12)
        assert run.image_counts == "calibration 60 + 60, test 60 + 60"

    def test_every_attack_at_every_tier_is_there(self, run):
        assert [row.title for row in run.rows] == [
            "Loss",
            "Loss (mean) 10",
            "Loss (mean) 30",
            "PIA (l2)",
            "PIA (l4)",
            "PIAN (l4)",
            "SecMI_stat",
            "SimA (l4)",
            "SimA-MC (l4, norms) 10",
            "SimA-MC (l4, norms) 30",
            "SimA-MC (l4, vector) 10",
            "SimA-MC (l4, vector) 30",
            "DIME 1+1",
            "DIME 10+1",
            "DIME 30+1",
            "DIME central 2",
            "DIME central 10",
            "DIME central 30",
            "DIME theory weights 1+1",
            "DIME theory weights 10+1",
            "DIME theory weights 30+1",
            "Level only (B²) 1",
            "Level only (B²) 10",
            "Level only (B²) 30",
            "Crowding only (V) 1+1",
            "Crowding only (V) 10+1",
            "Crowding only (V) 30+1",
            "Level only (l4)",
            "Level only (low frequencies)",
            "Loss and level",
        ]

    def test_it_says_how_to_repeat_it(self, directory):
        pretend(directory, "cifar10", "laptop", data__source="cifar10:DIR", attack__budgets=[2, 11])
        run = runs.read_run(directory)
        assert run.overrides() == {"data.source": "cifar10:DIR", "attack.budgets": [2, 11]}
        train, attack = run.commands()
        assert train.startswith("python -m experiments.train --config=experiments/configs/cifar10.py:laptop")
        assert attack.endswith("--workdir=W --config.data.source=cifar10:DIR --config.attack.budgets='(2, 11)'")

    def test_a_variant_without_name_is_the_default(self, directory):
        pretend(directory, "cifar10", "paper")
        contents = json.loads((directory / "config.json").read_text())
        contents["file"] = "experiments/configs/cifar10.py"
        (directory / "config.json").write_text(json.dumps(contents))
        assert runs.read_run(directory).name == "cifar10:paper"

    def test_other_directories_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"is not a run of experiments\.attack: it has no config\.json"):
            runs.read_run(tmp_path)


class TestPapersValues:
    def test_they_stand_beside_the_same_statistic(self, run):
        paper = {(line.row.attack, line.row.q): line.paper for line in run_table.make_table(run).lines if line.paper}
        once = {(name, None) for name in ("loss", "pia_l2", "secmi", "sima_l4")}
        assert set(paper) == once | {(name, q) for name in ("sima_mc_vector", "dime") for q in (10, 30)} | {("dime", 1)}
        assert paper["pia_l2", None].auc == 88.58
        assert paper["sima_mc_vector", 30] == (85.15, 92.00, 16.14)
        assert paper["dime", 10].tpr_at_1pct_fpr == 47.23

    @pytest.mark.parametrize(
        ("study", "variant", "changes", "shown"),
        [
            ("cifar10", "paper", {"data__source": "cifar10:/x", "attack__micro_batch": 4}, True),
            ("cifar10", "paper", {"attack__test_size": 100}, False),
            ("cifar10", "laptop", {}, False),
            ("imagenet256", "paper", {}, False),
            ("imagenet256", "as_published", {}, True),
            ("celeba", "paper", {"data__split": "sima_celeba"}, False),
        ],
    )
    def test_only_where_the_setting_is_the_same(self, directory, study, variant, changes, shown):
        pretend(directory, study, variant, **changes)
        lines = run_table.make_table(runs.read_run(directory)).lines
        assert any(line.paper for line in lines) == shown

    def test_a_table_of_the_paper_is_named_over_its_own_setting_only(self, directory, monkeypatch):
        pretend(directory, "cifar10", "paper")
        run = runs.read_run(directory)
        assert run_table.make_table(run).title == "Table 1, CIFAR-10 (cifar10:paper)"
        monkeypatch.setattr(paper_values, "FINGERPRINTS", {"cifar10": run.results.fingerprints["model"]})
        assert run_table.make_table(run).title.startswith("Table 1")
        monkeypatch.setattr(paper_values, "FINGERPRINTS", {"cifar10": "another checkpoint's"})
        another = run_table.make_table(run)
        assert another.title == "CIFAR-10 (cifar10:paper)"
        assert not any(line.paper for line in another.lines)
        pretend(directory, "cifar10", "laptop")
        assert run_table.make_table(runs.read_run(directory)).title == "CIFAR-10 (cifar10:laptop)"

    def test_dp_table_by_epsilon(self):
        assert paper_values.published("dp_celeba", 4)["pia_l2", None].auc == 48.1
        assert paper_values.published("dp_celeba")["dime", 10] == (79.8, 86.9, 22.40)
        assert paper_values.published("digits") == {}


def test_a_users_attack_is_a_baseline_whether_known_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    guide = (DOCS / "add_attack.md").read_text(encoding="utf-8")
    (tmp_path / "nudge.py").write_text(re.search(r"```py\n(.*?)```", guide, re.DOTALL)[1], encoding="utf-8")
    dj.attacks.load_attack_module(tmp_path / "nudge.py")
    jobs = planning.grid_jobs(["dime", "nudge"], "quick", [11], settings=[{"t": 120, "gamma": 0.4}])
    make_run(tmp_path / "attack", jobs, size=40, member_scale=0.5, heldout_scale=0.6, seed=3)
    pretend(tmp_path / "attack", "digits", "laptop")
    known = run_table.make_table(runs.read_run(tmp_path / "attack"))
    assert [(line.row.title, line.row.is_baseline) for line in known.lines] == [("DIME 10+1", False), ("Nudge", True)]
    assert known.lines[0].lead.baseline.attack == "nudge"
    assert render("run_table.tex", table=known).count(r"\midrule") == 2


class TestLead:
    def test_against_the_best_calibrated_baseline_at_no_more_queries(self, run):
        for row in run.rows:
            lead = run_table.lead(run, row)
            if row.attack in BASELINES:
                assert lead is None
                continue
            rivals = [r for r in run.rows if r.attack in BASELINES and r.queries <= row.queries]
            assert lead.baseline.queries <= row.queries
            assert lead.baseline.calibration.auc == max(r.calibration.auc for r in rivals)
            for metric, estimate in (("auc", lead.auc), ("tpr_at_1pct_fpr", lead.tpr)):
                difference = row.estimate(metric).value - lead.baseline.estimate(metric).value
                assert estimate.value == pytest.approx(difference, abs=1e-12)
            assert lead.p_value == pytest.approx(naive_delong(run, row, lead.baseline), abs=1e-9)

    def test_images_without_an_answer_are_left_out_of_both(self, run):
        row, other = row_of(run, "dime", 1), row_of(run, "loss")
        scores = row.scores.copy()
        scores[np.flatnonzero(run.member)[:7]] = np.nan
        first, second = run.paired_scores(row._replace(scores=scores), other)
        assert len(first[0]) == len(second[0]) == 53
        np.testing.assert_array_equal(second[0], other.scores[run.member][7:])


def study_section(directory, page):
    table = run_table.make_table(runs.read_run(directory))
    (study,) = runs.group_runs([table.run])
    return results_page.study_section(results_page.StudyResults(study, [table], questions.answers(study)), page)


class TestRendering:
    def test_the_formats_hold_the_same_numbers(self, run, tmp_path):
        table = run_table.make_table(run)
        dime = row_of(run, "dime", 10)
        values = [f"{100 * getattr(dime.result, name).value:.1f}" for name in runs.METRICS]
        (markdown,) = [
            line for line in render("run_table.md", table=table).splitlines() if line.startswith("| DIME 10+1 ")
        ]
        (latex,) = [line for line in render("run_table.tex", table=table).splitlines() if line.startswith("DIME 10+1 ")]
        assert re.findall(r"([\d.]+) \[[\d., ]+\]<br>\*paper ([\d.]+)\*", markdown) == list(
            zip(values, ["86.43", "93.35", "47.23"])
        )
        assert re.findall(r"([\d.]+) \[[\d., ]+\] \(([\d.]+)\)", latex) == list(
            zip(values, ["86.43", "93.35", "47.23"])
        )
        write_csv(tmp_path / "tables.csv", [tables.csv_row(run, line) for line in table.lines])
        with (tmp_path / "tables.csv").open(encoding="utf-8", newline="") as file:
            (record,) = [record for record in csv.DictReader(file) if record["title"] == "DIME 10+1"]
        assert float(record["auc"]) == dime.result.auc.value
        assert float(record["paper_auc"]) == 0.9335
        assert int(record["queries_per_image"]) == 11

    def test_latex_has_no_bare_specials(self, run):
        for line in render("run_table.tex", table=run_table.make_table(run)).splitlines():
            assert not re.search(r"(?<!\\)[_#]", line), line
            assert line.startswith("%") or not re.search(r"(?<!\\)%", line), line
            assert line.isascii() or line.startswith("%")

    def test_results_page_leads_from_numbers_to_tables(self, directory, tmp_path):
        pretend(directory, "cifar10", "laptop")
        page = directory.parent / "RESULTS.md"
        text = study_section(directory, page)
        results = stages.evaluation(directory)
        for fact in (
            "`experiments/configs/cifar10.py`, variant `laptop`",
            "python -m experiments.attack --config=experiments/configs/cifar10.py:laptop --workdir=W\n",
            "- seed: 0, of split and training 0",
            f"`{results.fingerprints['model'][:16]}`",
            f"`{results.fingerprints['test_data'][:16]}`",
            f"{results.queries_made:,}",
            "[test](attack/test)",
            "calibration 60 + 60, test 60 + 60",
            "## CIFAR-10 (cifar10:laptop)",
            "#### Does crowding help?",
        ):
            assert fact in text, fact
        elsewhere = study_section(directory, tmp_path / "RESULTS.md")
        assert "`W/attack/test`" in elsewhere

    def test_no_runs(self, tmp_path):
        with pytest.raises(ValueError, match="--runs must name at least one run directory"):
            tables.write_tables([], pathlib.Path(tmp_path))


DOCS = pathlib.Path(__file__).parents[2] / "docs"
