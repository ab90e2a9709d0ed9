"""The LoRA that ships with the package: found by its name, audited beside its base, its images the candidates."""

import collections
import csv
import json

import numpy as np
import pytest

from dime_jax import cli, data
from dime_jax.auditing import AuditConfig, images
from dime_jax.data import Split
from dime_jax.data.roles import Named, open_roles
from dime_jax.evidence import Verdict
from dime_jax.loading import model_directory
from dime_jax.loading.conversion import UseOptions

SHIPPED = model_directory.SHIPPED / "digits_lora"


def split_of(folder):
    return data.read_split(folder / "split.npz", data.open_source("digits"))


@pytest.mark.usefixtures("no_figures", "small_model_check")
def test_make_audit_lora(tmp_path):
    """Of the 50 digits that it saw 80 times each 35 are named, and none of the 50 others."""
    command = ["audit", "--model", "digits", "--lora", "digits_lora", "--quiet", "--output"]
    assert cli.main([*command, str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["images"]["members"] == 0
    assert results["model"]["name"] == "digits + digits_lora"
    assert results["reference"]["name"] == "digits"
    assert results["queries_made"] == results["reference_queries_made"]
    with open(tmp_path / "candidates.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert collections.Counter(row["member"] for row in rows) == {"True": 50, "False": 50}
    named = collections.Counter(row["member"] for row in rows if row["verdict"] == Verdict.EVIDENCE)
    assert named["True"] >= 15
    assert named["False"] <= 3


def images_of(**named):
    """The images of an audit of the shipped LoRA, without its model."""
    use = UseOptions(lora=named.pop("lora", ["digits_lora"]))
    return images._open(AuditConfig("out", use=use, **named), FakeDigits())


class FakeDigits:
    image_shape, fingerprint, name, num_classes, takes_text = (8, 8, 1), "another", "digits + a LoRA", None, False


def test_its_images_are_the_candidates_and_nobody_saw_the_others():
    roles, split, base = images_of(), split_of(SHIPPED), split_of(model_directory.SHIPPED / "digits")
    assert len(roles.split.member) == 0
    np.testing.assert_array_equal(roles.candidates[roles.truth], split.member)
    others = roles.candidates[~roles.truth]
    assert len(others) == 50
    np.testing.assert_array_equal(np.sort(np.concatenate([others, roles.split.heldout])), split.heldout)
    seen = np.concatenate([base.member, split.member])
    assert not np.isin(np.concatenate([others, roles.split.heldout]), seen).any()


def test_candidates_of_someone_else_are_compared_with_what_nobody_saw():
    mine = data.from_images(np.zeros((3, 8, 8, 1), np.uint8))
    roles = images_of(candidates=mine)
    assert len(roles.split.member) == 0
    np.testing.assert_array_equal(roles.split.heldout, split_of(SHIPPED).heldout)
    assert [roles.source.ids[index] for index in roles.candidates] == [f"candidates/{id}" for id in mine.ids]


def test_members_that_are_named_are_known():
    roles = images_of(members=data.from_images(np.zeros((30, 8, 8, 1), np.uint8)))
    assert (len(roles.split.member), len(roles.split.heldout)) == (30, 848)


def test_a_lora_without_a_split_beside_it_has_no_example(tmp_path):
    (tmp_path / "x.safetensors").write_bytes((SHIPPED / "adapter.safetensors").read_bytes())
    for loras in ([tmp_path / "x.safetensors"], ["digits_lora", "digits_lora"]):
        with pytest.raises(ValueError, match="heldout must be given, and members if you know any: no split"):
            images_of(lora=loras)


def test_the_shipped_name_gives_way_to_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_directory.find_adapter("digits_lora") == SHIPPED
    assert str(model_directory.find_adapter("../digits_lora")) == "../digits_lora"
    (tmp_path / "digits_lora").mkdir()
    assert str(model_directory.find_adapter("digits_lora")) == "digits_lora"
    with pytest.raises(ValueError, match=r"shipped model of that name \(digits\)$"):
        model_directory.find_model("digits_lora2")


def test_members_that_are_not_known_are_not_told():
    split = Split(np.arange(30), np.arange(40, 90))
    roles = open_roles(Named(), (8, 8, 1), lambda source: split, 3, members_known=False)
    assert roles.split.member.size == 0
    assert roles.truth.sum() == 30 == (~roles.truth).sum()
