"""DP-SGD: clipping, padding, batches, noise, accounting, continued runs, and everything that is refused."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import optimize, stats

from dime_jax import models, training
from dime_jax._util.distributed import data_mesh
from dime_jax.loading import model_directory, opening
from dime_jax.training import dp, inputs
from dime_jax.training.keys import as_key, update_keys
from dime_jax.training.method import adam, mean_gradient
from dime_jax.training.objective import NoisedExamples
from dime_jax.training.step import initial_state, make_step

# jax_privacy calls what optax has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")

KEY = np.arange(4, dtype=np.uint32)


def batch_of(x, mask=None):
    """A batch of which only the images and the mask matter."""
    x = jnp.asarray(x, jnp.float32)
    rows = x.shape[0]
    mask = jnp.ones(rows, bool) if mask is None else jnp.asarray(mask)
    return NoisedExamples(x, jnp.zeros(rows, jnp.int32), jnp.zeros_like(x), None, mask)


def linear_losses(params, noised, key):
    """Losses whose gradients are the images themselves."""
    del key
    return jnp.einsum("bhwc,hwc->b", noised.x, params)


def clipped(noised, params=None, **arguments):
    params = jnp.zeros(noised.x.shape[1:]) if params is None else params
    return _clipped(params, noised, **{"clip_norm": 1.0, "batch_size": 1, **arguments})


@functools.partial(jax.jit, static_argnames=("clip_norm", "batch_size", "microbatch"))
def _clipped(params, noised, **arguments):
    return dp.clipped_gradient(linear_losses, params, noised, as_key(KEY), **arguments)


class TestClipping:
    def test_without_limit_it_is_the_plain_gradient(self):
        rng = np.random.default_rng(0)
        weights = {name: jnp.asarray(rng.normal(size=(16, 16)) / 4, jnp.float32) for name in ("first", "second")}

        def losses(params, noised, key):
            del key
            flat = jnp.tanh(noised.x.reshape(len(noised.x), -1) @ params["first"]) @ params["second"]
            return jnp.mean((flat.reshape(noised.x.shape) - noised.target) ** 2, axis=(1, 2, 3))

        x, target = (jnp.asarray(rng.normal(size=(6, 4, 4, 1)), jnp.float32) for _ in range(2))
        t = jnp.asarray(rng.integers(0, 1000, 6), jnp.int32)
        noised = NoisedExamples(x, t, target, None, jnp.asarray([True, True, False, True, False, True]))
        recipe = tiny.recipe(batch_size=5)

        def gradients(params):
            plain = dp.poisson_method(recipe, 10, 1).gradient(losses, params, noised, as_key(KEY))
            private = dp.clipped_gradient(losses, params, noised, as_key(KEY), clip_norm=jnp.inf, batch_size=5)
            return plain, private, mean_gradient(losses, params, noised, as_key(KEY))

        plain, private, mean = jax.jit(gradients)(weights)
        assert private.loss == pytest.approx(float(plain.loss), rel=1e-5)
        largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(plain.gradient))
        for ours, theirs, average in zip(*(jax.tree.leaves(g.gradient) for g in (private, plain, mean))):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * largest)
            np.testing.assert_allclose(theirs, average * 4 / 5, atol=1e-5 * largest)  # 4 rows count, 5 are expected

    def test_it_is_the_naive_loop(self):
        x = np.random.default_rng(1).normal(size=(16, 2, 2, 1)) * np.logspace(-3, 3, 16)[:, None, None, None]
        norms = np.sqrt(np.sum(x**2, axis=(1, 2, 3)))
        expected = sum(row * min(1, 0.7 / norm) for row, norm in zip(x, norms)) / 4
        for microbatch in (None, 4, 16):
            found = clipped(batch_of(x), clip_norm=0.7, batch_size=4, microbatch=microbatch)
            np.testing.assert_allclose(found.gradient, expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("scale", [1e-20, 1.0, 1e8, 1e18, np.inf, np.nan])
    def test_no_row_moves_the_sum_by_more_than_the_clip_norm(self, scale):
        rng = np.random.default_rng(2)
        x = rng.normal(size=(8, 2, 2, 1))
        x[3] = np.where(rng.random((2, 2, 1)) < 0.5, scale, -x[3])
        x[3, 0, 0, 0] = scale
        with_it, without = (clipped(batch_of(x, mask), clip_norm=0.5).gradient for mask in (ALL, ALL_BUT_3))
        assert np.all(np.isfinite(with_it))
        assert np.linalg.norm(with_it - without) <= 0.5 * (1 + 1e-5)

    def test_padding_contributes_nothing(self):
        x = np.random.default_rng(3).normal(size=(8, 2, 2, 1))
        expected = clipped(batch_of(x[ALL_BUT_3]))
        for garbage in (0.0, 1e30, np.nan):
            padded = x.copy()
            padded[3] = garbage
            for microbatch in (None, 2):
                found = clipped(batch_of(padded, ALL_BUT_3), microbatch=microbatch)
                np.testing.assert_allclose(found.gradient, expected.gradient, rtol=1e-6)
                if np.isfinite(garbage):
                    assert found.loss == pytest.approx(float(expected.loss), abs=1e-6)
        np.testing.assert_array_equal(clipped(batch_of(x, np.zeros(8, bool))).gradient, 0)

    def test_gradients_of_single_images_stay_within_memory(self, monkeypatch):
        params = {"a": np.zeros((100, 10), np.float32), "b": np.zeros(24, np.float32)}  # 4 KiB
        for allowed, expected in ((2**20, 96), (96 * 2**12, 96), (95 * 2**12, 16), (15 * 2**12, 8), (1, 1)):
            monkeypatch.setattr(dp, "GRADIENT_BYTES", allowed)
            assert dp.microbatch_size(params, 96) == expected


ALL = np.ones(8, bool)
ALL_BUT_3 = np.arange(8) != 3


class TestBatches:
    def test_every_image_is_drawn_by_chance_in_every_update(self):
        batches = dp.poisson_batches(count=40, batch_size=10, steps=3000, seed=0)
        drawn = np.stack([np.bincount(batch[batch >= 0], minlength=40) for batch in batches])
        assert set(np.unique(drawn)) == {0, 1}
        assert stats.kstest(drawn.sum(axis=1) + np.random.default_rng(0).random(3000), _smooth_binomial).pvalue > 0.01
        assert stats.chisquare(drawn.sum(axis=0)).pvalue > 0.01
        correlation = np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]
        assert abs(correlation) < 4 / np.sqrt(3000)
        assert abs(np.corrcoef(drawn[1:, 0], drawn[:-1, 0])[0, 1]) < 4 / np.sqrt(3000)

    def test_shapes_are_fixed_and_nothing_is_cut_off(self):
        batches = dp.poisson_batches(count=40, batch_size=10, steps=500, seed=0)
        sizes = np.sum(batches >= 0, axis=1)
        assert batches.shape[1] % dp.ROWS_MULTIPLE == 0
        assert sizes.max() <= batches.shape[1] < sizes.max() + dp.ROWS_MULTIPLE
        assert np.all((batches >= 0) == (np.arange(batches.shape[1]) < sizes[:, None]))

    def test_a_batch_depends_on_the_seed_and_its_number_only(self):
        short, long, other = (dp.poisson_batches(40, 10, *rest) for rest in ((20, 0), (30, 0), (20, 1)))
        np.testing.assert_array_equal(short, long[:20])
        assert not np.array_equal(short, other)

    def test_runs_with_and_without_privacy_draw_the_same(self):
        recipe = tiny.recipe(steps=6)
        private = dp.dp_method(recipe, 10, dp.Privacy(epsilon=0.2, steps=6))
        plain = dp.poisson_method(recipe, 10, 6)
        for one, two in zip(private.draws, plain.draws, strict=True):
            np.testing.assert_array_equal(one, two)


def _smooth_binomial(x):
    """The distribution function of a Binomial(40, 1/4) plus a uniform variable."""
    below = np.floor(x)
    return stats.binom.cdf(below - 1, 40, 0.25) + (x - below) * stats.binom.pmf(below, 40, 0.25)


class TestNoise:
    def test_it_is_gaussian_and_independent(self):
        tree = {"a": jnp.full((50, 40), 3.0), "b": jnp.full(2000, -1.0)}
        first, second = (
            jax.tree.map(lambda noisy, leaf: np.ravel(noisy - leaf), dp.add_noise(tree, 0.7, as_key(key)), tree)
            for key in (update_keys(0, 1).dropout, update_keys(0, 2).dropout)
        )
        draws = [*first.values(), *second.values()]
        for draw in draws:
            assert stats.kstest(draw, stats.norm(scale=0.7).cdf).pvalue > 0.001
        assert stats.kstest(np.concatenate(draws), stats.norm(scale=0.7).cdf).pvalue > 0.01
        correlations = np.corrcoef(draws)[np.triu_indices(4, 1)]
        assert np.max(np.abs(correlations)) < 4.5 / np.sqrt(2000)

    def test_a_method_adds_noise_of_the_calibrated_size(self):
        recipe = tiny.recipe(steps=20, batch_size=4)
        privacy = dp.Privacy(epsilon=0.2, steps=20, clip_norm=0.3)
        method = dp.dp_method(recipe, 10, privacy)
        noised = batch_of(np.random.default_rng(4).normal(size=(16, 40, 40, 1)))
        params = jnp.zeros((40, 40, 1))
        noisy = method.gradient(linear_losses, params, noised, as_key(KEY)).gradient
        total = clipped(noised, params, clip_norm=0.3, batch_size=4).gradient
        stddev = dp.calibrated_noise(privacy, 0.4) * 0.3 / 4
        assert stats.kstest(np.ravel(noisy - total), stats.norm(scale=stddev).cdf).pvalue > 0.01

    def test_budgets_that_differ_in_their_noise_alone_are_one_program(self, monkeypatch):
        monkeypatch.setattr(dp, "calibrated_noise", lambda privacy, probability: 1 / privacy.epsilon)
        mesh, recipe, spec = data_mesh(jax.devices()[:1]), tiny.recipe(steps=1), tiny.spec()
        state = initial_state(spec, recipe, adam(recipe))
        examples = inputs.Examples(np.zeros((16, 4, 4, 1), np.float32), None, np.ones(16, bool))

        def lowered(epsilon):
            method = dp.dp_method(recipe, 10, dp.Privacy(epsilon=epsilon, steps=1))
            update = make_step(spec, recipe, method, mesh)
            (stddev,) = jax.tree.leaves(update.args)
            return stddev, update.func.lower(*update.args, state, examples, update_keys(0, 1)).as_text()

        (more_noise, one), (less_noise, two) = lowered(0.5), lowered(1.0)
        assert more_noise > less_noise
        assert one == two


class TestAccounting:
    @pytest.mark.parametrize(
        ("epsilon", "expected"), [(1, 21.13), (4, 6.17), pytest.param(10, 2.92, marks=pytest.mark.slow)]
    )
    def test_noise_of_the_papers_runs(self, epsilon, expected):
        privacy = dp.Privacy(epsilon=epsilon, steps=7812)  # 500 epochs of batch 64 over 1000 images
        z = dp.calibrated_noise(privacy, 64 / 1000)
        assert z == pytest.approx(expected, rel=0.01)
        spent = dp.spent_epsilon(z, 64 / 1000, 7812, privacy.delta)
        assert 0.99 * epsilon <= spent <= epsilon

    @pytest.mark.parametrize("z", [0.8, 2.0, 5.0])
    def test_one_update_on_all_images_is_the_gaussian_mechanism(self, z):
        def delta(epsilon):  # Balle & Wang 2018, Theorem 8
            here, there = 1 / (2 * z) - epsilon * z, -1 / (2 * z) - epsilon * z
            return stats.norm.cdf(here) - np.exp(epsilon) * stats.norm.cdf(there)

        exact = optimize.brentq(lambda epsilon: delta(epsilon) - 1e-5, 0, 20)
        spent = dp.spent_epsilon(z, 1.0, 1, 1e-5)
        assert exact <= spent + 1e-9
        assert spent == pytest.approx(exact, rel=1e-3)

    def test_more_updates_spend_more(self):
        spent = [dp.spent_epsilon(4.0, 0.1, steps, 1e-5) for steps in (1, 10, 100)]
        assert spent[0] < spent[1] < spent[2]

    def test_large_budgets_get_the_least_noise(self):
        assert dp.calibrated_noise(dp.Privacy(epsilon=1e4, steps=1), 1.0) == dp.LEAST_NOISE


# ----------------------------------------------------------------------------------------------------------- whole runs

PRIVACY = dp.Privacy(epsilon=0.25, steps=8)  # much noise, with which accounting is quick
COUNT = 10


def train(workdir, steps=8, privacy=PRIVACY, devices=1):
    options = training.TrainingOptions(log_every=2, save_every=4, silent=True, devices=jax.devices()[:devices])
    recipe, members = tiny.recipe(steps=steps, batch_size=4), np.arange(COUNT)
    return dp.train_privately(workdir, tiny.spec(), tiny.source(), members, recipe, privacy, options=options)


def weights(model):
    return jax.tree.leaves(opening.load_denoiser(model).params)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An unbroken run, and one that has made half of its updates."""
    whole, half = (tmp_path_factory.mktemp(name) / "run" for name in ("whole", "half"))
    train(whole)
    train(half, steps=4)
    return whole, half


