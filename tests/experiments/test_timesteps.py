"""Bands of several timesteps: against the same rule put together by hand, and what the page says of it."""

import numpy as np
import pytest
from small_runs import make_run, pretend

from dime_jax.attacks import get_attack
from dime_jax.attacks.bands import BANDS
from dime_jax.attacks.base import count_queries
from dime_jax.attacks.rules import Discriminant, TermPair
from dime_jax.evidence import metrics
from dime_jax.protocol import calibration
from dime_jax.scoring import planning
from experiments import cross_fit, kept, runs, synthetic, timesteps
from experiments.timesteps import TimestepStudy, Variant

pytestmark = pytest.mark.usefixtures("real_figures")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "attack"
    settings = [{"t": t, "gamma": 0.4} for t in (90, 120)]
    jobs = planning.grid_jobs(["dime_bands", "dime_bands_all"], "quick", [11], settings)
    make_run(directory, jobs, size=60, member_scale=0.5, heldout_scale=0.6, seed=0)
    pretend(directory, "digits", "laptop")
    return runs.read_run(directory)


@pytest.fixture(scope="module")
def found(run):
    return timesteps.run([run], cuts=2)


def test_every_variant_says_what_it_costs(found):
    assert [(one.title, one.queries) for one in found.variants] == [
        ("one probe at one timestep", 1),
        ("one probe at each timestep", 2),
        ("10 probes and the scaled image at one timestep", 11),
    ]
    for count in (1, 2, 5):
        setting = {**{f"t_{i:02d}": 10 * i for i in range(count)}, "gamma": 0.1}
        assert count_queries(timesteps.several_timesteps(setting)) == count


def test_one_timestep_is_dime_bands(run, found):
    half = run.calibration_half()
    jobs = [job for job in half.jobs if job.attack.name == "dime_bands"]
    parts = [cross_fit.cut(half, seed) for seed in range(2)]
    expected = np.mean([cross_fit.auc(part, cross_fit.scores(part, jobs)) for part in parts])
    assert found.variants[0].auc == [pytest.approx(expected, abs=1e-12)]


def test_two_timesteps_are_a_discriminant_over_the_bands_of_both(run, found):
    half, aucs = run.calibration_half(), []
    one = {t: half.table.terms(planning.Job(get_attack("dime_bands"), {"t": t, "gamma": 0.4})) for t in (90, 120)}
    terms = np.concatenate([one[90][:BANDS], one[120][:BANDS], one[90][BANDS:]])
    for seed in range(2):
        first = cross_fit.cut(half, seed).first
        for chooses in (first, ~first):
            stats = calibration.standardization(terms[:, chooses])
            sides = [np.stack(stats.standardize(terms[:, chooses & side])) for side in (half.member, ~half.member)]
            weights = max(Discriminant(asked=2 * BANDS).weights(None, {}, TermPair(*sides)), key=lambda one: one.auc)
            judged = [np.stack(stats.standardize(terms[:, ~chooses & side])) for side in (half.member, ~half.member)]
            aucs.append(metrics.auc(*(weights.values @ side for side in judged)))
    assert found.variants[1].auc == [pytest.approx(np.mean(aucs), abs=1e-9)]


def test_runs_of_other_attacks_and_of_two_studies_are_refused(run, tmp_path):
    make_run(tmp_path, planning.grid_jobs(["loss"], "light"), size=20, member_scale=0.5, heldout_scale=0.6, seed=0)
    pretend(tmp_path, "digits", "smoke")
    other = runs.read_run(tmp_path)
    with pytest.raises(ValueError, match="expected a run of dime_bands"):
        timesteps.run([other])
    with pytest.raises(ValueError, match="expected runs of one study, got digits:laptop, digits:smoke"):
        timesteps.run([run, other])


def test_the_kept_file_becomes_a_section(tmp_path):
    numbers = TimestepStudy("cifar10:overnight", ["seed 1", "seed 2"], 5, [Variant("one probe", 1, [0.79, 0.77])])
    synthetic.save_study(tmp_path, timesteps.NAME, numbers, timesteps.draw)
    ((file, drawing),) = kept.find_kept(tmp_path).drawn
    text = drawing.to_section(kept._read(file, drawing), "timesteps.png")
    assert "## More timesteps, or more probes? (cifar10:overnight)" in text
    assert "| one probe | 1 | 79.0 | 77.0 | 78.0 [65.3, 90.7] |" in text
