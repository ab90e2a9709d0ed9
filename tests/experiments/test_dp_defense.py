"""The DP-SGD study end to end, its recipes, and what its table claims: against closed forms and simulation."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from scipy import stats

import dime_jax as dj
from dime_jax import attacks, training
from dime_jax._util.distributed import data_mesh
from dime_jax.core import draws
from dime_jax.evidence import dp_tpr_bound, metrics
from dime_jax.evidence.metrics import Estimate
from dime_jax.scoring import score_table
from experiments import dp_defense, dp_table, results_page, runs
from experiments.configs import dp_celeba, dp_digits
from experiments.rendering import render

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")

FILE = "experiments/configs/dp_digits.py:smoke"


@pytest.fixture(scope="module", autouse=True)
def _one_device():
    """Several devices have tests of their own, and take longer to compile for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.loop, "data_mesh", lambda devices: data_mesh(jax.devices()[:1]))
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("dp")
    dp_defense.run(dp_digits.get_config("smoke"), workdir, FILE)
    return workdir


@pytest.fixture(scope="module")
def table(workdir):
    return dp_table.read_table(workdir)


@pytest.mark.slow  # half a minute; the page of results is made from such studies in every run of the tests
class TestStudy:
    def test_every_arm_is_trained_and_attacked(self, workdir, table):
        assert [arm.title for arm in table.arms] == ["ε = 0.2", "ε = 0.4", "Vanilla"]
        for arm in table.private:
            assert 0 < arm.privacy["epsilon"] <= arm.epsilon
            assert arm.privacy["steps"] == 4
        assert table.vanilla.privacy is None
        assert table.private[0].privacy["noise_multiplier"] > table.private[1].privacy["noise_multiplier"]
        fingerprints = {arm.run.results.fingerprints["model"] for arm in table.arms}
        assert len(fingerprints) == 3
        assert (workdir / "dp_table.md").read_text() == dp_table.to_section([table])

    def test_every_arm_has_noises_of_its_own(self, table):
        assert len({arm.run.results.seed for arm in table.arms}) == 3
        norms = [dp_table.noise_alone(arm.run).value for arm in table.arms]
        assert len(set(norms)) == 3
        # The halves are the study's, whatever the noises: the same images in the same order.
        for arm in table.private:
            np.testing.assert_array_equal(arm.run.member, table.vanilla.run.member)
            first, second = arm.run.rows[0].scores, table.vanilla.run.rows[0].scores
            assert not np.allclose(first, second)

    def test_the_noise_alone_is_what_loss_sees(self, table):
        run = table.vanilla.run
        test = score_table.read_table(run.directory / "test")
        nothing = dj.Denoiser.from_function(lambda x, t: np.zeros_like(x), dj.linear_schedule(), (8, 8, 1))
        noises = draws.Draws(jax.random.key(run.results.seed), draws.id_numbers(test.ids))
        loss = attacks.get_attack("loss").run(
            nothing.eps_fn(), nothing.schedule, np.zeros((len(test.ids), 8, 8, 1), np.float32), noises, {"t": 100}
        )
        member = np.isin(test.index, run.halves.test.member)
        expected = metrics.auc(np.asarray(loss[0])[member], np.asarray(loss[0])[~member])
        assert dp_table.noise_alone(run).value == pytest.approx(expected, abs=1e-9)

    def test_a_finished_study_is_left_alone(self, workdir):
        watched = [path for path in workdir.rglob("*") if path.name in ("spec.json", "seconds.json", "privacy.json")]
        before = [path.read_bytes() for path in watched]
        dp_defense.run(dp_digits.get_config("smoke"), workdir, FILE)
        assert [path.read_bytes() for path in watched] == before

    def test_going_past_the_budget_is_refused(self, workdir):
        config = dp_digits.get_config("smoke")
        config.train.recipe.steps = 6
        arm = dp_defense.arms(config)["epsilon_0.2"]
        with pytest.raises(ValueError, match=r"steps must be <= 4 for epsilon=0\.2, got 6"):
            dp_defense.train_arm(arm, workdir / "epsilon_0.2")

    def test_arms_that_were_not_attacked_alike_are_refused(self, workdir, tmp_path):
        copy = tmp_path / "study"
        shutil.copytree(workdir, copy)
        shutil.rmtree(copy / "vanilla")
        with pytest.raises(ValueError, match="must have one arm without privacy and some with it"):
            dp_table.read_table(copy)


