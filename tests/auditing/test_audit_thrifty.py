"""An audit with thrifty calibration: the option, what is said and counted, and that the page can be made of it."""

import numpy as np
import pytest
from memoriser import SHAPE, config, images, memoriser

import dime_jax as dj
from dime_jax import auditing, cli
from dime_jax.auditing import cost, stages
from dime_jax.auditing.images import open_images
from dime_jax.findings import json_files
from dime_jax.loading.opening import OpenedModel
from dime_jax.protocol import pipeline
from dime_jax.report import audit_figures, html
from dime_jax.scoring.query_ledger import queries_made

SETTINGS = {"attacks": ("sima_l4", "dime"), "queries": (2, 11), "grid": None}
KNOWN = images(64, 0)
MODEL = memoriser(KNOWN)
ROLES = {
    "members": dj.data.from_images(KNOWN, name="m"),
    "heldout": dj.data.from_images(images(64, 1), name="h"),
    "candidates": dj.data.from_images(images(4, 2), name="c"),
}


@pytest.fixture(autouse=True)
def _no_page(monkeypatch):
    monkeypatch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")
    monkeypatch.setattr(html, "write_comparison", lambda directory, *found: directory / "report.html")


def test_the_option_the_line_and_the_page(tmp_path, monkeypatch, capsys):
    asked = 0

    def eps(x, t):
        nonlocal asked
        asked += len(x)
        return MODEL.eps(x, t)

    model = dj.Denoiser.from_function(eps, MODEL.schedule, SHAPE, name="mine")
    monkeypatch.setattr(stages, "open_model", lambda *arguments: OpenedModel(model, "a test", {}))
    words = ["audit", "--output", str(tmp_path / "a"), "--attacks", "sima_l4", "dime"]
    for name, seed, count in (("members", 0, 64), ("heldout", 1, 64), ("candidates", 2, 4)):
        np.savez(tmp_path / f"{name}.npz", images=images(count, seed))
        words += [f"--{name}", str(tmp_path / f"{name}.npz")]
    assert cli.main([*words, "--thrifty"]) == 0
    directory, said = tmp_path / "a", capsys.readouterr().err
    saved = pipeline.read_thrift(directory)
    assert f"\n{saved.describe()}\n" in said
    record, results = json_files.read_record(directory), json_files.read_results(directory)
    assert record.facts.settings.thrifty
    assert results.queries_made == asked == queries_made(directory)
    assert results.grid_size == saved.settings > len(saved.kept)
    made = queries_made(directory / "pilot") + queries_made(directory / "calibration")
    assert made == saved.pilot_queries + saved.kept_queries <= saved.grid_queries / 2
    figure = audit_figures.draw_timesteps(record, results)
    kept = {(job.label, f"{job.setting['t']:g}") for job in pipeline.calibrated_jobs(directory)}
    labels = {"SimA (l4) (1)": "sima_l4@1", "DIME (11)": "dime@11"}
    shown = {(labels[row[0]], row[1]) for row in figure.numbers.rows}
    assert shown == {one for one in kept if one[0] != "dime@2"}
    assert auditing.report(directory).findings == results

    assert cli.main(words) == 2
    assert capsys.readouterr().err.endswith(
        f"{directory} holds a run with thrifty calibration: continue it with --thrifty\n"
    )
    scores = directory / "pilot" / "scores.parquet"
    scores.write_bytes(scores.read_bytes()[:-1])
    assert cli.main(["report", str(directory)]) == 2
    assert f"{scores} is damaged" in capsys.readouterr().err


def test_what_is_expected_is_half_and_a_lighter_audit_is_not_thrifty(tmp_path):
    whole, thrifty = (config(tmp_path, model=MODEL, **ROLES, **SETTINGS, thrifty=one) for one in (False, True))
    opened = open_images(whole, MODEL)
    before, after = (cost.expected(one, opened, MODEL.schedule) for one in (whole, thrifty))
    assert after == before._replace(calibration=before.calibration // 2)
    assert not cost.lighter(thrifty).thrifty


def test_a_comparison_counts_the_pilot(tmp_path):
    after = memoriser(images(64, 5), name="after")
    found = auditing.compare(config(tmp_path, model=MODEL, **ROLES, **SETTINGS, thrifty=True), after).findings
    assert found.queries_made == queries_made(tmp_path)
    assert queries_made(tmp_path / "pilot") > 0
    assert auditing.report_comparison(tmp_path).findings == found


def test_without_members_there_is_nothing_to_save(tmp_path):
    with pytest.raises(ValueError, match="expected known members with thrifty: without them nothing is calibrated"):
        config(tmp_path, heldout=ROLES["heldout"], candidates=ROLES["candidates"], thrifty=True)
