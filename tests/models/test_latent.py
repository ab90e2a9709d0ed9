"""Latent networks: sizes of the published ones, golden outputs, bounded attention, and specs that refuse nonsense."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import dit
from checkpoints_convert.convert import open_checkpoint
from checkpoints_convert.options import ConversionOptions
from dime_jax import models
from dime_jax.models import (
    AutoencoderSpec,
    ClipTextSpec,
    ConditionalUnetSpec,
    DitSpec,
    ModelSpec,
    layers,
)
from dime_jax.models.spec import ScheduleSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "latent"
EXPECTED = dict(np.load(GOLDEN / "expected.npz"))
TOLERANCE = 2e-5  # of the output's standard deviation

UNET_1 = ConditionalUnetSpec()
UNET_2 = ConditionalUnetSpec(level_heads=(5, 10, 20, 20), linear_projection=True, context_channels=1024)
CLIP_H = ClipTextSpec(width=1024, mlp_width=4096, num_heads=16, num_layers=23, activation="gelu")


@pytest.mark.parametrize(
    ("spec", "values", "tensors"),
    [
        (UNET_1, 859_520_964, 686),
        (UNET_2, 865_910_724, 686),
        (AutoencoderSpec(), 83_653_863, 248),
        (ClipTextSpec(), 123_060_480, 196),
        (CLIP_H, 340_387_840, 372),
        (DitSpec(), 675_129_632, None),
        (DitSpec(layout="diffusers", mlp_norm_eps=1e-5), 749_826_464, 538),
    ],
)
def test_sizes_of_the_published_networks(spec, values, tensors):
    shapes = models.param_shapes(spec)
    assert models.count_values(shapes) == values
    assert tensors in (None, len(jax.tree.leaves(shapes)))


def test_size_of_the_encoder_alone():
    shapes = models.param_shapes(AutoencoderSpec())["params"]
    half = [shapes["encoder"], shapes["quant_conv"]]
    assert (models.count_values(half), len(jax.tree.leaves(half))) == (34_163_664, 108)


def assert_close(got, expected):
    assert got.shape == expected.shape
    assert np.abs(np.asarray(got) - expected).max() <= TOLERANCE * expected.std()


@pytest.fixture(scope="module")
def stable_diffusion():
    pipeline = open_checkpoint(GOLDEN / "stable_diffusion")
    return pipeline.spec, pipeline.variables()


def test_text_embeddings(stable_diffusion):
    spec, variables = stable_diffusion
    got = jax.jit(models.embed_tokens(spec.text_encoder))(variables["text_encoder"], EXPECTED["tokens"])
    assert_close(got, EXPECTED["embeddings"])


def test_eps(stable_diffusion):
    spec, variables = stable_diffusion
    apply = jax.jit(models.denoise(spec))
    got = apply(variables["denoiser"], EXPECTED["x"], EXPECTED["t"], EXPECTED["embeddings"])
    assert_close(got, EXPECTED["eps"])


def test_latents_there_and_back(stable_diffusion):
    spec, variables = stable_diffusion
    parts = variables["autoencoder"]["params"]
    encoder = {"params": {name: parts[name] for name in ("encoder", "quant_conv")}}  # is enough to encode
    apply = jax.jit(models.encode(spec.autoencoder))
    assert_close(apply(encoder, EXPECTED["images"]), EXPECTED["latents"])
    decode = jax.jit(models.decode(spec.autoencoder))
    assert_close(decode(variables["autoencoder"], EXPECTED["latents"]), EXPECTED["decoded"])


def test_the_eps_of_every_norm(stable_diffusion):
    """With weights of 1/16, what is normalised is so small that each network's eps shows in its output."""
    spec, variables = stable_diffusion

    def scaled(path, leaf):
        return leaf * np.float32(1 if "norm" in jax.tree_util.keystr(path) else 2**-4)

    faint = jax.tree_util.tree_map_with_path(scaled, variables)
    got = jax.jit(models.embed_tokens(spec.text_encoder))(faint["text_encoder"], EXPECTED["tokens"])
    assert_close(got, EXPECTED["faint_embeddings"])
    apply = jax.jit(models.denoise(spec))
    got = apply(faint["denoiser"], EXPECTED["x"], EXPECTED["t"], EXPECTED["embeddings"])
    assert_close(got, EXPECTED["faint_eps"])
    factor = np.float32(spec.autoencoder.scaling_factor)
    got = jax.jit(models.encode(spec.autoencoder))(faint["autoencoder"], EXPECTED["images"])
    assert_close(got / factor, EXPECTED["faint_mean"])
    got = jax.jit(models.decode(spec.autoencoder))(faint["autoencoder"], EXPECTED["latents"] * factor)
    assert_close(got, EXPECTED["faint_decoded"])


