"""Members and held-out images swapped: whatever attacks decide, nobody is accused, and the headline says so."""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from memoriser import config, floats, images, memoriser, source

import dime_jax as dj
from dime_jax import attacks, auditing, cli, scoring
from dime_jax.auditing.deciding import choose_decider
from dime_jax.evidence import Judgement, Verdict, Way
from dime_jax.findings import gate, json_files
from dime_jax.findings.finding import find
from dime_jax.protocol import stages
from dime_jax.report import html
from dime_jax.scoring import planning

QUERIES = (2, 11)
LABELS = sorted({job.label for job in planning.grid_jobs(None, "quick", QUERIES, [{"t": 70, "gamma": 0.1}])})


@pytest.fixture(scope="module", autouse=True)
def _no_page():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")
        yield


def toy_roles():
    return {"members": images(60, 0), "heldout": images(60, 1), "candidates": images(12, 2)}


def make_memoriser(roles):
    return memoriser(roles["members"])


def make_ideal(roles):
    return dj.IdealDenoiser(floats(roles["members"]), dj.linear_schedule(1000, 1e-4, 0.02))


def make_shipped(roles):
    """The shipped model; its roles are its own members, and digits that it never saw, as candidates too."""
    digits = dj.data.open_source("digits")
    model = dj.load_denoiser("digits")
    split = auditing.images.example_split(digits, None, model.fingerprint)
    pixels = np.stack([digits[i].image for i in range(len(digits))])
    rng = np.random.default_rng(0)
    heldout = rng.permutation(split.heldout)
    roles["members"] = pixels[rng.permutation(split.member)[:160]]
    roles["heldout"], roles["candidates"] = pixels[heldout[:160]], pixels[heldout[160:190]]
    return model


class Scored:
    """One audit with swapped sets and all attacks, and its candidates scored by every one of them."""

    def __init__(self, directory, make_model):
        self.directory, roles = directory, toy_roles()
        self.model = make_model(roles)
        swapped = {"members": roles["heldout"], "heldout": roles["members"], "candidates": roles["candidates"]}
        self.roles = {name: source(pixels, name) for name, pixels in swapped.items()}
        self.settings = {
            "model": self.model,
            "attacks": None,
            "queries": QUERIES,
            "grid": [{"t": 70, "gamma": 0.1}],
            "calibration_size": 80,
            "test_size": 80,
            **self.roles,
        }
        auditing.audit(config(directory, **self.settings))
        self.record = json_files.read_record(directory)
        scoring.score(
            self.model,
            auditing.images.open_images(config(directory, **self.settings), self.model).source,
            [
                stages.frozen_job(one)
                for one in (*self.record.calibrations, *stages.read_calibrations(directory, Way.ADJUSTED))
            ],
            directory / "everything",
            indices=np.concatenate([self.record.arrays.heldout, self.record.arrays.candidates]),
            options=scoring.ScoringOptions(silent=True, micro_batch=64),
        )

    def found(self, directory, asked, wanted=None):
        """What the audit finds with these attacks only, from the stored tables."""
        run = json.loads((self.directory / "run.json").read_text())
        jobs = [planning.Job(attacks.get_attack(name), setting) for name, setting in run["jobs"]]
        jobs = [job for job in jobs if job.label in asked]
        stages.begin(directory, jobs, stages.read_halves(self.directory), run["seed"])
        for half in ("calibration", "test"):
            shutil.copytree(self.directory / half, directory / half)
        for name in ("statistics.json", "statistics.npz"):
            shutil.copy(self.directory / name, directory)
        frozen = [*stages.calibrate_run(directory), *stages.read_calibrations(directory, Way.ADJUSTED)]
        decider, why = choose_decider(
            frozen, stages.asked_labels(directory), wanted, stages.read_direction(directory, ["calibration"])
        )
        shutil.copytree(self.directory / "everything", directory / "candidates" / decider.label)
        adjusted = not decider.plain
        facts = dataclasses.replace(self.record.facts, decided_by=decider.label, chosen=why, adjusted=adjusted)
        shutil.copy(self.directory / "model_check.json", directory)
        json_files.write_record(directory, facts, self.record.arrays)
        return find(json_files.read_record(directory))


MODELS = {"memoriser": make_memoriser, "ideal": make_ideal, "shipped": make_shipped}


