"""Attack statistics over a converted checkpoint against those of the baselines' official code.

The recorded numbers come from PyTorch and the original repositories, on the EMA weights of ddpm_secmi.pt; DIME's and
Loss's from the paper's formulas with recorded draws.
"""

from pathlib import Path

import numpy as np
import pytest

import dime_jax as dj
from dime_jax.loading import opening
from dime_jax.loading.conversion import convert

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED = dict(np.load(GOLDEN / "attack_statistics_expected.npz"))
X = np.moveaxis(EXPECTED["x"], 1, -1)
TEN_TO_HUNDRED = range(10, 101, 10)


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory):
    return opening.load_denoiser(convert(GOLDEN / "ddpm_secmi.pt", tmp_path_factory.mktemp("golden") / "model"))


@pytest.mark.parametrize(("t_sec", "k"), [(100, 10), (60, 15)])
def test_secmi(denoiser, t_sec, k):
    got = dj.secmi(denoiser.eps_fn(), denoiser.schedule, X, t_sec=t_sec, k=k)
    np.testing.assert_allclose(got, EXPECTED[f"secmi_stat_tsec{t_sec}_k{k}"], rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "p", "normalize"),
    [("pia_l4_sum", 4, False), ("pian_l4_sum", 4, True), ("pia_l2_sum", 2, False)],
)
def test_pia(denoiser, name, p, normalize):
    for t, expected in zip(TEN_TO_HUNDRED, EXPECTED[f"{name}_t10_to_100"]):
        got = dj.pia(denoiser.eps_fn(), denoiser.schedule, X, t, p=p, normalize=normalize)
        np.testing.assert_allclose(got**p, expected, rtol=1e-3)
        np.testing.assert_allclose(got, expected ** (1 / p), rtol=1e-4)


def test_sima(denoiser):
    for t, expected in zip(range(0, 101, 10), EXPECTED["sima_l4_sum_t0_to_100"]):
        got = dj.sima(denoiser.eps_fn(), denoiser.schedule, X, t, p=4)
        np.testing.assert_allclose(got**4, expected, rtol=1e-3)
        np.testing.assert_allclose(got, expected**0.25, rtol=1e-4)


@pytest.mark.parametrize("t", [50, 130])
def test_loss(denoiser, t):
    noise = np.moveaxis(EXPECTED[f"loss_noise_t{t}"], 1, -1)
    got = dj.loss(denoiser.eps_fn(), denoiser.schedule, X, noise, t)
    np.testing.assert_allclose(got, EXPECTED[f"loss_l2_t{t}"], rtol=1e-4)


@pytest.mark.parametrize("t", [50, 130])
@pytest.mark.parametrize("gamma", [0.1, 0.4])
def test_dime(denoiser, t, gamma):
    probes = np.moveaxis(EXPECTED["dime_z"], 2, -1).astype(np.float32)
    terms = dj.dime_terms(denoiser.eps_fn(), denoiser.schedule, X, probes, t, gamma)
    np.testing.assert_allclose(terms.norm, EXPECTED[f"dime_B_t{t}_g{gamma}"], rtol=1e-4)
    trace = EXPECTED[f"dime_V_t{t}_g{gamma}"]
    np.testing.assert_allclose(terms.trace, trace, atol=1e-3 * trace.std(axis=1).min())


def test_secmi_round_trip_errors_of_pia_repository(denoiser):
    """PIA's re-implementation records the round trip from every step of the trajectory: ours, t_sec just above it."""
    for step, expected in enumerate(EXPECTED["secmi_pia_repo_t0_to_90"]):
        got = dj.secmi(denoiser.eps_fn(), denoiser.schedule, X, t_sec=10 * step + 1, k=10)
        np.testing.assert_allclose(got, expected, rtol=1e-3)
