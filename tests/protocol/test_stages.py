"""Calibrate, then test, in stages: against the same protocol in memory, and what may and may not influence it."""

import json
import shutil

import jax
import numpy as np
import pytest
from tiny_model import SHAPE, function, quiet

import dime_jax as dj
from dime_jax import attacks, evidence
from dime_jax._util import digests, records
from dime_jax.core import draws
from dime_jax.evidence import Way, metrics
from dime_jax.findings import json_files
from dime_jax.guards import identity, model_check
from dime_jax.protocol import calibration, stages, statistics
from dime_jax.protocol.beside import Guarded
from dime_jax.scoring import planning, score_table
from dime_jax.scoring.query_ledger import queries_made

SEED = 3
JOBS = [
    *planning.grid_jobs(["loss", "sima_l4"], "quick"),
    *planning.grid_jobs(["dime", "dime_theory"], "quick", [2], settings=[{"t": 70}]),
]


def members_are_small(x, t):
    """A model whose responses tell images of small pixel values from others, at late times only."""
    x = np.asarray(x)
    return x * np.abs(x).mean(axis=(1, 2, 3), keepdims=True) if t > 100 else np.sign(x)


@pytest.fixture(scope="module")
def source():
    rng = np.random.default_rng(0)
    scale = np.where(np.arange(80) < 40, 0.5, 0.7)[:, None, None, None]
    return dj.data.from_images((scale * rng.uniform(-1, 1, (80, *SHAPE))).astype(np.float32))


@pytest.fixture(scope="module")
def halves(source):
    return dj.data.halves(dj.data.Split(np.arange(40), np.arange(40, 80)), source.ids, seed=SEED)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def results(directory, source, halves):
    model = function(members_are_small)
    stages.run(directory, model, source, halves, JOBS, seed=SEED, options=quiet(micro_batch=16))
    return json_files.read_results(directory)


def test_it_is_the_protocol(results, source, halves):
    model, z = function(members_are_small), jax.random.key(SEED)

    def pair(job, split):
        def terms(index):
            x = np.stack([source[i].image for i in index])
            batch = draws.Draws(z, draws.id_numbers([source.ids[i] for i in index]))
            return np.asarray(job.attack.run(model.eps_fn(), model.schedule, x, batch, job.setting))

        return calibration.TermPair(terms(np.sort(split.member)), terms(np.sort(split.heldout)))

    for name in ("sima_l4", "loss", "dime"):
        jobs = [job for job in JOBS if job.attack.name == name]
        frozen = calibration.calibrate(
            jobs[0].attack, model.schedule, [j.setting for j in jobs], [pair(j, halves.calibration) for j in jobs]
        )
        outcome = calibration.evaluate(
            frozen, pair(planning.Job(jobs[0].attack, frozen.setting), halves.test), seed=SEED
        )
        assert name != "sima_l4" or frozen.setting["t"] == 120
        (row,) = [row for row in results.results if row.attack == name]
        assert {k: row.setting[k] for k in frozen.setting} == frozen.setting
        assert row.auc.value == pytest.approx(outcome.metrics.auc.value, abs=1e-6)
        assert row.at_threshold.tau == pytest.approx(frozen.tau, rel=1e-4)


def test_the_test_half_is_scored_at_the_frozen_settings_only(directory, results):
    table = score_table.read_table(directory / "test")
    frozen = [*stages.read_calibrations(directory), *stages.read_calibrations(directory, Way.ADJUSTED)]
    witness = planning.witness_jobs(JOBS)
    jobs = [planning.Job(attacks.get_attack(f.attack), f.setting) for f in frozen] + witness
    assert set(table.readings) == {str(reading) for job in jobs for reading in job.recipe.readings}
    calibration_queries = planning.make_plan(JOBS + witness, table.schedule).queries_per_image * 40
    test_queries = planning.make_plan(jobs, table.schedule).queries_per_image * 40
    check = model_check.read_check(directory, "function:mine").queries
    assert results.queries_made == calibration_queries + test_queries + check
    assert (
        check
        == queries_made(directory) - calibration_queries - test_queries
        > identity.queries(directory, "function:mine")
    )
    assert {(row.attack, row.queries_per_image) for row in results.results} == {
        ("loss", 1),
        ("sima_l4", 1),
        ("dime", 2),
        ("dime_theory", 2),
        ("level_only", 1),  # the witness of direction
    }


