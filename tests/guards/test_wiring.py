"""The check that a model is a denoiser: closed forms, what must fail, what must pass, and mistakes made on purpose."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj
from dime_jax import data, scoring
from dime_jax._util.records import parse
from dime_jax.core import draws
from dime_jax.guards import model_check
from dime_jax.guards.wiring import DenoiserCheck, Mistake, check_denoiser, usual_schedules
from dime_jax.loading.conversion import convert
from dime_jax.loading.opening import load_denoiser
from dime_jax.scoring.query_ledger import Budget, BudgetExceeded

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SHAPE = (8, 8, 1)
SCHEDULES = usual_schedules(1000)
LINEAR = SCHEDULES["linear"]
NO_WAIT = scoring.Retry(attempts=3, first_wait=0.0, longest_wait=0.0)


def slow(*values):
    """Cases that `make test-slow` runs: more of the same."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(scope="module")
def shipped():
    return load_denoiser("digits")


@pytest.fixture(scope="module")
def digits():
    """Members and held-out images of the shipped model, in [-1, 1]."""
    source = data.open_source("digits")
    transform = data.transform_for(source, SHAPE)
    split = dict(np.load(pathlib.Path(dj.__file__).parent / "shipped_models" / "digits" / "split.npz"))
    return tuple(np.stack([transform(source[i].image) for i in split[side]]) for side in ("member", "heldout"))


@pytest.fixture(scope="module")
def sixteen(digits):
    return digits[1][:16]


def function(eps, schedule=LINEAR, shape=SHAPE, **settings):
    return dj.Denoiser.from_function(
        lambda x, t, *label: eps(np.asarray(x), int(t), *label), schedule, shape, **settings
    )


def ideal(train, schedule=LINEAR):
    return dj.IdealDenoiser(train, schedule)


def nearest(train, schedule):
    """A memoriser: the noise that would lead to the nearest training image."""
    flat = train.reshape(len(train), -1)

    def eps(x, t):
        scale, sigma = float(schedule.sqrt_abar(t)), float(schedule.sigma(t))
        distances = np.sum((x.reshape(len(x), 1, -1) - scale * flat) ** 2, axis=-1)
        return (x - scale * train[np.argmin(distances, axis=1)]) / sigma

    return function(eps, schedule, train.shape[1:])


def levels(t):
    return float(LINEAR.sqrt_abar(t)), float(LINEAR.sigma(t))


def patches(count, seed):
    """Colour images with structure: smooth random fields."""
    coarse = np.random.default_rng(seed).normal(size=(count, 3, 3, 3))
    ramp = np.clip(1 - np.abs(np.arange(8)[:, None] / 3.5 - np.arange(3)), 0, None)
    return np.clip(np.einsum("bijc,hi,wj->bhwc", coarse, ramp, ramp) * 0.6, -1, 1).astype(np.float32)


