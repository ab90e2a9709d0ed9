"""What is kept beside runs so that tables need no images: against the run's own numbers, and scores fitted by hand."""

import shutil

import numpy as np
import pytest
from ml_collections.config_dict import ConfigDict
from small_runs import SHAPE, make_run, naive_auc, pictures, pretend

import dime_jax as dj
from dime_jax.attacks.loss_level import NAME, Classical
from dime_jax.data import Split
from dime_jax.protocol import stages, statistics
from dime_jax.scoring import planning, score_table
from experiments import cross_fit, kept_statistics, questions, runs
from experiments.study_data import Study

SIZE, SCALES = 40, (0.5, 0.6)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of today, with statistics and the rule's covariates."""
    directory = tmp_path_factory.mktemp("study") / "seed_0"
    jobs = planning.grid_jobs(["loss", "dime_theory", "level_only", NAME], "quick", [2], None)
    make_run(directory, jobs, SIZE, *SCALES, seed=0)
    pretend(directory, "digits", "laptop")
    return directory


@pytest.fixture
def kept(made, tmp_path, monkeypatch):
    """The same as it would have been made before: without statistics, adjusted calibrations and covariates."""
    directory = tmp_path / "seed_0"
    shutil.copytree(made, directory)
    for name in ("statistics.json", "statistics.npz"):
        (directory / name).unlink()
    with monkeypatch.context() as without:
        without.setattr(statistics, "exist", lambda directory: False)
        stages.calibrate_run(directory)
    source = dj.data.from_images(pictures(SIZE, *SCALES))
    study = Study(source, Split(np.arange(SIZE), np.arange(SIZE, 2 * SIZE)))
    monkeypatch.setattr(kept_statistics, "open_study", lambda config, workdir: study)
    config = ConfigDict({"seed": 0, "data": {}, "attack": {"model": "trained", "image_shape": SHAPE}})
    monkeypatch.setattr(runs.Run, "images_config", lambda run: config)
    return directory


def without_covariates(table):
    """The table as it was before the rule."""
    readings = {name: values for name, values in table.readings.items() if not name.startswith("Classical")}
    return score_table.dataclasses.replace(table, readings=readings)


def test_statistics_and_covariates_are_those_of_the_run(made, kept):
    kept_statistics.add(kept)
    before, after = statistics.read(made), statistics.read(kept)
    np.testing.assert_array_equal(before.index, after.index)
    np.testing.assert_array_equal(before.statistics, after.statistics)
    table = score_table.read_table(made / "calibration")
    assert kept_statistics.has_rule(without_covariates(table))
    again = kept_statistics.with_classical(without_covariates(table), kept)
    names = [str(one) for one in kept_statistics.rule_job(table).recipe.readings if isinstance(one.call, Classical)]
    assert len(names) == 4
    for name in names:
        np.testing.assert_allclose(again.readings[name], table.readings[name], rtol=1e-5)
    with pytest.raises(ValueError, match="no loss_level"):
        without_covariates(table).terms(kept_statistics.rule_job(table))


def test_other_images_are_refused(kept, monkeypatch):
    other = Study(dj.data.from_images(pictures(SIZE, 0.5, 0.61)), Split(np.arange(SIZE), np.arange(SIZE, 2 * SIZE)))
    monkeypatch.setattr(kept_statistics, "open_study", lambda config, workdir: other)
    with pytest.raises(ValueError, match="the images of its calibration_data have fingerprint"):
        kept_statistics.add(kept)
    assert not statistics.exist(kept)


