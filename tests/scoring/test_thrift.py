"""Thrifty calibration: what it keeps beside a naive search, what it costs by the ledger, and what it must notice."""

import itertools
import json
import shutil

import numpy as np
import pytest
from tiny_model import SCHEDULE, SHAPE, function, quiet

import dime_jax as dj
from dime_jax import thrift
from dime_jax._util.digests import Damaged
from dime_jax.protocol import calibration, pipeline
from dime_jax.scoring import planning, score_table
from dime_jax.scoring.query_ledger import Budget, BudgetExceeded, queries_made

SEED = 3
IMAGES = 64  # in each half
JOBS = planning.grid_jobs(["loss", "sima_l4", "pia_l2", "dime"], "quick", [2, 11])
WITNESS = planning.witness_jobs(JOBS)
GRID_QUERIES = planning.make_plan([*JOBS, *WITNESS], SCHEDULE).queries_per_image * IMAGES


def members_are_small(x, t):
    x = np.asarray(x)
    return x * np.abs(x).mean(axis=(1, 2, 3), keepdims=True) if t > 100 else np.sign(x)


@pytest.fixture(scope="module")
def source():
    scale = np.where(np.arange(2 * IMAGES) < IMAGES, 0.5, 0.6)[:, None, None, None]
    pixels = np.random.default_rng(0).uniform(-1, 1, (2 * IMAGES, *SHAPE))
    return dj.data.from_images((scale * pixels).astype(np.float32))


@pytest.fixture(scope="module")
def halves(source):
    return dj.data.halves(dj.data.Split(np.arange(IMAGES), np.arange(IMAGES, 2 * IMAGES)), source.ids, seed=SEED)


def run(directory, source, halves, model=None, jobs=JOBS, **options):
    model = model or function(members_are_small)
    options = quiet(micro_batch=IMAGES, **options)
    pipeline.begin(directory, jobs, halves, SEED, thrifty=True)
    pipeline.score_half(directory, "calibration", model, source, options=options)
    pipeline.calibrate_run(directory)
    pipeline.score_half(directory, "test", model, source, options=options)
    return pipeline.evaluate_run(directory)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, source, halves):
    directory = tmp_path_factory.mktemp("thrifty")
    return directory, run(directory, source, halves)


def pair(table, job, split):
    terms = table.terms(job)
    return calibration.TermPair(*(terms[:, np.isin(table.index, side)] for side in (split.member, split.heldout)))


def auc(table, job, split):
    return calibration.calibrate(job.attack, SCHEDULE, [job.setting], [pair(table, job, split)]).auc


def row_of(job):
    return job.attack.name, job.setting.get("q")


def same(jobs):
    return sorted(json.dumps([job.attack.name, dict(job.setting)], sort_keys=True) for job in jobs)


def test_it_costs_at_most_half_by_the_ledger(finished):
    directory, results = finished
    made = {name: queries_made(directory / name) for name in ("pilot", "calibration", "test")}
    found = pipeline.read_thrift(directory)
    assert (found.pilot_queries, found.kept_queries) == (made["pilot"], made["calibration"])
    assert found.grid_queries == GRID_QUERIES
    assert GRID_QUERIES / 3 < made["pilot"] + made["calibration"] <= GRID_QUERIES / 2
    assert results.queries_made == sum(made.values())
    share = (made["pilot"] + made["calibration"]) / GRID_QUERIES
    assert found.describe() == (
        f"thrifty calibration: {made['pilot'] + made['calibration']:,} of {GRID_QUERIES:,} queries ({share:.0%}), "
        f"{len(found.kept)} of {len(JOBS)} settings kept"
    )


def test_so_does_the_default_grid(tmp_path, source, halves):
    jobs = planning.grid_jobs(None, "quick", [2, 11])
    grid = planning.make_plan([*jobs, *planning.witness_jobs(jobs)], SCHEDULE).queries_per_image * IMAGES
    pipeline.begin(tmp_path, jobs, halves, SEED, thrifty=True)
    options = quiet(micro_batch=IMAGES)
    pipeline.score_half(tmp_path, "calibration", function(members_are_small), source, options=options)
    assert grid / 3 < queries_made(tmp_path) <= grid / 2
    assert set(map(row_of, pipeline.calibrated_jobs(tmp_path))) == set(map(row_of, jobs))


