"""Whole audits of a model that remembers; what they say is checked against what was built in."""

import csv
import dataclasses
import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
from memoriser import config, images, memoriser, source

import dime_jax as dj
from dime_jax import auditing, cli, scoring
from dime_jax._util import digests, records
from dime_jax.evidence import metrics
from dime_jax.findings import finding, gate, json_files, wording
from dime_jax.protocol import stages
from dime_jax.protocol.facts import Settings
from dime_jax.report import html
from dime_jax.scoring import query_ledger, score_table
from dime_jax.scoring.query_ledger import Budget, BudgetExceeded

pytestmark = pytest.mark.usefixtures("no_figures")

MEMBERS, HELDOUT, CANDIDATES = images(120, 0), images(120, 21), np.concatenate([images(6, 2), images(6, 6)])
OTHERS = images(120, 8)
# Half of the candidates are members as well, but are not among the known ones.
MODEL = memoriser(np.concatenate([MEMBERS, CANDIDATES[:6]]))
NAMES = [f"<img src=x onerror=alert({i})>" if i == 3 else f"candidate-{i}" for i in range(12)]
ROLES = {
    "members": source(MEMBERS, "m"),
    "heldout": source(HELDOUT, "h"),
    "candidates": source(CANDIDATES, "c", ids=NAMES),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def result(directory):
    return auditing.audit(config(directory, model=MODEL, **ROLES))


@pytest.fixture
def _no_page(monkeypatch):
    """Figures and page take seconds, and are not what most tests are about."""
    monkeypatch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")


def test_it_finds_the_members_among_the_candidates(result, directory):
    found = result.results["candidates"]
    with open(directory / "candidates.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [f"candidates/{name}" for name in NAMES]
    assert [row["verdict"] == "evidence of membership" for row in rows] == [True] * 6 + [False] * 6
    assert (found["count"], found["evidence"]) == (12, 6)
    assert found["set_test"]["statistic"] > 0.6
    assert found["truth"] is None
    assert result.results["headline"]["answer"].startswith("This model remembers its training images")
    assert result.results["headline"]["alarms"] == []


def test_it_estimates_which_fraction_of_the_candidates_was_used(result, directory):
    used = result.findings.fraction_used
    assert used.low <= 0.5 <= used.high
    assert abs(used.value - 0.5) < 0.1
    assert (used.n, used.n_members, used.n_heldout) == (12, 60, 60)
    assert f"About {100 * used.value:.0f} % of them were used in training" in result.findings.headline.candidates
    assert "What fraction of them was used:" in result.report.read_text(encoding="utf-8")
    assert json_files.read_results(directory).fraction_used == used


@pytest.mark.usefixtures("result")
class TestRecordsOfOtherVersions:
    """They are sealed as ours are; what they hold is another matter."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"schema_version": 2}, r"audit\.json: schema_version must be 1, got 2"),
            ({"grid_size": "many"}, r"audit\.json\.grid_size must be a number, got 'many'"),
            ({"images": {"members": 1, "heldout": 1, "candidates": 1}}, r"audit\.json\.images must have 'unusable'"),
        ],
    )
    def test_facts_are_refused_in_one_line(self, tmp_path, directory, changes, message):
        sealed = digests.read(directory / "audit.json")
        digests.write(tmp_path / "audit.json", {**sealed.contents, **changes}, [])
        with pytest.raises(ValueError, match=message) as error:
            json_files.read_record(tmp_path)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["compared", "members_found"])
    def test_a_missing_array_is_named(self, tmp_path, directory, name):
        sealed = digests.read(directory / "audit.json")
        arrays = sealed.read_arrays("audit.npz")
        del arrays[name]
        np.savez(tmp_path / "audit.npz", **arrays)
        digests.write(tmp_path / "audit.json", sealed.contents, ["audit.npz"])
        with pytest.raises(ValueError, match=rf"audit\.npz: no array '{name}' in it, so it is not of this version"):
            json_files.read_record(tmp_path)

    def test_a_calibration_of_another_version_is_refused(self, tmp_path, directory):
        sealed = digests.read(directory / "calibration.json")
        digests.write(tmp_path / "calibration.json", {**sealed.contents, "schema_version": 2}, [])
        with pytest.raises(ValueError, match=r"calibration\.json: schema_version must be 1, got 2"):
            stages.read_calibrations(tmp_path)


def test_p_values_are_ranks_among_held_out_images_that_chose_nothing(result, directory):
    halves = stages.read_halves(directory)
    decider = json_files.read_record(directory).decider
    table = score_table.read_table(directory / "candidates" / decider.label)
    heldout = stages.frozen_scores(table, decider, halves.test.heldout)
    with open(directory / "candidates.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        rank = np.sum(heldout <= float(row["score"]))
        assert float(row["p_value"]) == pytest.approx((1 + rank) / (1 + len(halves.test.heldout)))
    assert result.results["candidates"]["heldout"] == len(halves.test.heldout) == 60


def test_the_calibration_half_chooses_who_decides(result, directory):
    frozen = [one for one in stages.read_calibrations(directory) if one.attack != "level_only"]  # not asked for
    best = max(frozen, key=lambda one: one.auc)
    assert result.results["decided_by"]["calibration_auc"] == best.auc
    assert result.results["decided_by"]["chosen"] == "highest AUC on the calibration half"


def test_results_have_all_that_is_promised(result, directory):
    results = json.loads((directory / "results.json").read_text())
    assert results == result.results
    of_others = {"captions", "caption_baseline", "reference", "reference_queries_made"}
    assert set(results) == gate.AUDIT_KEYS - of_others  # of text-conditioned models, and beside a reference
    assert records.plain(json_files.read_results(directory)) == results
    for row in results["results"]:
        assert row.keys() == gate.ROW.keys() - {"beside", "beside_adjusted"}
        assert all(
            row[name].keys() == keys.keys()
            for name, keys in gate.ROW.items()
            if name in row and isinstance(keys, dict) and keys
        )
    promised = {"schema_version", "results", "blind_baseline", "duplicates", "fingerprints", "precision", "seed"}
    promised |= {"queries_made", "warnings", "candidates", "epsilon_lower_bound", "comparisons", "headline"}
    promised |= {"model_check", "direction"}
    assert promised <= set(results)
    rows = [(row["attack"], row["queries_per_image"]) for row in results["results"]]
    assert sorted(rows) == [("dime", 2), ("level_only", 1), ("pia_l2", 2), ("sima_l4", 1)]
    assert results["direction"]["judgement"] == "above"
    assert [(auc["half"], auc["t"], auc.get("adjusted")) for auc in results["direction"]["aucs"]] == [
        (half, t, adjusted) for half in ("calibration", "test") for t in (70, 120) for adjusted in (None, True)
    ]
    assert results["blind_baseline"]["auc"]["low"] < 0.5 < results["blind_baseline"]["auc"]["high"]
    assert not results["blind_baseline"]["explained"]
    assert results["epsilon_lower_bound"]["epsilon"] > 0.5
    assert "not a DP audit" in results["epsilon_lower_bound"]["label"]
    tables = [directory / "calibration", directory / "test", *(directory / "candidates").iterdir()]
    check = results["model_check"]
    assert check["passed"]
    scored = sum(score_table.read_table(table).queries_made for table in tables)
    assert results["queries_made"] == scored + check["queries"]


def test_dime_is_compared_with_the_best_baseline_at_no_more_queries(result, directory):
    (comparison,) = result.results["comparisons"]
    assert (comparison["budget"], comparison["dime"]) == (2, "dime@2")
    record = json_files.read_record(directory)
    by_label = {one.label: one for one in record.calibrations}
    best = max((by_label[name] for name in ("pia_l2@2", "sima_l4@1")), key=lambda one: one.auc)
    assert by_label[comparison["baseline"]].auc == best.auc
    scores = [record.scores(by_label[comparison[side]]) for side in ("dime", "baseline")]
    expected = metrics.auc(*scores[0]) - metrics.auc(*scores[1])
    assert comparison["auc_difference"]["value"] == pytest.approx(expected)


def test_what_crowding_adds_is_dime_minus_its_own_level(result, directory):
    (effect,) = result.results["crowding"]
    record = json_files.read_record(directory)
    by_label = {one.label: one for one in record.calibrations}
    dime, terms = by_label[effect["dime"]], record.known.table.terms(stages.frozen_job(by_label["dime@2"]))
    sides = [np.isin(record.known.table.index, side) for side in (record.split.member, record.split.heldout)]
    level = metrics.auc(*(terms[0, side] for side in sides))
    ours = metrics.auc(*(dime.score(terms[:, side]) for side in sides))
    assert effect["same_setting"]["value"] == pytest.approx(ours - level, abs=1e-12)
    assert effect["weight"] == dime.weights[1]
    alone = record.scores(by_label[effect["level"]])
    assert effect["own_setting"]["value"] == pytest.approx(ours - metrics.auc(*alone), abs=1e-12)
    assert "Does crowding help?" in (directory / "report.html").read_text()


def test_repeating_it_asks_nothing_and_changes_nothing(result, directory):
    before = {name: (directory / name).read_bytes() for name in ("results.json", "candidates.csv", "report.html")}
    asked = MODEL.queries.count
    auditing.audit(config(directory, model=MODEL, **ROLES))
    assert MODEL.queries.count == asked
    assert before == {name: (directory / name).read_bytes() for name in before}
    (directory / "results.json").unlink()
    (directory / "report.html").unlink()
    auditing.report(directory)
    assert before == {name: (directory / name).read_bytes() for name in before}


def test_another_function_of_that_name_is_not_given_its_results(result, directory, tmp_path):
    shutil.copytree(directory, tmp_path / "copy")
    other = dj.Denoiser.from_function(lambda x, t: np.asarray(x), MODEL.schedule, MODEL.image_shape, name=MODEL.name)
    with pytest.raises(ValueError, match="memoriser is not the model that this run was started with"):
        auditing.audit(config(tmp_path / "copy", model=other, **ROLES))
    assert other.queries.count == 1


def test_other_candidates_in_the_same_directory_are_refused(result, directory):
    with pytest.raises(ValueError, match="a finished audit of other images"):
        auditing.audit(config(directory, model=MODEL, **{**ROLES, "candidates": source(images(12, 5))}))


@pytest.fixture(scope="module")
def ones(tmp_path_factory):
    model = dj.Denoiser.from_function(lambda x, t: np.ones_like(x), MODEL.schedule, MODEL.image_shape, name="ones")
    return auditing.audit(config(tmp_path_factory.mktemp("ones"), model=model, **ROLES)), model


class TestWhatIsNoDenoiser:
    """A false all-clear is the worst answer: ones, and a model under another's schedule."""

    def test_is_the_headline_and_nothing_is_decided(self, ones):
        results = ones[0].results
        headline = results["headline"]
        assert headline["answer"].startswith("This cannot be audited as it is")
        assert "times that of predicting zero" in headline["alarms"][0]
        assert "No sign" not in json.dumps(headline)
        assert results["candidates"]["cannot_tell"] == 12
        assert not results["candidates"]["can_decide"]
        assert "does not predict noise" in ones[0].report.read_text()

    @pytest.mark.usefixtures("_no_page")
    def test_its_queries_are_counted_once(self, ones):
        results, model = ones[0].results, ones[1]
        assert results["queries_made"] == model.queries.count
        auditing.audit(config(ones[0].directory, model=model, **ROLES))
        assert results["queries_made"] == model.queries.count

    @pytest.mark.usefixtures("_no_page")
    def test_no_gate_passes_it(self, ones, capsys):
        assert cli.main(["report", str(ones[0].directory), "--fail-if", "queries_made < 0"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("dime-jax: no condition can be judged: The model does not predict noise: at t = ")
        assert error.count("\n") == 1
        assert cli.main(["report", str(ones[0].directory)]) == 0

    @pytest.mark.usefixtures("_no_page")
    def test_nor_without_known_members(self, tmp_path):
        model = dj.Denoiser.from_function(lambda x, t: np.zeros_like(x), MODEL.schedule, MODEL.image_shape)
        roles = {name: ROLES[name] for name in ("heldout", "candidates")}
        results = auditing.audit(config(tmp_path, model=model, **roles)).results
        assert results["headline"]["answer"].startswith("This cannot be audited as it is")
        assert results["candidates"]["cannot_tell"] == 12
        assert results["queries_made"] == model.queries.count

    @pytest.mark.usefixtures("_no_page")
    def test_a_wrong_schedule_is_named(self, tmp_path):
        shipped = dj.load_denoiser("digits")
        wrong = dj.Denoiser(shipped.apply, shipped.params, dj.cosine_schedule(), (8, 8, 1), fingerprint="wrong")
        digits = dj.data.open_source("digits")
        split = dict(np.load(pathlib.Path(dj.__file__).parent / "shipped_models" / "digits" / "split.npz"))
        sides = [np.stack([digits[i].image for i in split[side][:60]]) for side in ("member", "heldout")]
        members, heldout = (dj.data.from_images(x, name=n, transform="digits") for x, n in zip(sides, "mh"))
        settings = {"model": wrong, "members": members, "heldout": heldout, "attacks": ("sima_l4",)}
        results = auditing.audit(config(tmp_path, **settings)).results
        assert "seems to follow the linear schedule" in results["headline"]["alarms"][0]

    def test_what_returns_nothing_is_refused_in_one_line(self, tmp_path):
        model = dj.Denoiser.from_function(lambda x, t: None, MODEL.schedule, MODEL.image_shape)
        with pytest.raises(ValueError, match=r"eps must return an array of shape \[16, 8, 8, 1\], got None"):
            auditing.audit(config(tmp_path, model=model, **ROLES))


@pytest.mark.usefixtures("_no_page")
def test_an_interrupted_audit_continues(result, directory, tmp_path, failing):
    fails_once = failing(MODEL.eps, {30: KeyboardInterrupt()})
    model = dj.Denoiser.from_function(fails_once, MODEL.schedule, MODEL.image_shape, name=MODEL.name)
    with pytest.raises(KeyboardInterrupt):
        auditing.audit(config(tmp_path, model=model, **ROLES))
    again = auditing.audit(config(tmp_path, model=model, **ROLES)).results
    assert again["headline"] == result.results["headline"]
    assert [row["auc"] for row in again["results"]] == [row["auc"] for row in result.results["results"]]


@pytest.mark.usefixtures("_no_page")
def test_candidates_are_compared_with_every_image_that_calibrated_nothing(tmp_path):
    settings = config(tmp_path, model=MODEL, calibration_size=20, test_size=30, level=0.01, **ROLES)
    results = auditing.audit(settings).results
    halves = stages.read_halves(tmp_path)
    reference = json_files.read_record(tmp_path).arrays.heldout
    assert results["candidates"]["heldout"] == len(reference) == 100
    assert "fraction_used" not in results  # 30 members are too few to know it by
    assert not set(reference) & set(halves.calibration.heldout)
    assert set(halves.test.heldout) < set(reference)
    # Twelve candidates at 1 % need 1,199 held-out images for one alone.
    assert "With 100 held-out images, no candidate can be singled out" in results["headline"]["candidates"]
    assert "that would take 1,199." in results["headline"]["candidates"]


def test_a_weak_attack_does_not_clear_a_model_that_the_witness_accuses(result, directory):
    found = finding.find(json_files.read_record(directory)).results
    assert found.direction.judgement == "above"
    weak = [dataclasses.replace(row, auc=metrics.Estimate(0.5, 0.4, 0.6)) for row in found.results]
    answer = wording.headline(dataclasses.replace(found, results=tuple(weak))).answer
    assert answer.startswith("The attack that decides cannot tell members from held-out images, but")


@pytest.mark.usefixtures("_no_page")
def test_copies_of_held_out_images_accuse_nobody_more(tmp_path):
    """Three copies each of 120 pictures are 120 pictures, for p-values and for what they can decide."""
    roles = {**ROLES, "heldout": source(np.repeat(images(120, 5), 3, axis=0), "h")}
    found = auditing.audit(config(tmp_path, model=MODEL, attacks=("sima_l4",), **roles)).results["candidates"]
    assert found["withheld"] is None
    record = json_files.read_record(tmp_path)
    scores, heldout = (side.best for side in record.varied())
    distinct = np.unique(record.arrays.groups[record.arrays.heldout]).size
    assert distinct < 120 < len(heldout) == 3 * distinct
    assert (found["heldout"], found["smallest_p"]) == (distinct, 1 / (1 + distinct))
    expected = (1 + np.sum(heldout <= scores[:, None], axis=1) / 3) / (1 + distinct)
    np.testing.assert_allclose([row.p_value for row in finding.find(record).candidates], expected)


@pytest.mark.usefixtures("_no_page")
def test_the_attack_that_decides_can_be_named(tmp_path):
    result = auditing.audit(config(tmp_path, model=MODEL, decide_with="sima_l4@1", **ROLES))
    assert result.results["decided_by"]["attack"] == "sima_l4"
    assert result.results["decided_by"]["chosen"] == "asked for"
    with pytest.raises(ValueError, match=r"decide_with must be one of .*dime@2.*, got 'dime@7'"):
        auditing.audit(config(tmp_path, model=MODEL, decide_with="dime@7", **ROLES))


@pytest.mark.usefixtures("_no_page")
def test_swapped_sets_are_said_loudly_and_nothing_is_decided(tmp_path):
    swapped = {**ROLES, "members": ROLES["heldout"], "heldout": ROLES["members"]}
    results = auditing.audit(config(tmp_path, model=MODEL, **swapped)).results
    assert results["headline"]["answer"].startswith("Members and held-out images look swapped")
    assert "clearly below 50 %" in results["headline"]["alarms"][0]
    assert (results["candidates"]["evidence"], results["candidates"]["can_decide"]) == (0, False)
    assert results["candidates"]["cannot_tell"] == 12
    assert results["candidates"]["set_test"] is None
    assert results["epsilon_lower_bound"] is None


def test_candidates_of_another_kind_get_no_verdict(tmp_path):
    """Dimmed to half, they are unlike the held-out images: no verdict, though the model was trained on them."""
    dim = images(24, 2) // 2
    model = memoriser(np.concatenate([MEMBERS, dim]))
    result = auditing.audit(config(tmp_path, model=model, **{**ROLES, "candidates": source(dim, "c")}))
    found = result.results["candidates"]
    assert found["likeness"]["set_unlike"]
    assert (found["evidence"], found["cannot_tell"], found["set_test"]) == (0, 24, None)
    assert found["power"] == []
    with open(tmp_path / "candidates.csv", newline="", encoding="utf-8") as file:
        assert {(row["p_value"], row["p_not_used"]) for row in csv.DictReader(file)} == {("", "")}
    assert "a different kind of picture" in " ".join(result.results["headline"]["alarms"])
    assert "unlike the held-out images" in result.results["headline"]["candidates"]
    assert "a different kind of picture" in result.report.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be judged: no verdict was given on the candidates, since as pictures"):
        gate.check("candidates.evidence > 0", result.findings)
    assert gate.check("sima_l4@1.auc.low > 0.5", result.findings)


@pytest.mark.usefixtures("_no_page")
def test_candidates_that_look_less_like_members_than_held_out_images_do_are_an_alarm(tmp_path):
    """Without known members: the held-out images were trained on, the candidates were not."""
    roles = {"heldout": source(MEMBERS, "h"), "candidates": source(images(24, 5), "c")}
    results = auditing.audit(config(tmp_path, model=MODEL, **roles)).results
    assert results["candidates"]["less_like_members"] <= 0.01
    assert "clearly less like training images" in " ".join(results["headline"]["alarms"])
    assert results["candidates"]["evidence"] == 0


@pytest.mark.usefixtures("_no_page")
def test_no_set_is_judged_by_the_few_that_got_an_answer(tmp_path):
    """A model that gives no answer about just the candidates that it was trained on."""
    known = CANDIDATES[:6].astype(np.float32) / np.float32(127.5) - 1

    def evasive(x, t):
        scale = float(MODEL.schedule.sqrt_abar(int(t)))
        far = np.abs(np.asarray(x)[:, None] / scale - known[None]).reshape(len(x), 6, -1).mean(axis=2).min(axis=1) > 0.2
        return np.where(far[:, None, None, None], np.asarray(MODEL.eps(x, t)), np.float32(np.nan))

    model = dj.Denoiser.from_function(evasive, MODEL.schedule, MODEL.image_shape, name="evasive")
    result = auditing.audit(config(tmp_path, model=model, **ROLES))
    results = result.results
    assert results["candidates"]["set_withheld"] == "the model gave no finite answer for 6 of 12 candidates"
    assert results["candidates"]["withheld"] is None  # the others are judged one by one
    assert results["candidates"]["set_test"] is None
    assert "fraction_used" not in results
    with pytest.raises(ValueError, match="cannot be judged"):
        gate.check("candidates.evidence > 0", result.findings)


def test_no_gate_passes_where_no_candidate_could_have_been_evidence(result):
    found = result.findings
    undecided = dataclasses.replace(found, candidates=dataclasses.replace(found.candidates, can_decide=False))
    for condition in ("candidates.evidence > 0", "candidates.no_evidence < 1"):
        with pytest.raises(ValueError, match="cannot be judged: with so few held-out images no candidate could have"):
            gate.check(condition, undecided)
        gate.check(condition, found)
    gate.check("candidates.set_test.p_value <= 0.05", undecided)  # a set can be judged all the same


@pytest.mark.usefixtures("_no_page")
def test_the_check_of_the_model_is_evidence_too(tmp_path):
    ones = dj.Denoiser.from_function(lambda x, t: np.ones_like(x), MODEL.schedule, MODEL.image_shape, name="ones")
    auditing.audit(config(tmp_path, model=ones, **ROLES))
    (tmp_path / "model_check.json").unlink()
    with pytest.raises(ValueError, match=r"model_check\.json is missing, but audit\.json lists it"):
        auditing.report(tmp_path)


@pytest.mark.usefixtures("_no_page")
def test_a_model_that_remembers_something_else_shows_nothing(tmp_path):
    results = auditing.audit(config(tmp_path, model=memoriser(OTHERS), **ROLES)).results
    assert results["headline"]["answer"] == "No sign that this model remembers its training images."
    assert results["candidates"]["evidence"] == 0
    assert results["epsilon_lower_bound"]["epsilon"] == 0
    assert results["direction"]["judgement"] == "unsure"


@pytest.mark.usefixtures("_no_page")
def test_sets_that_differ_without_the_model_explain_the_result(tmp_path):
    bright, dark = images(120, 0), images(120, 1, brightest=140)
    roles = {"members": source(bright, "m"), "heldout": source(dark, "h")}
    results = auditing.audit(config(tmp_path, model=memoriser(images(120, 7)), **roles)).results
    blind = results["blind_baseline"]
    assert blind["fires"]
    assert blind["auc"]["low"] > 0.9
    assert results["headline"]["alarms"]
    assert "never saw the model" in " ".join(results["headline"]["alarms"])
    assert not results["headline"]["answer"].startswith("This model remembers")


@pytest.mark.usefixtures("_no_page")
def test_without_known_members_the_fixed_rule_decides(tmp_path):
    roles = {name: ROLES[name] for name in ("heldout", "candidates")}
    result = auditing.audit(config(tmp_path, model=MODEL, **roles))
    results = result.results
    assert results["results"] == []
    assert results["blind_baseline"] is None
    assert results["epsilon_lower_bound"] is None
    assert results["decided_by"]["setting"] == {"t_loss": 150, "t_level": 50, "gamma_level": 0.1}
    assert (results["decided_by"]["label"], results["decided_by"]["adjusted"]) == ("loss_level@3", True)
    asked = score_table.read_table(tmp_path / "candidates" / "loss_level@3").queries_made
    assert asked == 3 * (120 + 12) == results["queries_made"] - results["model_check"]["queries"]
    assert results["candidates"]["heldout"] == 120  # all of them: nothing was calibrated
    assert results["candidates"]["evidence"] == 6
    assert results["headline"]["answer"] == "6 of 12 candidates show evidence of membership."
    assert "finding nothing means little" in results["headline"]["detail"]
    assert (results["candidates"]["adjusted"], results["candidates"]["power"]) == (True, [])
    assert auditing.report(tmp_path).results == results


@pytest.mark.usefixtures("_no_page")
def test_what_depends_on_the_batch_tells_nobody_apart(tmp_path):
    """A model whose answers differ from batch to batch by far more than from image to image."""
    calls = iter(range(10**6))

    def moody(x, t):
        return np.asarray(x) * (1 + 0.05 * (next(calls) % 7))

    model = dj.Denoiser.from_function(moody, MODEL.schedule, MODEL.image_shape, name="moody")
    roles = {**ROLES, "members": source(OTHERS, "m"), "candidates": source(images(40, 5), "c")}
    results = auditing.audit(config(tmp_path, model=model, **roles)).results
    assert all(row["auc"]["low"] < 0.55 and row["auc"]["high"] > 0.45 for row in results["results"])
    assert results["candidates"]["set_test"]["p_value"] > 0.01


@pytest.mark.usefixtures("_no_page")
@pytest.mark.parametrize("right", [True, False])
def test_class_labels_reach_the_model(tmp_path, right):
    """A class-conditional model knows its images under their own labels only."""
    labels = np.arange(120, dtype=np.int32) % 3
    model = memoriser(MEMBERS, num_classes=3, labels=labels)
    given = labels if right else (labels + 1) % 3
    roles = {"members": source(MEMBERS, "m", labels=given), "heldout": source(HELDOUT, "h", labels=given)}
    row, _witness = auditing.audit(config(tmp_path, model=model, attacks=("sima_l4",), **roles)).results["results"]
    assert (row["auc"]["value"] > 0.99) == right


@pytest.mark.usefixtures("_no_page")
def test_owners_count_together(tmp_path):
    lines = [f"candidates/candidate-{i},{'one' if i < 6 else 'two'}" for i in range(12) if i != 3]
    (tmp_path / "groups.csv").write_text(
        "\n".join(["id,group", *lines, f"candidates/{NAMES[3]},one"]), encoding="utf-8"
    )
    settings = config(tmp_path / "audit", model=MODEL, groups=tmp_path / "groups.csv", **ROLES)
    test = auditing.audit(settings).results["candidates"]["set_test"]
    assert (test["n"], test["n_groups"]) == (12, 2)
    assert test["p_value"] > 0.01


@pytest.mark.usefixtures("_no_page")
def test_it_says_when_groups_leave_no_blind_baseline(tmp_path):
    owners = [f"members/{name},{'one' if i < 60 else 'two'}" for i, name in enumerate(ROLES["members"].ids)]
    (tmp_path / "groups.csv").write_text("\n".join(["id,group", *owners]), encoding="utf-8")
    settings = config(tmp_path / "audit", model=MODEL, groups=tmp_path / "groups.csv", **ROLES)
    results = auditing.audit(settings).results
    assert any("50% of the test images come in groups" in warning for warning in results["warnings"])
    assert results["blind_baseline"] is None
    assert any("differ without the model could not be checked" in warning for warning in results["warnings"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": 1.0}, "level must be > 0 and < 1, got 1.0"),
        ({"profile": "slow"}, "profile must be one of light, quick, paper, got 'slow'"),
        ({"images": "digits"}, "images and split must be given together"),
        ({"calibration_size": 3}, "calibration_size must be >= 10, got 3"),
        ({"attacks": ("dimes",)}, "unknown attack 'dimes'; expected one of loss, "),
        ({"queries": (1,), "attacks": ("dime",)}, "queries per image must be >= 2, the cost of dime, got 1"),
        ({"queries": (1,), "heldout": "h"}, "queries per image must be >= 3, the cost of loss_level, got 1"),
        ({"queries": (0,), "heldout": "h"}, r"queries must be >= 1, got \[0\]"),
        ({"decide_with": "dime"}, "decide_with must be one of sima_l4@1, pia_l2@2, dime@2, got 'dime'"),
        ({"decide_with": "dime@2", "heldout": "h"}, "must be one of loss_level@3, got 'dime@2'$"),
    ],
)
def test_bad_settings_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **change)


def test_settings_are_written_down(result):
    settings = result.results["settings"]
    assert settings["members"] == "m"
    assert settings["model"] == "memoriser"
    assert "output" not in settings
    asked = {field.name for field in dataclasses.fields(auditing.AuditConfig)}
    assert {field.name for field in dataclasses.fields(Settings)} == asked - {"output", "options", "use"} | {"after"}
    assert set(settings) <= asked


@pytest.mark.parametrize(
    ("profile", "dime", "central", "monte_carlo"),
    [
        ("light", [2], [2], []),
        ("quick", [2], [2], []),
        ("paper", [2, 11, 31], [2, 10, 30], [10, 30]),
    ],
)
def test_the_rows_of_a_profile(tmp_path, profile, dime, central, monte_carlo):
    settings = auditing.AuditConfig(tmp_path, profile=profile)
    labels = {row for row in settings.result_labels() if not row.startswith("secmi")}
    assert "secmi@8" in settings.result_labels()  # of fixed cost: no profile bounds it
    expected = {"loss": [1], "pia_l2": [2], "pia_l4": [2], "pian": [2], "sima_l4": [1], "dime_central": central}
    expected |= dict.fromkeys(("dime", "dime_theory", "crowding_only"), dime)
    expected |= {"level_only": [1, *(cost - 1 for cost in dime[1:])]}
    expected |= {name: [1] for name in ("level_l4", "level_low")} | {"loss_level": [3]}
    expected |= {
        **dict.fromkeys(("loss_mc", "sima_mc_norms", "sima_mc_vector"), monte_carlo),
        "clid": [15],
    }  # clid for captions
    assert labels == {f"{name}@{cost}" for name, costs in expected.items() for cost in costs}


@pytest.mark.usefixtures("_no_page")
def test_what_costs_more_than_was_allowed_is_left_out_and_said(tmp_path, capsys):
    roles = {**ROLES, "model": MODEL, "attacks": ("sima_l4", "secmi", "dime"), "queries": (1,)}
    options = scoring.ScoringOptions(micro_batch=64)
    results = auditing.audit(config(tmp_path, **roles, options=options)).results
    assert {row["attack"] for row in results["results"]} == {"sima_l4", "level_only"}
    said = capsys.readouterr().err
    assert "warning: secmi is left out: it costs at least 8 queries per image" in said
    assert "warning: dime is left out: it costs at least 2 queries per image" in said


@pytest.mark.usefixtures("_no_page")
def test_a_budget_binds_over_the_whole_audit(tmp_path):
    """One query short, the last stage is refused before it asks; the exact number, over restarts, is enough."""
    asked = []

    def eps(x, t):
        asked.append(len(x))
        return MODEL.eps(x, t)

    model = dj.Denoiser.from_function(eps, MODEL.schedule, MODEL.image_shape, name="counted")
    unbounded = auditing.audit(config(tmp_path / "unbounded", model=model, **ROLES)).findings.queries_made
    assert sum(asked) == unbounded
    asked.clear()
    for total in (unbounded - 1, unbounded):
        bounded = scoring.ScoringOptions(silent=True, micro_batch=64, budget=Budget(total=total))
        audit = functools.partial(auditing.audit, config(tmp_path / "b", model=model, options=bounded, **ROLES))
        if total < unbounded:
            with pytest.raises(BudgetExceeded, match=f"but the budget of {total:,} has "):
                audit()
            assert sum(asked) < total
    assert audit().findings.queries_made == sum(asked) == unbounded


@pytest.mark.usefixtures("_no_page")
def test_a_budget_per_image_counts_every_stage(tmp_path):
    """Held-out images of the test half are asked about again beside the candidates."""
    auditing.audit(config(tmp_path / "unbounded", model=MODEL, **ROLES))
    spent = query_ledger.spent_per_image(tmp_path / "unbounded", 10_000)
    assert spent.max() > 2
    for per_image, enough in ((int(spent.max()), True), (int(spent.max()) - 1, False)):
        bounded = scoring.ScoringOptions(silent=True, micro_batch=64, budget=Budget(per_image=per_image))
        audit = functools.partial(
            auditing.audit, config(tmp_path / str(per_image), model=MODEL, options=bounded, **ROLES)
        )
        if enough:
            audit()
        else:
            with pytest.raises(BudgetExceeded, match=f"the budget allows {per_image} queries per image"):
                audit()
