"""Live comparison of latent networks with diffusers and transformers: saved by their code, read by ours.

The reference computes in float64, so that what is measured is our rounding alone.
Run with `make parity`; needs torch, diffusers and transformers.
"""

import json
import resource

import jax
import numpy as np
import pytest

from checkpoints_convert.convert import open_checkpoint
from checkpoints_convert.diffusers import _part
from checkpoints_convert.diffusers_configs import parse_conditional_unet
from dime_jax import models
from dime_jax.models import ConditionalUnetSpec

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import latent_networks as networks  # noqa: E402

TOLERANCE = 2e-5  # of the output's standard deviation

PIPELINES = {
    "version 1": (networks.UNET_1, networks.AUTOENCODER_1, networks.TEXT_1),
    "version 2": (
        {**networks.UNET_2, "in_channels": 6, "out_channels": 6},
        networks.AUTOENCODER_2,
        networks.TEXT_2,
    ),
    "middle size": (networks.UNET_MID, networks.AUTOENCODER_MID, networks.TEXT_MID),
}


def to_jax(tensor):
    return np.moveaxis(tensor.float().numpy(), 1, -1)


def assert_close(got, expected, name, tolerance=TOLERANCE):
    got = np.asarray(got, np.float64)
    got = np.moveaxis(got, -1, 1) if got.ndim == 4 else got
    expected = expected.double().numpy()
    error = np.abs(got - expected).max() / expected.std()
    print(f"{name}: {error:.1e} of the output's scale")
    assert got.shape == expected.shape
    assert error <= tolerance, f"{name}: {error}"


def jitted(function, *arguments):
    with jax.default_matmul_precision("highest"):
        return jax.jit(function)(*arguments)


@pytest.mark.parity
@pytest.mark.parametrize("name", PIPELINES)
@torch.no_grad()
def test_pipeline(name, tmp_path):
    """eps, latents, decoded images and text embeddings of a whole folder."""
    unet_config, vae_config, text_config = PIPELINES[name]
    unet, vae = networks.unet(unet_config), networks.autoencoder(vae_config)
    text = networks.text_encoder(text_config)
    options = {"version 2": {"safe_serialization": True, "max_shard_size": "200KB"}}.get(name, {})
    pipeline = open_checkpoint(networks.save_pipeline(tmp_path, unet, vae, text, **options))
    assert pipeline.denoiser.file.name.endswith(".index.json") == (name == "version 2")
    variables, spec = pipeline.variables(), pipeline.spec

    tokens = torch.randint(0, text_config["vocab_size"], (2, text_config["max_position_embeddings"]))
    unet, vae, text = unet.double(), vae.double(), text.double()
    embeddings = text(tokens).last_hidden_state
    assert_close(
        jitted(models.embed_tokens(spec.text_encoder), variables["text_encoder"], tokens.int().numpy()),
        embeddings,
        "text",
    )
    size = unet_config["sample_size"]
    x = torch.randn(2, unet.config.in_channels, size, size)
    t = torch.tensor([3, 900])
    got = jitted(models.denoise(spec), variables["denoiser"], to_jax(x), t.int().numpy(), embeddings.float().numpy())
    assert_close(got, unet(x.double(), t, embeddings).sample, "eps")
    check_autoencoder(vae, variables["autoencoder"], spec)


def check_autoencoder(vae, variables, spec):
    height, width, channels = spec.image_shape
    images = torch.rand(2, channels, height, width) * 2 - 1
    posterior = vae.encode(images.double()).latent_dist
    shift, scale = vae.config.shift_factor or 0.0, vae.config.scaling_factor
    expected = (posterior.mean - shift) * scale
    assert_close(jitted(models.encode(spec.autoencoder), variables, to_jax(images)), expected, "latents")
    decoded = vae.decode(expected / scale + shift).sample
    assert_close(jitted(models.decode(spec.autoencoder), variables, to_jax(expected)), decoded, "decoded images")
    if height > 16:
        return
    noise = torch.randn_like(posterior.mean)
    sample = (posterior.mean + posterior.std * noise - shift) * scale
    got = jitted(models.encode(spec.autoencoder), variables, to_jax(images), to_jax(noise))
    assert_close(got, sample, "sampled latents")


@pytest.mark.parity
@pytest.mark.parametrize("config", [networks.DIT_1, networks.DIT_MID])
@torch.no_grad()
def test_dit(config, tmp_path):
    """A DiT whose blocks have embedders of their own, as a fine-tune in diffusers may."""
    network, vae = networks.dit(config), networks.autoencoder(networks.AUTOENCODER_1)
    scheduler = diffusers.DDIMScheduler()
    pipeline = open_checkpoint(networks.save_pipeline(tmp_path, network, vae, scheduler=scheduler))
    labels = torch.tensor([1, config["num_embeds_ada_norm"]])
    x = torch.randn(2, 4, config["sample_size"], config["sample_size"])
    t = torch.tensor([3, 300])  # at 900, torch's own rounding of the frequencies costs 2e-5
    expected = network.double()(x.double(), t, labels).sample[:, :4]
    variables = pipeline.variables()["denoiser"]
    got = jitted(models.denoise(pipeline.spec), variables, to_jax(x), t.int().numpy(), labels.int().numpy())
    assert_close(got, expected, "eps")


@pytest.mark.full_size
@torch.no_grad()
def test_the_unet_of_stable_diffusion_1(tmp_path):
    """At full size, one network in memory after the other; needs 10 GB. Run with `make parity-full-size`."""
    torch.manual_seed(0)
    network = diffusers.UNet2DConditionModel(cross_attention_dim=768, sample_size=64)
    networks.randomised(network)
    x, t, context = torch.randn(1, 4, 64, 64), torch.tensor([300]), torch.randn(1, 77, 768)
    expected = network(x, t, context).sample
    network.save_pretrained(tmp_path)
    del network
    config = json.loads((tmp_path / "config.json").read_text())
    part = _part("unet", parse_conditional_unet(config), tmp_path)
    assert part.spec == ConditionalUnetSpec()
    variables = part.variables()
    got = jitted(models.build(part.spec).apply, variables, to_jax(x), t.int().numpy(), context.numpy())
    assert_close(got, expected, "eps at full size", tolerance=1e-4)
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")