def by_hand(scores, statistics, judged, of_judged):
    """What a ridge regression of scores [n] leaves of others: its penalty by refitting without each image in turn."""
    mean, std = statistics.mean(axis=0), statistics.std(axis=0)
    varies = std > 1e-8
    columns, of_judged = (
        np.column_stack([np.clip((one - mean)[:, varies] / std[varies], -5, 5), np.ones(len(one))])
        for one in (statistics, of_judged)
    )

    def fit(keep, penalty):
        held = np.diag([penalty * len(scores)] * varies.sum() + [0.0])
        return np.linalg.solve(columns[keep].T @ columns[keep] + held, columns[keep].T @ scores[keep])

    def error(penalty):
        each = np.arange(len(scores))
        return sum((scores[i] - columns[i] @ fit(each != i, penalty)) ** 2 for i in each)

    best = min(10.0 ** np.arange(-3, 4), key=error)
    return judged - of_judged @ fit(slice(None), best)


def test_adjusted_columns_by_hand(kept):
    kept_statistics.add(kept)
    run, known = runs.read_run(kept), statistics.read(kept)
    tables = [score_table.read_table(kept / half) for half in stages.HALVES]
    for attack, q, transform in (("level_only", 1, np.log), ("loss", None, np.log), ("dime_theory", 1, np.asarray)):
        row = run.row(attack, q)
        job = stages.frozen_job(row.calibration)
        assert row.adjusted.calibration.setting == row.calibration.setting
        raw = [transform(row.calibration.score(table.terms(job))) for table in tables]
        pictures_of = [known.of(table.index) for table in tables]
        left = by_hand(raw[0], pictures_of[0], raw[1], pictures_of[1])
        member = np.isin(tables[1].index, run.halves.test.member)
        assert row.adjusted.result.auc.value == pytest.approx(naive_auc(left, member), abs=1e-12)
        order = np.argsort(tables[1].index)
        np.testing.assert_allclose(row.adjusted.scores, left[order], atol=1e-9)
    theory = run.row("dime_theory", 1)
    level = [table.terms(stages.frozen_job(theory.calibration))[0] for table in tables]
    np.testing.assert_allclose(
        theory.adjusted.level[np.argsort(order)], by_hand(level[0], pictures_of[0], level[1], pictures_of[1]), atol=1e-9
    )


def test_cross_fitted_columns_by_hand(kept):
    kept_statistics.add(kept)
    parts = cross_fit.cut(runs.read_run(kept))
    job = next(job for job in parts.jobs if job.attack.name == "loss")
    scores, aucs = np.log(parts.table.terms(job)[0]), []
    found = cross_fit.scores(parts, [job], adjusted=True)
    for judged in (parts.first, ~parts.first):
        left = by_hand(scores[~judged], parts.pictures[~judged], scores[judged], parts.pictures[judged])
        np.testing.assert_allclose(found[judged], left, atol=1e-9)
        aucs.append(naive_auc(left, parts.member[judged]))
    assert cross_fit.rates(parts, found).auc == pytest.approx(np.mean(aucs), abs=1e-12)


def test_the_rule_uses_no_label(kept):
    kept_statistics.add(kept)
    parts = cross_fit.cut(runs.read_run(kept))
    jobs = [kept_statistics.rule_job(parts.table)]
    mixed = parts._replace(member=np.random.default_rng(0).permutation(parts.member))
    np.testing.assert_array_equal(*(cross_fit.scores(one, jobs, adjusted=True) for one in (parts, mixed)))


def test_what_the_picture_explains_is_told_of_every_attack(kept):
    kept_statistics.add(kept)
    (study,) = runs.group_runs([runs.read_run(kept)])
    found = questions.difficulty(study)
    assert [one.title for one in found.attacks][-1] == "Loss and level"
    (loss,) = [one for one in found.attacks if one.title == "Loss"]
    assert found.loss_gain == loss.taken_out[0].result.auc.value - loss.rows[0].result.auc.value
    assert loss.queries == 1
    assert found.rule.queries == 3
    assert found.strongest[0].plain[0].result.auc.value == max(
        row.result.auc.value for row in study.first.rows if row.queries == 1
    )


def test_without_statistics_nothing_is_said(kept):
    (study,) = runs.group_runs([runs.read_run(kept)])
    assert study.first.rows[0].adjusted is None
    assert questions.difficulty(study) is None
