"""What `audit`, `dime-jax score` and the experiments do alike: transforms, guards, and checks of the images."""

import csv
import shutil

import numpy as np
import pytest
from PIL import Image

import dime_jax as dj
from dime_jax import auditing, cli, scoring
from dime_jax.loading.opening import OpenedModel
from dime_jax.protocol import stages
from dime_jax.scoring import score_table
from experiments import attack
from experiments.configs.attack_section import attack_section, data_section

pytestmark = pytest.mark.usefixtures("no_figures")

SHAPE = (32, 32, 3)
RNG = np.random.default_rng(0)


def model(shape=SHAPE):
    return dj.Denoiser.from_function(lambda x, t: np.tanh(3 * np.asarray(x)), dj.linear_schedule(), shape, name="mine")


def folder(path, pixels):
    path.mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(path / f"{number:03}.png")
    return str(path)


def score(monkeypatch, directory, members, heldout, *more):
    monkeypatch.setattr(auditing.models, "open_model", lambda *given, **how: OpenedModel(model(), "a test"))
    named = ["--members", str(members), "--heldout", str(heldout)]
    return cli.main(["score", str(directory), "--model", "mine", *named, "--attacks", "sima_l4", *more])


@pytest.fixture(scope="module")
def pictures():
    return RNG.integers(0, 256, (60, 96, 96, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def two_sources(pictures, tmp_path_factory):
    """One of them is resized by bilinear interpolation, the other by bicubic."""
    directory = tmp_path_factory.mktemp("stl10")
    pictures[:30].transpose(0, 3, 2, 1).tofile(directory / "unlabeled_X.bin")
    return f"stl10u:{directory}", folder(directory / "heldout", pictures[30:])


def test_each_source_has_its_own_transform_in_audit_and_score(two_sources, pictures, tmp_path, monkeypatch):
    members, heldout = two_sources
    options = scoring.ScoringOptions(silent=True)
    auditing.audit(
        auditing.AuditConfig(
            tmp_path / "audit", model=model(), members=members, heldout=heldout, attacks=["sima_l4"], options=options
        )
    )
    assert score(monkeypatch, tmp_path / "run", members, heldout) == 0
    audit, run = (score_table.read_table(tmp_path / name / "calibration") for name in ("audit", "run"))
    np.testing.assert_array_equal(audit.index, run.index)
    for name, readings in audit.readings.items():
        np.testing.assert_array_equal(readings, run.readings[name])
    # And these are the two pipelines: a member by bilinear, a held-out image by bicubic interpolation.
    for side, transform in ((run.index < 30, "stl10u"), (run.index >= 30, "fit")):
        seen = np.stack([dj.data.get_transform(transform, SHAPE)(pictures[index]) for index in run.index[side]])
        eps = np.asarray(model().eps(seen, 70), np.float64)
        norms = np.sum(np.abs(eps) ** 4, axis=(1, 2, 3)) ** 0.25
        np.testing.assert_allclose(run.readings["Raw(t=70).l4"][side], norms, rtol=1e-5)


def test_a_study_reads_two_sources_by_their_own_transforms(two_sources, pictures, tmp_path):
    config = study_config(model="closed_form", image_shape=SHAPE)
    config.data.source, config.data.heldout, config.data.split = *two_sources, "joined"
    attack.run(config.lock(), tmp_path)
    table = score_table.read_table(tmp_path / "attack" / "test")
    members = [dj.data.get_transform("stl10u", SHAPE)(picture) for picture in pictures[:30]]
    ideal = dj.IdealDenoiser(np.stack(members), dj.linear_schedule())
    seen = np.stack([dj.data.get_transform("fit", SHAPE)(pictures[index]) for index in table.index if index >= 30])
    norms = np.sum(np.abs(np.asarray(ideal.eps(seen, 300), np.float64)) ** 4, axis=(1, 2, 3)) ** 0.25
    np.testing.assert_allclose(table.readings["Raw(t=300).l4"][table.index >= 30], norms, rtol=1e-4)


def study_config(**settings):
    from ml_collections.config_dict import ConfigDict

    config = ConfigDict({"seed": 0})
    config.data, config.attack = data_section("digits"), attack_section()
    config.attack.names, config.attack.budgets = ("sima_l4",), (2,)
    config.attack.grids = ConfigDict({"all": {"t": (300,)}})
    config.attack.update(settings)
    return config


def test_one_set_given_twice_is_refused_by_score(two_sources, tmp_path, monkeypatch, capsys):
    assert score(monkeypatch, tmp_path / "run", two_sources[1], two_sources[1]) == 2
    assert "--members and --heldout must be different images, but 30 of 30" in capsys.readouterr().err
    assert not stages.is_begun(tmp_path / "run")


def test_score_reports_copies_and_unusable_images_and_keeps_the_roles(pictures, tmp_path, monkeypatch, capsys):
    members, heldout = folder(tmp_path / "a", pictures[:30]), folder(tmp_path / "b", pictures[30:])
    assert score(monkeypatch, tmp_path / "plain", members, heldout) == 0
    assert "warning: 30 of 30 members were resized to the model's 32x32" in capsys.readouterr().err
    shutil.copy(tmp_path / "a" / "003.png", tmp_path / "b" / "004.png")
    (tmp_path / "b" / "007.png").write_bytes(b"no picture")
    assert score(monkeypatch, tmp_path / "run", members, heldout) == 0
    said = capsys.readouterr().err
    assert "1 images cannot be used (1 held-out images; unusable_images.csv lists all): heldout/007.png" in said
    assert "1 clusters of copies lie across members and held-out images, and were left in" in said
    with open(tmp_path / "run" / "unusable_images.csv", newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["heldout/007.png"]
    there, here = (stages.read_halves(tmp_path / name) for name in ("plain", "run"))
    np.testing.assert_array_equal(there.together().heldout, here.together().heldout)
    assert stages.read_groups(tmp_path / "plain") is None
    groups = stages.read_groups(tmp_path / "run")
    assert groups[3] == groups[34] >= 0
    assert np.sum(groups >= 0) == 2


def test_a_study_stores_the_groups_that_it_finds(tmp_path):
    pixels = RNG.integers(0, 256, (80, 16, 16, 3), dtype=np.uint8)
    pixels[1::8] = pixels[::8]  # every eighth picture is there twice
    np.save(tmp_path / "images.npy", pixels)
    config = study_config(model="closed_form", image_shape=(16, 16, 3))
    config.data.source, config.data.split_size = str(tmp_path / "images.npy"), 40
    results = attack.run(config.lock(), tmp_path)
    groups = stages.read_groups(tmp_path / "attack")
    np.testing.assert_array_equal(groups[1::8], groups[::8])
    assert np.sum(groups >= 0) == 20
    plain = stages.evaluation(tmp_path / "attack", groups=np.full(80, -1))
    assert results.results[0].auc.value == plain.results[0].auc.value
    assert results.results[0].auc != plain.results[0].auc
    (tmp_path / "attack" / "images_alone.json").unlink()  # as if killed before it was written
    again = attack.run(config, tmp_path)
    assert again == results


def test_calibrate_warns_of_swapped_sets(pictures, tmp_path, monkeypatch, capsys):
    """The model knows its members, which are given as held-out images."""
    members, heldout = folder(tmp_path / "a", pictures[:30]), folder(tmp_path / "b", pictures[30:])
    seen = np.stack([dj.data.get_transform("fit", SHAPE)(picture) for picture in pictures[30:]])
    ideal = dj.IdealDenoiser(seen, dj.linear_schedule())
    monkeypatch.setattr(auditing.models, "open_model", lambda *given, **how: OpenedModel(ideal, "a test"))
    for name, sides in (("swapped", (members, heldout)), ("right", (heldout, members))):
        args = ["score", str(tmp_path / name), "--model", "mine", "--members", sides[0], "--heldout", sides[1]]
        assert cli.main([*args, "--attacks", "sima_l4"]) == 0
        capsys.readouterr()
        assert cli.main(["calibrate", str(tmp_path / name)]) == 0
        said = capsys.readouterr().err
        assert ("warning: Members look less like training images" in said) == (name == "swapped")
