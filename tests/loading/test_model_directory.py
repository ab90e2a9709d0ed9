"""Model directories: what is written is what is read, and nothing else is accepted."""

import json
import shutil
import time

import jax
import numpy as np
import pytest

from dime_jax import models
from dime_jax.loading import model_directory, opening
from dime_jax.models import DdpmUnetSpec, ModelSpec, ScheduleSpec

SPEC = ModelSpec(
    denoiser=DdpmUnetSpec(
        stem_channels=8,
        time_features=8,
        time_channels=8,
        level_channels=(8,),
        num_res_blocks=1,
        attention_levels=(),
        norm_groups=4,
        time_table_steps=10,
        num_classes=4,
        image_channels=1,
    ),
    image_shape=(4, 6, 1),
    schedule=ScheduleSpec(num_steps=10),
)


@pytest.fixture(scope="module")
def variables():
    rng = np.random.default_rng(0)
    shapes = models.param_shapes(SPEC.denoiser)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def saved(variables, tmp_path_factory):
    return model_directory.save_model(tmp_path_factory.mktemp("models") / "m", SPEC, variables, {"origin": "a test"})


@pytest.fixture
def model(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_round_trip(saved, variables):
    denoiser = opening.load_denoiser(saved)
    jax.tree.map(np.testing.assert_array_equal, denoiser.params, variables)
    assert (denoiser.image_shape, denoiser.num_classes, denoiser.name) == ((4, 6, 1), 4, "m")
    assert denoiser.schedule.num_steps == 10
    x = np.random.default_rng(1).normal(size=(2, 4, 6, 1)).astype(np.float32)
    expected = jax.jit(models.build(SPEC.denoiser).apply)(variables, x, np.array([3, 4]), np.array([0, 2]))
    np.testing.assert_allclose(denoiser.eps(x, np.array([3, 4]), np.array([0, 2])), expected, atol=1e-5)
    assert model_directory.read_spec_file(saved)["metadata"] == {"origin": "a test"}
    assert [file.name for file in saved.parent.iterdir()] == ["m"]  # no temporary directory left


def test_fingerprint_changes_with_weights_and_spec(variables):
    first = model_directory.fingerprint(variables, SPEC)
    assert first == model_directory.fingerprint(jax.tree.map(jax.numpy.asarray, variables), SPEC)
    changed = jax.tree.map(np.copy, variables)
    changed["params"]["conv_in"]["bias"][0] += 1e-6
    assert model_directory.fingerprint(changed, SPEC) != first
    other = ModelSpec(denoiser=SPEC.denoiser, image_shape=(4, 4, 1), schedule=SPEC.schedule)
    assert model_directory.fingerprint(variables, other) != first


def test_bad_saves_leave_nothing(variables, saved, tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        model_directory.save_model(saved, SPEC, variables)
    with pytest.raises(ValueError, match=r"variables differ.*conv_in"):
        model_directory.save_model(tmp_path / "m", SPEC, {"params": {"conv_in": {"bias": np.zeros(3)}}})
    with pytest.raises(ValueError, match="JSON"):
        model_directory.save_model(tmp_path / "m", SPEC, variables, {"loss": float("nan")})
    with pytest.raises(TypeError):
        model_directory.save_model(tmp_path / "m", SPEC, variables, {"loss": object()})
    assert list(tmp_path.iterdir()) == []


def test_one_process_of_several_writes_the_same_model(saved, variables, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        model = model_directory.save_model(tmp_path / "m", SPEC, variables)
    assert opening.load_denoiser(model).fingerprint == opening.load_denoiser(saved).fingerprint
    assert sorted(entry.name for entry in model.iterdir()) == ["spec.json", "variables"]


def test_interrupted_write_leaves_nothing(variables, tmp_path, monkeypatch):
    def fail(path, variables):
        path.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(model_directory, "_write_variables", fail)
    with pytest.raises(KeyboardInterrupt):
        model_directory.save_model(tmp_path / "m", SPEC, variables)
    assert list(tmp_path.iterdir()) == []


def refused(path, message):
    with pytest.raises(ValueError, match=message) as error:
        opening.load_denoiser(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def edit(model, **changes):
    file = model / "spec.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_foreign_and_damaged_directories_are_refused(model, tmp_path):
    refused(tmp_path / "none", "no model directory")
    refused(tmp_path, "no spec.json")
    edit(model, fingerprint="0" * 64)
    refused(model, "fingerprint")
    edit(model, version=99)
    refused(model, "version must be 1, got 99")
    edit(model, format="other")
    refused(model, "not written by dime_jax")
    (model / "spec.json").write_text("{")
    refused(model, "not JSON")


def test_changed_specs_and_missing_weights_are_refused(model):
    spec = SPEC.to_json()
    edit(model, spec=spec | {"image_shape": [4, 4, 1]})
    refused(model, "fingerprint")
    edit(model, spec=spec | {"prediction": "score"})
    refused(model, "prediction")
    edit(model, spec=spec | {"architecture": spec["architecture"] | {"num_classes": 5}})
    refused(model, "cannot be read")


HOSTILE = {
    "channels": {"level_channels": [8192], "stem_channels": 8192},
    "levels": {"level_channels": [8] * 10, "num_res_blocks": 16, "attention_levels": list(range(10))},
    "everything": {"level_channels": [8192] * 10, "num_res_blocks": 16, "attention_levels": list(range(10))},
    "time table": {"time_table_steps": 100_000, "time_features": 8192},
    "classes": {"num_classes": 100_000, "time_channels": 8192},
    "attention": {"attention_levels": [0] * 1_000_000},
    "fields": {f"field_{i}": 0 for i in range(200_000)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_absurd_specs_are_refused_before_anything_is_built(model, name):
    spec = SPEC.to_json()
    edit(model, spec=spec | {"image_shape": [512, 512, 1], "architecture": spec["architecture"] | HOSTILE[name]})
    start = time.process_time()
    refused(model, "the network of its spec needs|at most 10 integers|residual blocks|bad fields in spec.denoiser")
    assert time.process_time() - start < 2


def test_metadata_that_are_no_object_are_refused(model):
    edit(model, metadata=[])
    refused(model, "metadata must be a JSON object")


def test_damaged_weights_are_refused(model):
    data = max((model / "variables").rglob("d/*"), key=lambda file: file.stat().st_size)
    whole = data.read_bytes()
    middle = len(whole) // 2
    data.write_bytes(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    refused(model, "fingerprint|cannot be read")
    data.write_bytes(whole[:middle])
    refused(model, "missing, truncated or added")
    shutil.rmtree(model / "variables")
    refused(model, "missing, truncated or added")
