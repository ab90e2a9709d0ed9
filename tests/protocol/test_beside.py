"""A reference beside the model: asked the same with the same noise, counted and resumed on its own, and refused."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from memoriser import SHAPE, Counting, floats, images, memoriser
from memoriser import source as pixels
from tiny_model import SCHEDULE, function, network, quiet
from tiny_model import floats as tiny_floats
from tiny_model import source as tiny_source

import dime_jax as dj
from dime_jax import scoring
from dime_jax.core.denoiser import BESIDE, OWN
from dime_jax.evidence import Judgement, Way
from dime_jax.findings import json_files
from dime_jax.guards.wiring import DenoiserCheck
from dime_jax.protocol import beside, calibration, stages
from dime_jax.protocol.beside import Guarded
from dime_jax.scoring import planning, query_ledger, score_table
from dime_jax.scoring.query_ledger import Budget, BudgetExceeded

pytestmark = pytest.mark.usefixtures("small_model_check")

ALL = planning.grid_jobs(None, "light", [2], conditions=(OWN, BESIDE))
FEW = planning.grid_jobs(["loss", "dime", "loss_level_beside"], "quick", [2], [{"t": 70}], conditions=(OWN, BESIDE))
COUNT = 9


class Spy:
    """A model that keeps every question (t, image)."""

    def __init__(self):
        self.asked = []

    def __call__(self, x, t):
        self.asked += [(int(t), one) for one in np.asarray(x)]
        return np.tanh(np.asarray(x) * (1 + t / 100))

    @property
    def questions(self):
        return sorted((t, one.tobytes()) for t, one in self.asked)


def pair(model, reference, schedule=SCHEDULE):
    """A model and a reference that are functions; the reference may follow another schedule."""
    return Guarded(function(model), reference=Guarded(named(reference, schedule)))


def named(fn, schedule=SCHEDULE, name="reference"):
    return dj.Denoiser.from_function(fn, schedule, (4, 4, 1), name=name)


def score(asked, directory, jobs=FEW, **options):
    """The tables of both about nine images."""
    options, indices = quiet(**{"micro_batch": 4, **options}), np.arange(COUNT)
    return beside.score(asked, directory, "test", tiny_source(COUNT), jobs, indices=indices, seed=0, options=options)


# -------------------------------------------------------------------------------------------------- the same questions


@pytest.mark.parametrize("kind", ["function", "network"])
def test_what_computes_the_same_differs_by_exactly_nothing_in_every_attack(kind, tmp_path):
    asked = pair(Spy(), Spy()) if kind == "function" else Guarded(network(), reference=Guarded(network()))
    table = score(asked, tmp_path, ALL)
    for job in ALL:
        own, theirs = np.split(beside.terms(table, job, reference=True), 2)
        np.testing.assert_array_equal(own, theirs)
        assert np.ptp(own, axis=1).max() > 0
        sides = calibration.TermPair(*np.split(np.concatenate([own, theirs]), [4], axis=1))
        frozen = calibration.calibrate(job.attack, SCHEDULE, [job.setting], [sides], way=Way.BESIDE)
        left = np.concatenate([frozen.score(side) for side in sides])
        np.testing.assert_allclose(left, 0, atol=1e-9 * np.abs(own).max())
        pile = calibration.to_adjust(frozen, Way.BESIDE).pile(np.concatenate([own, theirs]), None)
        left = pile.residuals(frozen.combine if job.attack.rule.covariates else None)
        np.testing.assert_array_equal(left, np.zeros(COUNT))


def test_both_are_asked_the_same_questions_whoever_comes_first_and_however_many_at_a_time(tmp_path):
    model, reference, alone, in_one = Spy(), Spy(), Spy(), Spy()
    score(pair(model, reference), tmp_path / "both", ALL)
    options = quiet(micro_batch=4)
    scoring.score(function(alone), tiny_source(COUNT), ALL, tmp_path / "alone", options=options)
    score(pair(Spy(), in_one), tmp_path / "in one", ALL, micro_batch=COUNT)
    assert len(model.questions) == COUNT * planning.make_plan(ALL, SCHEDULE).queries_per_image
    assert reference.questions == alone.questions == model.questions
    # In another batch an image is multiplied by another program, which may round the last bit otherwise.
    one, other = (sorted(of.asked, key=lambda asked: (asked[0], *asked[1].ravel()[:3])) for of in (model, in_one))
    assert [t for t, _ in one] == [t for t, _ in other]
    np.testing.assert_allclose([x for _, x in one], [x for _, x in other], rtol=1e-5, atol=1e-6)


def test_the_number_of_devices_changes_no_draw(tmp_path):
    """A network that answers with its question, so that the loss is the distance between draw and question."""
    echo = [network(seed, apply=lambda params, x, t, label: x) for seed in range(2)]
    asked = Guarded(echo[0], reference=Guarded(echo[1]))
    one, four = (score(asked, tmp_path / str(n), devices=jax.devices()[:n], micro_batch=12 // n) for n in (1, 4))
    assert len(jax.devices()) == 4
    for job in FEW:
        found, expected = (beside.terms(table, job, reference=True) for table in (four, one))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert np.ptp(found, axis=1).max() > 0


@pytest.mark.parametrize("schedule", [dj.cosine_schedule(), dj.linear_schedule(500, 2e-4, 0.04)])
def test_a_reference_of_another_schedule_is_asked_at_the_nearest_noise_with_the_same_draws(schedule, tmp_path):
    model, reference = Spy(), Spy()
    job = next(job for job in FEW if job.attack.name == "loss_level_beside")
    table = score(pair(model, reference, schedule), tmp_path, [job])
    levels = {t: float(SCHEDULE.sigma(t)) for t in (150, 50)}
    sigmas = np.asarray(schedule.sigma_table, np.float64)
    nearest = {t: int(np.argmin(np.abs(sigmas - level))) for t, level in levels.items()}
    assert {t for t, _ in reference.asked} == set(nearest.values()) != set(nearest)
    for t, other in nearest.items():
        questions = zip(*([x for at, x in of.asked if at == when] for of, when in ((model, t), (reference, other))))
        x0 = tiny_floats(tiny_source(COUNT))
        for image, (ours, theirs) in zip(x0, questions):
            draw = (ours - float(SCHEDULE.sqrt_abar(t)) * image) / levels[t]
            same = (theirs - float(schedule.sqrt_abar(other)) * image) / sigmas[other]
            np.testing.assert_allclose(same, draw, atol=2e-5)
    assert beside.noise_warnings(table, [job]) == []
    own, theirs = np.split(beside.terms(table, job, reference=True), 2)
    np.testing.assert_array_equal(own, table.terms(job))
    answers = [np.log(np.linalg.norm(np.tanh(x * (1 + t / 100)))) for t, x in reference.asked if t == nearest[50]]
    np.testing.assert_allclose(theirs[1], answers, rtol=1e-5)


def test_noise_levels_that_a_reference_does_not_have_are_said(tmp_path):
    steps = dj.linear_schedule(4, 0.05, 0.9)
    table = score(pair(Spy(), Spy(), steps), tmp_path, [job for job in FEW if job.attack.name != "dime"])
    (line,) = beside.noise_warnings(table, FEW)  # 0.17 and 0.22 are nearer
    assert "the reference has other noise levels: what was asked of the model at 0.46 was asked of it at 0.61" in line
    assert beside.noise_warnings(dataclasses.replace(table, reference=None), FEW) == []


def test_what_a_reference_has_no_timestep_for_is_said_before_the_model_is_asked(tmp_path):
    model, steps = Spy(), dj.linear_schedule(4, 0.05, 0.9)  # SecMI's hops are of ten timesteps
    jobs = planning.grid_jobs(["secmi"], "light")
    with pytest.raises(ValueError, match=r"the reference reference cannot be asked the same: the step after t_sec's"):
        score(pair(model, Spy(), steps), tmp_path, jobs)
    assert model.asked == []


# -------------------------------------------------------------------------------------------------------- two tables


def test_tables_of_different_images_or_draws_are_not_read_together(tmp_path):
    score(pair(Spy(), Spy()), tmp_path / "run")
    for name, count, seed in (("images", COUNT - 1, 0), ("seed", COUNT, 1)):
        run = tmp_path / name
        shutil.copytree(tmp_path / "run", run)
        shutil.rmtree(run / "reference" / "test")
        indices, options = np.arange(count), quiet(micro_batch=4)
        theirs = run / "reference" / "test"
        scoring.score(named(Spy()), tiny_source(COUNT), FEW, theirs, indices=indices, seed=seed, options=options)
        with pytest.raises(ValueError, match=r"reference/test must be of the same (data|seed) as .*test") as error:
            beside.read(run, "test")
        assert "\n" not in str(error.value)


def test_an_answer_that_the_reference_does_not_have_is_named(tmp_path):
    table = score(pair(Spy(), Spy()), tmp_path)
    with pytest.raises(ValueError, match="has no sima_l4 at"):
        beside.terms(table, planning.grid_jobs(["sima_l4"], "light")[0], reference=True)
    with pytest.raises(ValueError, match=r"test has no reference beside it"):
        beside.terms(dataclasses.replace(table, reference=None), FEW[0], reference=True)


def test_smaller_batches_of_one_model_are_those_of_the_other(tmp_path):
    """As after memory ended: the reference takes the model's batches, and goes on with its own if they are smaller."""
    score(pair(Spy(), Spy()), tmp_path, micro_batch=2)
    batch = lambda place: score_table.read_manifest(tmp_path / place)["micro_batch"]  # noqa: E731
    assert (batch("test"), batch("reference/test")) == (2, 2)
    shutil.rmtree(tmp_path / "reference" / "test")
    broken = Spy()
    broken.calls = 0

    def memory_ends(x, t):
        broken.calls += 1
        if broken.calls > 3:
            raise KeyboardInterrupt
        return broken(x, t)

    with pytest.raises(KeyboardInterrupt):
        score(pair(Spy(), memory_ends), tmp_path)
    path = tmp_path / "reference" / "test"
    score_table.write_manifest(path, {**score_table.read_manifest(path), "micro_batch": 1})
    sizes = []

    def sized(x, t):
        sizes.append(len(x))
        return np.tanh(np.asarray(x) * (1 + t / 100))

    score(pair(Spy(), sized), tmp_path)
    assert set(sizes) == {1}


