"""Adjusted p-values of whole audits, beside a fit and a count made anew; hard pictures have high scores here."""

import csv

import numpy as np
import pytest
from memoriser import config, forgetful, source
from memoriser import contrasts as images

from dime_jax import auditing, evidence
from dime_jax.findings import json_files
from dime_jax.protocol import stages, statistics
from dime_jax.report import html

MEMBERS, HELDOUT = images(120, 0), images(260, 1)
CANDIDATES = np.concatenate([images(10, 2), images(9, 3)])
ALL = range(19)


def audit(directory, asked=ALL, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")
        model = forgetful(np.concatenate([MEMBERS, CANDIDATES[:10]]))
        candidates = source(CANDIDATES[list(asked)], "c", ids=[f"picture {index}" for index in asked])
        roles = {"heldout": source(HELDOUT, "h"), "candidates": candidates}
        auditing.audit(config(directory, model=model, **roles, **settings))
    with open(directory / "candidates.csv", newline="", encoding="utf-8") as file:
        return json_files.read_record(directory), list(csv.DictReader(file))


def naive_p(record, index):
    """The rank of one image in a fit over the held-out images and this one: by hand, from tables and pixels."""
    decider, images = record.decider, np.append(record.arrays.heldout, index)
    terms = stages.terms_of(record.candidates, decider, images)
    pictures = statistics.read(record.directory).of(images)
    if decider.attack == "loss_level":
        known = [np.column_stack([pictures, terms[3:5].T]), np.column_stack([pictures, terms[5:7].T]), pictures]
        left = np.stack([evidence.difficulty_residuals(*of) for of in zip(terms[:3], known)])
        rho = np.clip(np.corrcoef(left[:2])[0, 1], 0, 1)
        first, second, level = left / left.std(axis=1, keepdims=True)
        residuals = rho**3 * (first + second) / 2 + (1 - rho) ** 3 * level
    else:
        residuals = evidence.difficulty_residuals(np.log(terms[0]), pictures)
    return np.mean(residuals <= residuals[-1] + 1e-9)


@pytest.mark.parametrize("members", [True, False])
def test_p_values_are_ranks_of_what_the_picture_does_not_explain(tmp_path, members):
    known = {"members": source(MEMBERS, "m"), "attacks": ("sima_l4",), "calibration_size": 60} if members else {}
    record, rows = audit(tmp_path, **known)
    assert record.facts.adjusted
    assert record.decider.label == ("sima_l4@1" if members else "loss_level@3")
    assert [float(row["p_value"]) for row in rows] == [
        pytest.approx(naive_p(record, index)) for index in record.arrays.candidates
    ]
    plain = record.decider._replace(adjustment=None)
    scores, heldout = (
        stages.frozen_scores(record.candidates, plain, side)
        for side in (record.arrays.candidates, record.arrays.heldout)
    )
    expected = [(1 + np.sum(heldout <= score)) / (1 + len(heldout)) for score in scores]
    assert [float(row["p_not_used"]) for row in rows] == pytest.approx(expected)


def test_a_p_value_does_not_depend_on_who_else_was_asked_about(tmp_path):
    _, rows = audit(tmp_path / "all")
    _, fewer = audit(tmp_path / "fewer", asked=range(8, 12))
    assert [row["p_value"] for row in fewer] == [row["p_value"] for row in rows[8:12]]


def test_missing_statistics_are_said_in_one_line(tmp_path):
    record, _ = audit(tmp_path)
    (record.directory / "statistics.json").unlink()
    with pytest.raises(ValueError, match=r"statistics\.json is missing, but audit\.json lists it") as error:
        auditing.report(tmp_path)
    assert "\n" not in str(error.value)
