"""A new architecture is a spec and a network in one file, and one entry in `NETWORKS`."""

import dataclasses
import json
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dime_jax import models
from dime_jax.models.checks import Channels
from dime_jax.models.network_spec import floats, integers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySpec(models.DenoiserSpec):
    kind: ClassVar[str] = "toy"
    resizable: ClassVar[bool] = False

    width: Channels = 6
    num_classes: int = 3

    def example(self):
        return floats(4, 4, 2), integers(), integers()


class Toy(nn.Module):
    spec: ToySpec

    @nn.compact
    def __call__(self, x, t, label):
        h = (
            nn.Dense(self.spec.width, name="dense")(x)
            + nn.Embed(3, self.spec.width, name="label")(label)[:, None, None]
        )
        return nn.Dense(4, name="out")(h)  # the prediction and a variance


@pytest.fixture
def spec(monkeypatch):
    monkeypatch.setitem(models.NETWORKS, ToySpec, Toy)
    return models.ModelSpec(denoiser=ToySpec(), image_shape=(4, 4, 2))


def test_it_is_counted_and_goes_through_json(spec):
    assert models.count_values(models.model_shapes(spec)) == (2 * 6 + 6) + 3 * 6 + (6 * 4 + 4)
    contents = spec.to_json()
    assert contents["architecture"] == {"kind": "toy", "width": 6, "num_classes": 3}
    assert models.ModelSpec.from_json(json.loads(json.dumps(contents))) == spec
    assert (spec.shape, spec.num_classes, list(spec.parts)) == ((4, 4, 2), 3, ["denoiser"])
    for change, message in [
        ({"width": 0}, r"width must be an integer in \[1, 8192\], got 0"),
        ({"depth": 1}, "bad fields in spec.denoiser: unknown 'depth'"),
    ]:
        with pytest.raises(ValueError, match=message):
            models.ModelSpec.from_json({**contents, "architecture": {**contents["architecture"], **change}})
    with pytest.raises(ValueError, match="the image size must be 4, got 8"):
        dataclasses.replace(spec, image_shape=(8, 8, 2))


def test_it_predicts_noise(spec):
    variables = models.init(spec.denoiser, jax.random.key(0))
    x, label = jnp.ones((2, 4, 4, 2)), jnp.array([0, 2])
    eps = models.denoise(spec)(variables, x, jnp.array(5), label)
    expected = models.build(spec.denoiser).apply(variables, x, jnp.array(5), label)[..., :2]
    np.testing.assert_array_equal(eps, expected)
    assert eps.shape == x.shape


def test_it_has_latents_beside_an_autoencoder(spec):
    autoencoder = models.AutoencoderSpec(latent_channels=2, level_channels=(8, 8), norm_groups=4)
    latent = dataclasses.replace(spec, autoencoder=autoencoder, image_shape=(8, 8, 3))
    assert (latent.shape, list(latent.parts)) == ((4, 4, 2), ["denoiser", "autoencoder"])
    assert latent.to_json()["kind"] == "latent"
    assert models.ModelSpec.from_json(latent.to_json()) == latent
    assert set(models.model_shapes(latent)) == {"denoiser", "autoencoder"}