class TestErrors:
    def test_of_a_linear_gaussian_denoiser_are_the_closed_form(self):
        """x ~ N(μ, C) and ε̂ = σ (ᾱC + σ²)⁻¹ (x_t - √ᾱ μ): r = tr ᾱC(ᾱC + σ²)⁻¹ / d."""
        rng = np.random.default_rng(0)
        mean, root = rng.normal(size=6) / 2, rng.normal(size=(6, 6)) / 3
        covariance = root @ root.T
        images = (mean + rng.normal(size=(40_000, 6)) @ root.T).astype(np.float32)

        def eps(x, t):
            scale, sigma = levels(t)
            return (x - scale * mean) @ np.linalg.inv(scale**2 * covariance + sigma**2 * np.eye(6)) * sigma

        found = check_denoiser(function(eps, shape=(6,)), images)
        for t, error in zip(found.timesteps, found.errors):
            scale, sigma = levels(t)
            signal = scale**2 * covariance
            exact = np.trace(signal @ np.linalg.inv(signal + sigma**2 * np.eye(6))) / 6
            assert error == pytest.approx(exact, rel=0.03)
        assert found.passed

    def test_are_those_of_a_naive_loop(self, shipped, sixteen):
        ids = [f"image-{i}" for i in range(16)]
        found = check_denoiser(shipped, sixteen, ids=ids, seed=3)
        assert found.timesteps == (99, 199, 299, 499, 749, 979)
        key, numbers = jax.random.key(3), draws.id_numbers(ids)
        for t, draw, error in zip(found.timesteps, (5, 3, 4, 1, 2, 0), found.errors):
            scale, sigma = levels(t)
            noise = np.asarray(draws.gaussian(key, numbers, draw, SHAPE))
            eps = np.stack(
                [np.asarray(shipped.eps((scale * x + sigma * n)[None], t))[0] for x, n in zip(sixteen, noise)]
            )
            assert error == pytest.approx(np.sum((noise - eps) ** 2) / np.sum(noise**2), rel=1e-3)

    def test_low_t_condemns_nothing(self, digits, sixteen):
        found = check_denoiser(nearest(digits[0][:60], LINEAR), sixteen)
        assert found.errors[0] > 1
        assert found.limits[:3] == (None, None, None)
        assert found.passed

    def test_nor_does_a_schedule_with_little_noise_condemn_a_memoriser(self, digits, sixteen):
        short = dj.linear_schedule(100)
        two_tone = np.where(digits[0][:60] > 0, 1, -1).astype(np.float32)
        found = check_denoiser(nearest(two_tone, short), np.where(sixteen > 0, 1, -1))
        assert max(found.errors) > 1
        assert found.passed


class TestNoDenoiser:
    @pytest.mark.parametrize("constant", [1.0, 0.03, 0.0, *slow(0.1, -2.0)])
    def test_constants(self, sixteen, constant):
        found = check_denoiser(function(lambda x, t: np.full_like(x, constant)), sixteen)
        assert not found.predicts_noise
        assert found.mistakes == ()
        assert found.errors[-1] == pytest.approx(1 + constant**2, abs=0.15 * abs(constant))

    def test_random_weights(self, tmp_path):
        model = load_denoiser(convert(GOLDEN / "ddpm_secmi.pt", tmp_path / "model"))
        x = np.random.default_rng(0).uniform(-1, 1, (16, *model.image_shape)).astype(np.float32)
        found = check_denoiser(model, x)
        assert not found.predicts_noise
        assert found.mistakes == ()
        assert found.summary.startswith("The model does not predict noise: at t = ")

    def test_answers_that_are_not_finite(self, sixteen):
        found = check_denoiser(function(lambda x, t: x * np.nan), sixteen)
        assert not found.passed
        assert found.errors == (None,) * 6
        assert found.summary == "The model does not predict noise: at t = 979 it returns values that are not finite."

    def test_the_figure_is_in_the_summary(self, sixteen):
        found = check_denoiser(function(lambda x, t: np.zeros_like(x)), sixteen)
        assert "its squared error is 1.00 times that of predicting zero" in found.summary


