"""Another model under the same name is noticed, a noisy one is said to be, and a query or two is all it takes."""

import numpy as np
import pytest
from faulty_server import SHAPE, FaultyServer, metadata, tanh_model

import dime_jax as dj
from dime_jax import scoring
from dime_jax.guards import identity
from dime_jax.scoring import planning
from dime_jax.scoring.query_ledger import Budget, BudgetExceeded, queries_made, spent_per_image

RETRY = scoring.Retry(attempts=3, first_wait=0, longest_wait=0)


def function(eps=tanh_model, name="mine", shape=SHAPE, **others):
    return dj.Denoiser.from_function(eps, dj.linear_schedule(), shape, name=name, **others)


def recognise(directory, model, **options):
    """As a run does that begins or goes on."""
    options = scoring.ScoringOptions(**{"silent": True, "retry": RETRY, **options})
    if (ask := identity.guard(directory, model, options).before_asking) is not None:
        ask()


def test_the_same_function_is_asked_twice_and_then_once(tmp_path):
    for made in (2, 3, 4):
        model = function()
        recognise(tmp_path, model)
        assert queries_made(tmp_path) == identity.queries(tmp_path, "function:mine") == made
        assert model.queries.count == (2 if made == 2 else 1)
    assert not spent_per_image(tmp_path, 5).any()  # it is about none of the images
    assert identity.noise_warnings(tmp_path, "function:mine") == []


def test_a_function_that_was_recognised_is_not_asked_again_by_the_same_process(tmp_path):
    model = function()
    for _ in range(3):
        recognise(tmp_path, model)
    assert model.queries.count == 2
    recognise(tmp_path / "another", model)
    assert model.queries.count == 4