def test_the_pilot_is_an_eighth_of_each_side_of_the_calibration_half(finished, halves):
    index = score_table.read_table(finished[0] / "pilot").index
    for side in (halves.calibration.member, halves.calibration.heldout):
        assert np.isin(side, index).sum() == len(side) // 8
    assert np.isin(index, halves.test.member).sum() == np.isin(index, halves.test.heldout).sum() == 0


def test_what_is_kept_is_what_a_naive_search_keeps(finished, halves):
    """The same rule, with the planner itself asked what everything costs."""
    directory, _ = finished
    table = score_table.read_table(directory / "pilot")
    split = dj.data.Split(*(np.intersect1d(side, table.index) for side in vars(halves.calibration).values()))
    rows = {}
    for job in JOBS:
        rows.setdefault(row_of(job), []).append(job)
    most = (GRID_QUERIES // 2 - queries_made(directory / "pilot")) // IMAGES

    def cost(jobs):
        return planning.make_plan([*jobs, *WITNESS], SCHEDULE).queries_per_image

    def fits(kept):
        served = set(map(row_of, kept))
        for name, row in rows.items():
            if name not in served:
                kept = [*kept, min(row, key=lambda job: cost([*kept, job]))]
        return cost(kept) <= most, kept

    aucs = {name: [auc(table, job, split) for job in row] for name, row in rows.items()}
    orders = {name: np.argsort([-value for value in found], kind="stable") for name, found in aucs.items()}
    kept = []
    for place in range(max(map(len, rows.values()))):
        have = [name for name in rows if place < len(rows[name])]
        for name in sorted(have, key=lambda name: -aucs[name][orders[name][place]]):
            one = rows[name][orders[name][place]]
            if fits([*kept, one])[0]:
                kept.append(one)
    possible, kept = fits(kept)
    assert possible
    assert same(kept) == same(pipeline.calibrated_jobs(directory))
    assert len(rows) <= len(kept) < len(JOBS)


def test_the_whole_half_chooses_among_what_is_kept(finished, halves):
    directory, results = finished
    table, kept = score_table.read_table(directory / "calibration"), pipeline.calibrated_jobs(directory)
    assert len(table.index) == IMAGES
    asked = {str(reading) for job in [*kept, *WITNESS] for reading in job.recipe.readings}
    assert set(table.readings) == asked
    for frozen in pipeline.read_calibrations(directory):
        name = frozen.attack, frozen.setting.get("q")
        row = [job for job in [*kept, *WITNESS] if row_of(job) == name]
        assert frozen.auc == max(auc(table, job, halves.calibration) for job in row)
    assert {row.attack for row in results.results} == {job.attack.name for job in [*JOBS, *WITNESS]}
    assert len(results.direction.aucs) == 2 * len(WITNESS)
    assert {one.setting["t"] for one in pipeline.calibrations_by_timestep(directory)} <= {30, 70, 120}


def test_test_labels_keep_and_choose_nothing(finished, tmp_path, source, halves):
    both = np.random.default_rng(1).permutation(np.concatenate([halves.test.member, halves.test.heldout]))
    permuted = dj.data.Split(both[: IMAGES // 2], both[IMAGES // 2 :])
    run(tmp_path, source, halves._replace(test=permuted))
    assert pipeline.read_thrift(tmp_path) == pipeline.read_thrift(finished[0])
    assert pipeline.read_calibrations(tmp_path) == pipeline.read_calibrations(finished[0])


@pytest.mark.parametrize("stage", ["pilot", "calibration", "test"])
def test_a_run_that_was_killed_anywhere_asks_nothing_twice(finished, tmp_path, source, halves, stage):
    """No more than the call that was under way is lost."""
    pilot, kept = (queries_made(finished[0] / name) for name in ("pilot", "calibration"))
    calls = {
        "pilot": pilot // 8 // 2,
        "calibration": pilot // 8 + kept // IMAGES // 2,
        "test": pilot // 8 + kept // IMAGES + 2,
    }
    count = itertools.count()

    def fails(x, t):
        if next(count) == calls[stage]:
            raise KeyboardInterrupt
        return members_are_small(x, t)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, source, halves, function(fails), shard_seconds=0.0)
    assert [(tmp_path / name).exists() for name in ("pilot", "calibration", "test")] == [
        True,
        stage != "pilot",
        stage == "test",
    ]
    results = run(tmp_path, source, halves)
    assert finished[1].queries_made <= results.queries_made <= finished[1].queries_made + IMAGES
    assert [row.auc for row in results.results] == [row.auc for row in finished[1].results]
    assert pipeline.read_thrift(tmp_path) == pipeline.read_thrift(finished[0])


def test_a_finished_run_costs_nothing_again(finished, tmp_path, source, halves):
    shutil.copytree(finished[0], tmp_path / "again")
    before = queries_made(tmp_path / "again")

    def never(x, t):
        raise AssertionError

    run(tmp_path / "again", source, halves, function(never))
    assert queries_made(tmp_path / "again") == before


def test_a_run_of_the_other_kind_is_refused(finished, tmp_path, halves):
    with pytest.raises(ValueError, match=r"holds a run with thrifty calibration: continue it with --thrifty$"):
        pipeline.begin(finished[0], JOBS, halves, SEED)
    pipeline.begin(tmp_path, JOBS, halves, SEED)
    assert "thrifty" not in json.loads((tmp_path / "run.json").read_text())  # as older versions wrote it
    with pytest.raises(ValueError, match=r"holds a run without thrifty calibration: continue it without --thrifty$"):
        pipeline.begin(tmp_path, JOBS, halves, SEED, thrifty=True)


def test_the_budget_counts_the_pilot(finished, tmp_path, source, halves):
    found = pipeline.read_thrift(finished[0])
    total = found.pilot_queries + found.kept_queries - 1
    with pytest.raises(BudgetExceeded, match=f"has {found.kept_queries - 1:,} left"):
        run(tmp_path, source, halves, budget=Budget(total=total))
    assert queries_made(tmp_path) == found.pilot_queries
    kept = found.kept_queries // IMAGES
    twice = kept + found.pilot_queries // len(score_table.read_table(finished[0] / "pilot").index)
    with pytest.raises(BudgetExceeded, match=f"the plan takes {twice}"):
        run(tmp_path, source, halves, budget=Budget(per_image=twice - 1))


@pytest.mark.parametrize("name", ["pilot.json", "pilot/manifest.json", "pilot/scores.parquet", "pilot/queries-0.bin"])
@pytest.mark.parametrize("missing", [True, False])
def test_damage_to_the_pilot_is_noticed(finished, tmp_path, name, missing):
    shutil.copytree(finished[0], tmp_path / "run")
    path = tmp_path / "run" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink() if missing else path.write_bytes(content)
    with pytest.raises(Damaged, match=path.name):
        pipeline.evaluate_run(tmp_path / "run")


def test_of_another_run_it_is_noticed_when_the_run_goes_on(finished, tmp_path, source, halves):
    pipeline.begin(tmp_path, JOBS, halves, SEED, thrifty=True)
    shutil.copytree(finished[0] / "pilot", tmp_path / "pilot")
    contents = json.loads((finished[0] / "pilot.json").read_text())
    contents["kept"].pop()
    (tmp_path / "pilot.json").write_text(json.dumps(contents, indent=1) + "\n")
    with pytest.raises(Damaged, match=r"pilot\.json"):
        run(tmp_path, source, halves)
    assert not (tmp_path / "calibration").exists()


def test_what_cannot_be_thrifty_is_refused_before_the_first_query(tmp_path, halves):
    light = planning.grid_jobs(None, "light", [2])
    with pytest.raises(ValueError, match=r"too small for thrifty calibration: one setting for every attack takes \d+"):
        pipeline.begin(tmp_path, light, halves, SEED, thrifty=True)
    few = halves._replace(calibration=dj.data.Split(*(side[:31] for side in vars(halves.calibration).values())))
    with pytest.raises(ValueError, match=r"expected at least 32 members and held-out images each .* got 31 and 31"):
        pipeline.begin(tmp_path, JOBS, few, SEED, thrifty=True)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("profile", ["quick", "paper"])
def test_costs_are_those_of_the_planner(profile):
    jobs = planning.grid_jobs(["loss", "secmi", "pia_l4", "dime", "dime_central"], profile, [2, 11])
    witness = planning.witness_jobs(jobs)
    found = thrift.costs(jobs, witness, 100, 12)
    assert found.grid == planning.make_plan([*jobs, *witness], SCHEDULE).queries_per_image * 100
    assert found.pilot == planning.make_plan(jobs, SCHEDULE).queries_per_image * 12
    assert found.pilot + 100 * found.most <= found.grid / 2 < found.pilot + 100 * (found.most + 1)