# ------------------------------------------------------------------------------------------------ whole runs of both


MEMBERS, HELDOUT = images(24, 0), images(24, 1)
RUN_JOBS = planning.grid_jobs(["loss", "sima_l4"], "quick", settings=[{"t": 70}, {"t": 120}], conditions=(OWN, BESIDE))
SOURCE = pixels(np.concatenate([MEMBERS, HELDOUT]))
HALVES = dj.data.halves(dj.data.Split(np.arange(24), np.arange(24, 48)), SOURCE.ids, seed=0)
MODEL, OTHER = memoriser(MEMBERS, "model"), memoriser(images(24, 2), "other")


def run(directory, model=MODEL, reference=OTHER, take=stages.STAGES, **options):
    options = quiet(**{"micro_batch": 16, **options})
    stages.run(directory, model, SOURCE, HALVES, RUN_JOBS, reference=reference, options=options, take=take)
    return json_files.read_results(directory) if "evaluate" in take else None


def tables(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("scores.parquet")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_model_check):
    """A run that nobody disturbed, its results, and what either model counted."""
    directory, model, other = tmp_path_factory.mktemp("whole"), Counting(MODEL), Counting(OTHER)
    results = run(directory, model.denoiser, other.denoiser)
    return directory, results, model, other


def test_a_run_has_two_tables_of_each_half_and_counts_both(whole):
    directory, results, model, other = whole
    names = ["calibration", "reference/calibration", "reference/test", "test"]
    assert sorted(str(path.parent) for path in tables(directory)) == names
    assert (results.queries_made, results.reference_queries_made) == (model.images, other.images)
    assert query_ledger.queries_made(directory) == model.images
    assert query_ledger.queries_made(directory / "reference") == other.images
    assert results.fingerprints["reference"] == other.denoiser.fingerprint
    row = results.row("loss@1")
    assert {way for way in Way if row.read(way)} == set(Way)
    witness = [(auc.adjusted, auc.beside) for auc in results.direction.aucs if (auc.half, auc.t) == ("test", 70)]
    assert witness == [(None, None), (True, None), (None, True)]
    assert results.direction.judgement is Judgement.ABOVE