class TestNoFalseAlarm:
    @pytest.mark.parametrize("seed", [0, 1, *slow(2, 3, 4)])
    def test_the_shipped_model(self, shipped, digits, seed):
        chosen = np.random.default_rng(seed).choice(len(digits[1]), 16, replace=False)
        assert check_denoiser(shipped, digits[1][chosen], seed=seed).passed

    @pytest.mark.parametrize("make", [ideal, nearest])
    @pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
    @pytest.mark.parametrize("kind", ["digits", "colours", *slow("two-tone digits", "noise")])
    @pytest.mark.parametrize("seed", [0, *slow(1)])
    def test_perfect_memorisers(self, digits, make, schedule, kind, seed):
        rng = np.random.default_rng(0)
        train, heldout = {
            "digits": lambda: (digits[0][:300], digits[1]),
            "two-tone digits": lambda: tuple(np.where(side[:300] > 0, 1, -1).astype(np.float32) for side in digits),
            "colours": lambda: (patches(300, 1), patches(100, 2)),
            "noise": lambda: tuple(rng.uniform(-1, 1, (120, *SHAPE)).astype(np.float32) for _ in range(2)),
        }[kind]()
        found = check_denoiser(make(train, schedule), heldout[16 * seed : 16 * (seed + 1)], seed=seed)
        assert found.passed, found.summary

    @pytest.mark.parametrize("noise", [1.0, *slow(0.1, 0.3, 0.5)])
    def test_weak_networks(self, shipped, sixteen, noise):
        rng = np.random.default_rng(0)

        def noised(leaf):
            return np.float32(np.asarray(leaf) + noise * np.std(leaf) * rng.normal(size=leaf.shape))

        model = dj.Denoiser(shipped.apply, jax.tree.map(noised, shipped.params), LINEAR, SHAPE)
        found = check_denoiser(model, sixteen)
        assert found.passed, found.summary

    @pytest.mark.parametrize("eps", [lambda x, t: x, lambda x, t: x / 2, lambda x, t: np.tanh(x)])
    def test_weak_functions(self, sixteen, eps):
        for images in (sixteen, patches(16, 3)):
            found = check_denoiser(function(eps, shape=images.shape[1:]), images)
            assert found.passed, found.summary

    def test_what_predicts_noise_is_not_read_as_anything_else(self, sixteen):
        assert len(check_denoiser(function(lambda x, t: x), sixteen).tried) == 2 + 2 + 4  # schedules, scales, pictures

    @pytest.mark.parametrize("num_steps", [25, 4000, *slow(100)])
    def test_other_lengths(self, digits, sixteen, num_steps):
        for schedule in usual_schedules(num_steps).values():
            found = check_denoiser(ideal(digits[0][:300], schedule), sixteen)
            assert found.passed, found.summary

    def test_few_or_equal_images_accuse_nobody(self, shipped, sixteen):
        wrong = dj.Denoiser(shipped.apply, shipped.params, SCHEDULES["cosine"], SHAPE)
        for images in (sixteen[:7], np.repeat(sixteen[:1], 16, axis=0)):
            found = check_denoiser(wrong, images)
            assert (found.tried, found.mistakes, found.queries) == ((), (), 6 * len(images))


class TestMistakes:
    @pytest.fixture(params=[0, *slow(1, 2)])
    def one(self, request):
        """Check a model that has one mistake of the given kind."""
        seed = request.param

        def check(model, images, kind):
            found = check_denoiser(model, images[16 * seed : 16 * (seed + 1)], seed=seed)
            assert [mistake.kind for mistake in found.mistakes][:1] == [kind], found.summary
            assert not found.passed
            assert found.mistakes[0].times_better >= 1.25
            return found

        return check

    @pytest.mark.parametrize("given", ["scaled_linear", "cosine"])
    def test_linear_given_as_another_schedule(self, one, shipped, digits, given):
        wrong = dj.Denoiser(shipped.apply, shipped.params, SCHEDULES[given], SHAPE)
        found = one(wrong, digits[1], "schedule")
        assert found.predicts_noise  # which is why alternatives are tried anyway
        assert "seems to follow the linear schedule, which fits" in found.summary

    @pytest.mark.parametrize("true", ["scaled_linear", "cosine"])
    def test_another_schedule_given_as_linear(self, one, digits, true):
        model = ideal(digits[0], SCHEDULES[true])
        found = one(function(lambda x, t: model.eps(x, t)), digits[1], "schedule")
        assert true in found.summary

    def test_images_in_the_unit_interval(self, one, digits):
        found = one(ideal((digits[0] + 1) / 2), digits[1], "scale")
        assert "expect images in [0, 1], not [-1, 1]" in found.summary

    def test_noised_images_in_the_unit_interval(self, one, shipped, digits):
        found = one(function(lambda x, t: shipped.eps(2 * x - 1, t)), digits[1], "scale")
        assert "expect (x + 1)/2 in place of its input x" in found.summary

    def test_v_given_as_noise(self, one, shipped, digits):
        def v(x, t):
            scale, sigma = levels(t)
            return (np.asarray(shipped.eps(x, t)) - sigma * x) / scale

        assert "predict v" in one(function(v), digits[1], "prediction").summary

    def test_the_clean_image_given_as_noise(self, one, digits):
        model = ideal(digits[0])

        def clean(x, t):
            scale, sigma = levels(t)
            return (x - sigma * np.asarray(model.eps(x, t))) / scale

        assert "predict the clean image" in one(function(clean), digits[1], "prediction").summary

    def test_the_score_given_as_noise(self, one, shipped, digits):
        def score(x, t):
            return -np.asarray(shipped.eps(x, t)) / levels(t)[1]

        assert "return the score" in one(function(score), digits[1], "prediction").summary

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda x: x[:, :, ::-1], "mirrored"),
            (lambda x: x[:, ::-1], "upside down"),
            (lambda x: -x, "inverted"),
            (lambda x: x.swapaxes(1, 2), "rows and columns"),
        ],
    )
    def test_pictures_the_other_way_round(self, one, shipped, digits, change, words):
        model = function(lambda x, t: change(shipped.eps(change(jnp.asarray(x)), t)))
        assert words in one(model, digits[1], "picture").mistakes[0].seems_to

    def test_channels_first(self, one):
        """A network on flat vectors takes any layout without a word."""
        train, heldout = patches(400, 1), patches(48, 2)
        model = ideal(np.moveaxis(train, -1, 1).reshape(400, -1))
        flat = function(lambda x, t: np.asarray(model.eps(x.reshape(len(x), -1), t)).reshape(x.shape), shape=(8, 8, 3))
        assert "channels first" in one(flat, heldout, "layout").summary


