"""A tiny text-to-image model, trained and saved as diffusers saves one, audited with its LoRA from the command line."""

import csv
import json

import numpy as np
import pytest
import safetensors.numpy

from dime_jax import cli
from experiments import latent_study
from experiments.configs.latent_digits import get_config

pytestmark = pytest.mark.slow  # trains, and compiles every call of a U-Net


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    output = tmp_path_factory.mktemp("study")
    latent_study.make(output, latent_study.Size(**get_config("smoke").train))
    weak_lora(output)
    return output


def weak_lora(output):
    """A LoRA that changes one layer of the U-Net a little, in kohya's spelling."""
    state = safetensors.numpy.load_file(output / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    name = next(name for name in sorted(state) if name.endswith("attn2.to_q.weight"))
    rows, columns = state[name].shape
    module, rng = "lora_unet_" + name.removesuffix(".weight").replace(".", "_"), np.random.default_rng(0)
    tensors = {
        f"{module}.lora_down.weight": rng.normal(size=(2, columns)).astype(np.float32),
        f"{module}.lora_up.weight": (1e-3 * rng.normal(size=(rows, 2))).astype(np.float32),
    }
    safetensors.numpy.save_file(tensors, output / "lora.safetensors")


def audit(study, name, *more):
    roles = [word for role in ("members", "heldout", "candidates") for word in (f"--{role}", study / role)]
    model = ["--model", study / "pipeline", "--lora", study / "lora.safetensors", "--lora_scale", "0.5"]
    limits = ["--attacks", "dime", "sima_l4", "clid", "--profile", "light", "--quiet"]
    words = ["audit", *model, *roles, *limits, "--output", study / name, *more]
    assert cli.main([str(word) for word in words]) == 0
    return json.loads((study / name / "results.json").read_text())


def test_an_audit_from_the_command_line(study):
    results = audit(study, "own")
    assert results["model_check"]["passed"], results["model_check"]
    assert {row["attack"] for row in results["results"]} >= {"dime", "sima_l4", "clid"}
    assert next(row for row in results["results"] if row["attack"] == "clid")["queries_per_image"] == 15
    assert results["captions"] == "own"
    assert results["settings"]["conversion"] == {"lora": str(study / "lora.safetensors"), "lora_scale": "0.5"}
    assert "LoRA: lora.safetensors at scale 0.5" in results["model"]["facts"]
    caption = results["caption_baseline"]
    assert not caption["explained"] or caption["fires"]
    with (study / "own" / "candidates.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 2 * latent_study.CANDIDATES
    page = (study / "own" / "report.html").read_text()
    asked = "the model was asked about every image with the image’s own caption"
    assert f"{asked}; CLiD also with each third of it and with the empty one" in page
    assert "LoRA: lora.safetensors at scale 0.5" in page
    assert "no classifier-free guidance" in page
    assert "A classifier that reads the captions alone" in page
    made = results["queries_made"]
    assert audit(study, "own")["queries_made"] == made  # finished: nothing is asked again


def test_without_captions_nothing_is_said_about_them(study):
    results = audit(study, "none", "--captions", "none", "--attacks", "dime", "sima_l4")
    assert results["captions"] == "none"
    assert "caption_baseline" not in results
    assert "with the empty caption" in (study / "none" / "report.html").read_text()


def test_captions_that_betray_the_set(study):
    """Members captioned by one hand, held-out images by another: the headline must not speak of training."""
    for role, words in (("members", "the digit"), ("heldout", "a digit of")):
        file = study / role / "metadata.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [{**row, "text": f"{words} {row['text'].split()[-1]}"} for row in rows]
        file.write_text("\n".join(json.dumps(row) for row in rows))
    results = audit(study, "betrayed", "--attacks", "sima_l4")
    assert results["caption_baseline"]["fires"]
    assert any("The captions alone" in alarm for alarm in results["headline"]["alarms"])
    assert not results["headline"]["answer"].startswith("This model remembers")
