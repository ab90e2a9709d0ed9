"""Every config end to end as `:smoke`: generated files, conversion, scoring, calibration, tables and figures."""

import functools
import importlib
import json
import pathlib
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from ml_collections.config_dict import ConfigDict

import dime_jax as dj
from dime_jax._util import distributed
from dime_jax._util.records import plain
from dime_jax.loading import model_directory
from dime_jax.scoring import planning, score_table
from experiments import attack, figures, generated, runs, study_data, tables, without_model
from experiments.configs.attack_section import attack_section, data_section

# In the slow tests too: with more images, a random network would be asked in every other way as well.
pytestmark = pytest.mark.usefixtures("small_model_check")

STUDIES = ("cifar10", "cifar100", "stl10u", "celeba", "imagenet256")
# Of the others only the data differ, whose formats have tests of their own.
QUICK = ("cifar10", "imagenet256")
SMOKES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in STUDIES]
DIALECTS = {"imagenet256": "guided"}
REPOSITORY = pathlib.Path(__file__).parents[2]


def get_config(name, *variant):
    return importlib.import_module(f"experiments.configs.{name}").get_config(*variant)


def run_smoke(name, workdir):
    return attack.run(get_config(name, "smoke"), workdir, f"experiments/configs/{name}.py:smoke")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """name -> workdir of its smoke run, made when first asked for. Runs of the same network share its compilation."""

    @functools.cache
    def workdir(name):
        directory = tmp_path_factory.mktemp(name)
        run_smoke(name, directory)
        return directory

    return workdir


def test_queries_of_the_papers_cifar_run():
    """As experiments/README.md says."""
    jobs = attack.jobs_of(get_config("cifar10", "paper").attack)
    # DIME: 10 timesteps x (1 base + 5 gammas x (30 probes and 15 mirrored)); SimA-MC: 16 x 30, of which the first
    # noise is Loss's and all are its mean's; the response at t = 0 serves PIA, PIAN and SecMI; PIA, PIAN and SimA:
    # 16 each. SecMI walks once from 0 to 300 in steps of 10, and each answer on the way serves the hop back too.
    expected = 10 * (1 + 5 * 45) + 16 * 30 + 1 + 3 * 16 + 30
    assert planning.make_plan(jobs, dj.linear_schedule()).queries_per_image == expected == 2_819


