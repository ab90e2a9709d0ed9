"""The whole search, from every attack's grid to the attack that decides, on a model without memory."""

import numpy as np
import pytest

import dime_jax as dj
from dime_jax import scoring
from dime_jax.attacks.rules import TermPair
from dime_jax.data import from_images
from dime_jax.protocol import calibration
from dime_jax.protocol.frozen import best_calibrated
from dime_jax.scoring import planning

IMAGES, REPETITIONS = 320, 200


def forgetful(x, t):
    """Answers by the picture alone, unevenly: it never saw any of them."""
    del t
    return 0.6 * x + 0.3 * x**2 - 0.1


@pytest.mark.slow
def test_nothing_is_found_where_there_is_nothing(tmp_path):
    digits = dj.data.open_source("digits")
    pixels = np.stack([digits[i].image for i in range(IMAGES)])
    model = dj.Denoiser.from_function(forgetful, dj.linear_schedule(), (8, 8, 1))
    jobs = planning.grid_jobs(None, "quick", (2, 11), [{"t": t, "gamma": 0.4} for t in (30, 120)])
    table = scoring.score(model, from_images(pixels), jobs, tmp_path, options=scoring.ScoringOptions(silent=True))
    terms = [np.asarray(table.terms(job), np.float64) for job in jobs]
    aucs = []
    for seed in range(REPETITIONS):
        quarters = np.random.default_rng(seed).permutation(IMAGES).reshape(4, -1)
        frozen = [_calibrate(label, jobs, terms, quarters[:2]) for label in planning.row_labels(jobs)]
        aucs.append(_test_auc(best_calibrated(frozen), jobs, terms, quarters[2:]))
    assert np.mean(aucs) == pytest.approx(0.5, abs=0.01)


def _calibrate(label, jobs, terms, sides):
    row = [(job, values) for job, values in zip(jobs, terms) if job.label == label]
    pairs = [TermPair(*(values[:, side] for side in sides)) for _, values in row]
    return calibration.calibrate(row[0][0].attack, dj.linear_schedule(), [job.setting for job, _ in row], pairs)


def _test_auc(frozen, jobs, terms, sides):
    (values,) = [v for job, v in zip(jobs, terms) if job.label == frozen.label and job.setting == frozen.setting]
    return calibration.evaluate(frozen, TermPair(*(values[:, side] for side in sides))).metrics.auc.value
