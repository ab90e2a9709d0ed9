"""The engine against the attack functions themselves, on any number of devices, and its promises about programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import FEW, GRID, SCHEDULE, SHAPE, TWO, floats, function, network, quiet, source, unconditional

import dime_jax as dj
from dime_jax import attacks, scoring
from dime_jax.attacks import dime, registry
from dime_jax.core import draws
from dime_jax.scoring import call_runner, placement, planning, score_table


def direct(job, model, x, ids):
    """An attack by its public function, with the draws that the contract names."""
    z, eps_fn, c = draws.Draws(jax.random.key(0), draws.id_numbers(ids)), model.eps_fn(), job.setting
    signs, noise = (
        jnp.stack([draw(k, jnp.asarray(x)) for k in range(c.get("q", 1))]) for draw in (z.rademacher, z.gaussian)
    )
    t, gamma = c["t"], c.get("gamma")
    terms = {
        "loss": lambda: dj.loss(eps_fn, SCHEDULE, x, noise[0], t),
        "pia_l2": lambda: dj.pia(eps_fn, SCHEDULE, x, t, p=2),
        "pian": lambda: dj.pia(eps_fn, SCHEDULE, x, t, p=4, normalize=True),
        "secmi": lambda: dj.secmi(eps_fn, SCHEDULE, x, t, c["k"]),
        "sima_l4": lambda: dj.sima(eps_fn, SCHEDULE, x, t),
        "sima_mc_norms": lambda: dj.sima_mc(eps_fn, SCHEDULE, x, noise, t),
        "sima_mc_vector": lambda: dj.sima_mc(eps_fn, SCHEDULE, x, noise, t, average="vector"),
        "dime": lambda: dj.dime_terms(eps_fn, SCHEDULE, x, signs, t, gamma),
        "dime_central": lambda: dj.dime_central_terms(eps_fn, SCHEDULE, x, signs, t, gamma),
        "level_only": lambda: attacks.dime_norms(eps_fn, SCHEDULE, x, signs, t, gamma),
    }[job.attack.name]()
    if isinstance(terms, dj.DimeTerms):
        norm, trace = (np.asarray(part, np.float64) for part in terms)
        return np.stack([norm.mean(axis=0) ** 2, trace.mean(axis=0)])
    if job.attack.name == "level_only":
        return np.asarray(terms, np.float64).mean(axis=0, keepdims=True) ** 2
    return np.asarray(terms)[None]


def assert_close(job, got, want):
    """Levels and scores to 1e-5 of their scale; traces and SecMI's errors, which are small differences, to 1e-3."""
    scale = np.abs(want).max(axis=1, keepdims=True)
    tolerance = np.array([[1e-3]] if job.attack.name == "secmi" else [[1e-5], [1e-3]])[: len(want)]
    np.testing.assert_array_less(np.abs(got - want) / scale, np.broadcast_to(tolerance, want.shape))


TRACES = []


def traced(params, x, t, label):
    TRACES.append(x.shape)
    return unconditional(params, x, t, label)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    model = network(apply=traced)
    for part in (call_runner.query_program, call_runner.reduce_program):
        part.cache_clear()
    return scoring.score(model, source(), GRID, tmp_path_factory.mktemp("reference"), options=quiet(micro_batch=2))


def test_one_program_per_kind_of_call_for_the_whole_grid(reference):
    kinds = {reading.call.__class__ for job in GRID for reading in job.recipe.readings}
    assert len(kinds) == 6
    assert [(8, *SHAPE)] == TRACES, "the network is one program for all kinds"
    sharding = placement.choose_placement(network(), None).sharding
    for kind in {*kinds, dime.Scaled}:  # Scaled is read by nobody, but asked
        for part in (call_runner.query_program, call_runner.reduce_program):
            assert part(kind, sharding)._cache_size() == 1


