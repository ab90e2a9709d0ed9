"""Wrong and hostile latent models and captions: one line each from the command line, exit code 2."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from dime_jax import cli

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "latent" / "stable_diffusion"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return pathlib.Path(shutil.copytree(GOLDEN, tmp_path / "pipeline"))


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def images(path, seed, captions=None, count=24):
    path.mkdir()
    rng = np.random.default_rng(seed)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path / f"{number:03d}.png")
    if captions is not None:
        rows = [json.dumps({"file_name": name, "text": text}) for name, text in captions.items()]
        (path / "metadata.jsonl").write_text("\n".join(rows))
    return path


def audit(tmp_path, model, *more, captions=None):
    for number, role in enumerate(("members", "heldout")):
        if not (tmp_path / role).exists():
            images(tmp_path / role, number, captions)
    sources = ["--members", tmp_path / "members", "--heldout", tmp_path / "heldout", "--output", tmp_path / "out"]
    return cli.main([str(word) for word in ("audit", "--model", model, *sources, "--quiet", *more)])


def refused(capsys, code, message):
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len([line for line in lines if line.startswith("dime-jax:")]) == 1
    assert message in lines[-1]


def remove_part(folder, name):
    shutil.rmtree(folder / name)


def narrow(folder):
    tensors = safetensors.numpy.load_file(folder / "unet" / WEIGHTS)
    tensors["conv_in.bias"] = tensors["conv_in.bias"][:-1]
    safetensors.numpy.save_file(tensors, folder / "unet" / WEIGHTS)


def lying_tokenizer(folder):
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps({"<|startoftext|>": 97, "<|endoftext|>": 10**6}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: remove_part(folder, "vae"), "vae/config.json"),
        (
            lambda folder: remove_part(folder, "unet"),
            "is not a diffusers folder: no config.json, and no unet/ or transformer/ in it",
        ),
        (lambda folder: remove_part(folder, "text_encoder"), "text_encoder/config.json"),
        (lambda folder: remove_part(folder, "tokenizer"), "must hold tokenizer.json, or vocab.json and merges.txt"),
        (lambda folder: (folder / "unet" / WEIGHTS).unlink(), "must hold diffusion_pytorch_model.safetensors or"),
        (narrow, "conv_in.bias"),
        (lying_tokenizer, "1000000"),
        (
            lambda folder: edit(folder / "model_index.json", _class_name="StableDiffusionXLPipeline"),
            "is not supported, because it is an SDXL model",
        ),
        (
            lambda folder: edit(folder / "model_index.json", _class_name="KandinskyPipeline"),
            "cannot honour _class_name",
        ),
        (lambda folder: edit(folder / "unet" / "config.json", _class_name="UNet3DConditionModel"), "UNet3DCondition"),
        (lambda folder: edit(folder / "unet" / "config.json", in_channels=9), "in_channels=9"),
    ],
)
def test_pipelines_that_cannot_be_opened(tmp_path, capsys, folder, harm, message):
    harm(folder)
    refused(capsys, audit(tmp_path, folder), message)


def test_a_lora_for_another_model(tmp_path, capsys):
    tensors = {f"lora_unet_nowhere.lora_{way}.weight": np.zeros((2, 2), np.float32) for way in ("down", "up")}
    safetensors.numpy.save_file(tensors, tmp_path / "lora.safetensors")
    refused(capsys, audit(tmp_path, GOLDEN, "--lora", tmp_path / "lora.safetensors"), "nowhere")


def test_a_hub_name_that_does_not_exist(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    refused(capsys, audit(tmp_path, "hf:nobody/nothing"), "hf:nobody/nothing: ")
    refused(capsys, audit(tmp_path, "hf:nobody"), "Hub names must be hf:owner/name or hf:owner/name@revision")


def test_images_without_captions(tmp_path, capsys):
    code = audit(tmp_path, GOLDEN)
    refused(capsys, code, "takes captions, and not all images have one: give --captions none")


def test_captions_of_other_files(tmp_path, capsys):
    code = audit(tmp_path, GOLDEN, captions={"elsewhere.png": "a cat"})
    refused(capsys, code, "give --captions none")


def test_captions_for_a_model_that_takes_none(tmp_path, capsys):
    refused(capsys, cli.main(["audit", "--captions", "none", "--output", str(tmp_path)]), "takes no text")


def test_clid_without_captions(tmp_path, capsys):
    code = audit(tmp_path, GOLDEN, "--captions", "none", "--attacks", "clid", "dime")
    refused(capsys, code, "attack clid is for text-conditioned models")
    code = cli.main(["audit", "--attacks", "clid", "dime", "--output", str(tmp_path / "digits")])
    refused(capsys, code, "attack clid is for text-conditioned models")


@pytest.mark.slow  # compiles two encoders
@pytest.mark.parametrize(
    ("factor", "message"), [(1.05, "must encode images as the model does, to 1%; its latents d"), (1, "")]
)
def test_a_reference_with_another_encoder_is_refused(folder, tmp_path, capsys, factor, message):
    """With the same encoder and another network it goes on, to where this one turns out to predict no noise."""
    other = pathlib.Path(shutil.copytree(folder, tmp_path / "other"))
    for part, name, by in (("vae", "quant_conv.weight", factor), ("unet", "conv_out.weight", 1.5)):
        tensors = safetensors.numpy.load_file(other / part / WEIGHTS)
        tensors[name] = np.float32(by) * tensors[name]
        safetensors.numpy.save_file(tensors, other / part / WEIGHTS)
    code = audit(
        tmp_path, folder, "--reference", other, "--captions", "none", "--attacks", "loss", "--max_queries", "40"
    )
    refused(capsys, code, message or "the reference other cannot be used: The model does not predict noise")