@pytest.mark.parametrize("which", ["model", "reference"])
def test_interrupted_at_ten_moments_the_tables_are_the_same_to_the_bit(which, whole, tmp_path):
    directory, results, *counted = whole
    calls, number = counted[which == "reference"].calls, 0
    for moment in np.linspace(1, calls, 10).round().astype(int):
        models = [Counting(MODEL), Counting(OTHER)]
        models[which == "reference"].interrupted = moment
        place, denoisers = tmp_path / str(moment), [one.denoiser for one in models]
        with pytest.raises(KeyboardInterrupt):
            run(place, *denoisers, take=stages.STAGES[:3])
        run(place, *denoisers, take=stages.STAGES[:3])
        assert tables(place) == tables(directory)
        for name in ("calibration.json", "statistics.npz"):
            assert undated(place / name) == undated(directory / name)
        made = [query_ledger.queries_made(of) for of in (place, place / "reference")]
        assert made == [one.images for one in models]
        number += sum(made)
    assert number > 10 * (results.queries_made + results.reference_queries_made)  # the interrupted ones count, too
    again = stages.evaluate_run(place)
    assert (again.queries_made, again.reference_queries_made) == tuple(made)
    assert again.direction == results.direction
    assert [row.beside_adjusted for row in again.results] == [row.beside_adjusted for row in results.results]