def test_damage_is_found_before_the_model_is_asked(tmp_path):
    source = dj.data.from_images(np.random.default_rng(0).integers(0, 256, (8, *SHAPE), dtype=np.uint8))
    jobs = planning.grid_jobs(["sima_l4"], "quick", settings=[{"t": 70}])

    def score(model):
        options = scoring.ScoringOptions(silent=True, micro_batch=8)
        hooks = identity.guard(tmp_path, model, options)
        return scoring.score(model, source, jobs, tmp_path / "table", options=options, hooks=hooks)

    table, other = score(function()), function(lambda x, t: np.asarray(x))
    with pytest.raises(
        ValueError, match="mine is not the model that this run was started with"
    ):  # it would be credited with the answers of the first
        score(other)
    same = function()
    np.testing.assert_array_equal(score(same).readings["Raw(t=70).l4"], table.readings["Raw(t=70).l4"])
    assert same.queries.count == 1
    (tmp_path / "table" / "scores.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"scores.parquet is damaged"):
        score(never := function())
    assert never.queries.count == 0


def network(factor, **settings):
    return dj.Denoiser(lambda params, x, t, label: params * x, factor, dj.linear_schedule(), SHAPE, **settings)


def test_so_is_what_can_be_compiled_and_is_known_by_its_name_alone(tmp_path):
    recognise(tmp_path / "function", function(lambda x, t: 0.5 * x, traceable=True))
    with pytest.raises(ValueError, match="mine is not the model that this run was started with"):
        recognise(tmp_path / "function", function(lambda x, t: 0.6 * x, traceable=True))
    recognise(tmp_path / "network", network(np.float32(0.5)))
    with pytest.raises(ValueError, match="denoiser is not the model that this run was started with"):
        recognise(tmp_path / "network", network(np.float32(0.6)))
    known = network(np.float32(0.5), fingerprint="of its weights")
    recognise(tmp_path / "known", known)
    assert known.queries.count == 0


def test_another_function_of_the_same_name_is_refused(tmp_path):
    recognise(tmp_path, function())
    with pytest.raises(ValueError, match=r"mine is not the model that this run was started with: .* differs by 0.0"):
        recognise(tmp_path, function(lambda x, t: tanh_model(x, t) * np.float32(1.01)))
    with pytest.raises(ValueError, match="mine is not the model that this run was started with"):
        recognise(tmp_path, function(shape=(2, 2, 1)))
    recognise(tmp_path, function(lambda x, t: tanh_model(x, t) * np.float32(1 + 3e-5)))  # accelerators round
    recognise(tmp_path, function(lambda x, t: np.asarray(x), name="another"))
    recognise(tmp_path, function())


def test_conditional_functions_and_large_images(tmp_path):
    recognise(tmp_path, function(lambda x, t, label: np.asarray(x) + np.asarray(label, np.float32)[0], num_classes=3))
    with pytest.raises(ValueError, match="is not the model that this run was started with"):
        recognise(tmp_path, function(lambda x, t, label: np.asarray(x) + np.float32(1), num_classes=3))
    recognise(tmp_path / "large", function(lambda x, t: np.asarray(x), shape=(128, 128, 3)))
    assert (tmp_path / "large" / identity.FILE).stat().st_size < 120_000


def test_networks_have_fingerprints_and_are_not_asked(tmp_path):
    recognise(tmp_path, dj.IdealDenoiser(np.zeros((3, *SHAPE), np.float32), dj.linear_schedule()))
    assert list(tmp_path.iterdir()) == []


def test_noise_is_named_with_the_attacks_that_remain(tmp_path, capsys):
    rng = np.random.default_rng(0)

    def noisy(x, t):
        return tanh_model(x, t) + np.float32(0.01) * rng.normal(size=np.shape(x)).astype(np.float32)

    recognise(tmp_path, function(noisy), silent=False)
    said = capsys.readouterr().err
    assert "the model's answers are noisy" in said
    remain = said.partition("The attacks that remain: ")[2]
    assert {"loss", "pia_l4", "sima_l4", "level_only"} <= set(remain.strip().split(", "))
    assert not {"dime", "dime_central", "crowding_only"} & set(remain.strip().split(", "))
    for _ in range(20):  # its own noise makes it no other model
        recognise(tmp_path, function(noisy))
    with pytest.raises(ValueError, match="is not the model that this run was started with"):
        recognise(tmp_path, function(lambda x, t: -noisy(x, t)))


def test_a_model_that_changes_behind_its_address_is_noticed(tmp_path):
    with FaultyServer() as server:
        recognise(tmp_path, dj.RemoteDenoiser(server.url))
        assert sum(server.received) == 2
        recognise(tmp_path, dj.RemoteDenoiser(server.url))
        server.model = lambda x, t: tanh_model(x, t) * np.float32(0.999)
        with pytest.raises(ValueError, match="m is not the model that this run was started with"):
            recognise(tmp_path, dj.RemoteDenoiser(server.url))
        assert sum(server.received) == queries_made(tmp_path) == 4
        server.said = metadata(parameters={**server.said["parameters"], "fingerprint": "new"})
        assert dj.RemoteDenoiser(server.url).fingerprint == "served:new"  # the score tables refuse it by that


def test_an_answer_of_nan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mine must give a finite answer to an image of noise"):
        recognise(tmp_path, function(lambda x, t: np.asarray(x) * np.nan))


def test_failures_are_counted_and_the_budget_holds(tmp_path, failing):
    busy = failing(tanh_model, {1: ConnectionError("busy"), 3: ConnectionError("busy")})
    recognise(tmp_path, function(busy))
    assert busy.calls == queries_made(tmp_path) == 4
    with pytest.raises(BudgetExceeded, match="the budget must be >= 2 queries, to detect a changed model, got 1"):
        recognise(tmp_path / "poor", function(), budget=Budget(total=1))
    down = failing(tanh_model, dict.fromkeys(range(1, 9), ConnectionError("busy")))
    with pytest.raises(BudgetExceeded):
        recognise(tmp_path / "down", function(down), budget=Budget(total=2))
    assert down.calls == queries_made(tmp_path / "down") == 2


def test_a_used_up_budget_goes_on_with_a_warning(tmp_path, capsys):
    recognise(tmp_path, function(), budget=Budget(total=2))
    recognise(tmp_path, function(), budget=Budget(total=2), silent=False)
    assert "the budget is used up, so nothing checks" in capsys.readouterr().err
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "queries-check.bin").write_bytes(np.arange(5, dtype="<i4").tobytes())
    recognise(tmp_path / "new", function(), silent=False)
    assert capsys.readouterr().err == ""


def test_damage_is_named(tmp_path):
    recognise(tmp_path, function())
    path = tmp_path / identity.FILE
    path.write_bytes(path.read_bytes().replace(b'"noise": 0.0', b'"noise": 9.0'))
    with pytest.raises(ValueError, match=f"{identity.FILE} is damaged"):
        recognise(tmp_path, function())
