"""An audit that an earlier version finished still opens, and says what that version did not look at."""

import csv
import pathlib
import shutil

import pytest

from dime_jax import auditing, cli

OLDER = pathlib.Path(__file__).parents[1] / "golden" / "audit_schema_1"


@pytest.fixture
def older(tmp_path):
    return shutil.copytree(OLDER, tmp_path / "audit")


def test_it_opens_and_says_what_was_not_checked(older):
    result = auditing.report(older)
    assert result.results["direction"]["judgement"] == "not checked"
    assert result.results["headline"]["alarms"][0].startswith("Direction not checked")
    assert result.results["candidates"]["likeness"] is None
    assert result.results["model_check"] is None
    assert "fraction_used" not in result.results
    assert any("without digests" in warning for warning in result.results["warnings"])
    with open(older / "candidates.csv", newline="", encoding="utf-8") as file:
        assert [row["p_adjusted"] for row in csv.DictReader(file)] == [""] * 6
    assert result.findings.candidates.adjusted.missing.startswith("an audit of an older version")
    assert "There are no adjusted p-values: an audit of an older" in result.report.read_text(encoding="utf-8")
    assert "Direction not checked" in result.report.read_text(encoding="utf-8")
    # The verdicts are those of the version that made it.
    assert (result.results["candidates"]["count"], result.results["candidates"]["evidence"]) == (6, 0)
    assert [row["auc"]["value"] for row in result.results["results"]] == [1, 1, 1]


def test_its_stages_still_evaluate(older, capsys):
    (older / "audit.json").unlink()
    assert cli.main(["evaluate", str(older)]) == 0
    printed = capsys.readouterr().out
    assert "Direction not checked" in printed
