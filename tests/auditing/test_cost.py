"""How long an audit takes is said early and about right, and what is quicker for a slow model."""

import dataclasses
import time

import numpy as np
import pytest
from memoriser import SHAPE, config, images, memoriser, source

import dime_jax as dj
from dime_jax import auditing, scoring
from dime_jax._util.progress import duration
from dime_jax.auditing import cost
from dime_jax.auditing.images import open_images
from dime_jax.report import html
from dime_jax.scoring import score_table

ROLES = {
    "members": source(images(60, 0), "m"),
    "heldout": source(images(60, 21), "h"),
    "candidates": source(images(6, 2), "c"),
}
MODEL = memoriser(images(60, 0))


@pytest.fixture(autouse=True)
def _no_page(monkeypatch):
    monkeypatch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")


@pytest.mark.parametrize("decide_with", [None, "sima_l4@1"])
def test_the_expected_queries_are_those_of_the_audit_or_more(tmp_path, decide_with):
    settings = config(tmp_path, model=MODEL, decide_with=decide_with, **ROLES)
    expected = cost.expected(settings, open_images(settings, MODEL), MODEL.schedule)
    auditing.audit(settings)
    made = {name: score_table.read_table(tmp_path / name).queries_made for name in ("calibration", "test")}
    (candidates,) = (score_table.read_table(path).queries_made for path in (tmp_path / "candidates").iterdir())
    assert expected.calibration == made["calibration"]
    assert made["test"] <= expected.test == 60 * (1 + 2 + 2 + 2)  # the witness of direction is asked at both timesteps
    assert candidates <= expected.candidates == (30 + 6) * (1 if decide_with else 2)
    assert expected.settings == len(settings.jobs()) == 6
    assert expected.heldout == 30


def test_without_members_there_are_only_candidates(tmp_path):
    settings = config(tmp_path, model=MODEL, heldout=ROLES["heldout"], candidates=ROLES["candidates"])
    expected = cost.expected(settings, open_images(settings, MODEL), MODEL.schedule)
    assert expected == cost.Cost(0, 0, 66 * 3, 1, 60, 3)


def test_a_slow_model_says_early_what_it_will_take(tmp_path, capsys, monkeypatch):
    """A model of half a millisecond a query: the estimate of its first second must be near what it takes."""
    slow, asked = 0.0005, 0

    def eps(x, t):
        nonlocal asked
        asked += len(x)
        time.sleep(slow * len(x))
        return MODEL.eps(x, t)

    model = dj.Denoiser.from_function(eps, MODEL.schedule, SHAPE, name="slow")
    monkeypatch.setattr(cost, "LONG_SECONDS", 0.5)
    options = scoring.ScoringOptions(micro_batch=30)
    settings = config(tmp_path, model=model, queries=(2, 11), grid=None, options=options, **ROLES)
    result = auditing.audit(settings)
    lines = capsys.readouterr().err.splitlines()
    (total,) = [line for line in lines if "all stages" in line]
    assert lines.index(total) < next(i for i, line in enumerate(lines) if " queries, " in line and " left, " in line)
    expected = cost.expected(settings, open_images(settings, model), model.schedule)
    left = int(total.split("at most ")[1].split(" more")[0].replace(",", ""))
    assert expected.test + expected.candidates < left < expected.queries
    seconds = float(total.rpartition("about ")[2].removesuffix(" s"))
    assert left * slow - 1 <= seconds <= 10 * left * slow  # a busy machine may be slower
    assert sum("a lighter audit takes about" in line for line in lines) == 1
    assert result.results["queries_made"] == asked  # nothing was asked to measure


class TestAnnouncement:
    def lines(self, settings, seconds):
        return list(cost.eta_lines(settings, open_images(settings, MODEL), MODEL.schedule, seconds))

    def test_below_ten_minutes_it_is_only_the_time(self, tmp_path):
        settings = config(tmp_path, model=MODEL, **ROLES)
        total = cost.expected(settings, open_images(settings, MODEL), MODEL.schedule).queries
        assert len(self.lines(settings, 599 / total)) == 1
        assert self.lines(settings, 60 / total) == [
            f"all stages of the audit need at most {total:,} more queries: about 60 s"
        ]

    def test_above_it_says_what_is_quicker_and_what_that_loses(self, tmp_path):
        many = {"members": source(images(600, 0), "m"), "heldout": source(images(600, 21), "h")}
        settings = config(tmp_path / "mine", model=MODEL, candidates=ROLES["candidates"], grid=None, **many)
        _, quicker, loss = self.lines(settings, 10.0)
        light = cost.expected(cost.lighter(settings), open_images(settings, MODEL), MODEL.schedule)
        assert light.calibration == 120 * (2 * (1 + 1) + 1 + 2 * 2)  # two t: sima, pia with its start, dime
        took = duration(10.0 * light.queries)
        how = "try --profile light with another --output"
        assert quicker == f"a lighter audit takes about {took}: {how} and without --queries"
        _, quicker, _ = self.lines(dataclasses.replace(settings, queries=None), 10.0)
        assert quicker == f"a lighter audit takes about {took}: {how}"
        assert "it chooses from 6 attack settings instead of 12" in loss
        assert "among 140 held-out images instead of 450, so that no p-value is below 0.0071 instead of 0.0022" in loss

    def test_without_members_nothing_asks_less_than_three_queries(self, tmp_path):
        roles = {name: ROLES[name] for name in ("heldout", "candidates")}
        assert len(self.lines(config(tmp_path, model=MODEL, queries=None, attacks=None, **roles), 10.0)) == 1

    @pytest.mark.parametrize("change", [{"profile": "light"}, {"attacks": ("sima_mc_norms",), "queries": (10,)}])
    def test_where_nothing_is_lighter_nothing_is_advised(self, tmp_path, change):
        assert len(self.lines(config(tmp_path, model=MODEL, **ROLES, **change), 10.0)) == 1


def test_the_light_profile_is_a_whole_audit(tmp_path):
    results = auditing.audit(
        config(tmp_path, model=MODEL, profile="light", attacks=None, queries=None, grid=None, **ROLES)
    ).results
    assert {row["attack"] for row in results["results"]} >= {"loss", "secmi", "sima_l4", "dime", "dime_central"}
    assert {row["queries_per_image"] for row in results["results"] if row["attack"] == "dime"} == {2}
    times = [row["setting"]["t"] for row in results["results"] if "t" in row["setting"]]
    assert np.unique(times).tolist() in ([70], [120], [70, 120])
