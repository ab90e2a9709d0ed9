"""Adjusted p-values of an audit, beside a fit and a count made anew; hard pictures have high scores here."""

import csv
import dataclasses

import numpy as np
import pytest
from memoriser import SCHEDULE, SHAPE, config, floats, source

import dime_jax as dj
from dime_jax import auditing, evidence
from dime_jax.evidence import adjusting
from dime_jax.findings import json_files
from dime_jax.findings.candidates import find_candidates
from dime_jax.protocol import stages
from dime_jax.protocol.record import Record
from dime_jax.report import html

FORGOTTEN = 0.45  # of every training image


def images(count, seed):
    """Noise of more or less contrast."""
    rng = np.random.default_rng(seed)
    contrast = rng.uniform(0.3, 1, (count, 1, 1, 1))
    return np.uint8(np.round(127.5 + contrast * rng.uniform(-127.5, 127.5, (count, *SHAPE))))


def forgetful(train):
    """Remembers a paler version of its training images, so that what it forgot grows with their contrast."""
    train = floats(train).reshape(len(train), -1)

    def eps(x, t):
        flat = np.asarray(x).reshape(len(x), -1)
        scale, sigma = float(SCHEDULE.sqrt_abar(int(t))), float(SCHEDULE.sigma(int(t)))
        nearest = np.argmin(np.sum((flat[:, None] - scale * train[None]) ** 2, axis=-1), axis=1)
        return ((flat - scale * (1 - FORGOTTEN) * train[nearest]) / sigma).reshape(np.shape(x)).astype(np.float32)

    return dj.Denoiser.from_function(eps, SCHEDULE, SHAPE, name="forgetful")


MEMBERS, HELDOUT = images(120, 0), images(260, 1)
UNLIKE = np.uint8(255 * (np.indices(SHAPE).sum(axis=0) % 2))[None]  # a chessboard
CANDIDATES = np.concatenate([images(10, 2), images(9, 3), UNLIKE])


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")
        return auditing.audit(
            config(
                tmp_path_factory.mktemp("adjusted"),
                model=forgetful(np.concatenate([MEMBERS, CANDIDATES[:10]])),
                members=source(MEMBERS, "m"),
                heldout=source(HELDOUT, "h"),
                candidates=source(CANDIDATES, "c"),
                attacks=("sima_l4",),
                calibration_size=60,
            )
        )


@pytest.fixture(scope="module")
def record(result):
    return json_files.read_record(result.directory)


