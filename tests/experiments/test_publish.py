"""Published runs: the same numbers from less, and nothing damaged is sealed again."""

import numpy as np
import pytest
from small_runs import make_run, pretend

from dime_jax._util.digests import Damaged
from dime_jax.protocol import stages
from dime_jax.scoring import planning, score_table
from experiments import publish, runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("study") / "seed_0" / "attack"
    settings = [{"t": t, "gamma": gamma} for t in (90, 120) for gamma in (0.1, 0.4)]
    jobs = planning.grid_jobs(["loss", "dime", "level_low"], "quick", [2, 11], settings)
    make_run(directory, jobs, size=40, member_scale=0.5, heldout_scale=0.6, seed=0)
    pretend(directory, "digits", "laptop")
    return directory


def test_every_reading_is_the_same_and_the_ledger_is_a_number(run, tmp_path):
    publish.publish(run.parents[1], tmp_path / "copy")
    copy = tmp_path / "copy" / "seed_0" / "attack"
    for half in stages.HALVES:
        before, after = score_table.read_table(run / half), score_table.read_table(copy / half)
        assert before.queries_made == after.queries_made > 0
        assert list(before.readings) == list(after.readings)
        for name, values in before.readings.items():
            np.testing.assert_array_equal(values, after.readings[name])
    assert list(run.rglob("queries-*.bin"))
    assert not list(copy.rglob("queries-*.bin"))
    assert stages.evaluation(copy) == stages.evaluation(run)
    assert stages.calibrate_run(copy) == stages.read_calibrations(run)


def test_without_the_calibration_half_the_results_are_the_same(run, tmp_path):
    copy = tmp_path / "attack"
    publish.publish(run, copy, trim_calibration=True)
    assert stages.evaluation(copy) == stages.evaluation(run)
    for before, after in zip(runs.read_run(run).rows, runs.read_run(copy).rows):
        np.testing.assert_array_equal(before.scores, after.scores)
    left = score_table.read_table(copy / "calibration")
    assert 0 < len(left.readings) < len(score_table.read_table(run / "calibration").readings)
    for name, values in left.readings.items():
        np.testing.assert_array_equal(values, score_table.read_table(run / "calibration").readings[name])
    done = score_table.rows_done(copy / "calibration", len(left.manifest["identity"]["settings"]), 80)
    assert np.all(done[:, left.index] == score_table.OK)
    with pytest.raises(ValueError, match="has no loss at"):
        stages.calibrate_run(copy)


@pytest.mark.parametrize("name", ["halves.npz", "test/scores.parquet", "calibration/queries-0.bin"])
def test_a_damaged_run_is_refused(run, tmp_path, name):
    publish_from = tmp_path / "run"
    publish.shutil.copytree(run, publish_from)
    content = bytearray((publish_from / name).read_bytes())
    content[len(content) // 2] ^= 1
    (publish_from / name).write_bytes(content)
    with pytest.raises(Damaged, match=name.rpartition("/")[2]):
        publish.publish(publish_from, tmp_path / "copy")


def test_a_published_run_is_damaged_like_any_other(run, tmp_path):
    publish.publish(run, tmp_path / "copy")
    manifest = tmp_path / "copy" / "test" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"queries_made": ', '"queries_made": 1'))
    with pytest.raises(Damaged, match=r"manifest\.json is damaged"):
        score_table.read_table(manifest.parent)