def test_stages_repeat_without_a_model(directory, results):
    before = (directory / "calibration.json").read_bytes()
    (directory / "calibration.json").unlink()
    stages.calibrate_run(directory)
    assert (directory / "calibration.json").read_bytes() == before
    assert stages.evaluate_run(directory) == results
    assert records.plain(results) == json.loads((directory / "results.json").read_text())


FITTED = planning.grid_jobs(
    ["dime_central", "level_low"], "quick", [2], settings=[{"t": t, "gamma": 0.4} for t in (70, 120)]
)


@pytest.mark.parametrize("jobs", [JOBS, FITTED], ids=["searched", "adjusted"])
def test_test_labels_choose_nothing(source, halves, tmp_path, jobs):
    member, heldout = halves.test.member, halves.test.heldout
    swapped = dj.data.Split(np.concatenate([member[:5], heldout[5:]]), np.concatenate([heldout[:5], member[5:]]))
    found = []
    for name, test in (("right", halves.test), ("swapped", swapped)):
        model, some = function(members_are_small), halves._replace(test=test)
        stages.run(tmp_path / name, model, source, some, jobs, seed=SEED, options=quiet(micro_batch=16))
        found.append(stages.read_calibrations(tmp_path / name))
    assert found[0] == found[1]
    assert {job.attack.name for job in jobs} <= {one.attack for one in found[0]}


def test_a_frozen_threshold_survives_json(directory, results, tmp_path):
    frozen = [one._replace(tau=-np.inf) for one in stages.read_calibrations(directory)]
    digests.write(tmp_path / "calibration.json", {"schema_version": 1, "calibrations": records.plain(frozen)}, [])
    assert stages.read_calibrations(tmp_path) == frozen


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (lambda path: stages.calibrate_run(path), r"no .*run\.json: start a run first"),
        (lambda path: stages.score_half(path, "test", None, None), r"no .*run\.json: start a run first"),
        (lambda path: stages.score_half(path, "both", None, None), "unknown half 'both'; expected one of"),
        (lambda path: stages.evaluate_run(path), "is not a score table"),
    ],
)
def test_stages_out_of_order_say_what_is_missing(tmp_path, stage, message):
    with pytest.raises(ValueError, match=message) as error:
        stage(tmp_path)
    assert "\n" not in str(error.value)


def test_another_run_in_the_same_directory_is_refused(directory, results, halves, source):
    with pytest.raises(ValueError, match="holds a run with another seed"):
        stages.begin(directory, JOBS, halves, seed=SEED + 1)
    with pytest.raises(ValueError, match="holds a run with other members"):
        stages.begin(directory, JOBS, halves._replace(test=halves.calibration), seed=SEED)
    with pytest.raises(ValueError, match="was calibrated on model function:mine, this is function:other"):
        stages.score_half(directory, "test", Guarded(function(name="other")), source)


def test_an_empty_side_is_refused(tmp_path, halves):
    empty = dj.data.Split(np.zeros(0, np.int64), halves.test.heldout)
    with pytest.raises(ValueError, match="test_member must not be empty"):
        stages.begin(tmp_path, JOBS, halves._replace(test=empty))


def test_images_without_a_finite_answer_are_left_out_with_a_count(tmp_path):
    many = dj.data.from_images(np.random.default_rng(0).uniform(-1, 1, (400, *SHAPE)).astype(np.float32))
    cut = dj.data.halves(dj.data.Split(np.arange(200), np.arange(200, 400)), many.ids)
    victim = many[cut.test.member[0]].image[0, 0, 0]

    def eps(x, t):
        return np.where(np.asarray(x)[:, :1, :1] == victim, np.nan, members_are_small(x, t))

    jobs = planning.grid_jobs(["sima_l4"], "quick", settings=[{"t": 70}])
    stages.run(tmp_path, function(eps), many, cut, jobs, options=quiet(micro_batch=64))
    results = json_files.read_results(tmp_path)
    assert results.warnings == ("1 of 200 test images were left out: unreadable or no finite answer",)


