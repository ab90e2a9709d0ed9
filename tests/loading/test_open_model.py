"""Whatever a user names as a model: opened by one function, converted once, or refused in one line."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

import dime_jax as dj
from checkpoints_convert import convert as converter
from dime_jax import ConversionOptions, UseOptions
from dime_jax.loading import conversion

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SECMI, DDIM = GOLDEN / "ddpm_secmi.pt", GOLDEN / "ddpm_ddim.pt"


def test_everything_that_is_a_model(tmp_path):
    converted = dj.open_model(SECMI, cache=tmp_path)
    assert converted.origin.startswith("converted from ddpm_secmi.pt, cached in model-")
    assert "image size: 16 x 16 (x_T in the file)" in converted.facts
    directory = tmp_path / converted.origin.rpartition(" ")[2]
    for again in (dj.open_model(SECMI, cache=str(tmp_path)), dj.open_model(directory, cache=tmp_path / "elsewhere")):
        assert again.denoiser.fingerprint == converted.denoiser.fingerprint
        assert again.facts == converted.facts  # they are kept with the model
    folder = dj.open_model(GOLDEN / "ddpm_diffusers", cache=tmp_path)
    assert "prediction: epsilon (scheduler_config.json)" in folder.facts
    assert dj.open_model("digits", cache=tmp_path).origin == "shipped with dime_jax"
    denoiser = dj.Denoiser.from_function(lambda x, t: x, dj.linear_schedule(), (8, 8, 1))
    assert dj.open_model(denoiser, cache=tmp_path) == (denoiser, "a Python object", (), None, None)
    kept = [entry.name for entry in tmp_path.iterdir() if not entry.name.endswith(".lock")]
    assert len(kept) == 2
    assert {name.partition("-")[0] for name in kept} == {"model"}
    assert converted.describe().splitlines()[0] == f"model ddpm_secmi.pt ({converted.origin})"


def test_a_conversion_is_kept_by_content_options_and_converter(tmp_path, monkeypatch):
    calls = []

    def convert_for_show(source, output, options, *_):
        calls.append((source.name, options))
        return shutil.copytree(pathlib.Path(dj.__file__).parent / "shipped_models" / "digits", output)

    monkeypatch.setattr(conversion, "convert", convert_for_show)
    file, flags = tmp_path / "x.pt", tmp_path / "flags.json"
    file.write_bytes(b"one")
    flags.write_text("{}")
    small, other = {"image_size": 8}, {"image_size": 8, "weights": "raw"}
    with_flags = {"model_flags": flags}
    for options in (small, small, other, other, with_flags, with_flags):
        dj.open_model(file, cache=tmp_path / "cache", **options)
    assert len(calls) == 3
    flags.write_text('{"a": 1}')  # the same option, another content
    dj.open_model(file, cache=tmp_path / "cache", **with_flags)
    file.write_bytes(b"two")
    dj.open_model(file, cache=tmp_path / "cache", **small)
    monkeypatch.setattr(converter, "CONVERTER_VERSION", -1)
    dj.open_model(file, cache=tmp_path / "cache", **small)
    assert len(calls) == len(list((tmp_path / "cache").glob("model-*"))) == 6


def test_every_option_counts():
    flags_file = str(GOLDEN / "guided_cond.json")
    values = {"dialect": "ddim", "weights": "raw", "model_flags": flags_file, "image_size": 3, "schedule": "cosine"}
    values |= {"prediction": "sample", "autoencoder": str(DDIM)}
    assert values.keys() == {field.name for field in dataclasses.fields(ConversionOptions)}
    one_each = [ConversionOptions(**{name: value}) for name, value in values.items()]
    assert [options.given() for options in one_each] == [{name: value} for name, value in values.items()]
    assert len({options.identity() for options in (*one_each, ConversionOptions())}) == 8
    use = {"latent": "sample", "latent_weighting": "pullback", "hold": "float16", "lora": [SECMI, "b"]}
    use["lora_scale"] = [0.5, 1.0]
    assert use.keys() == {field.name for field in dataclasses.fields(UseOptions)}
    assert UseOptions(**use).given() == use | {"lora": f"{SECMI}, b", "lora_scale": "0.5, 1.0"}


def test_an_unknown_option_is_one_line_that_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown option 'size'; expected one of dialect, .*, hold, lora, lora_scale$"
    ):
        dj.open_model("digits", size=3)


def test_facts_from_a_stranger_are_printed_safely(tmp_path):
    model = shutil.copytree(pathlib.Path(dj.__file__).parent / "shipped_models" / "digits", tmp_path / "m")
    many = ["x" * 1000] * 1000
    for facts, shown in ((["a\x1b[2J\nb", 3], ("a\\x1b[2J\\nb", "3")), ("text", ()), (many, ("x" * 500,) * 20)):
        contents = json.loads((model / "spec.json").read_text())
        contents["metadata"]["facts"] = facts
        (model / "spec.json").write_text(json.dumps(contents))
        assert dj.open_model(model, cache=tmp_path).facts == shown


def test_options_with_nothing_to_convert_are_refused(tmp_path):
    directory = conversion.convert(SECMI, tmp_path / "m")
    denoiser = dj.Denoiser.from_function(lambda x, t: x, dj.linear_schedule(), (8, 8, 1))
    for model, what in ((directory, "a model directory"), ("digits", "shipped with dime_jax"), (denoiser, "a Python")):
        with pytest.raises(
            ValueError, match=rf"^--image_size applies only when a checkpoint is converted; .* is {what}"
        ):
            dj.open_model(model, cache=tmp_path, image_size=8)


def test_options_reach_the_converter(tmp_path):
    with pytest.raises(ValueError, match="add --image_size"):
        dj.open_model(DDIM, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("model-*"))
    assert dj.open_model(DDIM, cache=tmp_path / "cache", image_size=64).denoiser.image_shape == (64, 64, 3)


def pipeline_folder(path, parts, network="UNet2DModel"):
    path.mkdir()
    index = {"_class_name": "SomePipeline", **{part: ["library", "Class"] for part in parts}, "safety": [None, None]}
    (path / "model_index.json").write_text(json.dumps(index))
    (path / "unet").mkdir()
    (path / "unet" / "config.json").write_text(json.dumps({"_class_name": network}))
    return path


@pytest.mark.parametrize(
    ("parts", "network", "why"),
    [
        (["vae", "unet", "text_encoder"], "UNet2DConditionModel", "cannot honour _class_name='SomePipeline'"),
        (["vqvae", "unet"], "UNet2DModel", "not supported, because its autoencoder is a VQ model"),
        (["unet", "text_encoder_2"], "UNet2DConditionModel", "because it has a second text encoder, as SDXL does"),
        (["unet"], "UNet2DConditionModel", "cannot honour _class_name='SomePipeline'"),
    ],
)
def test_other_latent_and_text_models_are_refused_with_the_reason(tmp_path, parts, network, why):
    with pytest.raises(ValueError, match=why) as error:
        dj.open_model(pipeline_folder(tmp_path / "model", parts, network), cache=tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").glob("model-*"))


def test_a_latent_checkpoint_is_told_by_its_tensors(tmp_path):
    from safetensors.numpy import save_file

    save_file({"first_stage_model.decoder.weight": np.zeros(2, np.float32)}, tmp_path / "sd.safetensors")
    with pytest.raises(ValueError, match="latent-diffusion model in a single file"):
        dj.open_model(tmp_path / "sd.safetensors", cache=tmp_path / "cache")


def test_a_missing_model_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no model directory 'nowhere', and no shipped model of that name"):
        dj.open_model("nowhere", cache=tmp_path)