class TestSmoke:
    @pytest.mark.parametrize("name", SMOKES)
    def test_from_checkpoint_to_results(self, smoke, name):
        results = json.loads((smoke(name) / "attack" / "results.json").read_text())
        costs = {"loss": 1, "pia_l4": 2, "sima_l4": 1, "dime": 2}
        names = ("loss", "dime") if name == "imagenet256" else tuple(costs)
        rows = {row["attack"]: row for row in results["results"]}
        witness = rows.pop("level_only")  # not asked for, but always heard
        assert {name: row["queries_per_image"] for name, row in rows.items()} == {n: costs[n] for n in names}
        # 4 + 4 images in each half; calibrating, DIME's base response serves both of its gammas. The witness shares
        # DIME's probes: of all when calibrating, and of the frozen gammas, plain and adjusted, when testing.
        once, dime = sum(costs[n] for n in names), rows["dime"]
        gammas = {one["setting"]["gamma"] for one in (dime, dime["adjusted"], witness)}
        tested = once - 1 + len(gammas)
        assert results["queries_made"] == 8 * (once + 1) + 8 * tested + results["model_check"]["queries"]
        assert not results["model_check"]["passed"]  # these networks are random
        (model,) = smoke(name).glob("model-*")
        metadata = model_directory.read_spec_file(model)["metadata"]
        assert metadata["dialect"] == DIALECTS.get(name, "secmi")
        assert metadata["weights"] == ("only" if name == "imagenet256" else "ema")

    @pytest.mark.parametrize("name", SMOKES)
    def test_data_are_read_from_the_published_format(self, smoke, name):
        manifest = score_table.read_manifest(smoke(name) / "attack" / "test")
        expected = {"cifar10": "cifar", "cifar100": "cifar", "imagenet256": "fit-16x16x3"}
        assert manifest["identity"]["transform"] == expected.get(name, name)

    @pytest.mark.parametrize("name", SMOKES)
    def test_what_the_images_alone_show_stands_beside_the_rows(self, smoke, name):
        results = json.loads((smoke(name) / "attack" / "results.json").read_text())
        blind, duplicates = results["blind_baseline"], results["duplicates"]
        assert blind["images"] == [4, 4]
        assert blind["auc"]["low"] <= blind["auc"]["value"] <= blind["auc"]["high"]
        assert duplicates["across_calibration_test"] is not None
        found = runs.read_run(smoke(name) / "attack").results
        assert plain(found) == results
        assert "a classifier that never saw the model has AUC" in without_model.describe(found)

    def test_again_costs_nothing(self, smoke):
        before = json.loads((smoke("cifar100") / "attack" / "results.json").read_text())
        assert plain(run_smoke("cifar100", smoke("cifar100"))) == before

    def test_tables_and_figures_from_the_runs(self, smoke, tmp_path):
        directories = [smoke(name) / "attack" for name in QUICK]
        made = tables.write_tables(directories, tmp_path / "tables")
        assert [table.run.study for table in made] == list(QUICK)
        assert {path.name for path in (tmp_path / "tables").iterdir()} == {
            "tables.csv",
            *(f"{name}_smoke{suffix}" for name in QUICK for suffix in (".md", ".tex", "_questions.md")),
        }
        figures.draw_runs([made[0].run], tmp_path / "figures")
        names = {f"{name}.{suffix}" for name in figures.RUN_FIGURES for suffix in ("png", "svg", "json")}
        assert {path.name for path in (tmp_path / "figures").iterdir()} == names

    def test_another_checkpoint_is_refused(self, smoke, tmp_path):
        shutil.copytree(smoke("cifar100"), tmp_path / "w")
        other = study_data.generated_directory(smoke("cifar10")) / generated.CHECKPOINT
        shutil.copy(other, study_data.generated_directory(tmp_path / "w") / generated.CHECKPOINT)
        with pytest.raises(ValueError, match=r"cannot continue the score table .*: model was"):
            run_smoke("cifar100", tmp_path / "w")

    def test_scrambled_labels_only_as_published(self, smoke):
        config = get_config("imagenet256", "smoke")
        opened = study_data.open_study(config, smoke("imagenet256"))
        folders = [id.split("/")[-2] for id in opened.source.ids]
        heldout = opened.split.heldout
        assert opened.source.labels[heldout].tolist() == [int(folders[i]) for i in heldout]
        scrambled = config.copy_and_resolve_references().unlock()
        scrambled.data.heldout_options = get_config("imagenet256", "as_published").data.heldout_options
        with pytest.warns(UserWarning, match="wrong class labels"):
            wrong = study_data.open_study(scrambled, smoke("imagenet256"))
        # "0", "1", "10", "11", "2" in string order: 10 becomes 2, 11 becomes 3, 2 becomes 4.
        pairs = {(int(folders[i]), int(wrong.source.labels[i])) for i in wrong.split.heldout}
        assert pairs == {(0, 0), (1, 1), (10, 2), (11, 3), (2, 4)}


