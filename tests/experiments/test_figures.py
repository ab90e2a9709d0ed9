"""The numbers behind the figures, against closed forms and naive loops."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from small_runs import SHAPE, make_run, pretend

import dime_jax as dj
from dime_jax.evidence import metrics
from dime_jax.protocol import calibration, stages
from dime_jax.scoring import planning, score_table
from experiments import cross_fit, figures, model_figures, run_figures, runs, synthetic
from experiments.model_figures import SidePair


def naive_ideal(train, schedule):
    """ε* as one softmax in float32: fine at the noise levels of these tests, and a function that JAX can trace."""
    flat = jnp.asarray(train.reshape(len(train), -1))

    def eps(g, t):
        points = schedule.sqrt_abar(t) * flat
        x = g.reshape(len(g), 1, -1)
        logits = -jnp.sum((x - points[None]) ** 2, axis=-1) / (2 * schedule.sigma(t) ** 2)
        mean = jax.nn.softmax(logits, axis=1) @ points
        return (g - mean.reshape(g.shape)) / schedule.sigma(t)

    return eps


@pytest.fixture(scope="module")
def cloud():
    rng = np.random.default_rng(0)
    train, heldout = rng.normal(size=(2, 30, *SHAPE)).astype(np.float32)
    return train, SidePair(train[:12], heldout[:12])


class TestIdealGap:
    def test_none_for_the_ideal_itself(self, cloud):
        train, images = cloud
        schedule = dj.linear_schedule()
        ideal = dj.Denoiser.from_function(naive_ideal(train, schedule), schedule, SHAPE, traceable=True)
        gap = model_figures.ideal_gap(ideal, train, images, [200, 400], seed=0)
        assert max(*gap.noised_error, *gap.image_error["member"], *gap.image_error["heldout"]) < 1e-4
        np.testing.assert_allclose(gap.crowding["network"]["heldout"], gap.crowding["ideal"]["heldout"], atol=1e-4)
        assert min(gap.rank_correlation["level"] + gap.rank_correlation["crowding"]) > 0.999
        # V/(d σ²) by its definition, the spread of the responsibility-weighted points.
        parts = dj.IdealDenoiser(train, schedule).decompose(images.member, 200)
        expected = np.median(parts.crowding) / (4 * schedule.sigma(200).item() ** 2)
        assert gap.crowding["ideal"]["member"][0] == pytest.approx(expected, rel=1e-3)

    def test_a_known_distance(self, cloud):
        train, images = cloud
        schedule = dj.linear_schedule()
        ideal = naive_ideal(train, schedule)
        shifted = dj.Denoiser.from_function(lambda g, t: ideal(g, t) + 0.5, schedule, SHAPE, traceable=True)
        gap = model_figures.ideal_gap(shifted, train, images, [300], seed=0)
        for error in (gap.noised_error, gap.image_error["member"], gap.image_error["heldout"]):
            assert error[0] == pytest.approx(0.5, abs=1e-4)

    def test_trace_of_a_known_jacobian(self):
        square = dj.Denoiser.from_function(lambda g, t: g**2, dj.linear_schedule(), SHAPE, traceable=True)
        g = np.random.default_rng(1).normal(size=(5, *SHAPE)).astype(np.float32)
        np.testing.assert_allclose(
            model_figures.network_trace(square, g, 7), 2 * g.sum(axis=(1, 2, 3)), rtol=1e-5, atol=1e-5
        )

    def test_a_plain_function_has_no_derivative(self):
        plain = dj.Denoiser.from_function(lambda g, t: g, dj.linear_schedule(), SHAPE)
        with pytest.raises(ValueError, match=r"the network must be unconditional, .* differentiate it, got mine"):
            model_figures.network_trace(plain, np.zeros((1, *SHAPE), np.float32), 7)


class TestNormEffect:
    def test_against_a_naive_loop(self):
        rng = np.random.default_rng(2)
        calibrates = SidePair(*rng.normal(size=(2, 70, *SHAPE)).astype(np.float32))
        tests = SidePair(*rng.normal(size=(2, 70, *SHAPE)).astype(np.float32))
        calls = []

        def eps(x, t):  # members (any image: only the arithmetic is tested) answer by their values
            calls.append(int(t))
            return np.asarray(x) * (1 + np.asarray(x)) * (1 + int(t) / 100)

        model = dj.Denoiser.from_function(eps, dj.linear_schedule(), SHAPE)
        orders, times = [1.0, 4.0, np.inf], [10, 200]
        numbers = model_figures.norm_effect(model, calibrates, tests, orders, times)

        def auc(images, t, p):
            score = [np.linalg.norm(eps(side, t).reshape(70, -1), ord=p, axis=1) for side in images]
            return metrics.auc(score[0], score[1])

        for number, p in enumerate(orders):
            best = numbers.t["SimA"][number]
            assert numbers.auc["SimA"][number].value == pytest.approx(auc(tests, best, p), abs=1e-9)
            aucs = {t: auc(calibrates, t, p) for t in times}
            assert aucs[best] == max(aucs.values())
        assert set(numbers.auc) == {"SimA", "PIA"}
        assert numbers.p == ["1", "4", "∞"]

    def test_other_norms_cost_no_queries(self):
        images = SidePair(*np.random.default_rng(3).normal(size=(2, 4, *SHAPE)).astype(np.float32))
        model = dj.Denoiser.from_function(lambda x, t: np.asarray(x) / 2, dj.linear_schedule(), SHAPE)
        model_figures.norm_scores(model, "PIA", images, [1.0, 2.0, 4.0], [30, 70])
        assert model.queries.count == 8 * 3  # t = 0 once, and each of two timesteps


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three attacks at three timesteps, of which the last is best."""
    directory = tmp_path_factory.mktemp("run") / "attack"
    jobs = planning.grid_jobs(["loss", "sima_l4", "dime"], "quick", [2])
    make_run(directory, jobs, size=80, member_scale=0.4, heldout_scale=0.7, seed=5)
    pretend(directory, "digits", "smoke")
    return runs.read_run(directory)


