"""The results page and those that it links to: against the files they are made from, and what they must not exceed."""

import json
import pathlib
import re

import numpy as np
import pytest

from dime_jax._util import records
from dime_jax.evidence.metrics import Estimate
from experiments import fresh_models, results_page, synthetic
from experiments.rendering import render
from experiments.synthetic import Curve, Panel


def estimates(values):
    return [Estimate(value, value - 0.01, value + 0.01) for value in values]


def panel(n, lead, asr_of_dime, asr_of_level):
    """A panel of three noise levels; only what the page shows of it has meaning."""

    def curve(asr):
        return Curve(estimates(asr), estimates([0.5] * 3), estimates([0.0] * 3), [None] * 3)

    curves = {"dime": curve(asr_of_dime), "sima_mc_shared": curve(asr_of_level), "sima_mc_gaussian": curve([0.4] * 3)}
    sigma = [0.1, 0.3, 0.6]
    gaussian = estimates([value + 0.1 for value in lead])
    correlation = synthetic.rank_correlation(lead, sigma)
    return Panel(n, 10, [5, 50, 200], [0.99, 0.9, 0.6], sigma, curves, {}, estimates(lead), gaussian, correlation)


PANELS = [
    panel(10, [0.01, 0.08, 0.03], [0.9, 0.8, 0.6], [0.9, 0.7, 0.65]),
    panel(100, [0.0, 0.02, 0.05], *[[0.7] * 3] * 2),
]


def test_where_the_lead_peaks_and_where_asr_is_behind():
    values = results_page.DRAWINGS["dataset_size"].values(PANELS)
    text = render("synthetic.md", picture="dataset_size.png", **values)
    lines = [line for line in text.splitlines() if line.startswith(("| n = 10 |", "| n = 100 |"))]
    assert lines[0] == (
        "| n = 10 | +4.0 | +8.0 [+7.0, +9.0] at t = 50 (ᾱ = 0.900) | +3.0 [+2.0, +4.0] at t = 200 | +0.50 | t = 200 |"
    )
    assert lines[1].endswith("at t = 200 | +1.00 | no t |")
    assert lines[2].startswith("| n = 10 | +14.0 | +18.0 [")
    assert "| 50 | 0.900 | +8.0 [+7.0, +9.0] | +2.0 [+1.0, +3.0] |" in text
    assert "![AUC, ASR and TPR over noise](dataset_size.png)" in text


def test_panels_survive_their_file(tmp_path):
    file = tmp_path / "dataset_size.json"
    file.write_text(json.dumps(synthetic.plain(PANELS)))
    (read,) = results_page.find_drawn(tmp_path)
    assert read.file == file
    leads = [one.auc_lead for one in read.numbers]
    np.testing.assert_allclose(leads, [one.auc_lead for one in PANELS], rtol=1e-6, atol=1e-9)
    written = read._replace(numbers=PANELS)
    page = tmp_path / "RESULTS.md"
    assert render("synthetic.md", **read.values(page)) == render("synthetic.md", **written.values(page))


def fresh(seed, auc, file="experiments/configs/cifar10.py:overnight"):
    """What `experiments.fresh_models` writes for one model."""
    plain = {name: {"auc": one, "tpr_at_1pct_fpr": one} for name, one in (("level", [0.6, 0.5, 0.7]),)}
    reading = {"auc": [auc, auc - 0.02, auc + 0.02], "tpr_at_1pct_fpr": [0.25, 0.2, 0.3]}
    plain[fresh_models.RULE] = reading
    plain[fresh_models.PLAIN] = {"auc": [0.7, 0.68, 0.72], "tpr_at_1pct_fpr": [0.02, 0.01, 0.03]}
    readings = {
        name: {key: dict(zip(("value", "low", "high"), of)) for key, of in one.items()} for name, one in plain.items()
    }
    lead = dict(zip(("value", "low", "high"), (auc - 0.7, auc - 0.73, auc - 0.67)))
    counts = {"members": 500, "fitted": 200, "counted": 1000, "queries_made": 5100}
    return {"file": file, "seed": seed, **counts, "readings": readings, "lead_over_plain_loss": lead}


def test_fresh_models_have_a_section_once_there_are_any(tmp_path):
    kept, page = tmp_path / "kept", tmp_path / "RESULTS.md"
    (kept / "fresh_models").mkdir(parents=True)
    assert "trained after it" not in results_page.to_pages(kept, page)[page]
    models = [fresh(21, 0.90), fresh(22, 0.86), fresh(23, 0.88), fresh(5, 0.96, "experiments/configs/digits.py")]
    for number, model in enumerate(models):
        (kept / "fresh_models" / f"model_{number}.json").write_text(json.dumps(model))
    texts = results_page.to_pages(kept, page)
    assert set(texts) == {page}
    lines = [line for line in texts[page].splitlines() if line.startswith(("| cifar10:overnight", "| digits"))]
    assert lines[0] == (
        "| cifar10:overnight, seed 21 | 90.0 [88.0, 92.0] | 25.0 [20.0, 30.0] | 70.0 | +20.0 [+17.0, +23.0] |"
    )
    margin = 100 * 4.30265 * np.std([0.90, 0.86, 0.88], ddof=1) / np.sqrt(3)
    assert lines[3].startswith(f"| cifar10:overnight, mean of 3 | 88.0 [{88 - margin:.1f}, {88 + margin:.1f}] |")
    assert last_cell(lines[3]) == f"+18.0 [+{18 - margin:.1f}, +{18 + margin:.1f}]"
    assert [line.split(" |")[0] for line in lines[4:]] == ["| digits, seed 5"]
    assert "AUC is 86.0 to 96.0; the lead over plain Loss" in texts[page]
    assert "has an interval above 0 for all 4 models." in texts[page]


DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_kept_synthetic_study_is_the_papers_config_and_its_lead_does_not_peak_at_most_noise():
    folder = DOCS / "results" / "synthetic"
    panels = records.parse(list[Panel], json.loads((folder / "dataset_size.json").read_text()), "dataset_size")
    assert [one.n for one in panels] == [10, 100, 1000]
    assert all(len(one.t) == 11 for one in panels)
    for one in panels:
        assert np.argmax([lead.value for lead in one.auc_lead]) < len(one.t) - 1
        assert one.auc_lead[-1].value == pytest.approx(
            one.curves["dime"].auc[-1].value - one.curves["sima_mc_shared"].auc[-1].value, abs=1e-6
        )


def test_a_folder_without_runs_has_its_pages_too(tmp_path):
    (tmp_path / "kept" / "closed_form").mkdir(parents=True)
    (tmp_path / "kept" / "closed_form" / "dataset_size.json").write_text(json.dumps(synthetic.plain(PANELS)))
    page = tmp_path / "RESULTS.md"
    texts = results_page.to_pages(tmp_path / "kept", page)
    assert set(texts) == {page, tmp_path / "results_closed_form.md"}
    assert "it adds most at t = 50 for n = 10 (+8.0 [+7.0, +9.0]), t = 200 for n = 100" in texts[page]
    assert "## Is DIME ahead of the baselines?" not in texts[page]


@pytest.fixture(scope="module")
def pages():
    return results_page.to_pages(DOCS / "results", DOCS / "RESULTS.md")


def test_the_pages_are_what_the_kept_files_give(pages):
    assert {page.name for page in pages} == {"RESULTS.md", *(page.name for page in DOCS.glob("results_*.md"))}
    for page, text in pages.items():
        assert text == page.read_text(encoding="utf-8"), f"{page.name}: run `make results`"


def test_the_short_page_is_short_and_leads_to_the_others(pages):
    short = pages[DOCS / "RESULTS.md"]
    assert len([word for word in short.split() if re.search("[A-Za-z]", word)]) <= 1500  # besides numbers in tables
    assert set(re.findall(r"\]\((results_\w+\.md)\)", short)) == {page.name for page in pages} - {"RESULTS.md"}


def test_what_is_kept_is_small():
    assert sum(file.stat().st_size for file in (DOCS / "results").rglob("*")) <= 25e6


def test_the_short_answers_are_those_of_the_full_tables(pages):
    """A row of each table of the short page, against the same number in the full one."""
    short, full = pages[DOCS / "RESULTS.md"], pages[DOCS / "results_cifar10_overnight.md"]

    def rows(question):
        section = short[short.index(f"## {question}") :].split("\n## ")[0]
        return [line for line in section.splitlines() if line.startswith("| cifar10:overnight |")]

    (dime,) = [line for line in full.splitlines() if line.startswith("| DIME 10+1 | SimA-MC (l4, vector) 10 |")]
    differences = [line for line in full.splitlines() if line.startswith("| DIME 10+1 |") and "SimA-MC" in line]
    assert min(differences, key=lambda line: float(last_cell(line).split()[0])) == dime
    assert rows("Is DIME ahead") == [
        f"| cifar10:overnight | DIME 10+1 | 75.2 | SimA-MC (l4, vector) 10 | {last_cell(dime)} |"
    ]
    crowding = full[full.index("#### Does crowding help?") :].splitlines()
    place = next(number for number, line in enumerate(crowding) if line.startswith("| DIME 10+1 |"))
    (row,) = rows("Does crowding help?")
    assert row.endswith(f"| {last_cell(crowding[place])} | {last_cell(crowding[place + 1])} |")
    tiers = next(line for line in full.splitlines() if line.startswith("| DIME 10+1 | DIME 1+1 |"))
    times = [line.split(" | ")[1] for line in full.splitlines() if line.startswith("| t = ")]
    means = [f"{np.mean([float(auc) for auc in line.split(', ')]):.1f}" for line in times]
    (row,) = rows("How do results hold")
    assert row.split(" | ")[1] == f"{min(means)} to {max(means)}"
    assert last_cell(row) == f"{last_cell(tiers)} (DIME 10+1)"
    blind = re.findall(r"never saw the model has AUC ([\d.]+) %.*?ahead of it by (\S+) points", full)
    aucs, gaps = zip(*blind)
    (row,) = rows("Could the pictures alone")
    assert row.endswith(f"| {min(aucs)} to {max(aucs)} | {min(gaps)} to {max(gaps)} |")
    explained = full[full.index("#### How much of an attack") :].split("\n#### ")[0].splitlines()
    (row,) = rows("How much of an attack")
    cells = row.strip("| ").split(" | ")
    table = [line.strip("| ").split(" | ") for line in explained if line.startswith("| ")][1:]
    single = [one for one in table if one[1] == "1"]
    assert cells[1:3] == [max((one[column] for one in single), key=auc_of) for column in (2, 3)]
    assert table[-1][:2] == ["Loss and level", "3"]
    assert cells[5] == table[-1][-1]
    again = full[full.index("#### Does crowding help, once") :].split("\n#### ")[0].splitlines()
    place = next(number for number, line in enumerate(again) if line.startswith("| DIME theory weights 10+1 |"))
    (row,) = rows("Does crowding help, once")
    assert row.strip("| ").split(" | ")[1:] == [last_cell(line) for line in again[place + 1 : place + 3]]


def auc_of(cell):
    return float(cell.split(" / ")[0])


def last_cell(line):
    return line.strip(" |").split(" | ")[-1]