class TestConfigs:
    @pytest.mark.parametrize("name", [*STUDIES, "synthetic"])
    def test_locked_and_default_is_the_paper(self, name):
        config = get_config(name)
        assert config.is_locked
        assert config.to_json() == get_config(name, "paper").to_json()
        with pytest.raises(ValueError, match="unknown variant 'tiny'"):
            get_config(name, "tiny")

    @pytest.mark.parametrize("name", STUDIES)
    def test_paper_is_the_authors_protocol(self, name):
        config = get_config(name, "paper")
        sizes = {"stl10u": (500, 5000), "imagenet256": (1500, 1500)}.get(name, (500, 12_500))
        assert (config.attack.calibration_size, config.attack.test_size) == sizes
        assert (config.attack.halves, config.seed) == ("as_published", 2025 if name == "imagenet256" else 0)
        jobs = attack.jobs_of(config.attack)
        dime = [job.setting for job in jobs if job.attack.name == "dime"]
        times = [10, 50, 90, 130, 170, 190] if name == "imagenet256" else list(range(50, 231, 20))
        assert sorted({s["t"] for s in dime}) == times
        assert sorted({s["gamma"] for s in dime}) == [0.05, 0.1, 0.2, 0.4, 0.6]
        assert {s["q"] for s in dime} == {1, 10, 30}
        assert len(dime) == len(times) * 5 * 3
        secmi = [(job.setting["t"], job.setting["k"]) for job in jobs if job.attack.name == "secmi"]
        if name == "imagenet256":
            assert secmi == [(t, 15) for t in (20, 50, 80, 110, 140, 170, 190)]
            assert [j.setting["t"] for j in jobs if j.attack.name == "loss"] == list(range(0, 191, 10))
        else:
            assert secmi == [(t, 10) for t in (*range(10, 300, 20), 300)]
        planning.make_plan(jobs, dj.linear_schedule())  # every setting fits the schedule

    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            (
                "cifar10",
                {},
                r"config\.data\.source must name a folder: --config\.data\.source=cifar10:DIR, got 'cifar10:'",
            ),
            ("imagenet256", {"source": "digits"}, r"must name a folder: --config\.data\.heldout=imagenetv2:DIR"),
            ("cifar10", {"source": "digits"}, r"must be set for the split 'file': --config\.data\.split_file"),
            ("cifar10", {"split": "halves"}, "unknown config.data.split 'halves'"),
        ],
    )
    def test_missing_places_are_named(self, tmp_path, name, changes, message):
        config = get_config(name).unlock()
        config.data.update(changes)
        with pytest.raises(ValueError, match=message):
            study_data.open_study(config, tmp_path)

    def test_missing_checkpoint_is_named(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"config\.attack\.checkpoint must be set: --config\.attack\.checkpoint=FILE"
        ):
            attack.checkpoint(get_config("cifar10"), tmp_path)


def closed_form_config(names=("loss", "sima_l4", "dime"), **changes):
    config = ConfigDict()
    config.seed = 0
    config.data = data_section("digits")
    config.data.split_size = 100
    config.attack = attack_section()
    config.attack.model = "closed_form"
    config.attack.image_shape = (8, 8, 1)
    config.attack.names = names
    config.attack.budgets = (2,)
    config.attack.grids = ConfigDict({"all": {"t": (300, 400), "gamma": (0.4,)}, "loss": {"t": (250,)}})
    config.data.update(changes)
    return config.lock()


def test_grids_replace_the_profile_by_attack():
    jobs = attack.jobs_of(closed_form_config().attack)
    assert [(job.attack.name, dict(job.setting)) for job in jobs] == [
        ("loss", {"t": 250}),
        ("sima_l4", {"t": 300}),
        ("sima_l4", {"t": 400}),
        ("dime", {"t": 300, "gamma": 0.4, "q": 1}),
        ("dime", {"t": 400, "gamma": 0.4, "q": 1}),
    ]


def test_the_closed_form_knows_its_members(tmp_path):
    row, witness = attack.run(closed_form_config(["dime"]), tmp_path).results
    assert (row.attack, witness.attack) == ("dime", "level_only")
    assert row.auc.value > 0.95
    with pytest.raises(ValueError, match=r"no config experiments/configs/\.py"):
        runs.read_run(tmp_path / "attack")