class TestRunFigures:
    def test_distributions_are_the_scores_and_the_threshold(self, run):
        (panel,) = run_figures.distributions([run])
        frozen = next(c for c in stages.read_calibrations(run.directory) if c.attack == "dime")
        table = score_table.read_table(run.directory / "test")
        halves = stages.read_halves(run.directory)
        np.testing.assert_array_equal(
            np.sort(panel.member), np.sort(stages.frozen_scores(table, frozen, halves.test.member))
        )
        assert panel.tau == frozen.tau

    def test_stability_is_cross_fitted(self, run):
        (panel,) = run_figures.stability([run])
        assert set(panel.curves) == {"dime", "sima_l4", "loss"}  # no PIA in this run
        assert list(panel.curves["dime"]) == [30, 70, 120]
        # SimA has one setting per t: nothing is chosen, so the mean over the parts is that of their AUCs.
        table = score_table.read_table(run.directory / "calibration")
        member = np.isin(table.index, stages.read_halves(run.directory).calibration.member)
        scores = table.terms(planning.Job(dj.attacks.get_attack("sima_l4"), {"t": 120}))[0]
        whole = metrics.auc(scores[member], scores[~member])
        assert panel.curves["sima_l4"][120] == pytest.approx(whole, abs=0.1)
        assert panel.curves["sima_l4"][120] > 0.75 > 0.65 > panel.curves["sima_l4"][30]

    def test_labels_without_meaning_give_chance(self, run):
        # 16 angles and 2 gammas find something in any 40 + 40 labels; cross-fitting must not report it.
        table = score_table.read_table(run.directory / "calibration")
        jobs = [planning.Job(dj.attacks.get_attack("dime"), {"t": 120, "gamma": g, "q": 1}) for g in (0.1, 0.4)]
        rng, fitted, optimistic = np.random.default_rng(0), [], []
        for _ in range(40):
            member = rng.permutation(len(table.index)) % 2 == 0
            first = rng.permutation(len(table.index)) % 2 == 0
            parts = cross_fit.Parts(table, member, first, jobs)
            fitted.append(cross_fit.auc(parts, cross_fit.scores(parts, jobs)))
            terms = [table.terms(job) for job in jobs]
            pairs = [calibration.TermPair(one[:, member], one[:, ~member]) for one in terms]
            chosen = calibration.calibrate(jobs[0].attack, table.schedule, [job.setting for job in jobs], pairs)
            optimistic.append(chosen.auc)
        assert np.mean(optimistic) > 0.54
        assert abs(np.mean(fitted) - 0.5) < 3 * stats.sem(fitted)

    def test_frontier_and_roc_agree_with_the_table(self, run):
        (panel,), (curves,) = run_figures.frontier([run]), run_figures.roc([run])
        assert {(point.attack, point.queries) for point in panel.points} == {("loss", 1), ("sima_l4", 1), ("dime", 2)}
        for row in run.rows:
            fpr, tpr = curves.curves[row.attack]
            assert np.trapezoid(tpr, fpr) == pytest.approx(row.result.auc.value, abs=1e-9)
        assert curves.least_fpr == 1 / 40

    def test_a_run_without_dime_is_named(self, run):
        with pytest.raises(ValueError, match="must have the attack dime, got"):
            run_figures.best_dime(run._replace(rows=run.rows[:1]))


@pytest.mark.slow
def test_every_figure_is_made_from_the_smoke_variant(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(synthetic, "run", lambda config, output: made.append(config.attack.members))  # tested by itself
    figures.draw_all(tmp_path, "smoke")
    assert made == [60]
    names = [*figures.RUN_FIGURES, "norm_effect", "ideal_gap"]
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    gap = json.loads((tmp_path / "ideal_gap.json").read_text())
    assert (gap["model"], gap["images"], gap["train"]) == (dj.load_denoiser("digits").fingerprint, 4, 898)