@pytest.fixture(
    scope="module", params=["memoriser", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ideal", "shipped"))]
)
def scored(request, tmp_path_factory):
    return Scored(tmp_path_factory.mktemp(request.param), MODELS[request.param])


def assert_nobody_is_accused(found):
    results, rows = found
    assert results.direction.judgement is Judgement.BELOW
    assert results.headline.answer.startswith("Members and held-out images look swapped")
    assert "clearly below 50 %" in results.headline.alarms[0]
    assert "remembers" not in str(results.headline)
    assert results.candidates.evidence == 0
    assert results.candidates.set_test is None
    assert results.fraction_used is None
    assert {row.verdict for row in rows} == {Verdict.CANNOT_TELL}
    assert {row.p_value for row in rows} == {None}
    with pytest.raises(ValueError, match="look swapped"):
        gate.refuse_unjudged(results)


@pytest.mark.parametrize("asked", [*LABELS, "all"])
def test_no_attack_accuses_anybody(scored, asked, tmp_path):
    # The rule has timesteps of its own, and the tables have the witness at those of the others.
    alone = ["loss_level@3", "level_only@1"] if asked == "loss_level@3" else [asked]
    asked = LABELS if asked == "all" else alone
    assert_nobody_is_accused(scored.found(tmp_path, asked))


@pytest.mark.slow
@pytest.mark.parametrize("asked", list(itertools.combinations(LABELS, 2)))
def test_no_pair_of_attacks_accuses_anybody(scored, asked, tmp_path):
    assert_nobody_is_accused(scored.found(tmp_path, asked))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", LABELS)
def test_no_attack_that_the_user_names_accuses_anybody(scored, wanted, tmp_path):
    assert_nobody_is_accused(scored.found(tmp_path, LABELS, wanted))


def test_the_gate_is_not_judged(tmp_path, capsys):
    roles = toy_roles()
    np.savez(tmp_path / "members.npz", images=roles["heldout"])
    np.savez(tmp_path / "heldout.npz", images=roles["members"])
    model = make_memoriser(roles)
    settings = {"members": str(tmp_path / "members.npz"), "heldout": str(tmp_path / "heldout.npz")}
    auditing.audit(config(tmp_path / "audit", model=model, **settings))
    assert cli.main(["report", str(tmp_path / "audit"), "--fail-if", "dime@2.auc.low > 0.99"]) == 2
    error = capsys.readouterr().err
    assert "look swapped" in error
    assert len(error.strip().splitlines()) == 1
    assert cli.main(["report", str(tmp_path / "audit")]) == 0


def random_audit(directory, seed):
    """An audit of a model with some memory, from none to full, with right or swapped sets and unseen candidates.

    The model is a denoiser, by the best linear guess, to which it adds a part that depends on the picture alone, so
    that memory is weak against the differences between pictures.
    """
    rng = np.random.default_rng(seed)
    strength, swapped = rng.choice([0, 0.003, 0.01, 0.03, 0.1, 1]), bool(rng.integers(2))
    train = images(40, (seed, 0))
    remembers, waves = memoriser(train), rng.normal(size=(64, 3)) / 4

    def eps(x, t):
        flat = np.asarray(x).reshape(len(x), -1)
        guess = float(remembers.schedule.sigma(int(t))) * flat
        own = 0.08 * np.exp(np.sin(flat @ waves).sum(axis=1))[:, None] * np.sign(flat)
        memory = np.asarray(remembers.eps(x, t)).reshape(len(x), -1)
        return ((1 - strength) * guess + strength * memory + own).reshape(np.shape(x)).astype(np.float32)

    model = dj.Denoiser.from_function(eps, remembers.schedule, remembers.image_shape, name="partly")
    sides = [source(train, "m"), source(images(40, (seed, 1)), "h")]
    members, heldout = reversed(sides) if swapped else sides
    settings = config(
        directory,
        model=model,
        members=members,
        heldout=heldout,
        candidates=source(images(20, (seed, 2)), "c"),
        attacks=("sima_l4", "dime", "pia_l2", "secmi", "dime_central"),
        seed=seed,
    )
    return swapped, auditing.audit(settings).results


@pytest.mark.slow
def test_random_audits_accuse_within_the_level(tmp_path):
    """300 audits: candidates are never seen, so every accusation is false."""
    accused, refused, judged = [], [], []
    for seed in range(300):
        swapped, results = random_audit(tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed))
        found = results["candidates"]
        set_verdict = found["set_test"] is not None and found["set_test"]["p_value"] <= 0.05
        accused.append(found["evidence"] > 0 or set_verdict)
        if not swapped:
            refused.append(results["direction"]["judgement"] == "below")
            judged.append(found["withheld"] is None)
    print(f"accused {np.mean(accused):.3f}; of {len(refused)} right sets refused {np.mean(refused):.3f}", end=", ")
    print(f"judged {np.mean(judged):.3f}")
    assert np.mean(accused) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)
    assert np.mean(refused) <= 0.02
    assert np.mean(judged) >= 0.9  # else nobody could have been accused


LEARNED, FIXED, OTHER, WITNESS = (
    stages.Calibration(name, setting, weights, {}, None, 0.0, auc, attacks.get_attack(name).queries(setting))
    for name, setting, weights, auc in [
        ("dime", {"t": 70, "gamma": 0.1, "q": 1}, (-1.0, 0.0), 0.9),
        ("sima_l4", {"t": 70}, (1.0,), 0.6),
        ("pia_l2", {"t": 70}, (1.0,), 0.7),
        ("level_only", {"t": 70, "gamma": 0.1, "q": 1}, (1.0,), 0.55),
    ]
)


@pytest.mark.parametrize(
    ("attacks", "wanted", "decider"),
    [
        ([LEARNED, FIXED, OTHER], None, WITNESS),
        ([LEARNED, FIXED, OTHER], LEARNED, WITNESS),
        ([LEARNED, FIXED, OTHER], FIXED, FIXED),
        ([LEARNED, FIXED], None, FIXED),
        ([LEARNED, FIXED], LEARNED, WITNESS),
        ([LEARNED], None, WITNESS),
        ([FIXED, OTHER], None, WITNESS),
        ([FIXED], None, FIXED),
        ([FIXED, WITNESS], None, WITNESS),
    ],
)
def test_labels_choose_the_decider_only_if_the_witness_confirms_them(attacks, wanted, decider):
    frozen = [*attacks, *([] if WITNESS in attacks else [WITNESS])]
    asked, label = [one.label for one in attacks], wanted and wanted.label
    first = wanted or max(attacks, key=lambda one: one.auc)
    for may_learn, expected in [(True, first), (False, decider)]:
        direction = dj.evidence.Direction(dj.evidence.Judgement.ABOVE, may_learn, ())
        choice = choose_decider(frozen, asked, label, direction)
        assert choice.decider == expected
        assert ("does not confirm" in choice.why) == (expected != first)