class TestImagesAlone:
    def look(self, member, heldout):
        pixels = np.concatenate([member, heldout])
        n = len(member)
        split = dj.data.Split(np.arange(n), np.arange(n, len(pixels)))
        source = dj.data.from_images(pixels)
        halves = dj.data.halves(split, source.ids, seed=0)
        return without_model.look(source, halves, dj.data.transform_for(source, pixels.shape[1:]), seed=0)[0]

    def test_copies_on_both_sides_are_counted_and_said(self):
        pixels = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
        pixels[31] = pixels[2]  # a member that is held out too
        found = self.look(pixels[:30], pixels[30:])
        assert (found.duplicates.exact_pairs, found.duplicates.across_member_heldout) == (1, 1)
        assert found.warnings == ("1 clusters of copies lie across members and held-out images, and were left in",)

    def test_sets_that_differ_are_told_apart_without_a_model(self):
        rng = np.random.default_rng(0)
        dark, bright = (rng.integers(low, low + 100, (60, 16, 16, 3), dtype=np.uint8) for low in (0, 60))
        assert self.look(dark, bright).blind_auc.low > 0.8
        assert self.look(dark[:30], dark[30:]).blind_auc.low < 0.5


def test_the_record_holds_no_places():
    config = get_config("imagenet256").unlock()
    config.data.source, config.data.heldout = "imagenet:/a/b", "imagenetv2:/c?decode=strict"
    config.attack.checkpoint = "/d/e.pt"
    values = attack.without_places(config)
    assert values["data"]["source"] == "imagenet:DIR"
    assert values["data"]["heldout"] == "imagenetv2:DIR"
    assert values["attack"]["checkpoint"] == "e.pt"
    assert values["attack"]["model"] == "converted"
    assert attack.without_places(closed_form_config())["data"]["source"] == "digits"
    assert attack.without_places(get_config("cifar10"))["data"]["source"] == "cifar10:"


def test_a_small_study_draws_its_images_once():
    whole = study_data.open_study(closed_form_config(), "unused").split
    small = study_data.open_study(closed_form_config(max_members=20, max_heldout=30), "unused").split
    again = study_data.open_study(closed_form_config(max_members=20, max_heldout=30), "unused").split
    assert len(small.member) == 20
    assert len(small.heldout) == 30
    assert np.isin(small.member, whole.member).all()
    assert np.isin(small.heldout, whole.heldout).all()
    np.testing.assert_array_equal(small.member, again.member)


def test_first_process_raises_its_own_error():
    def fail():
        raise ValueError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        distributed.on_first_process(fail)


PROGRAM = """
import runpy
from dime_jax.guards import model_check
model_check.IMAGES = 2  # as in the other runs
runpy.run_module("experiments.attack", run_name="__main__")
"""


def start(workdir, process, address):
    command = [sys.executable, "-c", PROGRAM, f"--workdir={workdir}"]
    command += ["--config=experiments/configs/cifar10.py:smoke", "--distributed", f"--coordinator={address}"]
    command += ["--num_processes=2", f"--process_id={process}", "--config.attack.names=('loss', 'sima_l4')"]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_finish_one_run(smoke, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start(tmp_path / "w", i, address) for i in range(2)]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert ["SimA" in out for out, _ in outputs] == [True, False]  # the first process prints the table
    both = json.loads((tmp_path / "w" / "attack" / "results.json").read_text())
    alone = json.loads((smoke("cifar10") / "attack" / "results.json").read_text())
    assert both["queries_made"] == 16 * 3 + alone["model_check"]["queries"]
    assert both["model_check"] == alone["model_check"]
    expected = {row["attack"]: row["auc"] for row in alone["results"]}
    found = {row["attack"]: row["auc"] for row in both["results"]}
    assert set(found) == {"loss", "sima_l4", "level_only"}
    assert all(found[name] == expected[name] for name in ("loss", "sima_l4"))