def test_a_sample_of_the_latent(stable_diffusion):
    """mean + std * noise, of a posterior whose log variance is clipped."""
    spec, variables = stable_diffusion
    bound = models.build(spec.autoencoder).bind(variables["autoencoder"])
    mean, log_variance = np.split(np.asarray(bound.quant_conv(bound.encoder(EXPECTED["images"]))), 2, axis=-1)
    noise = np.random.default_rng(0).standard_normal(EXPECTED["latents"].shape).astype(np.float32)
    got = models.encode(spec.autoencoder)(variables["autoencoder"], EXPECTED["images"], noise)
    std = np.exp(np.clip(log_variance, -30, 20) / 2)
    assert_close(got, (mean + std * noise) * np.float32(spec.autoencoder.scaling_factor))
    assert not np.allclose(got, EXPECTED["latents"], atol=1e-3)


def test_shift_and_scale(stable_diffusion):
    """(z - shift) * scale on the way in, and its inverse on the way out."""
    _, variables = stable_diffusion
    spec = AutoencoderSpec(
        level_channels=(8, 16), num_res_blocks=1, norm_groups=4, scaling_factor=2.0, shift_factor=0.5
    )
    got = models.encode(spec)(variables["autoencoder"], EXPECTED["images"])
    assert_close(got, (EXPECTED["latents"] / np.float32(0.18215) - np.float32(0.5)) * np.float32(2))
    assert_close(models.decode(spec)(variables["autoencoder"], got), EXPECTED["decoded"])


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_dit(layout, monkeypatch):
    """Both dialects of one network: they differ in the frequencies of t, and so in eps."""
    vae = GOLDEN / "stable_diffusion" / "vae"
    source = GOLDEN / ("dit" if layout == "diffusers" else "dit_original.pt")
    monkeypatch.setitem(dit._HEADS_BY_WIDTH, 24, 3)
    pipeline = open_checkpoint(source, ConversionOptions(autoencoder=vae))
    variables = pipeline.denoiser.variables()
    apply = jax.jit(models.denoise(pipeline.spec))
    got = apply(variables, EXPECTED["dit_x"], EXPECTED["dit_t"], EXPECTED["dit_labels"])
    assert pipeline.spec.denoiser.layout == layout
    assert_close(got, EXPECTED["dit_eps" if layout == "diffusers" else "dit_original_eps"])
    assert np.abs(EXPECTED["dit_eps"] - EXPECTED["dit_original_eps"]).max() > 0.01


def test_v_prediction(stable_diffusion, monkeypatch):
    """ε = √ᾱ v + σ x; the golden eps stands for v."""

    class Known:
        def apply(self, variables, x, t, condition):
            return jnp.asarray(EXPECTED["eps"])

    monkeypatch.setitem(models.NETWORKS, ConditionalUnetSpec, lambda spec: Known())
    spec = ModelSpec.from_json({**stable_diffusion[0].to_json(), "prediction": "v_prediction"})
    t = EXPECTED["t"]
    got = models.denoise.__wrapped__(spec)({}, jnp.asarray(EXPECTED["x"]), t, EXPECTED["embeddings"])
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    abar = np.cumprod(1 - betas)[t].astype(np.float32)[:, None, None, None]
    assert_close(got, np.sqrt(abar) * EXPECTED["eps"] + np.sqrt(1 - abar) * EXPECTED["x"])