@pytest.mark.parametrize("name", sorted({job.attack.name for job in GRID}))
def test_the_table_is_what_the_attack_functions_give_image_by_image(reference, name):
    model, images = network(), source()
    jobs = [job for job in GRID if job.attack.name == name]
    for job in (jobs[0], jobs[-1]):
        one_by_one = [direct(job, model, floats(images, [i]), [images.ids[i]]) for i in range(0, 21, 5)]
        assert_close(job, reference.terms(job)[:, ::5], np.concatenate(one_by_one, axis=1))


@pytest.mark.parametrize(("micro_batch", "devices"), [(1, 1), (7, 2), (16, 4), (64, 1)])
def test_batch_size_order_and_devices_do_not_matter(reference, tmp_path, micro_batch, devices):
    order = np.random.default_rng(micro_batch).permutation(21)
    options = quiet(micro_batch=micro_batch, devices=jax.local_devices()[:devices])
    jobs = [job for job in GRID if job.attack.name == "dime"]
    table = scoring.score(network(), source(), jobs, tmp_path, indices=order, options=options)
    np.testing.assert_array_equal(table.index, order)
    assert table.ids == [source().ids[i] for i in order]
    for job in jobs:
        assert_close(job, table.terms(job), reference.terms(job)[:, order])


def test_draws_are_bitwise_the_same_on_any_devices(tmp_path):
    """A model that hands its query back: readings are then exact functions of the draws."""
    echo = network(apply=lambda params, x, t, label: jnp.sign(x))  # on the image 0 the sign is the probe itself
    blank = dj.data.from_images(np.zeros((9, *SHAPE), np.float32))
    job = planning.Job(attacks.get_attack("dime"), {"t": 70, "gamma": 0.5, "q": 3})
    tables = [
        scoring.score(
            echo, blank, [job], tmp_path / str(n), options=quiet(micro_batch=size, devices=jax.local_devices()[:n])
        )
        for n, size in ((1, 9), (4, 1))
    ]
    for name in tables[0].readings:
        for other in tables[1:]:
            np.testing.assert_array_equal(other.readings[name], tables[0].readings[name])
    np.testing.assert_allclose(tables[0].terms(job)[1], 16 / (0.5 * SCHEDULE.sigma(70)), rtol=1e-6)


def test_kinds_of_call_with_equal_parameters_do_not_share_a_program():
    """A probe and its mirror differ by their class alone."""
    for part in (call_runner.query_program, call_runner.reduce_program):
        assert len({part(kind, None) for kind in (dime.Probe, dime.Mirror)}) == 2


def test_labels_travel_with_their_images(tmp_path):
    labels = np.arange(21, dtype=np.int32) % 3

    def apply(params, x, t, label):
        return x * (1 + label.astype(jnp.float32))[:, None, None, None]

    model, images = network(num_classes=3, apply=apply), source(labels=labels)
    order = np.random.default_rng(0).permutation(21)
    job = planning.Job(attacks.get_attack("sima_l4"), {"t": 70})
    table = scoring.score(model, images, [job], tmp_path, indices=order, options=quiet(micro_batch=4))
    expected = dj.sima(model.eps_fn(labels[order]), SCHEDULE, floats(images, order), 70)
    np.testing.assert_allclose(table.terms(job)[0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "tiny is class-conditional, but arrays has no class labels"),
        (np.full(21, 3, np.int32), "labels in arrays must be >= 0 and < 3, got 3"),
    ],
)
def test_a_class_conditional_model_needs_labels(tmp_path, labels, message):
    model = network(num_classes=3)
    with pytest.raises(ValueError, match=message):
        scoring.score(model, source(labels=labels), FEW, tmp_path / "table", options=quiet())
    assert model.queries.count == 0
    assert not (tmp_path / "table").exists()