def undated(path):
    """A file of a run, without the digests of manifests, which hold the seconds that it took."""
    return path.read_bytes().partition(b'"digests"')[0]


# ----------------------------------------------------------------------------------------------------------- budgets


def ideal(train, name):
    """As `memoriser`, but a network, which has no fixed question to answer; it counts by itself."""
    model = dj.IdealDenoiser(floats(train), MODEL.schedule)
    model.name = name
    return model


@pytest.mark.parametrize("more", ["model", "reference"])
def test_a_budget_binds_either_by_itself_to_the_query(more, tmp_path):
    """One query too few for the model that needs more; then that query, and nothing is asked again."""

    def models():
        if more == "model":
            return Counting(MODEL).denoiser, ideal(images(24, 2), "other")
        return ideal(MEMBERS, "model"), Counting(OTHER).denoiser

    def asked(directory, denoisers):
        made = [query_ledger.queries_made(place) for place in (directory, directory / "reference")]
        assert made == [denoiser.queries.count for denoiser in denoisers]
        return made

    first, number = models(), int(more == "reference")
    free = run(tmp_path / "free", *first)
    needed = [free.queries_made, free.reference_queries_made]
    assert needed == asked(tmp_path / "free", first)
    assert needed[number] > needed[1 - number]
    second, most = models(), max(needed)
    with pytest.raises(BudgetExceeded, match=f"budget of {most - 1:,} has") as error:
        run(tmp_path / "bound", *second, budget=Budget(total=most - 1))
    assert "\n" not in str(error.value)
    spent = asked(tmp_path / "bound", second)
    assert max(spent) < most
    if more == "reference":
        assert spent[0] == needed[0]
    bound = run(tmp_path / "bound", *second, budget=Budget(total=most))
    assert [bound.queries_made, bound.reference_queries_made] == needed == asked(tmp_path / "bound", second)
    assert tables(tmp_path / "bound") == tables(tmp_path / "free")


def test_a_budget_of_each_image_binds_either_by_itself(whole, tmp_path):
    directory, *_ = whole
    spent = [query_ledger.spent_per_image(place, 48) for place in (directory, directory / "reference")]
    most = int(max(spent[0].max(), spent[1].max()))
    # The check of a model asks as often as it may about its images, so that a bound changes what is spent.
    first, second = Counting(MODEL), Counting(OTHER)
    results = run(tmp_path, first.denoiser, second.denoiser, budget=Budget(per_image=most))
    assert (results.queries_made, results.reference_queries_made) == (first.images, second.images)
    for place in (tmp_path, tmp_path / "reference"):
        assert query_ledger.spent_per_image(place, 48).max() <= most


# ------------------------------------------------------------------------------------------------------------ guards


ONES = dj.Denoiser.from_function(lambda x, t: np.ones_like(x), MODEL.schedule, SHAPE, name="ones")


def as_latents(factor=1.0, name="latent"):
    """A model of images that it first multiplies."""
    inner = memoriser(images(24, 2))
    return dj.Denoiser(
        lambda params, x, t, condition: inner.eps(x, t),
        (),
        MODEL.schedule,
        SHAPE,
        encode=lambda params, x, draws: factor * x,
        fingerprint=f"{name}-{factor}",
        name=name,
        traceable=False,
    )


def relabelled(model, name, change=0.0):
    """Another object that answers the same, but for noise of so much of the answer's size: rounding, or more."""

    def answer(x, t):
        found = np.asarray(model.eps(x, t))
        noise = np.random.default_rng(int(t)).normal(size=SHAPE)
        return (found * (1 + change * noise)).astype(np.float32)

    return dj.Denoiser.from_function(answer, model.schedule, SHAPE, name=name)