def spent(workdir):
    return json.loads((workdir / "model" / dp.PRIVACY_FILE).read_text())


class TestRuns:
    def test_continued_it_is_the_same_run_and_spends_once(self, runs, tmp_path):
        whole, half = runs
        continued = tmp_path / "run"
        shutil.copytree(half, continued)
        before = weights(half / "model")
        train(continued)
        for one, two in zip(weights(continued / "model"), weights(whole / "model"), strict=True):
            np.testing.assert_array_equal(one, two)
        assert any(not np.array_equal(one, two) for one, two in zip(before, weights(whole / "model"), strict=True))
        assert spent(continued) == spent(whole)

    def test_what_was_spent_lies_beside_the_weights(self, runs):
        whole, half = runs
        record = spent(whole)
        probability = 4 / COUNT
        exact = dp.spent_epsilon(record["noise_multiplier"], probability, 8, 1e-5)
        assert record["epsilon"] == exact <= PRIVACY.epsilon
        assert record["steps"] == record["budget_steps"] == 8
        assert record["sampling_probability"] == probability
        assert spent(half)["steps"] == 4
        assert spent(half)["epsilon"] < record["epsilon"]
        assert "epsilon=0.25" in model_directory.read_spec_file(whole / "model")["metadata"]["method"]

    @pytest.mark.slow
    def test_on_two_devices_it_stays_close(self, runs, tmp_path):
        whole, _ = runs
        train(tmp_path, devices=2)
        for one, two in zip(weights(tmp_path / "model"), weights(whole / "model"), strict=True):
            np.testing.assert_allclose(one, two, atol=1e-4)

    def test_going_past_the_budget_is_refused(self, runs):
        whole, _ = runs
        with pytest.raises(
            ValueError, match=r"steps must be <= 8 for epsilon=0\.25, got 9, which would spend 0\.2[5-9]"
        ) as error:
            train(whole, steps=9)
        assert "\n" not in str(error.value)

    def test_another_budget_is_another_run(self, runs):
        whole, _ = runs
        for privacy in (dp.Privacy(epsilon=0.2, steps=8), dp.Privacy(epsilon=0.25, steps=9)):
            with pytest.raises(ValueError, match="holds another run"):
                train(whole, privacy=privacy)


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "match"),
        [
            ({"epsilon": 0}, "epsilon must be finite and > 0, got 0"),
            ({"epsilon": -1.0}, "epsilon must be finite and > 0, got -1.0"),
            ({"epsilon": float("nan")}, "epsilon must be finite and > 0, got nan"),
            ({"delta": 1.0}, r"delta must be in \(0, 1\), got 1.0"),
            ({"delta": 0.0}, r"delta must be in \(0, 1\), got 0.0"),
            ({"steps": 0}, "steps must be >= 1, got 0"),
            ({"clip_norm": 0.0}, "clip_norm must be finite and > 0, got 0.0"),
        ],
    )
    def test_budgets_check_themselves(self, fields, match):
        with pytest.raises(ValueError, match=match):
            dp.Privacy(**{"epsilon": 1.0, "steps": 1, **fields})

    def test_a_large_delta_is_warned_of(self):
        with pytest.warns(UserWarning, match=r"delta=0\.01 is not below 1/n for n=100 images"):
            dp.dp_method(tiny.recipe(steps=1), 100, dp.Privacy(epsilon=0.1, steps=100, delta=0.01))

    def test_batches_larger_than_the_set(self):
        with pytest.raises(ValueError, match="batch_size must be <= 10, the images that it is drawn from, got 12"):
            dp.poisson_batches(10, 12, 1, 0)

    def test_networks_with_batch_statistics(self, monkeypatch, tmp_path):
        shapes = {"params": {}, "batch_stats": {"mean": np.zeros(3)}}
        monkeypatch.setattr(models, "param_shapes", lambda architecture: shapes)
        with pytest.raises(ValueError, match="DP-SGD needs a network without batch statistics"):
            train(tmp_path)
        assert not list(tmp_path.iterdir())


def test_rows_of_a_batch_are_read_from_the_draws(runs):
    """Positions are of the members, and rows beyond the batch are masked."""
    recipe = tiny.recipe(steps=8, batch_size=4)
    method = dp.dp_method(recipe, COUNT, PRIVACY)
    examples = next(inputs.read_examples(method.draws, tiny.source(), np.arange(COUNT), tiny.spec()))
    np.testing.assert_array_equal(examples.mask, method.draws[0] >= 0)
    assert not np.any(examples.images[~examples.mask])