def test_an_attack_without_recipe_runs_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    def run(eps_fn, schedule, x, z, setting):
        noise = z.gaussian(1, x)
        return attacks.norm(eps_fn(x + noise, int(setting["t"])))[None]

    mine = attacks.register_attack(attacks.Attack("mine", "Mine", "me", run, lambda c: 1, {"quick": [{"t": 9}]}))
    model, images = network(), source()
    jobs = [*planning.grid_jobs(["sima_l4"], "quick"), planning.Job(mine, {"t": 9})]
    table = scoring.score(model, images, jobs, tmp_path, options=quiet(micro_batch=8))
    z = draws.Draws(jax.random.key(0), draws.id_numbers(images.ids))
    expected = mine.run(model.eps_fn(), SCHEDULE, jnp.asarray(floats(images)), z, {"t": 9})
    np.testing.assert_allclose(table.terms(jobs[-1]), expected, rtol=1e-5)
    assert table.queries_made == 21 * 4


class TestWholeAttacksThatMayBeCompiled:
    @staticmethod
    def attack(monkeypatch, run, queries=lambda setting: int(setting["q"])):
        monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
        grids = {"quick": attacks.grid(t=[9, 70, 120], gamma=[0.1, 0.2])}
        mine = attacks.Attack("mine", "Mine", "me", run, queries, grids, tiers=(1, 2), traceable=True)
        return attacks.register_attack(mine)

    def test_one_program_for_each_tier_serves_the_grid(self, tmp_path, monkeypatch):
        traces = []

        def run(eps_fn, schedule, x, z, setting):
            traces.append(setting)
            x = schedule.scaled(x, setting["t"])
            noisy = [x + setting["gamma"] * z.gaussian(k, x) for k in range(setting["q"])]
            return sum(attacks.norm(eps_fn(one, setting["t"])) for one in noisy)[None]

        mine = self.attack(monkeypatch, run)
        model, images, jobs = network(), source(), planning.grid_jobs(["mine"], "quick")
        table = scoring.score(model, images, jobs, tmp_path, options=quiet(micro_batch=2))
        assert len(jobs) == 12
        assert [setting["q"] for setting in traces] == [1, 2]
        assert table.queries_made == model.queries.count == 21 * 6 * (1 + 2)
        z = draws.Draws(jax.random.key(0), draws.id_numbers(images.ids))
        for job in jobs:
            expected = mine.run(model.eps_fn(), SCHEDULE, jnp.asarray(floats(images)), z, job.setting)
            np.testing.assert_allclose(table.terms(job), expected, rtol=1e-5)

    @pytest.mark.parametrize(
        ("run", "message"),
        [
            (lambda e, s, x, z, c: e(x, int(c["t"]))[None], "attack 'mine' is not traceable, though declared to be: "),
            (
                lambda e, s, x, z, c: attacks.norm(e(x, 1) + e(x, 2))[None],
                "mine must make 1 queries per image, as ",
            ),
        ],
    )
    def test_what_does_not_hold_is_said_in_one_line(self, tmp_path, monkeypatch, run, message):
        jobs = [planning.Job(self.attack(monkeypatch, run), {"t": 9, "gamma": 0.1, "q": 1})]
        with pytest.raises(ValueError, match=message) as error:
            scoring.score(network(), source(), jobs, tmp_path, options=quiet(micro_batch=8))
        assert "\n" not in str(error.value)


