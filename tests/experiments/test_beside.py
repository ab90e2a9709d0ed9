"""The studies of a second model on a tiny network: who is who, what is fitted to whom, and the pages."""

import json

import numpy as np
import pytest
from small_runs import naive_auc

from dime_jax import data
from dime_jax.protocol import statistics
from dime_jax.scoring import score_table
from experiments import beside, finetune, reference, results_page, train
from experiments.configs import digits
from experiments.study_data import open_study

SEED, STEPS = 3, [2, 4]


@pytest.fixture(scope="module")
def small():
    """Few images, passes and attacks."""
    every, cut = beside.fixed_jobs, beside.cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "FITTED", 30)
        patch.setattr(finetune, "FITTED", 30)
        patch.setattr(finetune, "IMAGES", 20)
        patch.setattr(finetune, "PASSES", (2, 4))
        patch.setattr(finetune, "RANKS", {"full": None, "rank-4": 4})
        patch.setattr(beside, "cut", lambda *given: cut(*given, counted=50))
        patch.setattr(
            beside, "fixed_jobs", lambda s: [job for job in every(s) if job.attack.name in ("loss", "pia_l2")]
        )
        yield


@pytest.fixture(scope="module")
def config():
    made = digits.get_config("smoke").unlock()
    made.seed = SEED
    made.data.max_members = 40
    return made.lock()


@pytest.fixture(scope="module")
def workdir(config, small, tmp_path_factory):
    directory = tmp_path_factory.mktemp("digits")
    train.run(config, directory)
    return directory


@pytest.fixture(scope="module")
def beside_reference(config, workdir):
    return reference.run(config, workdir, "experiments/configs/digits.py:smoke")


def by_hand(table, other, roles, name="loss"):
    """AUC of the log score minus its least squares line on the other's, fitted to `roles.fitted`; and of it alone."""
    (job,) = [job for job in beside.fixed_jobs(table.schedule) if job.attack.name == name]
    ours, theirs = (dict(zip(one.index.tolist(), np.log(one.terms(job)[0]))) for one in (table, other))
    of = {name: np.array([(ours[i], theirs[i]) for i in getattr(roles, name)]) for name in roles._fields}
    slope, constant = np.polyfit(of["fitted"][:, 1], of["fitted"][:, 0], 1)
    left = {name: own - slope * others - constant for name, (own, others) in ((n, v.T) for n, v in of.items())}
    alone = naive_auc(*(np.concatenate([of["member"][:, 0], of["counted"][:, 0]]), np.arange(90) < 40))
    return naive_auc(np.concatenate([left["member"], left["counted"]]), np.arange(90) < 40), alone


def test_a_reference_saw_no_image_that_is_judged(config, workdir, beside_reference):
    study = open_study(config, workdir)
    fitted, counted, apart = beside.cut(config, workdir, config.reference.images, reference.FITTED)
    sets = [set(part.tolist()) for part in (study.split.member, fitted, counted, apart)]
    assert [len(part) for part in sets] == [40, 30, 50, 40]
    assert len(set.union(*sets)) == 160
    trained = json.loads((workdir / "reference" / "40" / "train" / "run.json").read_text())["images"]
    assert trained["fingerprint"] == data.fingerprint(study.source, apart)
    assert trained["count"] == 40
    seeds = {
        json.loads((at / "train" / "run.json").read_text())["recipe"]["seed"]
        for at in (workdir, workdir / "reference" / "40")
    }
    assert len(seeds) == 2  # other weights to begin with


def test_what_is_found_beside_a_reference_by_hand(config, workdir, beside_reference):
    directory = workdir / "reference"
    assert beside_reference.updates == STEPS
    roles = beside.ImageRoles(
        open_study(config, workdir).split.member, *reversed(beside.cut(config, workdir, 40, reference.FITTED)[:2])
    )
    target = score_table.read_table(directory / "target")
    for steps, found in zip(STEPS, beside_reference.found):
        other = score_table.read_table(directory / "40" / f"asked-{steps}")
        auc, alone = by_hand(target, other, roles)
        assert found["loss"]["beside"].auc.value == pytest.approx(auc, abs=1e-9)
        assert found["loss"]["plain"].auc.value == pytest.approx(alone, abs=1e-9)
        assert found["loss"]["beside"].lead.value == pytest.approx(auc - alone, abs=1e-9)
    assert set(statistics.read(directory).index.tolist()) == set(roles.all.tolist())


