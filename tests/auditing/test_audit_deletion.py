"""The deletion check: a model with and without some images."""

import dataclasses
import json

import numpy as np
import pytest
from memoriser import config, images, memoriser, source

import dime_jax as dj
from dime_jax import auditing, evidence
from dime_jax.findings import gate
from dime_jax.report import html
from dime_jax.scoring import score_table

KEPT, DELETED, HELDOUT = images(80, 0), images(10, 2), images(100, 21)
WITH = memoriser(np.concatenate([KEPT, DELETED]), "with")
WITHOUT = memoriser(KEPT, "without")
ROLES = {"heldout": source(HELDOUT, "h"), "candidates": source(DELETED, "c")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def result(directory):
    return auditing.compare(config(directory, model=WITH, members=source(KEPT, "m"), **ROLES), WITHOUT)


def test_a_deletion_shows(result):
    results = result.results
    assert set(results) == gate.COMPARE_KEYS
    assert results["verdict"] == "no evidence of membership after"
    assert results["set_before"]["p_value"] < 0.01
    assert results["set_after"]["p_value"] > 0.05
    assert results["flagged"]["before"] == 10
    assert results["flagged"]["after"] <= 2
    assert results["headline"]["answer"] == "The images no longer look like training images."


def test_everything_is_frozen_on_the_model_before(result, directory):
    manifests = {name: score_table.read_manifest(directory / name)["identity"] for name in ("before", "after")}
    assert manifests["before"]["settings"] == manifests["after"]["settings"]
    assert manifests["before"]["data"] == manifests["after"]["data"]
    assert score_table.read_manifest(directory / "calibration")["identity"]["model"] == WITH.fingerprint
    assert result.results["facts"]["images"]["heldout"] == 50  # the half that chose nothing


@pytest.mark.parametrize("path", ["flagged.after", "set_after.p_value", "change.p_value"])
def test_no_gate_passes_where_nothing_was_there_to_delete(result, path):
    nothing = dataclasses.replace(result.findings, verdict=evidence.DeletionVerdict.NOTHING_BEFORE)
    with pytest.raises(ValueError, match="cannot be judged: the verdict on the deletion is 'cannot tell: no evidence"):
        gate.check(f"{path} <= 0.05", nothing)
    gate.check(f"{path} <= 0.05", result.findings)


def test_it_is_written_again_without_the_models(result, directory):
    before = {name: (directory / name).read_bytes() for name in ("compare.json", "candidates.csv", "report.html")}
    assert auditing.report_comparison(directory).results.items() <= json.loads(before["compare.json"]).items()
    assert before == {name: (directory / name).read_bytes() for name in before}


def test_nothing_deleted_remains(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "write_comparison", lambda directory, *_: directory / "report.html")
    twin = memoriser(np.concatenate([DELETED, KEPT]), "twin")
    results = auditing.compare(config(tmp_path, model=WITH, **ROLES), twin).results  # no members: the fixed rule
    assert results["verdict"] == "evidence of membership remains"
    assert results["facts"]["fixed_setting"] == {"t_loss": 150, "t_level": 50, "gamma_level": 0.1}
    assert results["facts"]["adjusted"]
    assert results["flagged"] == {"before": 10, "after": 10}


@pytest.mark.parametrize("broken", ["before", "after"])
def test_a_held_out_image_without_an_answer_is_left_out_under_both_models(tmp_path, monkeypatch, broken):
    monkeypatch.setattr(html, "write_comparison", lambda directory, *_: directory / "report.html")
    lost = HELDOUT[3].reshape(-1) / 127.5 - 1

    def partly(model):
        def eps(x, t):
            near = [np.corrcoef(row, lost)[0, 1] > 0.8 for row in np.asarray(x).reshape(len(x), -1)]
            return np.where(np.reshape(near, (-1, 1, 1, 1)), np.nan, model.eps(x, t))

        return dj.Denoiser.from_function(eps, model.schedule, model.image_shape, name=f"broken {model.name}")

    models = (partly(WITH), WITHOUT) if broken == "before" else (WITH, partly(WITHOUT))
    found = auditing.compare(config(tmp_path, model=models[0], **ROLES), models[1]).findings
    assert found.verdict == evidence.DeletionVerdict.GONE
    assert any("for 1 held-out images: they were left out" in warning for warning in found.warnings)


@pytest.mark.parametrize("dead", ["before", "after"])
def test_an_untrained_model_is_no_successful_deletion(tmp_path, monkeypatch, dead):
    monkeypatch.setattr(html, "write_comparison", lambda directory, *_: directory / "report.html")
    zero = dj.Denoiser.from_function(lambda x, t: np.zeros_like(x), WITH.schedule, WITH.image_shape, name="zero")
    before, after = (zero, WITH) if dead == "before" else (WITH, zero)
    asked = zero.queries.count + WITH.queries.count
    results = auditing.compare(config(tmp_path, model=before, **ROLES), after).results
    assert results["verdict"] == "cannot tell: a model does not predict noise the way it was asked to"
    assert results["headline"]["answer"].startswith("This cannot be audited as it is")
    assert results["headline"]["alarms"][0].startswith(f"The model {dead} does not predict noise")
    assert results["queries_made"] == zero.queries.count + WITH.queries.count - asked
    assert auditing.report_comparison(tmp_path).results == results


def test_bad_pairs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the models before and after must differ, got function:with twice"):
        auditing.compare(config(tmp_path, model=WITH, **ROLES), WITH)
    with pytest.raises(ValueError, match="candidates must be given"):
        auditing.compare(config(tmp_path, model=WITH, heldout=ROLES["heldout"]), WITHOUT)
    with pytest.raises(ValueError, match="holds no comparison"):
        auditing.report_comparison(tmp_path)
