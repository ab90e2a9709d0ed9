"""Is this a denoiser at all, and is it asked in its own terms?

A function that returns ones, an untrained network and a network under another model's schedule give every attack scores
without any signal. Left unchecked, that reads as "no sign that this model remembers".

**Does it predict noise?** At t = 0.5 T, 0.75 T and 0.98 T, r(t) = mean‖ξ - ε̂(√ᾱ x + σ ξ, t)‖² / mean‖ξ‖² is 1 for a
model that predicts zero. The highest r at these t, measured on 16 held-out images at a time:

    the shipped model                                               0.03
    ideal denoisers and nearest-neighbour memorisers                0.02 to 0.6, under three schedules
    DP-SGD at ε = 1, after 300 updates                              0.24
    the shipped weights plus noise of 0.5 and 1 standard deviation  0.11 and 0.40
    zero; a constant c; the random networks of the tests            1.0; 1 + c²; 1.35 to 1.42

So with r >= 0.9 it is not a denoiser. Low t is no ground for rejection: there a perfect memoriser is worse than zero on
images that it does not know. If it answers with an image drawn at random, r is 2 var(x) ᾱ/σ². Where 1.25 times that is
above 0.9, which at these t takes a schedule with little noise, it is the limit.

**Would it do clearly better if asked otherwise?** As a predictor of v, of the clean image or of the score; with images
in [0, 1]; with channels first; under another schedule; with mirrored, turned or inverted pictures. Errors of different
questions cannot be compared as they are: with less contrast or more noise every prediction is better. So each is
divided by the error that the means and variances of pixels alone allow: q = (e + c) / (b + c) with b = mean ᾱ var/(ᾱ
var + σ²) and c = 0.005, below which a difference is no sign of a mistake. An alternative is named if, over t = 0.1,
0.2, 0.3, 0.5 and 0.75 T, its q is nowhere more than 3 % above that of the question as given, is 1.25 times lower in
geometric mean, and is 0.9 or less somewhere: it must show knowledge of images beyond the means of their pixels, as no
weak model and no constant does under any reading. Other predictions than noise are named only where the first check
failed, as it must if they are right. Another schedule must also bring the noise's share in the answers, ⟨ε̂, ξ⟩/‖ξ‖²,
closer to 1: with too much noise for its t a model returns more than all of it, with too little less, however little it
knows of the images.

Gaussian, ideal and nearest-neighbour denoisers of eight sets of images, each under three schedules of 250 and 1,000
steps, with twelve choices of images: asked correctly, no alternative passes even without the factor of 1.25. With it,
none is named for the shipped model, its noised weights, DP-SGD, or functions such as x, x/2 and tanh x. The shipped
model under a wrong schedule reaches 1.38 to 1.7, ideal denoisers of digits 1.2 to 1.5 (linear given as another) and 3
to 6 (the others given as linear), [0, 1] images 3 and more, wrong predictions 6 and more. What is missed: many mistakes
with a model that knows little about these images beyond the means of their pixels, and scaled_linear given as cosine,
which is too close.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax._util.text import one_line
from dime_jax._util.typing import Array, PyTree
from dime_jax.core import draws
from dime_jax.core.denoiser import Denoiser
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.models import ScheduleSpec
from dime_jax.scoring.query_ledger import BudgetExceeded

IMAGES = 16  # as many as the measurements above
NO_BETTER_THAN_ZERO = 0.9
CLEARLY_BETTER, NOWHERE_WORSE, KNOWS_IMAGES = 1.25, 0.97, 0.9
FEWEST_IMAGES = 8  # with fewer, alternatives are not tried

_HIGH = (0.98, 0.5, 0.75)  # of T, most telling first
_COMPARED = (0.2, 0.75, 0.5, 0.3, 0.1)
_FRACTIONS = (*_HIGH, 0.2, 0.3, 0.1)
_NEGLIGIBLE = 0.005
_SAME_SCHEDULE = 0.02  # largest difference of ᾱ
# Errors that say nothing about how the model was asked.
_OTHER_ERRORS = (OSError, MemoryError, BudgetExceeded, jax.errors.JaxRuntimeError)

Ask = Callable[[Denoiser, jax.Array, int, PyTree], ArrayLike]
_Change = Callable[[Array], Array]
_Reading = Callable[[Array, Array, float, float], Array]  # of (answer, x_t, √ᾱ, σ) as noise


@dataclasses.dataclass(frozen=True)
class Mistake:
    """Another way to ask, which the model fits clearly better.

    Attributes:
      kind: "prediction", "scale", "layout", "schedule" or "picture".
      seems_to: what the model seems to expect or return: "The model seems to ...".
      times_better: how many times lower its error is, as the module says.
    """

    kind: str
    seems_to: str
    times_better: float


@dataclasses.dataclass(frozen=True)
class DenoiserCheck:
    """What `check_denoiser` found.

    Attributes:
      timesteps: where the error was measured, rising.
      errors: mean‖ξ - ε̂‖² / mean‖ξ‖² at each, 1 for predicting zero; None if not finite.
      limits: the error at which it stops being a denoiser, at middle and high t; None at low t, where none is rejected.
      mistakes: other ways to ask that fit clearly better, the best first.
      tried: the alternatives that were compared.
      images: how many images were used.
      queries: how many were asked.
    """

    timesteps: tuple[int, ...]
    errors: tuple[float | None, ...]
    limits: tuple[float | None, ...]
    mistakes: tuple[Mistake, ...]
    tried: tuple[str, ...]
    images: int
    queries: int

    @property
    def predicts_noise(self) -> bool:
        """Whether the error is below its limit at every middle and high t."""
        return all(limit is None or (e is not None and e < limit) for e, limit in zip(self.errors, self.limits))

    @property
    def passed(self) -> bool:
        """Whether the model predicts noise and no other way to ask fits clearly better."""
        return self.predicts_noise and not self.mistakes

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        if self.passed:
            return f"The model predicts noise: {self._figure}."
        if not self.mistakes:
            return f"The model does not predict noise: {self._figure}."
        kind, best = self.mistakes[0].kind, self.mistakes[0].times_better
        seems_to = " or to ".join(one.seems_to for one in self.mistakes if one.kind == kind)
        return f"The model seems to {seems_to}, which fits {best:.1f} times better; as asked, {self._figure}."

    @property
    def _figure(self) -> str:
        """The worst of middle and high t in words."""
        rows = zip(self.timesteps, self.errors, self.limits)
        error, t = max((np.inf if e is None else e, t) for t, e, limit in rows if limit is not None)
        if not np.isfinite(error):
            return f"at t = {t} it returns values that are not finite"
        return f"at t = {t} its squared error is {error:.2f} times that of predicting zero"

    def to_json(self) -> Mapping[str, object]:
        """Return what results.json holds: the attributes, and `passed` and `summary`."""
        return {**dataclasses.asdict(self), "passed": self.passed, "summary": self.summary}


@dataclasses.dataclass(frozen=True)
class _Question:
    """A way to ask: what is noised, by which schedule, how the model gets it, and how noise follows from its answer."""

    kind: str
    seems_to: str
    denoiser: Denoiser
    schedule: NoiseSchedule
    images: _Change = lambda x: x
    given: _Change = lambda x_t: x_t
    noise: _Reading = lambda answer, x_t, sqrt_abar, sigma: answer


def check_denoiser(
    denoiser: Denoiser,
    images: ArrayLike,
    condition: PyTree = None,
    *,
    ids: Sequence[str | int] | None = None,
    seed: int = 0,
    max_queries_per_image: int | None = None,
    ask: Ask = Denoiser.eps,
) -> DenoiserCheck:
    """Check that a model predicts noise, and that no other way to ask it fits clearly better.

    Costs 6 queries per image, and 1 to 5 more for each alternative that has to be asked: it is dropped at the first
    timestep where it fits worse. Draws depend on the seed and the ids only.

    Args:
      denoiser: the model.
      images: [B, *image_shape] in [-1, 1], best 16 that it was not trained on; with fewer than 8, or all the same, no
        alternatives are tried.
      condition: of the images, for conditional models: their classes [B], or what `embed` gives for their captions.
      ids: of the images, for the draws; their positions if None.
      seed: of the noise.
      max_queries_per_image: at least 1; what would take more is left out.
      ask: asks a model about (x, t, condition): `Denoiser.eps`, or that with counting or retries around it.

    Raises:
      ValueError: in one line, if the model fails on such a batch, or returns anything but an array of its shape.
    """
    images = jnp.asarray(images, jnp.float32)
    validate.check_shape(images, (None, *denoiser.image_shape), "images")
    validate.check_not_empty(images, "images")
    if max_queries_per_image is not None:
        validate.check_at_least(max_queries_per_image, 1, "max_queries_per_image")
    numbers = draws.id_numbers(range(len(images)) if ids is None else ids)
    x = denoiser.encode(images, ids=ids, seed=seed)
    check = _Check(denoiser, x, condition, draws.Draws(jax.random.key(seed), numbers), ask)
    return check.run(len(_FRACTIONS) * 10 if max_queries_per_image is None else max_queries_per_image)


class _Check:
    """One check: whom to ask about which images, with which draws; and what was answered."""

    def __init__(self, denoiser: Denoiser, x: jax.Array, condition: PyTree, batch_draws: draws.Draws, ask: Ask):
        self.denoiser, self.x, self.condition, self.draws, self.ask = denoiser, x, condition, batch_draws, ask
        self.as_given = _Question("as given", "", denoiser, denoiser.schedule)
        self.noises: dict[float, jax.Array] = {}
        self.answers: dict[float, np.ndarray] = {}
        self.calls = 0

    def run(self, most: int) -> DenoiserCheck:
        """Ask as given, and then otherwise, in at most `most` calls."""
        for fraction in _FRACTIONS[:most]:
            self.answers[fraction] = self._first_answer(fraction)
        fractions = sorted(self.answers)
        errors = [self._error(self.as_given, fraction, self.answers[fraction]) for fraction in fractions]
        found = DenoiserCheck(
            timesteps=tuple(self._t(fraction) for fraction in fractions),
            errors=tuple(error if np.isfinite(error) else None for error in errors),
            limits=tuple(self._limit(fraction) if fraction in _HIGH else None for fraction in fractions),
            mistakes=(),
            tried=(),
            images=len(self.x),
            queries=self.calls * len(self.x),
        )
        alike = not np.any(np.ptp(np.asarray(self.x), axis=0))
        if len(self.answers) < len(_FRACTIONS) or len(self.x) < FEWEST_IMAGES or alike:
            return found
        return self._with_alternatives(found, most)

    def _with_alternatives(self, found: DenoiserCheck, most: int) -> DenoiserCheck:
        given = {fraction: self._fit(self.as_given, fraction, self.answers[fraction]) for fraction in _COMPARED}
        questions = _costly(self.denoiser) if found.predicts_noise else [*_free(self.denoiser), *_costly(self.denoiser)]
        mistakes, tried = [], []
        for question in questions:
            if question.kind != "prediction" and self.calls + len(_COMPARED) > most:
                break
            tried.append(question.seems_to)
            mistakes += _judge(question, given, self._fits(question, given))
        mistakes.sort(key=lambda one: -one.times_better)
        queries = self.calls * len(self.x)
        return dataclasses.replace(found, mistakes=tuple(mistakes), tried=tuple(tried), queries=queries)

    def _fits(self, question: _Question, given: dict[float, float]) -> dict[float, float]:
        """Return q at each timestep, or at fewer if the question is refused or fits worse than as given."""
        fits: dict[float, float] = {}
        answers: dict[float, np.ndarray] = {}
        for fraction in given:
            answer = self._answer(question, fraction)
            if answer is None:
                return {}
            answers[fraction], fits[fraction] = answer, self._fit(question, fraction, answer)
            if not given[fraction] >= NOWHERE_WORSE * fits[fraction]:
                return {}
        misled = question.kind == "schedule" and not self._off(answers) < self._off(self.answers)
        return {} if misled else fits

    def _answer(self, question: _Question, fraction: float) -> np.ndarray | None:
        """Return the answer to an alternative; None from a model that refuses another layout, as it should."""
        if question.kind == "prediction":
            return self.answers[fraction]
        try:
            return self._call(question, fraction)
        except _OTHER_ERRORS:
            raise
        except Exception:
            if question.kind != "layout":
                raise
            return None

    def _first_answer(self, fraction: float) -> np.ndarray:
        """Return the answer to the question as given; if there is none, raise in one line what was expected."""
        try:
            return self._call(self.as_given, fraction)
        except _OTHER_ERRORS:
            raise
        except Exception as error:
            reason = one_line(error, None)
            if reason.startswith("eps must"):
                raise
            raise ValueError(
                f"eps must take images of shape {list(self.x.shape)} and a timestep, and return an array of "
                f"that shape; {self.denoiser.name} failed with {type(error).__name__}: {reason}{self._hint()}"
            ) from error

    def _hint(self) -> str:
        """Say what to do about a model that refuses the images, if it takes them with channels first."""
        for question in _channels_first(self.denoiser):
            answer = self._answer(question, _HIGH[0])
            if answer is not None and self._error(question, _HIGH[0], answer) < NO_BETTER_THAN_ZERO:
                return f". It seems to {question.seems_to}"
        return ""

    def _call(self, question: _Question, fraction: float) -> np.ndarray:
        self.calls += 1
        given = jnp.asarray(question.given(self._noised(question, fraction)))
        return np.asarray(self.ask(question.denoiser, given, self._t(fraction), self.condition), np.float32)

    def _t(self, fraction: float) -> int:
        return int(fraction * (self.denoiser.schedule.num_steps - 1))

    def _draw(self, fraction: float) -> jax.Array:
        """Draw the noise of a timestep, the same for every question."""
        if fraction not in self.noises:
            self.noises[fraction] = self.draws.gaussian(_FRACTIONS.index(fraction), self.x)
        return self.noises[fraction]

    def _noised(self, question: _Question, fraction: float) -> jax.Array:
        return question.schedule.noised(jnp.asarray(question.images(self.x)), self._draw(fraction), self._t(fraction))

    def _error(self, question: _Question, fraction: float, answer: np.ndarray) -> float:
        """mean‖ξ - ε̂‖² / mean‖ξ‖²."""
        t, x_t, noise = self._t(fraction), np.asarray(self._noised(question, fraction)), self._draw(fraction)
        eps = question.noise(answer, x_t, float(question.schedule.sqrt_abar(t)), float(question.schedule.sigma(t)))
        true = np.asarray(noise, np.float64)
        with np.errstate(all="ignore"):
            return float(np.mean((true - eps) ** 2) / np.mean(true**2))

    def _fit(self, question: _Question, fraction: float, answer: np.ndarray) -> float:
        """q: the error relative to what the means and variances of pixels allow."""
        t, x = self._t(fraction), np.asarray(question.images(self.x), np.float64)
        signal = float(question.schedule.abar(t)) * np.var(x, axis=0, ddof=1)
        allowed = float(np.mean(signal / (signal + float(question.schedule.sigma(t)) ** 2)))
        return (self._error(question, fraction, answer) + _NEGLIGIBLE) / (allowed + _NEGLIGIBLE)

    def _off(self, answers: Mapping[float, np.ndarray]) -> float:
        """Return how far the noise's share in the answers, ⟨ε̂, ξ⟩/‖ξ‖², is from 1, on average over these timesteps."""
        draws_of = {fraction: np.asarray(self._draw(fraction), np.float64) for fraction in _COMPARED}
        shares = [np.sum(noise * answers[fraction]) / np.sum(noise**2) for fraction, noise in draws_of.items()]
        return float(np.mean(np.abs(1 - np.array(shares))))

    def _limit(self, fraction: float) -> float:
        """Return the error at which it stops being a denoiser; with a margin, no memoriser reaches it either."""
        schedule, t = self.denoiser.schedule, self._t(fraction)
        variance = float(np.mean(np.var(np.asarray(self.x), axis=0)))
        return max(NO_BETTER_THAN_ZERO, 2.5 * variance * float(schedule.abar(t)) / float(schedule.sigma(t)) ** 2)