def test_a_fine_tune_is_judged_beside_its_base(config, workdir):
    results = finetune.run(config, workdir, "experiments/configs/digits.py:smoke")
    fitted, counted, members = beside.cut(config, workdir, finetune.IMAGES, finetune.FITTED)
    roles, directory = beside.ImageRoles(members, counted, fitted), workdir / "finetune"
    base = score_table.read_table(directory / "base")
    assert [one.kind for one in results] == ["full", "rank-4"]
    seen = {base.manifest["identity"]["model"]}
    for one in results:
        assert (one.members, one.counted, one.fitted, one.passes) == (20, 50, 30, [2, 4])
        for passes in (2, 4):
            table = score_table.read_table(directory / one.kind / f"asked-{passes}")
            seen.add(table.manifest["identity"]["model"])
        terms = {}
        for name, index in roles._asdict().items():
            own, others = (np.log(t.terms(beside.fixed_jobs(t.schedule)[0])[0]) for t in (table, base))
            place = np.searchsorted(np.sort(table.index), index)
            order = np.argsort(table.index)
            terms[name] = own[order][place], others[np.argsort(base.index)][place]
        slope, constant = np.polyfit(terms["fitted"][1], terms["fitted"][0], 1)
        left = [own - slope * other - constant for own, other in (terms["member"], terms["counted"])]
        auc = naive_auc(np.concatenate(left), np.arange(70) < 20)
        assert one.found[1]["loss"]["beside"].auc.value == pytest.approx(auc, abs=1e-9)
    assert len(seen) == 5


def test_too_few_images_are_refused_before_anything_is_trained(config, workdir, tmp_path):
    with pytest.raises(ValueError, match="30 images for fits and 850 set aside must leave 30, of 898 held out"):
        beside.cut(config, workdir, 850, 30)


def counted(auc, tpr, lead=0.0):
    return {
        "auc": {"value": auc, "low": auc - 0.02, "high": auc + 0.02},
        "tpr_at_1pct_fpr": {"value": tpr, "low": 0.0, "high": 1.0},
        "lead": {"value": lead, "low": lead - 0.03, "high": lead + 0.03},
    }


def found_record(alone, together):
    ways = {"plain": counted(alone, 0.02), "adjusted": counted(0.7, 0.05)}
    ways |= {way: counted(together, 0.4, together - alone) for way in ("beside", "beside_adjusted")}
    names = ("loss_level", "loss_level_beside", "loss", "level_only", "crowding_only", "dime_theory")
    return dict.fromkeys(names, ways)


def test_the_pages_tell_what_was_found(tmp_path):
    kept, page = tmp_path / "kept", tmp_path / "RESULTS.md"
    shared = {"file": "experiments/configs/cifar10.py:overnight", "fitted": 100, "counted": 1000}
    for folder in ("reference", "finetune"):
        (kept / folder).mkdir(parents=True)
    for seed, images, auc in ((21, 500, 0.9), (22, 500, 0.94), (21, 100, 0.6)):
        record = shared | {"seed": seed, "members": 500, "reference_images": images, "small": False}
        record |= {"updates": [1000, 3000], "found": [found_record(0.55, 0.7), found_record(0.6, auc)]}
        (kept / "reference" / f"{seed}-{images}.json").write_text(json.dumps(record))
    for seed, auc in ((21, 0.8), (22, 0.9)):
        for kind in ("full", "rank-16"):
            record = shared | {"seed": seed, "kind": kind, "members": 100, "passes": [5, 40]}
            record |= {"found": [found_record(0.5, 0.6), found_record(0.6, auc)]}
            (kept / "finetune" / f"{seed}-{kind}.json").write_text(json.dumps(record))
    pages = results_page.to_pages(kept, page)
    short, full = pages[page], pages[tmp_path / "results_beside.md"]
    assert "the AUC of Loss rises by +30.0 to +34.0 points" in short
    lines = [line for line in short.splitlines() if line.startswith("| cifar10:overnight, seed")]
    assert [line.split(" |")[:5] for line in lines] == [
        ["| cifar10:overnight, seed 21", " 500 images, 3,000 updates", " 60.0 / 2.0", " 70.0 / 5.0", " 90.0 / 40.0"],
        ["| cifar10:overnight, seed 22", " 500 images, 3,000 updates", " 60.0 / 2.0", " 70.0 / 5.0", " 94.0 / 40.0"],
    ]
    assert "| passes | full fine-tune, alone | beside its base | LoRA of rank 16, alone | beside its base |" in short
    assert "| 40 | 60.0 / 2.0 | 85.0 / 40.0 | 60.0 / 2.0 | 85.0 / 40.0 |" in short
    assert full.count("| Loss | 60.0 / 2.0 | 70.0 / 5.0 | 94.0 / 40.0 |") == 1
    assert "seed 21, beside a model of its architecture trained on 100 others" in full
    assert "seed 22: LoRA of rank 16 beside its base" in full
