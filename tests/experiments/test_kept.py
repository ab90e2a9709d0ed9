"""The parts of the results page that do not come from runs: against the numbers of the files they are made from."""

import json
import pathlib

import numpy as np
import pytest

from dime_jax._util import records
from dime_jax.evidence.metrics import Estimate
from experiments import kept, synthetic
from experiments.synthetic import Curve, Panel


def estimates(values):
    return [Estimate(value, value - 0.01, value + 0.01) for value in values]


def panel(n, lead, asr_of_dime, asr_of_level):
    """A panel of three noise levels; only what the page shows of it has meaning."""

    def curve(asr):
        return Curve(estimates(asr), estimates([0.5] * 3), estimates([0.0] * 3), [None] * 3)

    curves = {"dime": curve(asr_of_dime), "sima_mc_shared": curve(asr_of_level), "sima_mc_gaussian": curve([0.4] * 3)}
    sigma = [0.1, 0.3, 0.6]
    gaussian = estimates([value + 0.1 for value in lead])
    correlation = synthetic.noise_correlation(lead, sigma)
    return Panel(n, 10, [5, 50, 200], [0.99, 0.9, 0.6], sigma, curves, {}, estimates(lead), gaussian, correlation)


PANELS = [
    panel(10, [0.01, 0.08, 0.03], [0.9, 0.8, 0.6], [0.9, 0.7, 0.65]),
    panel(100, [0.0, 0.02, 0.05], *[[0.7] * 3] * 2),
]


def test_where_the_lead_peaks_and_where_asr_is_behind():
    text = kept.dataset_size_section(PANELS, "dataset_size.png")
    lines = [line for line in text.splitlines() if line.startswith(("| n = 10 |", "| n = 100 |"))]
    assert lines[0] == (
        "| n = 10 | +4.0 | +8.0 [+7.0, +9.0] at t = 50 (ᾱ = 0.900) | +3.0 [+2.0, +4.0] at t = 200 | +0.50 | t = 200 |"
    )
    assert lines[1].endswith("at t = 200 | +1.00 | no t |")
    assert lines[2].startswith("| n = 10 | +14.0 | +18.0 [")
    assert "| 50 | 0.900 | +8.0 [+7.0, +9.0] | +2.0 [+1.0, +3.0] |" in text
    assert "![AUC, ASR and TPR over noise](dataset_size.png)" in text


def test_panels_survive_their_file(tmp_path):
    file = tmp_path / "dataset_size.json"
    file.write_text(json.dumps(synthetic.plain(PANELS)))
    ((path, drawing),) = kept.find_kept(tmp_path).drawn
    assert path == file
    read = kept._read(file, drawing)
    np.testing.assert_allclose([one.auc_lead for one in read], [one.auc_lead for one in PANELS], rtol=1e-6, atol=1e-9)
    assert kept.dataset_size_section(read, "x") == kept.dataset_size_section(PANELS, "x")


DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_kept_synthetic_study_is_the_papers_config_and_its_lead_does_not_peak_at_most_noise():
    folder = DOCS / "results" / "synthetic"
    panels = records.parse(list[Panel], json.loads((folder / "dataset_size.json").read_text()), "dataset_size")
    assert [one.n for one in panels] == [10, 100, 1000]
    assert all(len(one.t) == 11 for one in panels)
    for one in panels:
        assert np.argmax([lead.value for lead in one.auc_lead]) < len(one.t) - 1
        assert one.auc_lead[-1].value == pytest.approx(
            one.curves["dime"].auc[-1].value - one.curves["sima_mc_shared"].auc[-1].value, abs=1e-6
        )
