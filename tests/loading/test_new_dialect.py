"""A new architecture and a new dialect: a file and an entry in a table each, and nothing else is touched."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj
from checkpoints_convert import convert as converter
from checkpoints_convert import mapping
from checkpoints_convert.checkpoint import Dialect, Facts, Known, by_convention, file_checkpoint
from dime_jax import models
from dime_jax.loading import model_directory
from dime_jax.models.checks import Channels
from dime_jax.models.network_spec import floats, integers
from dime_jax.protocol import stages
from experiments.torch_writer import write_zip

# --- what would be dime_jax/models/toy.py ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySpec(models.DenoiserSpec):
    kind: ClassVar[str] = "toy"

    width: Channels = 6

    def example(self):
        return floats(2, 2, 1), integers(), None


class Toy(nn.Module):
    spec: ToySpec

    @nn.compact
    def __call__(self, x, t, condition):
        return x + nn.Dense(1, name="out")(nn.Dense(self.spec.width, name="dense")(x))


# --- what would be checkpoints_convert/toy.py ---


def naming(spec):
    return mapping.Naming({"dense": "embedder", "out": "head.linear"}, {}, {"out": "conv1x1"})


def open_weights(weights, options):
    spec = ToySpec(width=mapping.width_of(weights.state, [("embedder.bias", 0)]))
    schedule, prediction = by_convention(models.ScheduleSpec(), "toys"), by_convention("epsilon", "toys")
    facts = Facts(Known((8, 8), "toys are small"), schedule, prediction)
    return file_checkpoint(weights, options, spec, naming(spec), facts)


DIALECT = Dialect("toy", ("embedder.", "head."), open_weights)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A file of the toy's authors, after both tables know it."""
    monkeypatch.setitem(models.NETWORKS, ToySpec, Toy)
    monkeypatch.setitem(converter.DIALECTS, "toy", DIALECT)
    spec = ToySpec(width=5)
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), models.param_shapes(spec))
    write_zip(tmp_path / "toy.pt", mapping.to_state_dict(variables, mapping.name_table(spec, naming(spec))))
    return tmp_path / "toy.pt", variables


def test_it_is_opened_converted_counted_saved_and_loaded(checkpoint, tmp_path):
    file, variables = checkpoint
    opened = dj.open_model(file, cache=tmp_path / "cache")
    jax.tree.map(np.testing.assert_array_equal, opened.denoiser.params, variables)
    assert "image size: 8 x 8 (toys are small)" in opened.facts
    (directory,) = (tmp_path / "cache").glob("model-*")
    metadata = model_directory.read_spec_file(directory)["metadata"]
    assert (metadata["dialect"], metadata["weights"], metadata["source"]) == ("toy", "only", "toy.pt")
    assert models.count_values(models.model_shapes(model_directory.read_spec(directory))) == (5 + 5) + (5 + 1)
    again = model_directory.save_model(tmp_path / "again", model_directory.read_spec(directory), variables)
    loaded = dj.load_denoiser(again)
    assert loaded.fingerprint == opened.denoiser.fingerprint == dj.load_denoiser(directory).fingerprint
    x = np.random.default_rng(1).normal(size=(2, 8, 8, 1)).astype(np.float32)
    dense, out = variables["params"]["dense"], variables["params"]["out"]
    expected = x + (x @ dense["kernel"] + dense["bias"]) @ out["kernel"] + out["bias"]
    np.testing.assert_allclose(loaded.eps(x, jnp.int32(3)), expected, rtol=1e-5, atol=1e-5)
    assert dj.open_model(file, cache=tmp_path / "cache", dialect="toy", image_size=4).denoiser.shape == (4, 4, 1)


def test_it_is_audited(checkpoint, tmp_path):
    images = np.random.default_rng(2).uniform(-1, 1, (48, 8, 8, 1)).astype(np.float32)
    members, heldout = (dj.data.from_images(part, name=name) for part, name in ((images[:24], "m"), (images[24:], "h")))
    config = dj.AuditConfig(
        tmp_path / "audit", model=checkpoint[0], members=members, heldout=heldout, attacks=["sima_l4"], profile="light"
    )
    result = dj.audit(config)
    opened = dj.open_model(checkpoint[0], cache=tmp_path / "cache").denoiser
    assert (result.results["model"]["name"], result.results["model"]["fingerprint"]) == ("toy.pt", opened.fingerprint)
    (row,) = [row for row in result.results["results"] if row["attack"] == "sima_l4"]
    # The AUC of its own norms of the same images: the audit asked this network, and about these images.
    halves = stages.read_halves(tmp_path / "audit")
    norms = np.asarray(dj.sima(opened.eps_fn(), opened.schedule, images, int(row["setting"]["t"])))
    lower = norms[halves.test.member, None] < norms[halves.test.heldout]
    assert row["auc"]["value"] == pytest.approx(lower.mean())
    assert result.report.is_file()