@pytest.mark.parametrize(
    ("model", "reference", "message"),
    [
        (MODEL, named(Spy()), r"the reference must have the image_shape of the model, \(8, 8, 1\), got \(4, 4, 1\)"),
        (
            MODEL,
            memoriser(MEMBERS, "m", 3, np.arange(24) % 3),
            "the reference must have the num_classes .* None, got 3",
        ),
        (MODEL, MODEL, "the reference must be another model, got model itself"),
        (MODEL, relabelled(MODEL, "same"), "the reference same answers exactly as the model does: there is nothing to"),
        (MODEL, relabelled(MODEL, "hosted", 1e-7), "the reference hosted answers exactly as the model does"),
        (MODEL, ONES, "the reference ones cannot be used: The model does not predict noise"),
        (as_latents(), as_latents(1.02, "other"), "the reference must encode images as the model does, .* by 2.0%"),
        (MODEL, as_latents(1.02), "the reference must encode images as the model does, to 1%; its latents differ by"),
        (as_latents(1.02), MODEL, "the reference must encode images as the model does"),
    ],
)
def test_a_reference_that_is_none_is_refused_in_one_line(model, reference, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        run(tmp_path, model, reference)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "calibration").exists()


def test_encoders_that_hardly_differ_and_models_that_do_are_let_through(tmp_path):
    run(tmp_path / "a", MODEL, as_latents(1.002))
    run(tmp_path / "b", MODEL, relabelled(MODEL, "nearly", 1e-5))


def test_errors_that_nobody_can_compare_are_not_the_same():
    check = DenoiserCheck((500, 750), (0.5, 0.25), (0.9, 0.9), (), (), 16, 32)
    with pytest.raises(ValueError, match="answers exactly"):
        beside.check_answers(check, check, "x")
    beside.check_answers(check, dataclasses.replace(check, timesteps=(50, 75)), "x")
    beside.check_answers(check, dataclasses.replace(check, errors=(0.5, 0.2501)), "x")
    beside.check_answers(dataclasses.replace(check, errors=(None, 0.25)), check, "x")


def test_a_run_goes_on_with_its_own_reference_only(whole, tmp_path):
    directory, *_ = whole
    shutil.copytree(directory, tmp_path / "run")
    third = memoriser(images(24, 3), "third")
    for reference in (None, third):
        with pytest.raises(ValueError, match="holds a run with another seed, reference, other attacks or settings"):
            run(tmp_path / "run", reference=reference)
        guarded = Guarded(MODEL, reference=None if reference is None else Guarded(reference))
        expected = "this is no reference" if reference is None else "this is the reference function:third"
        with pytest.raises(ValueError, match=f"was begun with the reference function:other, {expected}"):
            stages.score_half(tmp_path / "run", "test", guarded, SOURCE)
    run(tmp_path / "alone", reference=None)
    with pytest.raises(ValueError, match="was begun with no reference, this is the reference function:other"):
        stages.score_half(tmp_path / "alone", "test", Guarded(MODEL, reference=Guarded(OTHER)), SOURCE)
    with pytest.raises(ValueError, match="other is not the model that this run was started with"):
        run(tmp_path / "run", reference=memoriser(images(24, 3), "other"))  # of the same name


@pytest.mark.parametrize("damage", ["gone", "changed", "another reference's"])
@pytest.mark.parametrize("place", ["calibration", "test"])
def test_what_the_reference_answered_is_needed_as_it_was(place, damage, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    table = tmp_path / "run" / "reference" / place
    if damage == "changed":
        content = bytearray((table / "scores.parquet").read_bytes())
        content[len(content) // 2] ^= 1
        (table / "scores.parquet").write_bytes(content)
    else:
        shutil.rmtree(table)
    if damage == "another reference's":
        run(tmp_path / "other", reference=memoriser(images(24, 3), "third"))
        shutil.copytree(tmp_path / "other" / "reference" / place, table)
    with pytest.raises(ValueError, match=r"reference/|was begun with the reference function:other, this is ") as error:
        stages.evaluate_run(tmp_path / "run")
    assert "\n" not in str(error.value)
    if place == "calibration" and damage != "changed":
        with pytest.raises(ValueError, match="was begun with the reference function:other, this is "):
            stages.calibrate_run(tmp_path / "run")


def test_calibration_goes_with_what_the_reference_answered(whole, tmp_path):
    """Which a manifest says: one that was sealed anew is not the one that calibration.json was made from."""
    shutil.copytree(whole[0], tmp_path / "run")
    table = tmp_path / "run" / "reference" / "calibration"
    score_table.write_manifest(table, {**score_table.read_manifest(table), "seconds": 1.0})
    with pytest.raises(ValueError, match=r"reference/calibration/manifest.json is damaged or from another run"):
        stages.read_calibrations(tmp_path / "run")