class TestBadAnswers:
    def one_line(self, model, images, labels=None):
        with pytest.raises(ValueError, match="eps must") as error:
            check_denoiser(model, images, labels)
        assert "\n" not in str(error.value)
        return str(error.value)

    @pytest.mark.parametrize(
        ("answer", "got"),
        [(lambda x: None, "None"), (lambda x: x[..., 0], r"[16, 8, 8]"), (lambda x: (x, x), "tuple")],
    )
    def test_what_is_no_array_of_the_shape(self, sixteen, answer, got):
        line = self.one_line(function(lambda x, t: answer(x)), sixteen)
        assert f"eps must return an array of shape [16, 8, 8, 1], got {got} from mine" in line

    def test_an_error_about_shapes(self, sixteen):
        def fails(x, t):
            raise RuntimeError("mat1 and mat2 shapes cannot\nbe multiplied")

        line = self.one_line(function(fails), sixteen)
        assert "eps must take images of shape [16, 8, 8, 1]" in line
        assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in line

    def test_a_model_that_takes_channels_first_only(self, shipped, sixteen):
        def strict(x, t):
            if x.shape[1] != 1:
                raise RuntimeError(f"expected input to have 1 channel, but got {x.shape[1]}")
            return np.moveaxis(np.asarray(shipped.eps(np.moveaxis(x, 1, -1), t)), -1, 1)

        assert "It seems to expect channels first" in self.one_line(function(strict), sixteen)

    def test_other_errors_pass_as_they_are(self, sixteen):
        def offline(x, t):
            raise ConnectionError("no route to host")

        with pytest.raises(ConnectionError, match="no route"):
            check_denoiser(function(offline), sixteen)


class TestCounting:
    def counting(self, eps, **settings):
        seen = []

        def counted(x, t, *label):
            seen.append((len(x), t, *label))
            return eps(x, t)

        return function(counted, **settings), seen

    @pytest.mark.parametrize("eps", [lambda x, t: x, lambda x, t: np.ones_like(x), lambda x, t: np.tanh(x)])
    def test_every_query_is_counted(self, sixteen, eps):
        model, seen = self.counting(eps)
        found = check_denoiser(model, sixteen)
        assert found.queries == sum(entry[0] for entry in seen) == model.queries.count
        assert found.queries <= 16 * (6 + 5 * 9)

    def test_another_reading_costs_nothing(self, sixteen):
        model, seen = self.counting(lambda x, t: np.full_like(x, np.nan))
        found = check_denoiser(model, sixteen)
        assert len(found.tried) == 3 + 2 + 2 + 4  # readings, schedules, scales, pictures
        assert len(seen) == 6 + 2 + 2 + 4  # each that is asked is dropped after one timestep

    @pytest.mark.parametrize("most", [1, 2, 3, 6, 10, 11, 30])
    def test_the_budget_holds(self, sixteen, most):
        model, seen = self.counting(lambda x, t: np.ones_like(x))
        found = check_denoiser(model, sixteen, max_queries_per_image=most)
        assert len(seen) <= most
        assert len(found.timesteps) == min(6, most)
        assert not found.passed
        assert max(found.timesteps) == 979

    def test_labels_reach_the_model(self, sixteen):
        model, seen = self.counting(lambda x, t: x, num_classes=3)
        labels = np.arange(16, dtype=np.int32) % 3
        check_denoiser(model, sixteen, labels)
        assert all(np.array_equal(entry[2], labels) for entry in seen)

    def test_it_survives_json(self, sixteen):
        found = check_denoiser(function(lambda x, t: x * np.nan), sixteen)
        with_mistake = DenoiserCheck((1,), (0.5,), (0.9,), (Mistake("scale", "expect", 2.0),), ("a",), 16, 16)
        for one in (found, with_mistake):
            assert parse(DenoiserCheck, json.loads(json.dumps(one.to_json())), "check") == one