def test_terms_of_foreign_attacks_are_kept(tmp_path, monkeypatch):
    """The table gives them to a reader that does not know the attack, to the bit, and notices damage to them."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    two = attacks.Attack("two", "", "", recipe=attacks.get_attack("dime").recipe, signs=(1, -1))
    job = planning.Job(attacks.register_attack(two), {"t": 70, "gamma": 0.1, "q": 2})
    table = scoring.score(network(), source(), [job], tmp_path, options=quiet(micro_batch=8))
    known = planning.Job(attacks.get_attack("dime"), job.setting)
    del registry._REGISTRY["two"]
    stranger = planning.Job(attacks.describe_attack("two"), job.setting)
    assert list(table.own_terms) == ['["two", [["gamma", 0.1], ["q", 2], ["t", 70]]]']
    np.testing.assert_array_equal(table.terms(stranger), table.terms(known))
    with pytest.raises(ValueError, match="attack 'two' is not known here"):
        table.terms(stranger._replace(setting={"t": 9}))
    manifest = (tmp_path / "manifest.json").read_bytes()
    scoring.score(network(), source(), [known], tmp_path, options=quiet(micro_batch=8))
    assert (tmp_path / "manifest.json").read_bytes() == manifest
    (tmp_path / "terms.npz").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"terms\.npz is damaged"):
        score_table.read_table(tmp_path)


def test_a_plain_function_is_asked_the_same(tmp_path):
    model, images = function(), source(5)
    jobs = [job for job in GRID if job.setting["t"] == 70 and job.setting.get("q", 1) in (1, 5)]
    table = scoring.score(model, images, jobs, tmp_path, options=quiet(micro_batch=4))
    for job in jobs:
        assert_close(job, table.terms(job), direct(job, model, floats(images), images.ids))


SIMA = planning.grid_jobs(["sima_l4"], "quick")


class TestMemory:
    @staticmethod
    def model(limit, error="RESOURCE_EXHAUSTED: out of memory"):
        def apply(params, x, t, label):
            if len(x) > limit:
                raise jax.errors.JaxRuntimeError(error)
            return jnp.tanh(x)

        return network(apply=apply)

    def test_the_batch_halves_until_it_fits_and_never_grows(self, tmp_path):
        options = quiet(micro_batch=16, devices=jax.local_devices()[:1])
        table = scoring.score(self.model(5), source(), SIMA, tmp_path, options=options)
        assert table.manifest["micro_batch"] == 4
        assert len(table.index) == 21

    def test_other_errors_are_not_swallowed(self, tmp_path):
        options = quiet(micro_batch=16, devices=jax.local_devices()[:1])
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
            scoring.score(self.model(5, "INTERNAL: no"), source(), SIMA, tmp_path, options=options)
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            scoring.score(self.model(0), source(), SIMA, tmp_path / "never", options=options)


@pytest.mark.parametrize(
    ("shape", "platform", "expected"),
    [
        ((32, 32, 3), "cpu", 16),
        ((32, 32, 3), "gpu", 256),
        ((256, 256, 3), "tpu", 4),
        ((256, 256, 3), "cpu", 1),
        ((8, 8, 1), "cpu", 128),
    ],
)
def test_the_micro_batch_is_a_fixed_function_of_image_and_device(shape, platform, expected):
    assert scoring.default_micro_batch(shape, platform) == expected


def test_tuning_measures_and_stops_where_memory_ends():
    assert scoring.tune_micro_batch(TestMemory.model(5), candidates=[4, 8], rounds=1) == 4
    with pytest.raises(ValueError, match="mine is a plain function"):
        scoring.tune_micro_batch(function())


@pytest.mark.parametrize(("devices", "cores", "waits"), [(4, 2, True), (4, 4, False), (1, 1, False)])
def test_programs_of_more_virtual_devices_than_cores_do_not_overlap(tmp_path, monkeypatch, devices, cores, waits):
    """Several in flight can hold every thread of XLA's pool, each waiting for one more, until XLA aborts."""
    waited = []

    def block_until_ready(answer):
        waited.append(answer)
        return answer

    monkeypatch.setattr(placement.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(jax, "block_until_ready", block_until_ready)
    options = quiet(micro_batch=2, devices=jax.devices()[:devices])
    scoring.score(network(), source(8), TWO, tmp_path, options=options)
    answers = [answer for answer in waited if isinstance(answer, attacks.Answer)]
    assert bool(answers) == waits
    if waits:
        calls = planning.make_plan(TWO, SCHEDULE).queries_per_image  # each is one program for the only batch
        assert len(answers) == calls


def test_an_image_named_twice_is_refused_before_anything_is_asked(tmp_path):
    model = function()
    with pytest.raises(ValueError, match="the 3 indices must be unique, got 2 different ones"):
        scoring.score(model, source(4), FEW, tmp_path, indices=[1, 1, 2], options=quiet())
    assert model.queries.count == 0