class TestRecipes:
    def test_arms_differ_in_clipping_and_noise_only(self):
        for config in (dp_celeba.get_config(), dp_digits.get_config()):
            configs = [arm.to_dict() for arm in dp_defense.arms(config).values()]
            for one in configs:
                one["dp"].pop("epsilon")
                one["attack"].pop("seed")
            assert all(one == configs[0] for one in configs)
            assert config.dp.vanilla.batches == "poisson"
            assert config.dp.steps == config.train.recipe.steps

    def test_the_papers_study(self):
        config = dp_celeba.get_config()
        assert config.data.split == "identity"
        assert config.data.split_size == 1000
        assert config.train.recipe.steps == 500 * 1000 // 64
        assert config.dp.epsilons == (1.0, 4.0, 10.0)
        assert config.dp.delta == 1e-5
        assert config.attack.test_size == 500

    def test_the_authors_recipes_differ(self):
        arms = dp_defense.arms(dp_celeba.get_config("as_published"))
        vanilla = training.TrainingRecipe(**arms["vanilla"].train.recipe)
        private = training.TrainingRecipe(**arms["epsilon_1"].train.recipe)
        assert vanilla.steps == private.steps == 15_625 == 500 * 1000 / 32
        assert (vanilla.flips, vanilla.compute_dtype, vanilla.warmup_steps) == (True, "bfloat16", 5000)
        assert (private.flips, private.compute_dtype, private.warmup_steps) == (False, "float32", 0)
        assert (vanilla.ema_decay, private.ema_decay) == (0.999, 0.0)
        assert (vanilla.batch_size, vanilla.clip_norm, private.batch_size) == (32, 1.0, 32)

    @pytest.mark.slow
    def test_the_smallest_celeba_study_end_to_end(self, tmp_path):
        table = dp_defense.run(dp_celeba.get_config("smoke"), tmp_path, "experiments/configs/dp_celeba.py:smoke")
        assert [arm.title for arm in table.arms] == ["ε = 1", "Vanilla"]
        assert table.private[0].privacy["images"] == 30
        assert table.private[0].privacy["epsilon"] <= 1
        assert "People, not photos, were assigned to sides" in dp_table.to_section([table])