def _judge(question: _Question, given: dict[float, float], fits: dict[float, float]) -> list[Mistake]:
    """Return the mistake, if a question that fits nowhere worse fits clearly better."""
    if len(fits) < len(given) or min(fits.values()) > KNOWS_IMAGES:
        return []
    times_better = float(np.exp(np.mean([np.log(given[fraction] / fits[fraction]) for fraction in given])))
    return [Mistake(question.kind, question.seems_to, times_better)] if times_better >= CLEARLY_BETTER else []


def _free(denoiser: Denoiser) -> list[_Question]:
    """Return the alternatives that read the same answers otherwise."""
    readings: dict[str, _Reading] = {
        "predict v, not noise, which is √ᾱ v + σ x": lambda v, x_t, sqrt_abar, sigma: sqrt_abar * v + sigma * x_t,
        "predict the clean image x₀, not noise, which is (x - √ᾱ x₀)/σ": lambda x, x_t, sqrt_abar, sigma: (
            (x_t - sqrt_abar * x) / sigma
        ),
        "return the score s, not noise, which is -σ s": lambda score, x_t, sqrt_abar, sigma: -sigma * score,
    }
    return [_Question("prediction", name, denoiser, denoiser.schedule, noise=noise) for name, noise in readings.items()]


def _costly(denoiser: Denoiser) -> list[_Question]:
    """Return the alternatives that the model has to be asked. Latents have no scale to mistake and are not pictures."""
    layouts = _channels_first(denoiser) if denoiser.shape[-1] > 1 else []  # one channel is in the same order
    if denoiser.encode_fn is not None:
        return [*_schedules(denoiser), *layouts]
    return [*_schedules(denoiser), *_scales(denoiser), *layouts, *_pictures(denoiser)]