@pytest.fixture(scope="module")
def grouped(directory, results, halves, tmp_path_factory):
    """The same run with groups of four neighbours, of which some lie in both halves and on both sides."""
    copy = tmp_path_factory.mktemp("grouped")
    groups = np.where(np.arange(80) < 72, np.arange(80) // 4, -1)
    stages.begin(copy, JOBS, halves, SEED, groups=groups)
    for name in ("calibration", "test"):
        shutil.copytree(directory / name, copy / name)
    for name in ("statistics.json", "statistics.npz"):
        shutil.copy(directory / name, copy / name)
    stages.calibrate_run(copy)
    return copy, groups


def test_groups_are_stored_and_intervals_allow_for_them(grouped, directory, results, halves):
    copy, groups = grouped
    np.testing.assert_array_equal(stages.read_groups(copy), groups)
    assert stages.read_halves(copy).test.member.tolist() == halves.test.member.tolist()
    found = stages.evaluate_run(copy)
    table = score_table.read_table(copy / "test")
    for frozen, row, plain in zip(stages.read_calibrations(copy), found.results, results.results):
        scores = [stages.frozen_scores(table, frozen, np.sort(side)) for side in halves.test.sides]
        own = tuple(groups[np.sort(side)] for side in halves.test.sides)
        assert row.auc.value == plain.auc.value
        np.testing.assert_allclose(row.auc, metrics.auc_interval(*scores, groups=own), atol=1e-6)
    assert any(row.auc != plain.auc for row, plain in zip(found.results, results.results))
    assert found.direction.aucs != results.direction.aucs
    calibrated = tuple(auc for auc in found.direction.aucs if auc.half == "calibration")
    assert stages.read_direction(copy, ["calibration"]).aucs == calibrated != ()
    # A run that has none stored is read as one without groups, unless they are given.
    assert stages.read_groups(directory) is None
    assert stages.evaluation(directory, groups=groups).direction == found.direction


def test_a_run_goes_on_with_its_own_groups_only(grouped, directory, results, halves):
    copy, groups = grouped
    stages.begin(copy, JOBS, halves, SEED, groups=groups)
    stages.begin(copy, JOBS, halves, SEED)
    with pytest.raises(ValueError, match="holds a run with other members, held-out images, groups or halves"):
        stages.begin(copy, JOBS, halves, SEED, groups=np.where(groups == 3, -1, groups))
    stages.begin(directory, JOBS, halves, SEED, groups=groups)  # begun before groups were stored
    assert stages.read_groups(directory) is None


def test_only_the_first_process_writes(grouped, halves, tmp_path, monkeypatch):
    shutil.copytree(grouped[0], tmp_path / "run")
    for name in ("calibration.json", "results.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
    files = sorted((tmp_path / "run").rglob("*"))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    stages.begin(tmp_path / "new", JOBS, halves, SEED)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"no .*calibration.json: calibrate first"):
        stages.calibrate_run(tmp_path / "run")
    shutil.copy(grouped[0] / "calibration.json", tmp_path / "run")
    assert stages.evaluate_run(tmp_path / "run").results
    assert sorted((tmp_path / "run").rglob("*")) == sorted([*files, tmp_path / "run" / "calibration.json"])


def test_adjusted_rows_are_a_fit_over_the_calibration_half_without_labels(directory, results, halves):
    """Every adjusted AUC anew: ridge residuals of log scores, frozen on one half and applied to the other."""
    pictures, tables = statistics.read(directory), {}
    for half in stages.HALVES:
        tables[half] = score_table.read_table(directory / half)
    adjusted = {frozen.label: frozen for frozen in stages.read_calibrations(directory, Way.ADJUSTED)}
    for label in ("loss@1", "sima_l4@1", "level_only@1"):
        job = stages.frozen_job(adjusted[label])
        terms = {half: table.terms(job)[0] for half, table in tables.items()}
        fitted = evidence.fit_difficulty(
            np.log(terms["calibration"]), pictures.of(tables["calibration"].index)
        )  # in the order of the table: labels play no part
        left = fitted(np.log(terms["test"]), pictures.of(tables["test"].index))
        sides = [left[np.isin(tables["test"].index, side)] for side in halves.test.sides]
        assert results.row(label).adjusted.auc.value == pytest.approx(metrics.auc(*sides))
        assert results.row(label).adjusted.setting == adjusted[label].setting


def test_permuting_labels_of_the_calibration_half_changes_no_fit(directory, halves):
    (frozen,) = (one for one in stages.read_calibrations(directory, Way.ADJUSTED) if one.label == "loss@1")
    table, pictures = score_table.read_table(directory / "calibration"), statistics.read(directory)
    index = np.random.default_rng(0).permutation(table.index)
    again = calibration.adjust(frozen, stages.terms_of(table, frozen, index), pictures.of(index))
    assert again.adjustment == frozen.adjustment


def test_statistics_are_made_once_for_all_images_and_damage_is_noticed(directory, halves, tmp_path):
    pictures = statistics.read(directory)
    together = np.unique(np.concatenate([*halves.calibration.sides, *halves.test.sides]))
    assert set(together.tolist()) <= set(pictures.index.tolist())
    with pytest.raises(ValueError, match="no statistics of some of its images"):
        pictures.of(np.array([10**6]))
    copy = tmp_path / "run"
    shutil.copytree(directory, copy)
    content = bytearray((copy / "statistics.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (copy / "statistics.npz").write_bytes(content)
    with pytest.raises(digests.Damaged, match=r"statistics\.npz is damaged"):
        stages.evaluation(copy)


def test_statistics_are_made_again_for_other_pixels_and_never_over_those_of_a_finished_audit(tmp_path):
    def make(pixels):
        source = dj.data.from_images(pixels)
        statistics.make(tmp_path, source, np.arange(len(pixels)), dj.data.transform_for(source, SHAPE))
        return statistics.read(tmp_path).statistics

    first, other = np.random.default_rng(0).integers(0, 256, (2, 6, *SHAPE), dtype=np.uint8)
    before = make(first)
    assert np.all(np.any(make(other) != before, axis=1))  # as many images, in the same places
    np.testing.assert_array_equal(make(first), before)
    (tmp_path / "audit.json").touch()
    np.testing.assert_array_equal(make(first), before)
    for pixels in (other, first[:5]):
        with pytest.raises(ValueError, match="holds a finished audit of other images"):
            make(pixels)
    np.testing.assert_array_equal(make(np.concatenate([first, other]))[:6], before)


def test_the_witness_of_a_model_that_answers_nothing_is_heard(directory, halves):
    pictures = statistics.read(directory)
    known = dj.data.Pair(*(pictures.of(side) for side in halves.test.sides))
    silent = dj.data.Pair(*(np.zeros((1, len(side))) for side in halves.test.sides))
    witness = calibration.fixed_rule(
        attacks.get_attack("level_only"), dj.linear_schedule(), {"t": 50, "gamma": 0.1, "q": 1}
    )
    left = stages._residuals(witness, silent, known, Way.ADJUSTED)
    assert not np.any(np.concatenate(left))


def test_the_witness_is_read_plain_and_adjusted_with_the_error_split_over_both(directory, halves):
    found = stages.read_direction(directory)
    witness, pictures = planning.witness_jobs(JOBS), statistics.read(directory)
    assert len(found.aucs) == 2 * 2 * len(witness)
    confidence = 1 - 2 * found.error_rate / len(found.aucs)
    table = score_table.read_table(directory / "test")
    scores = np.log(table.terms(witness[0])[0])
    left = evidence.difficulty_residuals(scores, pictures.of(table.index))
    for adjusted, of in ((None, scores), (True, left)):
        (auc,) = (a for a in found.aucs if (a.half, a.t, a.adjusted) == ("test", witness[0].setting["t"], adjusted))
        sides = [of[np.isin(table.index, side)] for side in halves.test.sides]
        np.testing.assert_allclose((auc.value, auc.low, auc.high), metrics.auc_interval(*sides, confidence))