class TestOnce:
    """`model_check.check_once`: kept, resumed, and within the budget."""

    @pytest.fixture
    def source(self):
        return data.from_images(np.random.default_rng(0).integers(0, 256, (40, *SHAPE), dtype=np.uint8))

    def once(self, directory, model, source, **options):
        options = scoring.ScoringOptions(silent=True, retry=NO_WAIT, **options)
        return model_check.check_once(directory, model, source, np.arange(10, 40), options=options)

    def test_a_second_time_asks_nothing(self, tmp_path, source):
        model = function(lambda x, t: x)
        first = self.once(tmp_path, model, source)
        assert first.queries == model.queries.count
        assert self.once(tmp_path, model, source) == first
        assert model.queries.count == first.queries
        assert model_check.read_check(tmp_path, model.fingerprint) == first
        assert model_check.read_check(tmp_path, "another") is None

    def test_two_models_are_kept_apart(self, tmp_path, source):
        good = self.once(tmp_path, function(lambda x, t: x, name="good"), source)
        bad = self.once(tmp_path, function(lambda x, t: np.ones_like(x), name="bad"), source)
        assert good.passed
        assert not bad.passed
        assert model_check.read_check(tmp_path, "function:good") == good

    @pytest.mark.parametrize("micro_batch", [5, 16, None])
    def test_batches_change_nothing(self, tmp_path, source, micro_batch):
        whole = self.once(tmp_path / "whole", function(lambda x, t: x), source, micro_batch=64)
        parts = self.once(tmp_path / "parts", function(lambda x, t: x), source, micro_batch=micro_batch)
        assert parts == whole

    def test_what_was_asked_before_a_kill_is_counted_once(self, tmp_path, source, failing):
        killed = failing(lambda x, t: x, {4: KeyboardInterrupt()})
        model = function(killed)
        with pytest.raises(KeyboardInterrupt):
            self.once(tmp_path, model, source)
        found = self.once(tmp_path, model, source)
        assert found.queries == 16 * killed.calls == model.queries.count

    def test_a_model_that_fails_for_a_while_is_asked_again(self, tmp_path, source, failing):
        busy = failing(lambda x, t: x, {2: ConnectionError("busy"), 3: ConnectionError("busy")})
        assert self.once(tmp_path, function(busy), source).queries == 16 * busy.calls

    def test_the_budget_holds(self, tmp_path, source):
        ones = function(lambda x, t: np.ones_like(x))
        found = self.once(tmp_path / "total", ones, source, budget=Budget(total=100))
        assert found.queries == 96
        assert not found.passed
        assert self.once(tmp_path / "image", ones, source, budget=Budget(per_image=2)).queries == 32
        before = ones.queries.count
        with pytest.raises(BudgetExceeded, match="the budget must be >= 16 queries"):
            self.once(tmp_path / "none", ones, source, budget=Budget(total=15))
        assert ones.queries.count == before

    def test_unreadable_images_are_passed_over(self, tmp_path, source):
        def read(index):
            if index < 20:
                raise data.BadImage("broken")
            return source.read(index)

        broken = data.Source(**{**{f: getattr(source, f) for f in source.__dataclass_fields__}, "read": read})
        assert self.once(tmp_path, function(lambda x, t: x), broken).images == 16