def _schedules(denoiser: Denoiser) -> list[_Question]:
    """Return the usual schedules of the model's length, without the one that it has."""
    given = np.asarray(denoiser.schedule.abar_table)
    return [
        _Question("schedule", f"follow the {name} schedule", denoiser, schedule)
        for name, schedule in usual_schedules(len(given)).items()
        if np.max(np.abs(np.asarray(schedule.abar_table) - given)) > _SAME_SCHEDULE
    ]


def usual_schedules(num_steps: int) -> dict[str, NoiseSchedule]:
    """Return the linear, scaled_linear and cosine schedules, as noisy as with 1,000 steps; none below 25 steps."""
    if num_steps < 25:
        return {}
    kinds, start, end = ("linear", "scaled_linear", "cosine"), 1e-4 * 1000 / num_steps, 0.02 * 1000 / num_steps
    return {
        kind: ScheduleSpec(kind=kind, num_steps=num_steps, beta_start=start, beta_end=end).build() for kind in kinds
    }


def _scales(denoiser: Denoiser) -> list[_Question]:
    def halved(x: Array) -> Array:
        return (x + 1) / 2

    return [
        _Question("scale", "expect images in [0, 1], not [-1, 1]", denoiser, denoiser.schedule, images=halved),
        _Question("scale", "expect (x + 1)/2 in place of its input x", denoiser, denoiser.schedule, given=halved),
    ]