@pytest.fixture
def rows(result):
    with open(result.directory / "candidates.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def statistics(pixels):
    return evidence.image_statistics(floats(pixels))


def naive_ridge(design, target):
    """The penalty that predicts images best from the others, by leaving each of them out."""
    n, k = design.shape

    def solve(keep, penalty):
        held_back = n * penalty * np.diag([1.0] * (k - 1) + [0.0])
        return np.linalg.solve(design[keep].T @ design[keep] + held_back, design[keep].T @ target[keep])

    everyone, best = np.arange(n), None
    for penalty in 10.0 ** np.arange(-3, 4):
        off = np.array([target[i] - design[i] @ solve(everyone != i, penalty) for i in everyone])
        if best is None or np.sum(off**2) < np.sum(best[0] ** 2):
            best = off, solve(everyone >= 0, penalty)
    return best


def naive_adjustment(scores, pictures):
    mean, std = pictures.mean(axis=0), pictures.std(axis=0)
    varies = std > 1e-8

    def design(those):
        standard = np.clip((those[:, varies] - mean[varies]) / std[varies], -5, 5)
        return np.concatenate([standard, np.ones((len(those), 1))], axis=1)

    off, location = naive_ridge(design(pictures), scores)
    _, scale = naive_ridge(design(pictures), np.log(np.maximum(np.abs(off), 0.1 * np.median(np.abs(off)))))
    return lambda score, those: (score - design(those) @ location) / np.exp(design(those) @ scale)


@pytest.fixture(scope="module")
def naive(result, record):
    """Adjusted scores of candidates, reference and test members: from pixels, score tables and nothing else."""
    halves, decider = stages.read_halves(result.directory), record.decider
    pixels = np.concatenate([MEMBERS, HELDOUT, CANDIDATES])
    calibration = dj.scoring.score_table.read_table(result.directory / "calibration")
    adjust = naive_adjustment(
        stages.frozen_scores(calibration, decider, halves.calibration.heldout),
        statistics(pixels[halves.calibration.heldout]),
    )
    asked = record.candidates
    reference = np.setdiff1d(np.arange(120, 380), halves.calibration.heldout)
    candidates = np.arange(380, 400)
    return {
        name: adjust(stages.frozen_scores(table, decider, those), statistics(pixels[those]))
        for name, table, those in (
            ("reference", asked, reference),
            ("candidates", asked, candidates),
            ("members", record.known.table, halves.test.member),
        )
    }


def naive_p(scores, reference):
    return [(1 + sum(other <= score for other in reference)) / (1 + len(reference)) for score in scores]


def test_the_column_is_the_rank_of_what_the_picture_does_not_explain(rows, naive):
    assert list(rows[0])[-1] == "p_adjusted"
    expected = naive_p(naive["candidates"], naive["reference"])
    assert len(naive["reference"]) == 200
    assert [float(row["p_adjusted"]) for row in rows[:-1]] == pytest.approx(expected[:-1], abs=1e-12)
    assert [row["p_adjusted"] for row in rows] != [row["p_value"] for row in rows]


def test_what_is_unlike_has_neither_p_value(rows):
    assert rows[-1]["reason"] == "as a picture it is unlike the held-out images"
    assert (rows[-1]["p_value"], rows[-1]["p_adjusted"]) == ("", "")


def test_power_beside_is_the_share_of_test_members_below_the_level(result, record, naive):
    found = result.findings.candidates.adjusted
    assert (found.missing, found.fitted_to, found.heldout, found.members) == ("", 60, 200, 60)
    plain = naive_p(record.scores(record.decider).member, record.own_scores(record.arrays.heldout))
    adjusted = naive_p(naive["members"], naive["reference"])
    assert [at.level for at in found.power] == [0.05, 0.01]
    for at in found.power:
        assert at.plain.value == pytest.approx(sum(p <= at.level for p in plain) / 60)
        assert at.adjusted.value == pytest.approx(sum(p <= at.level for p in adjusted) / 60)
        assert at.plain.low <= at.plain.value <= at.plain.high
    assert found.power[0].adjusted.low > found.power[0].plain.value + 0.1  # here the picture explains much
    assert json_files.read_results(result.directory).candidates.adjusted == found


def test_verdicts_are_those_of_the_plain_p_values(result, record, rows):
    p = np.array([float(row["p_value"] or np.nan) for row in rows])
    expected = evidence.candidate_verdicts(p, 200).verdict
    assert [row["verdict"] for row in rows] == expected
    adjusted = np.array([float(row["p_adjusted"] or np.nan) for row in rows])
    assert expected != evidence.candidate_verdicts(adjusted, 200).verdict


def column(record):
    return [row.p_adjusted for row in find_candidates(record, None)[0]]


@pytest.mark.parametrize("role", ["calibration members", "test members", "reference"])
def test_the_fit_is_to_calibration_held_out_images_alone(record, monkeypatch, role):
    """Other scores of anybody else change no coefficient."""
    fits, fit = [], adjusting.fit_adjustment
    monkeypatch.setattr(adjusting, "fit_adjustment", lambda *arguments: fits.append(fit(*arguments)) or fits[-1])
    before = column(record)
    calibration, test, own = Record.calibration_scores, Record.scores, Record.own_scores

    def moved(sides):
        return dj.data.Pair(sides.member + 7, sides.heldout)

    changed = {
        "calibration members": ("calibration_scores", lambda self: moved(calibration(self))),
        "test members": ("scores", lambda self, frozen: moved(test(self, frozen))),
        "reference": ("own_scores", lambda self, those: own(self, those) + 7 * np.isin(those, self.arrays.heldout)),
    }
    monkeypatch.setattr(Record, *changed[role])
    after = column(record)
    assert (after == before) == (role != "reference")  # only the reference is compared with
    assert len(fits) == 4
    for one in fits[1:]:
        np.testing.assert_array_equal(one.location, fits[0].location)
        np.testing.assert_array_equal(one.scale, fits[0].scale)


def test_images_in_groups_widen_the_interval_of_the_power(record):
    """Test members as ten owners of six, who score alike."""
    member = record.split.member
    owners = np.full(len(record.arrays.groups), -1)
    owners[member[np.argsort(record.scores(record.decider).member)]] = np.repeat(np.arange(10), 6)
    grouped = dataclasses.replace(record, arrays=dataclasses.replace(record.arrays, groups=owners))
    alone, together = (find_candidates(one, None)[1].adjusted.power[0].plain for one in (record, grouped))
    assert together.value == alone.value
    assert together.high - together.low > 1.5 * (alone.high - alone.low)
