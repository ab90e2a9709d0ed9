"""Models with a space of their own and conditions of their own, against the same asked in plain pixels."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import FEW, SCHEDULE, floats, function, images, network, quiet, source, unconditional

import dime_jax as dj
from dime_jax import attacks, scoring
from dime_jax.attacks import base, calls
from dime_jax.core import draws
from dime_jax.core.denoiser import Denoiser
from dime_jax.guards import model_check, wiring
from dime_jax.scoring import planning

FACTOR = 0.7
PIXELS = (8, 8, 1)
TOKENS = {"tokens": jax.ShapeDtypeStruct((3, 4), jnp.float32)}
SIMA = planning.Job(attacks.get_attack("sima_l4"), {"t": 70})


def pooled(params, pixels, draws):
    """A toy encoder: the mean of each square of 2 x 2 pixels times a factor."""
    del params, draws
    return FACTOR * pixels.reshape(len(pixels), 4, 2, 4, 2, 1).mean(axis=(2, 4))


def latent(encode=pooled, **settings):
    settings = {"fingerprint": "latent", "name": "latent", **settings}
    return Denoiser(unconditional, network().params, SCHEDULE, PIXELS, shape=(4, 4, 1), encode=encode, **settings)


def big_images(count=21):
    return np.random.default_rng(5).uniform(-1, 1, (count, *PIXELS)).astype(np.float32)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_latent_model_scores_what_its_network_scores_on_the_encoded_images(tmp_path, devices):
    images = big_images()
    inner = np.asarray(pooled(None, jnp.asarray(images), None))
    options = quiet(micro_batch=2, devices=jax.local_devices()[:devices])
    got = scoring.score(latent(), dj.data.from_images(images), FEW, tmp_path / "latent", options=options)
    want = scoring.score(network(), dj.data.from_images(inner), FEW, tmp_path / "pixels", options=options)
    assert got.queries_made == want.queries_made  # encoding is free
    for job in FEW:
        np.testing.assert_allclose(got.terms(job), want.terms(job), rtol=1e-4, atol=1e-5)


def test_a_batch_is_encoded_once_whatever_is_asked_about_it(tmp_path):
    traced, run = [], []

    def encode(params, pixels, draws):
        traced.append(pixels.shape)
        jax.debug.callback(lambda: run.append(1))
        return pooled(params, pixels, draws)

    options = quiet(micro_batch=4, devices=jax.local_devices()[:1])
    scoring.score(latent(encode), dj.data.from_images(big_images()), FEW, tmp_path, options=options)
    jax.effects_barrier()
    assert traced == [(4, *PIXELS)]
    assert len(run) == 6  # batches of 4 out of 21 images


def test_the_samples_of_an_encoder_depend_on_seed_and_id_alone(tmp_path):
    def encode(params, pixels, draws):
        mean = pooled(params, pixels, draws)
        return mean + jnp.float32(0.1) * draws.latent(mean)

    model, images = latent(encode), dj.data.from_images(big_images())
    runs = [
        scoring.score(model, images, [SIMA], tmp_path / str(n), seed=seed, options=quiet(micro_batch=n))
        for n, seed in ((2, 3), (5, 3), (3, 4))
    ]
    first, second, other = (run.terms(SIMA)[0] for run in runs)
    np.testing.assert_allclose(first, second, rtol=1e-5)
    assert np.all(np.abs(first / other - 1) > 1e-4)
    x = model.encode(big_images(), ids=images.ids, seed=3)
    np.testing.assert_allclose(first, dj.sima(model.eps_fn(), SCHEDULE, x, 70), rtol=1e-5)


def some(params, x, draws):
    """About half of the coordinates of each image, by its signs of the first probe."""
    del params
    return draws.pullback(0, x.shape[1:]) > 0


@pytest.mark.parametrize(("traceable", "devices"), [(True, 4), (False, 1)])
def test_norms_run_over_the_coordinates_inside_the_mask(tmp_path, traceable, devices):
    """The same attacks on a model of the same answers, with norms and sums that see the masked coordinates alone."""
    images, plain = source(), network()
    model = Denoiser(plain.apply, plain.params, SCHEDULE, plain.shape, mask=some, traceable=traceable)
    options = quiet(micro_batch=2, devices=jax.local_devices()[:devices])
    table = scoring.score(model, images, FEW[:4], tmp_path, seed=3, options=options)
    assert table.queries_made == planning.make_plan(FEW[:4], SCHEDULE).queries_per_image * len(images)
    x = floats(images)
    mask = np.asarray(model.mask(x, ids=images.ids, seed=3))
    assert 0.3 < mask.mean() < 0.7

    own = draws.Draws(jax.random.key(3), draws.id_numbers(images.ids))
    eps = lambda x, t: np.asarray(plain.eps(np.asarray(x), t))  # noqa: E731
    norm = lambda v, p=2: (np.abs(np.where(mask, v, 0)) ** p).sum(axis=(1, 2, 3)) ** (1 / p)  # noqa: E731
    abar = float(SCHEDULE.abar(70))
    scaled, sigma = np.float32(np.sqrt(abar)) * x, np.float32(np.sqrt(1 - abar))
    noise, z, gamma = np.asarray(own.gaussian(0, x)), np.asarray(own.rademacher(0, x)), np.float32(0.1)
    eps0, probe, base_ = eps(x, 0), eps(scaled + gamma * sigma * z, 70), eps(scaled, 70)
    trace = np.where(mask, z * (probe - base_), 0).sum(axis=(1, 2, 3)) / (gamma * sigma)
    want = {
        "loss": [norm(noise - eps(scaled + sigma * noise, 70))],
        "pia_l4": [norm(eps0 - eps(scaled + sigma * eps0, 70), 4)],
        "sima_l4": [norm(eps(x, 70), 4)],
        "dime": [norm(probe) ** 2, trace],
    }
    for job in FEW[:4]:
        np.testing.assert_allclose(table.terms(job), want[job.attack.name], rtol=2e-4, atol=2e-4, err_msg=job.label)


def test_an_attack_with_norms_of_its_own_is_refused_where_coordinates_are_left_out(tmp_path):
    plain = network()
    model = Denoiser(plain.apply, plain.params, SCHEDULE, plain.shape, mask=some)
    mine = attacks.Attack("mine", "", "", lambda *_: None, lambda setting: 1, {"quick": [{"t": 70}]})
    with pytest.raises(ValueError, match=r"attack mine computes its own norms: --latent_weighting"):
        scoring.score(model, source(), [planning.Job(mine, {"t": 70})], tmp_path / "table", options=quiet())
    assert model.queries.count == 0


def test_nothing_is_compiled_or_copied_to_encode_pixels():
    x = jnp.asarray(floats(source(3)))
    assert network().encode(x) is x


def test_the_micro_batch_follows_from_the_models_own_shape(tmp_path):
    options = quiet(devices=jax.local_devices()[:1])
    table = scoring.score(latent(), dj.data.from_images(big_images()), [SIMA], tmp_path, options=options)
    assert table.manifest["micro_batch"] == scoring.default_micro_batch((4, 4, 1), "cpu")


def test_an_encoding_of_another_shape_is_refused(tmp_path):
    wrong = latent(lambda params, pixels, draws: pixels)
    message = r"the latents of latent must have shape \[\d+, 4, 4, 1\], got \[\d+, 8, 8, 1\]"
    with pytest.raises(ValueError, match=message):
        scoring.score(wrong, dj.data.from_images(big_images()), [SIMA], tmp_path, options=quiet())
    with pytest.raises(ValueError, match=message):
        wrong.encode(big_images())
    assert wrong.queries.count == 0


def test_the_check_of_a_latent_model_is_that_of_its_network_on_encoded_images():
    train = np.asarray(pooled(None, jnp.asarray(big_images(40)), None))
    ideal = dj.IdealDenoiser(train, SCHEDULE)
    model = Denoiser(ideal.apply, ideal.params, SCHEDULE, PIXELS, shape=(4, 4, 1), encode=pooled)
    got = wiring.check_denoiser(model, big_images(56)[40:])
    want = wiring.check_denoiser(ideal, pooled(None, jnp.asarray(big_images(56)[40:]), None))
    np.testing.assert_allclose(got.errors, want.errors, rtol=1e-5)
    assert got.passed
    assert not any("picture" in tried or "[0, 1]" in tried for tried in got.tried)


class Worded(Denoiser):
    """A model of captions."""

    def conditions_for(self, labels, captions):
        return {"own": self.embed(captions), "empty": self.embed([""] * len(captions))}


def captioned(count=21):
    return dj.data.from_images(images(count), captions=[f"caption {number}" for number in range(count)])


def embed(params, captions):
    """Three vectors of four numbers for a caption: the codes of its last 12 characters."""
    del params
    rows = [np.frombuffer(caption.rjust(12)[-12:].encode(), np.uint8) for caption in captions]
    return {"tokens": np.stack(rows).reshape(-1, 3, 4).astype(np.float32) / 100}


def by_tokens(params, x, t, condition):
    gain = jnp.einsum("bij,i->b", condition["tokens"], jnp.asarray([1.0, 10.0, 100.0]))
    return jnp.tanh(x) * gain[:, None, None, None]


def worded(traceable=True):
    return Worded(
        by_tokens,
        (),
        SCHEDULE,
        (4, 4, 1),
        condition_shape=TOKENS,
        conditions=("own", "empty"),
        embed=embed,
        name="worded",
        traceable=traceable,
    )


@dataclasses.dataclass(frozen=True, order=True)
class Unprompted(calls.Call):
    """ε(x, t) without the caption."""

    t: int

    condition: ClassVar[str] = "empty"

    def query(self, schedule, x, drawn, given):
        return calls.Query(x, self.t)

    def reduce(self, schedule, x, drawn, given, asked, eps, mask):
        return calls.Answer(None, {"l4": calls.norm(eps, 4, mask)})


def guided_job():
    """How much the caption changes the norm of the answer: a number under either condition."""

    def recipe(setting):
        readings = (base.Reading(calls.Raw(setting["t"]), "l4"), base.Reading(Unprompted(setting["t"]), "l4"))
        return base.Recipe(readings, lambda numbers: numbers[:1] - numbers[1:])

    attack = attacks.Attack("worded", "", "", lambda *_: None, lambda c: 2, {"quick": [{"t": 70}]}, recipe=recipe)
    return planning.Job(attack, {"t": 70})


@pytest.mark.parametrize("traceable", [True, False])
def test_calls_are_asked_under_the_condition_that_they_name(tmp_path, traceable):
    model, source, job = worded(traceable), captioned(), guided_job()
    table = scoring.score(model, source, [job], tmp_path, options=quiet(micro_batch=4))
    x = floats(source)
    own, empty = (
        dj.sima(model.eps_fn(model.embed(captions)), SCHEDULE, x, 70) for captions in (source.captions, [""] * len(x))
    )
    np.testing.assert_allclose(table.terms(job)[0], own - empty, rtol=1e-4)
    assert np.ptp(own / empty) > 1e-3  # the captions differ
    assert table.queries_made == 2 * 21


@pytest.mark.parametrize("model", [network(), function()])
def test_a_condition_that_the_model_does_not_offer_is_refused_before_any_query(tmp_path, model):
    with pytest.raises(ValueError, match=r"Unprompted\(t=70\) needs the condition 'empty'; .* offers only") as e:
        scoring.score(model, source(), [guided_job()], tmp_path / "table", options=quiet())
    assert "\n" not in str(e.value)
    assert model.queries.count == 0
    assert not (tmp_path / "table").exists()


def test_micro_batches_of_conditional_models_can_be_tuned():
    assert scoring.tune_micro_batch(worded(), candidates=[4], rounds=1) == 4
    assert scoring.tune_micro_batch(latent(), candidates=[4], rounds=1) == 4


def test_the_check_of_a_run_asks_under_the_images_own_conditions(tmp_path):
    seen = []

    class Seen(Worded):
        def ask_once(self, x, t, condition=None):
            seen.append(np.asarray(condition["tokens"]))
            return super().ask_once(x, t, condition)

    model = worded()
    model.__class__ = Seen
    source = captioned()
    model_check.check_once(tmp_path, model, source, np.arange(21), options=quiet(micro_batch=3))
    known = embed((), source.captions)["tokens"]
    assert seen[0].shape == (3, 3, 4)
    assert all(any(np.array_equal(row, one) for one in known) for row in np.concatenate(seen[:6]))
