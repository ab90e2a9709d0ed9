"""A LoRA of a tiny Stable Diffusion gives its images away beside its base, and not alone: from the command line."""

import collections
import csv
import json

import pytest

from dime_jax import cli
from dime_jax.evidence import Verdict

pytestmark = pytest.mark.usefixtures("no_figures", "small_model_check")


def audit(directory, *words):
    assert cli.main([str(word) for word in ("audit", *words, "--output", directory, "--quiet")]) == 0
    with open(directory / "candidates.csv", newline="", encoding="utf-8") as file:
        return json.loads((directory / "results.json").read_text()), list(csv.DictReader(file))


def named(rows, is_member):
    """How many members, and how many others, show evidence."""
    found = collections.Counter(is_member(row) for row in rows if row["verdict"] == Verdict.EVIDENCE)
    return found[True], found[False]


def test_beside_its_base_a_lora_gives_its_images_away(latent_lora, tmp_path):
    """Of 20 of its 40 images 17, seen 60 times each, and none of the 20 others; alone, by three queries, none."""
    words = ["--model", latent_lora / "pipeline", "--lora", latent_lora / "lora.safetensors"]
    words += ["--heldout", latent_lora / "lora_heldout", "--candidates", latent_lora / "lora_candidates"]
    found = {}
    for way, more in (("beside", ()), ("alone", ("--reference", "none"))):
        results, rows = audit(tmp_path / way, *words, *more)
        assert results["decided_by"]["queries_per_image"] == (2 if way == "beside" else 3)
        assert results["captions"] == "own"
        assert len(rows) == 40
        found[way] = named(rows, lambda row: row["id"] < "candidates/0020")
    members, others = found["beside"]
    assert members >= 10
    assert others <= 1
    assert found["alone"][0] <= members - 5