@pytest.mark.parametrize(("queries", "keys"), [(7, 5), (12, 12), (1, 40)])
def test_attention_in_parts_is_attention(queries, keys, monkeypatch):
    """Also where the last part is not full, and in its derivative."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, n, 3, 4)), jnp.float32) for n in (queries, keys, keys))
    monkeypatch.setattr(layers, "MAX_LOGITS", 2 * 3 * keys * 2)

    def value_and_slope(attend):
        value_of = lambda q: attend(q, key, value)  # noqa: E731
        return jax.jit(lambda q: (value_of(q), jax.grad(lambda q: (value_of(q) ** 2).sum())(q)))(query)

    (expected, slope), (got, got_slope) = map(value_and_slope, (layers.attend, layers.attend_bounded))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got_slope, slope, rtol=1e-5, atol=1e-6)


def test_attention_memory_is_bounded():
    """4,096 positions, 8 heads, 4 images: 2 GiB of logits at once; in parts, a fraction."""
    shape = jax.ShapeDtypeStruct((4, 4096, 8, 40), jnp.float32)
    compiled = jax.jit(layers.attend_bounded).lower(shape, shape, shape).compile()
    whole = 4 * 4 * 8 * 4096**2
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 4


@pytest.mark.parametrize(
    ("spec", "fields", "message"),
    [
        (ConditionalUnetSpec, {"level_channels": (320, 630)}, "divisible by norm_groups=32"),
        (ConditionalUnetSpec, {"level_channels": 320}, "level_channels must be a list"),
        (ConditionalUnetSpec, {"level_heads": (8, 8)}, "level_heads must have 4 entries, one for each level"),
        (ConditionalUnetSpec, {"level_heads": (7, 8, 8, 8)}, "320 and 7"),
        (ConditionalUnetSpec, {"attention_levels": (4,)}, r"attention_levels must be an integer in \[0, 3\]"),
        (ConditionalUnetSpec, {"channels": True}, "channels must be an integer"),
        (ConditionalUnetSpec, {"linear_projection": 1}, "linear_projection must be true or false"),
        (ConditionalUnetSpec, {"norm_eps": float("nan")}, "norm_eps must be a number"),
        (ConditionalUnetSpec, {"num_res_blocks": 8, "transformer_layers": 16}, "number of transformer layers"),
        (ConditionalUnetSpec, {"num_res_blocks": 16}, "number of residual blocks"),
        (DitSpec, {"layout": "new"}, "unknown layout 'new'"),
        (DitSpec, {"latent_size": 33}, "latent_size must be divisible by patch_size=2, got 33"),
        (DitSpec, {"num_heads": 5}, "num_heads=5"),
        (DitSpec, {"latent_size": 4096, "width": 8192}, "the table of positions is too large"),
        (AutoencoderSpec, {"scaling_factor": 0}, "scaling_factor"),
        (AutoencoderSpec, {"level_channels": (128,) * 11}, "at most 10 integers"),
        (ClipTextSpec, {"activation": "relu"}, "unknown activation 'relu'"),
        (ClipTextSpec, {"vocabulary": 10**9}, "vocabulary"),
    ],
)
def test_bad_specs(spec, fields, message):
    with pytest.raises(ValueError, match=message) as error:
        spec(**fields)
    assert "\n" not in str(error.value)


def model_spec(**changes):
    fields = {
        **{"denoiser": UNET_1, "autoencoder": AutoencoderSpec(), "text_encoder": ClipTextSpec()},
        **{"image_shape": (512, 512, 3), "schedule": ScheduleSpec()},
    }
    return ModelSpec(**{**fields, **changes})


def test_a_model_spec_goes_through_json():
    dit = model_spec(denoiser=DitSpec(), text_encoder=None, image_shape=(256, 256, 3))
    for spec in (model_spec(), dit, model_spec(denoiser=UNET_2, text_encoder=CLIP_H, prediction="v_prediction")):
        assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert (model_spec().shape, dit.shape) == ((64, 64, 4), (32, 32, 4))
    assert (model_spec().num_classes, dit.num_classes) == (None, 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_shape": (500, 512, 3)}, "divisible by 64, got 500"),
        ({"image_shape": (512, 512, 1)}, "image_channels=3, got 1"),
        ({"denoiser": DitSpec()}, "text_encoder must be None|image size must be 256"),
        ({"text_encoder": None}, "text_encoder must be given"),
        ({"text_encoder": CLIP_H}, "text_encoder must have width 768"),
        ({"autoencoder": AutoencoderSpec(latent_channels=8)}, "take the autoencoder's 8 channels"),
        ({"prediction": "flow"}, "unknown prediction"),
    ],
)
def test_parts_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        model_spec(**changes)


def test_bad_json():
    fields = model_spec().to_json()
    for changed, message in [
        ({**fields, "kind": "pixel"}, "bad fields in spec: unknown 'kind'"),
        ({**fields, "more": 1}, "bad fields in spec: unknown 'more'"),
        ({**fields, "denoiser": {**fields["denoiser"], "kind": "vit"}}, "unknown spec.denoiser kind 'vit'"),
        (
            {**fields, "autoencoder": {"kind": "autoencoder"}},
            "bad fields in spec.autoencoder: missing 'image_channels'",
        ),
        ([], "spec must be an object"),
    ]:
        with pytest.raises(ValueError, match=message):
            ModelSpec.from_json(changed)
