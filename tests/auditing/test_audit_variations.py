"""Was a variation of my picture used? A model that remembers mirrored pictures is asked about the originals."""

import csv

import numpy as np
import pytest
from memoriser import config, images, memoriser, source

from dime_jax import auditing, evidence, scoring
from dime_jax.auditing import cost
from dime_jax.auditing.images import open_images
from dime_jax.data.variations import VARIATIONS
from dime_jax.findings import json_files, wording
from dime_jax.protocol.calibration import to_adjust
from dime_jax.scoring.query_ledger import Budget

pytestmark = pytest.mark.usefixtures("no_figures")

MEMBERS, HELDOUT, CANDIDATES = images(120, 0), images(120, 21), np.concatenate([images(6, 2), images(6, 6)])
MODEL = memoriser(np.concatenate([MEMBERS, CANDIDATES[:6, :, ::-1]]))
ROLES = {
    "members": source(MEMBERS, "m"),
    "heldout": source(HELDOUT, "h"),
    "candidates": source(CANDIDATES, "c", ids=[f"c{i}" for i in range(12)]),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("variations")


@pytest.fixture(scope="module")
def result(directory):
    return auditing.audit(config(directory, model=MODEL, variations=True, level=0.2, **ROLES))


@pytest.fixture
def rows(result, directory):
    with open(directory / "candidates.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_pictures_whose_mirror_images_were_used_are_found(rows):
    assert [row["variation"] for row in rows[:6]] == ["mirrored"] * 6
    assert [row["verdict"] == "evidence of membership" for row in rows] == [True] * 6 + [False] * 6


def test_as_they_are_they_look_like_any_other_picture(result, directory):
    record = json_files.read_record(directory)
    own, heldout = (record.own_scores(side) for side in (record.arrays.candidates, record.arrays.heldout))
    assert np.median(evidence.conformal_p_values(own[:6], heldout)) > 0.3


def test_held_out_images_are_given_the_same_chances(result, directory, rows):
    record = json_files.read_record(directory)
    count = len(record.arrays.heldout) + len(CANDIDATES)
    assert record.variations.index.size == count * len(VARIATIONS)
    best, heldout = (side.best for side in record.varied())
    assert np.all(heldout <= record.own_scores(record.arrays.heldout))
    assert np.sum(heldout < record.own_scores(record.arrays.heldout)) > 20
    np.testing.assert_allclose([float(row["p_value"]) for row in rows], evidence.conformal_p_values(best, heldout))


def test_adjusted_p_values_compare_best_with_best(result, directory, rows):
    """Each version enters the fit with its own statistics, and the lowest residual of an image counts."""
    record = json_files.read_record(directory)
    frozen = to_adjust(record.decider)
    candidates, heldout = record.piles(frozen, record.candidates)
    versions = 1 + len(VARIATIONS)
    assert candidates.scores.shape == (1, len(CANDIDATES), versions)
    expected = []
    for place in range(len(CANDIDATES)):
        scores = np.concatenate([heldout.scores[0], candidates.scores[0, [place]]])
        pictures = np.concatenate([heldout.statistics[0], candidates.statistics[0, [place]]])
        left = evidence.difficulty_residuals(scores.reshape(-1), pictures.reshape(len(scores) * versions, -1))
        lowest = left.reshape(-1, versions).min(axis=1)
        expected.append(np.mean(lowest <= lowest[-1]))
    column = "p_not_used" if record.decider.plain else "p_value"
    np.testing.assert_allclose([float(row[column]) for row in rows], expected)
    assert result.findings.candidates.power == ()  # no variations of members were asked about


def test_queries_and_digests_count_the_variations(result, directory):
    record = json_files.read_record(directory)
    decider, pictures = record.decider, len(record.arrays.heldout) + len(CANDIDATES)
    assert record.variations.queries_made == decider.queries * pictures * len(VARIATIONS)
    settings = config(directory, model=MODEL, variations=True, **ROLES)
    expected = cost.expected(settings, open_images(settings, MODEL), MODEL.schedule)
    assert expected.candidates >= decider.queries * pictures * (1 + len(VARIATIONS))
    manifest = directory / "variations" / decider.label / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"variations.*manifest"):
        auditing.report(directory)


def test_no_fraction_is_estimated_from_the_best_of_variations(result):
    assert result.findings.fraction_used is None
    assert wording.fraction(None) == ""
    assert "was also asked about mirrored, cropped" in result.report.read_text(encoding="utf-8")


def test_variations_are_not_bounded_image_by_image(tmp_path):
    options = scoring.ScoringOptions(silent=True, budget=Budget(per_image=100))
    with pytest.raises(ValueError, match="variations cannot be combined with a limit on queries per image"):
        config(tmp_path, model=MODEL, variations=True, options=options, **ROLES)