def _pictures(denoiser: Denoiser) -> list[_Question]:
    """Return changes of orientation or colours of a picture. Each undoes itself, and noise changes likewise."""
    if len(denoiser.image_shape) != 3:
        return []
    height, width, channels = denoiser.image_shape
    changes: dict[str, _Change] = {
        "expect pictures mirrored left to right": lambda x: x[:, :, ::-1],
        "expect pictures upside down": lambda x: x[:, ::-1],
        "expect inverted pictures, -x": lambda x: -x,
    }
    if height == width:
        changes["expect rows and columns exchanged"] = lambda x: x.swapaxes(1, 2)
    if channels == 3:
        changes["expect channels in the order blue, green, red"] = lambda x: x[..., ::-1]
    return [_changed(denoiser, seems_to, change) for seems_to, change in changes.items()]


def _changed(denoiser: Denoiser, seems_to: str, change: _Change) -> _Question:
    return _Question("picture", seems_to, denoiser, denoiser.schedule, given=change, noise=lambda eps, *_: change(eps))


def _channels_first(denoiser: Denoiser) -> list[_Question]:
    """Ask in [B, C, H, W], not [B, H, W, C], for images and their latents; a hosted model has said which it takes."""
    if len(denoiser.shape) != 3 or denoiser.requests is not None:
        return []
    height, width, channels = denoiser.shape
    turned = copy.copy(denoiser)  # which counts its queries with those of the original
    turned.shape = turned.image_shape = (channels, height, width)
    question = _Question(
        "layout",
        "expect channels first, [B, C, H, W]",
        turned,
        denoiser.schedule,
        given=lambda x_t: jnp.moveaxis(x_t, -1, 1),
        noise=lambda eps, x_t, sqrt_abar, sigma: np.moveaxis(np.asarray(eps), 1, -1),
    )
    return [question]