@pytest.mark.slow
class TestTable:
    def test_cells_are_the_runs_numbers(self, table):
        lines = render("dp_seed.md", report=dp_table.report(table), page=None).splitlines()
        baselines, variants = lines[0], lines[6]
        assert baselines == "|  | Loss | PIA (l2) |"
        assert variants == "|  | DIME 1+1 |"
        assert [line.split(" | ")[0] for line in lines[2:5]] == ["| ε = 0.2", "| ε = 0.4", "| Vanilla"]
        row = table.private[1].run.rows[0]
        asr, auc, tpr = row.estimate("asr"), row.estimate("auc"), row.estimate("tpr_at_1pct_fpr")
        expected = f"ASR {_show(asr)}<br>AUC {_show(auc)}<br>TPR@1%FPR {_show(tpr)}"
        assert lines[3].split(" | ")[1] == expected
        assert "*paper" not in "\n".join(lines)

    def test_papers_values_stand_beside_the_authors_recipes_only(self, table):
        for variant, shown in (("as_published", True), ("paper", False)):
            vanilla, *_, private = dp_defense.arms(dp_celeba.get_config(variant)).values()
            for arm, like in ((table.vanilla, vanilla), (table.private[1], private)):
                config = json.loads(like.to_json())
                here = arm._replace(run=arm.run._replace(study="dp_celeba", variant=variant, config=config))
                assert dp_table.is_papers_setting(here) == shown
                config["train"]["recipe"]["learning_rate"] = 1.0
                assert not dp_table.is_papers_setting(here)

    def test_the_section_has_what_it_takes_to_judge_it(self, table):
        workdir = table.vanilla.run.directory.parents[1]
        text, test = dp_table.to_section([table], workdir / "RESULTS.md"), table.vanilla.run.halves.test
        for fact in (
            "experiments.dp_defense --config=experiments/configs/dp_digits.py:smoke --workdir=W",
            "60 images, 4 updates, Poisson batches of 16 expected images, clip norm 1, δ = 1e-05",
            f"{table.private[0].privacy['epsilon']:.3f}",
            "one for all rows, which differ in clipping and noise only",
            "TPR <= e^ε FPR + δ",
            *(f"`{arm.run.results.fingerprints['model'][:16]}`" for arm in table.arms),
            *(f"{arm.run.results.queries_made:,}" for arm in table.arms),
            "[test](epsilon_0.2/attack/test)",
            "- Frozen settings, ε = 0.2: Loss: t=100;",
            "Loss asks about one draw of noise per image, another in each row",
            f"{100 * dp_table.detectable_auc(len(test.member), len(test.heldout)):.1f} %",
        ):
            assert fact in text, fact
        (found,) = results_page.read_folder(workdir, workdir / "RESULTS.md").dp_studies
        assert dp_table.to_section(found, workdir / "RESULTS.md") == text

    def test_seeds_of_a_study_are_summed_up_over_models(self, table):
        def shifted(arm, seed):
            config = {**arm.run.config, "seed": seed}
            return arm._replace(run=arm.run._replace(config=config))

        again = dp_table.DpTable(tuple(shifted(arm, 1) for arm in table.private), shifted(table.vanilla, 1))
        assert dp_table.group_tables([table, again]) == [[table, again]]
        text = dp_table.to_section([table, again])
        assert "--workdir=W --seeds=0,1\n" in text
        (line,) = [line for line in text.splitlines() if line.startswith("| Loss | ") and "<br>" not in line]
        value = 100 * table.private[0].run.rows[0].result.auc.value
        assert line.split(" | ")[1] == f"{value:.1f} [{value:.1f}, {value:.1f}]"  # two equal models have no spread
        assert "2 models: no significance is claimed below 5" in text


@pytest.fixture(scope="module")
def kept():
    """A finished study that the results page shows."""
    return dp_table.read_table(pathlib.Path(__file__).parents[2] / "docs/results/dp_digits/seed_0")


class TestCheck:
    def test_leaking_scores_refute_a_small_epsilon_and_chance_does_not(self, kept):
        arm = kept.private[0]
        run = arm.run
        member = np.arange(2000) < 1000

        def with_scores(scores):
            rows = tuple(row._replace(scores=scores) for row in run.rows)
            return arm._replace(run=run._replace(rows=rows, member=member))

        rng, delta = np.random.default_rng(0), arm.privacy["delta"]
        honest, leaking = (with_scores(rng.normal(size=2000) - shift * member) for shift in (0, 4))
        assert dp_table.check(honest).refuting == ()
        assert dp_table.lower_bound(honest.run, honest.best, delta).epsilon < 1
        assert len(dp_table.check(leaking).refuting) == len(run.rows)
        bound = dp_table.lower_bound(leaking.run, leaking.best, delta)
        assert arm.epsilon < bound.epsilon <= bound.ceiling

    def test_measured_rates_above_the_bound_are_named(self, kept):
        arm = kept.private[0]
        rows = []
        for row, tpr in zip(arm.run.rows, (0.0, 0.012, 0.04)):
            result = dataclasses.replace(row.result, tpr_at_1pct_fpr=Estimate(tpr, 0.0, 1.0), attained_fpr=0.01)
            rows.append(row._replace(result=result))
        found = dp_table.check(arm._replace(run=arm.run._replace(rows=tuple(rows))))
        assert found.above == (rows[2].title,)  # 0.01 · e = 0.027 at most


