"""The synthetic studies against closed forms and float64 loops, and the facts that must hold in them."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

import dime_jax as dj
from dime_jax.core.draws import Draws
from dime_jax.report import figures
from experiments import synthetic
from experiments.configs.synthetic import get_config

FIGURES = ("bias_crowding", "three_cases", "denoiser_1d", "dataset_size", "query_budget")


@pytest.fixture(scope="module")
def config():
    return get_config()


@pytest.fixture(scope="module")
def reduced():
    reduced = get_config().unlock()
    reduced.attack.sizes = (10, 100)  # n = 1000 is in the slow test of the full config
    reduced.attack.timesteps = (20, 75, 200)
    reduced.attack.members, reduced.attack.heldout = 100, 300
    return reduced


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("synthetic") / "new" / "folder"


@pytest.fixture(scope="module")
def smoke(workdir):
    """All numbers of the smoke variant, whose scene and line are those of the full config."""
    return synthetic.run(get_config("smoke"), workdir)


@pytest.fixture(scope="module")
def numbers(smoke):
    return smoke["bias_crowding"]


@pytest.fixture(scope="module")
def line(smoke):
    return smoke["denoiser_1d"]


def naive_cloud(train, g, abar):
    """E[Y] and V of the definition, point by point in float64."""
    train, sigma_sq = np.sqrt(abar) * np.asarray(train, np.float64), 1 - abar
    means, spreads = [], []
    for query in np.asarray(g, np.float64):
        sq_dist = np.sum((train - query) ** 2, axis=1)
        weights = np.exp(-(sq_dist - sq_dist.min()) / (2 * sigma_sq))
        weights /= weights.sum()
        means.append(weights @ train)
        spreads.append(weights @ np.sum((train - means[-1]) ** 2, axis=1))
    return np.array(means), np.array(spreads)


class TestBiasCrowding:
    def test_is_the_decomposition_by_definition(self, config, numbers, schedule):
        train, candidates = synthetic.scene(config)
        for t in (0, 40, 300):
            abar = float(schedule.abar(t))
            mean, crowding = naive_cloud(train, np.sqrt(abar) * candidates, abar)
            bias = np.sum((mean - np.sqrt(abar) * candidates) ** 2, axis=1)
            np.testing.assert_allclose(numbers.bias[:, t], bias, rtol=2e-3, atol=1e-6)
            np.testing.assert_allclose(numbers.crowding[:, t], crowding, rtol=2e-3, atol=1e-6)
        np.testing.assert_allclose(numbers.error, numbers.bias + numbers.crowding, rtol=1e-6)

    def test_crowded_non_member_rises_first(self, numbers):
        member, biased, crowded = numbers.rise_t
        assert crowded < 50
        assert min(member, biased) > 4 * 50
        assert numbers.crowding[2, 50] > 1000 * numbers.crowding[:2, 50].max()

    def test_bias_is_near_zero_low_and_high(self, numbers):
        member, biased, crowded = numbers.bias
        assert member.max() < 1e-3 * biased.max()
        assert np.all(crowded < biased / 2)
        assert crowded[0] > 0.1  # at t = 0 the nearest ring point wins

    def test_first_above(self):
        rows = np.array([[0.0, 2.0, 3.0], [0.0, 2.0, 2.0], [3.0, 0.0, 0.0]])
        assert synthetic.first_above(rows, 2.0) == [2, None, 0]

    def test_three_cases_agree_with_it(self, smoke, numbers):
        cases = smoke["three_cases"]
        np.testing.assert_allclose(cases.bias, numbers.bias[:, cases.t], rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(cases.crowding, numbers.crowding[:, cases.t], rtol=1e-3, atol=1e-6)
        from_candidate = np.linalg.norm(cases.m_local - cases.candidates, axis=1)
        assert from_candidate[0] < 1e-5
        assert from_candidate[2] < 0.1 * from_candidate[1]


class TestDenoiser1d:
    def test_two_points_give_tanh(self, line):
        panel = line.panels[0]
        assert panel.train.tolist() == [-1, 1]
        for eps, abar in zip(panel.eps, line.abar):
            a, sigma_sq = np.sqrt(abar), 1 - abar
            g = a * panel.x.astype(np.float64)
            expected = (g - a * np.tanh(a * g / sigma_sq)) / np.sqrt(sigma_sq)
            np.testing.assert_allclose(eps, expected, atol=2e-4)

    def test_slope_between_two_points_shows_crowding_abar(self, line):
        # dε*/dg = 1/σ - V/σ³ and V = ᾱ at x = 0: bias 0, crowding ᾱ.
        panel, middle = line.panels[0], len(line.panels[0].x) // 2
        for eps, abar, sigma in list(zip(panel.eps, line.abar, line.sigma))[2:]:
            step = np.sqrt(abar) * (panel.x[middle + 1] - panel.x[middle - 1])
            slope = (eps[middle + 1] - eps[middle - 1]) / step
            np.testing.assert_allclose((1 / sigma - slope) * sigma**3, abar, rtol=1e-3)

    def test_low_noise_crosses_zero_at_every_training_point(self, line):
        assert [panel.n for panel in line.panels] == [2, 3, 10]
        for panel in line.panels:
            values = np.interp(panel.train, panel.x, panel.eps[0])
            assert np.abs(values).max() < 0.02 * np.abs(panel.eps[0]).max()

    def test_noise_levels_are_those_asked_for(self, config, line):
        np.testing.assert_allclose(line.abar, config.line.abar, atol=5e-3)
        assert line.abar == sorted(line.abar, reverse=True)


def naive_ranks(values):
    """Twice the rank, with ties in the middle of theirs."""
    return [sum(other < value for other in values) + sum(other <= value for other in values) for value in values]


class TestAttackStudy:
    def test_terms_are_those_of_a_naive_loop(self, config, schedule):
        points = synthetic.cluster_points(np.random.default_rng(1), config, 12)
        draws = Draws(jax.random.key(3), jnp.arange(12, dtype=jnp.uint32))
        small = get_config().unlock()
        small.attack.timesteps = (35, 150)
        denoiser = dj.IdealDenoiser(points[:5], schedule)
        terms = synthetic.attack_terms(denoiser, small, points, draws, probes=2)
        for level, t in enumerate(small.attack.timesteps):
            abar, sigma = float(schedule.abar(t)), float(schedule.sigma(t))
            g = np.sqrt(abar) * points
            spread = naive_cloud(points[:5], g, abar)[1]
            np.testing.assert_allclose(terms.trace[level], 4 / sigma - spread / sigma**3, rtol=1e-3)
            for k in range(2):
                signs = np.asarray(draws.rademacher(k, jnp.asarray(points)))
                noise = np.asarray(draws.gaussian(k, jnp.asarray(points)))
                for step, found in ((0.4 * signs, terms.norm), (noise, terms.gaussian_norm)):
                    query = g + sigma * step
                    eps = (query - naive_cloud(points[:5], query, abar)[0]) / sigma
                    np.testing.assert_allclose(found[k, level], np.linalg.norm(eps, axis=1), rtol=1e-3, atol=1e-4)

    @pytest.mark.slow
    def test_dime_leads_on_average_for_each_n_and_q(self, reduced):
        study = synthetic.attack_study(reduced)
        assert [panel.n for panel in study["dataset_size"]] == [10, 100]
        assert [panel.q for panel in study["query_budget"]] == [1, 10, 30]
        for panel in (*study["dataset_size"], *study["query_budget"]):
            for sima in ("sima_mc_shared", "sima_mc_gaussian"):
                assert panel.mean_auc["dime"] >= panel.mean_auc[sima], (panel.n, panel.q, sima)
            lead = [estimate.value for estimate in panel.auc_lead]
            assert np.mean(lead) == pytest.approx(panel.mean_auc["dime"] - panel.mean_auc["sima_mc_shared"])
            expected = np.corrcoef(naive_ranks(lead), naive_ranks(panel.sigma))[0, 1]
            assert panel.lead_noise_correlation == pytest.approx(expected)

    def test_test_half_chooses_nothing(self, reduced):
        # Made-up terms: swapping the test half's labels turns its AUC around and leaves the angles alone.
        rng = np.random.default_rng(0)
        levels = len(reduced.attack.timesteps)

        def terms(shift):
            return synthetic.Terms(
                rng.gamma(9 + shift, size=(2, levels, 80)),
                rng.gamma(9 + shift, size=(2, levels, 80)),
                rng.normal(-shift, size=(levels, 80)),
            )

        calibration = synthetic.Half(terms(0), terms(3))
        test = synthetic.Half(terms(0), terms(3))
        straight = synthetic.attack_panel(reduced, 10, 2, calibration, test)
        swapped = synthetic.attack_panel(reduced, 10, 2, calibration, synthetic.Half(*test[::-1]))
        for method, curve in straight.curves.items():
            assert curve.phi == swapped.curves[method].phi
            for one, two in zip(curve.auc, swapped.curves[method].auc):
                assert one.value > 0.5
                assert one.value == pytest.approx(1 - two.value)

    def test_halves_share_no_points(self, config, schedule, monkeypatch):
        seen = []

        def record(denoiser, config, points, draws, probes):
            seen.append(points)
            return synthetic.Terms(*np.zeros((2, probes, 1, len(points))), np.zeros((1, len(points))))

        monkeypatch.setattr(synthetic, "attack_terms", record)
        for half in (0, 1):
            pooled = synthetic.attack_half(config, 100, 3, half)
            assert pooled.member.norm.shape == (3, 1, config.attack.members)
            assert pooled.heldout.trace.shape == (1, config.attack.heldout)
        rows = np.concatenate(seen)
        assert len(np.unique(rows, axis=0)) == len(rows) == 2 * (config.attack.members + config.attack.heldout)

    @pytest.mark.parametrize("name", ["members", "heldout"])
    def test_refuses_an_empty_class(self, schedule, name):
        empty = get_config().unlock()
        empty.attack[name] = 0
        with pytest.raises(ValueError, match=rf"attack\.{name} must be >= 1, got 0"):
            synthetic.attack_half(empty, 3, 1, 0)


class TestRun:
    def test_writes_figures_and_numbers(self, smoke, workdir):
        assert tuple(smoke) == FIGURES
        names = {f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "svg", "json")}
        assert {path.name for path in workdir.iterdir()} == names | {"config.json"}
        for name in FIGURES:
            assert (workdir / f"{name}.png").read_bytes().startswith(b"\x89PNG")
            assert "<svg" in (workdir / f"{name}.svg").read_text()
        panel = json.loads((workdir / "dataset_size.json").read_text())[0]
        assert set(panel["curves"]) == set(synthetic.METHODS)
        assert set(panel["curves"]["dime"]["auc"][0]) == {"value", "low", "high"}
        assert json.loads((workdir / "config.json").read_text())["seed"] == 0

    def test_same_config_same_bytes(self, smoke, workdir, tmp_path):
        config = get_config("smoke")
        with figures.style():
            panels = synthetic.attack_study(config)["query_budget"]
            synthetic.save_study(tmp_path, "query_budget", panels, synthetic.draw_attack_panels)
        for path in tmp_path.iterdir():
            assert path.read_bytes() == (workdir / path.name).read_bytes(), path.name

    def test_seed_changes_the_draws(self):
        config = get_config("smoke")
        other = get_config("smoke").unlock()
        other.seed = 1
        points = [synthetic.cluster_points(np.random.default_rng(0), c, 5) for c in (config, other)]
        assert not np.allclose(*points)

    def test_unknown_variant(self):
        with pytest.raises(ValueError, match="unknown variant 'tiny'"):
            get_config("tiny")

    def test_config_is_locked(self, config):
        with pytest.raises(AttributeError):
            config.sead = 1


class TestFigures:
    def test_ellipse_is_the_level_set(self):
        covariance = np.array([[2.0, 0.7], [0.7, 0.5]])
        axes = Figure().subplots()
        ellipse = figures.add_covariance_ellipse(axes, np.array([1.0, -2.0]), covariance, 2)
        angles = np.linspace(0, 2 * np.pi, 9)
        unit_circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        from_mean = ellipse.get_patch_transform().transform(unit_circle) - [1.0, -2.0]
        level = np.einsum("ni,ij,nj->n", from_mean, np.linalg.inv(covariance), from_mean)
        np.testing.assert_allclose(level, 4, rtol=1e-9)

    def test_style_leaves_the_users_settings_alone(self):
        with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red"}):
            with figures.style():
                assert matplotlib.rcParams["font.size"] == 8
                assert matplotlib.rcParams["axes.facecolor"] == "white"
            assert matplotlib.rcParams["font.size"] == 20
            assert matplotlib.rcParams["axes.facecolor"] == "red"

    def test_ordered_colors_lighten(self):
        luminance = np.array(figures.ordered_colors(4))[:, :3] @ [0.2126, 0.7152, 0.0722]
        assert np.all(np.diff(luminance) > 0)


@pytest.mark.slow
def test_command_line_gives_the_same_bytes(smoke, workdir, tmp_path):
    command = [sys.executable, "-m", "experiments.synthetic", f"--workdir={tmp_path}"]
    command.append("--config=experiments/configs/synthetic.py:smoke")
    done = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    for path in workdir.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_full_config_dime_leads(config):
    study = synthetic.attack_study(config)
    assert [panel.n for panel in study["dataset_size"]] == [10, 100, 1000]
    for panel in (*study["dataset_size"], *study["query_budget"]):
        assert panel.mean_auc["dime"] >= panel.mean_auc["sima_mc_shared"] >= panel.mean_auc["sima_mc_gaussian"]
        assert panel.mean_auc["dime_theory"] >= panel.mean_auc["sima_mc_shared"]