@pytest.mark.slow
class TestNoise:
    """Over 200 seeds: the draws favour nobody, and two arms do not share their luck."""

    SEEDS = range(200)

    def test_the_norm_of_the_noise_tells_nobody_apart(self):
        run = runs.read_run(pathlib.Path(__file__).parents[2] / "docs/results/dp_digits/seed_0/vanilla/attack")
        test = score_table.read_table(run.directory / "test")
        ids, member = draws.id_numbers(test.ids), np.isin(test.index, run.halves.test.member)
        aucs = []
        for seed in self.SEEDS:
            noise = np.asarray(draws.gaussian(jax.random.key(seed), ids, 0, (8, 8, 1)))
            norms = np.linalg.norm(noise.reshape(len(ids), -1), axis=1)
            aucs.append(metrics.auc(norms[member], norms[~member]))
        m, h = int(member.sum()), int((~member).sum())
        error = np.sqrt((m + h + 1) / (12 * m * h))
        assert abs(np.mean(aucs) - 0.5) < 3 * error / np.sqrt(len(aucs))
        assert np.std(aucs) == pytest.approx(error, rel=0.15)
        assert stats.kstest((np.array(aucs) - 0.5) / error, "norm").pvalue > 0.01
        assert aucs[0] == pytest.approx(0.589, abs=5e-4)  # as docs/REPRODUCTION.md says

    @pytest.mark.parametrize(("name", "setting"), [("loss", {"t": 100}), ("loss_mc", {"t": 100, "q": 10})])
    def test_two_untrained_arms_do_not_share_their_luck(self, schedule, name, setting):
        rng = np.random.default_rng(0)
        x = rng.uniform(-1, 1, (300, 8, 8, 1)).astype(np.float32)
        ids, member = draws.id_numbers([f"image-{i}" for i in range(300)]), np.arange(300) % 2 == 0
        weights = {arm: (0.02 * rng.normal(size=(64, 64))).astype(np.float32) for arm in ("vanilla", "epsilon_1")}

        @jax.jit
        def scores(weight, key):
            def eps(g, t):
                return jax.numpy.tanh(g.reshape(len(g), -1) @ weight).reshape(g.shape)

            return attacks.get_attack(name).run(eps, schedule, x, draws.Draws(key, ids), setting)[0]

        def measure(seed_of):
            found = {arm: [] for arm in weights}
            for seed in self.SEEDS:
                for arm, weight in weights.items():
                    one = np.asarray(scores(weight, jax.random.key(seed_of(seed, arm))))
                    found[arm].append(metrics.auc_interval(one[member], one[~member]))
            aucs = [[one.value for one in found[arm]] for arm in weights]
            covered = [np.mean([one.low <= 0.5 <= one.high for one in found[arm]]) for arm in weights]
            return np.corrcoef(*aucs)[0, 1], covered

        correlation, covered = measure(dp_defense.draw_seed)
        assert abs(correlation) < 0.2
        assert min(covered) >= 0.91
        shared, _ = measure(lambda seed, arm: seed)
        assert shared > 0.8


class TestPower:
    def test_the_detectable_auc_is_found_four_times_in_five(self):
        size, rng = 150, np.random.default_rng(0)
        shift = stats.norm.ppf(dp_table.detectable_auc(size, size)) * np.sqrt(2)
        found = 0
        for _ in range(1000):
            member, heldout = rng.normal(size=size) - shift, rng.normal(size=size)
            found += stats.mannwhitneyu(member, heldout, alternative="less").pvalue < 0.05
        assert found / 1000 == pytest.approx(0.8, abs=0.04)

    @pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 1e-5), (4.0, 1e-5), (1.0, 0.2)])
    def test_the_allowed_auc_is_the_area_below_the_bound(self, epsilon, delta):
        fpr = np.linspace(0, 1, 1_000_001)
        area = np.trapezoid(dp_tpr_bound(fpr, epsilon, delta), fpr)
        assert dp_table.allowed_auc(epsilon, delta) == pytest.approx(area, abs=1e-6)


def _show(estimate):
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
