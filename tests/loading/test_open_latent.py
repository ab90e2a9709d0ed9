"""Latent models opened as users name them, against their parts called by hand."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import dime_jax as dj
from checkpoints_convert.convert import open_checkpoint
from checkpoints_convert.options import ConversionOptions
from dime_jax import cli, models
from dime_jax.core import draws
from dime_jax.core.denoiser import TEXT_CONDITIONS
from dime_jax.loading.latent_denoiser import LatentDenoiser, describe_memory

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "latent"
FOLDER, DIT, VAE = GOLDEN / "stable_diffusion", GOLDEN / "dit", GOLDEN / "stable_diffusion" / "vae"
CAPTIONS = ["a cat", "a dog", "a cat", ""]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def opened(cache):
    return dj.open_model(FOLDER, cache=cache)


def pixels(count=4, channels=3, size=16):
    return np.random.default_rng(0).uniform(-1, 1, (count, size, size, channels)).astype(np.float32)


def lora_file(path, seed=1):
    """A kohya LoRA of one layer of the U-Net."""
    name = next(k for k in open_checkpoint(FOLDER).denoiser.read() if k.endswith("attn2.to_q.weight"))
    weight = open_checkpoint(FOLDER).denoiser.read()[name]
    rng, module = np.random.default_rng(seed), "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
    tensors = {
        f"{module}.lora_down.weight": rng.normal(size=(2, weight.shape[1])).astype(np.float32),
        f"{module}.lora_up.weight": rng.normal(size=(weight.shape[0], 2)).astype(np.float32),
        f"{module}.alpha": np.float32(2)[None].reshape(()),
    }
    safetensors.numpy.save_file(tensors, path)
    return path


def test_an_opened_pipeline_computes_what_torch_does(opened):
    """Against what diffusers and transformers computed with the same folder, see parity/make_latent_golden.py."""
    model, golden = opened.denoiser, dict(np.load(GOLDEN / "expected.npz"))
    assert (model.image_shape, model.shape, model.conditions) == ((16, 16, 3), (8, 8, 4), TEXT_CONDITIONS)
    found = {
        "eps": model.eps(golden["x"], golden["t"], golden["embeddings"]),
        "latents": model.encode(golden["images"]),
        "decoded": model.decode(golden["latents"]),
    }
    for name, array in found.items():
        np.testing.assert_allclose(array, golden[name], atol=2e-5 * golden[name].std(), rtol=0, err_msg=name)
    tokens, spec = model._tokenizer.encode(CAPTIONS), open_checkpoint(FOLDER).spec
    embed = jax.jit(models.embed_tokens(spec.text_encoder))
    with jax.default_matmul_precision("highest"):
        condition = embed(model.params["text_encoder"], tokens)  # which is compared with torch in models/test_latent.py
    np.testing.assert_allclose(model.embed(CAPTIONS), condition, rtol=1e-5, atol=1e-6)
    assert np.abs(condition[0] - condition[1]).max() > 0.1  # a cat is not a dog


def test_conditions_are_the_captions_and_each_text_is_embedded_once(cache, monkeypatch):
    model = dj.open_model(FOLDER, cache=cache).denoiser
    embedded = []
    plain = model._tokenizer.encode

    class Counting:
        def encode(self, captions):
            embedded.extend(captions)
            return plain(captions)

    monkeypatch.setattr(model, "_tokenizer", Counting())
    offered = model.conditions_for(None, CAPTIONS)
    assert tuple(offered) == TEXT_CONDITIONS
    assert not embedded  # nothing that nobody asks for
    own = offered["own"]
    np.testing.assert_array_equal(own[0], own[2])
    np.testing.assert_array_equal(offered["empty"], np.repeat(own[3:], 4, axis=0))
    np.testing.assert_array_equal(offered["part_2"][0], model.embed([" c"])[0])  # "a", " c" and "at"
    model.conditions_for(None, CAPTIONS[::-1])["own"]
    words = [text for text in embedded if text]
    assert sorted(words) == sorted(set(words))
    with pytest.raises(ValueError, match="takes captions: give one for each image, or --captions none"):
        model.conditions_for(None, None)


def test_samples_are_keyed_by_the_image(cache, opened):
    model = dj.open_model(FOLDER, cache=cache, latent="sample").denoiser
    spec, variables = open_checkpoint(FOLDER).spec, open_checkpoint(FOLDER).variables()
    ids = ["a", "b", "c", "d"]
    noise = draws.Draws(jax.random.key(3), draws.id_numbers(ids)).latent(jnp.zeros((4, 8, 8, 4)))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(models.encode(spec.autoencoder))(variables["autoencoder"], pixels(), noise)
    np.testing.assert_allclose(model.encode(pixels(), ids=ids, seed=3), expected, rtol=1e-4, atol=1e-5)
    turned = model.encode(pixels()[::-1], ids=ids[::-1], seed=3)[::-1]
    np.testing.assert_allclose(turned, expected, rtol=1e-4, atol=1e-5)
    assert model.fingerprint != opened.denoiser.fingerprint


def test_the_coordinates_that_the_decoder_shows_are_kept(cache, opened):
    model = dj.open_model(FOLDER, cache=cache, latent_weighting="pullback").denoiser
    x = opened.denoiser.encode(pixels(2))
    own, step = draws.Draws(jax.random.key(3), draws.id_numbers(["a", "b"])), 1e-2
    signs = np.stack([own.pullback(index, model.image_shape)[0] for index in range(16)]).reshape(16, -1)
    moves = step * np.eye(x[0].size, dtype=np.float32).reshape(-1, *model.shape)
    moved = model.decode(jnp.concatenate([x[:1] + moves, x[:1] - moves])).reshape(2, x[0].size, -1)
    expected = ((signs @ np.asarray(moved[0] - moved[1]).T) ** 2).mean(axis=0).reshape(model.shape)
    mask = model.mask(x, ids=["a", "b"], seed=3)
    assert mask.shape == x.shape
    assert mask.sum(axis=(1, 2, 3)).tolist() == [x[0].size - int(0.4 * x[0].size)] * 2
    assert (mask[0] == (expected >= np.quantile(expected, 0.4))).mean() > 0.98  # some may be nearly equal
    np.testing.assert_array_equal(model.mask(x[::-1], ids=["b", "a"], seed=3)[::-1], mask)
    assert opened.denoiser.mask(x) is None
    assert model.fingerprint != opened.denoiser.fingerprint


@pytest.mark.slow
def test_held_weights_compute_in_float32(cache, opened):
    models = [dj.open_model(FOLDER, cache=cache, hold=hold).denoiser for hold in ("bfloat16", "float16")]
    for model, dtype in zip(models, (jnp.bfloat16, jnp.float16)):
        assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(dtype)}
    assert len({model.fingerprint for model in (*models, opened.denoiser)}) == 3
    model, golden = models[0], dict(np.load(GOLDEN / "expected.npz"))
    rounded = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(jnp.bfloat16).astype(np.float32), opened.denoiser.params
    )
    x, t, condition = golden["x"], golden["t"], golden["embeddings"]
    with jax.default_matmul_precision("highest"):  # the program of the model that holds float32, with other weights
        expected = opened.denoiser._call(rounded, jnp.asarray(x), jnp.asarray(t, jnp.int32), jnp.asarray(condition))
    got = model.eps(x, t, condition)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_lora_is_merged_and_fingerprinted(tmp_path, opened, cache):
    file = lora_file(tmp_path / "style.safetensors")
    options = {"lora": [file], "lora_scale": [0.5]}
    model = dj.open_model(FOLDER, cache=cache, **options)
    assert "LoRA: style.safetensors at scale 0.5" in model.facts
    assert model.denoiser.name == "stable_diffusion + style.safetensors"
    full = dj.open_model(FOLDER, cache=cache, lora=[file])
    assert len({one.denoiser.fingerprint for one in (model, full, opened)}) == 3
    before = jax.tree.map(np.array, model.denoiser.params)
    model.denoiser.release()
    jax.tree.map(np.testing.assert_array_equal, model.denoiser.params, before)
    shutil.copy(lora_file(tmp_path / "other.safetensors", seed=2), file)
    model.denoiser.release()
    with pytest.raises(ValueError, match="must hold the model that was opened"):
        _ = model.denoiser.params


def test_a_dit_takes_classes(cache):
    model = dj.open_model(DIT, cache=cache, autoencoder=VAE).denoiser
    assert isinstance(model, LatentDenoiser)
    assert (model.conditions, model.num_classes) == (
        ("own",),
        open_checkpoint(DIT, ConversionOptions(autoencoder=VAE)).spec.num_classes,
    )
    x = model.encode(pixels(2, size=model.image_shape[0]))
    assert model.eps(x, 3, np.array([0, 1])).shape == (2, *model.shape)
    with pytest.raises(ValueError, match="takes no text"):
        model.embed(["a cat"])


def test_the_memory_is_said_before_anything_is_read(tmp_path, monkeypatch, opened):
    said = []
    spec = open_checkpoint(FOLDER).spec
    monkeypatch.setattr("checkpoints_convert.checkpoint.Checkpoint.variables", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dj.open_model(FOLDER, cache=tmp_path, say=said.append)
    assert said == [describe_memory(spec)]
    values = sum(leaf.size for leaf in jax.tree.leaves(opened.denoiser.params))
    assert said[0].startswith(f"{values:,} weights take {4 * values / 1e6:.1f} MB of memory in float32;")
    assert f"take {2 * values / 1e6:.1f} MB of memory in bfloat16, and {4 * values / 1e6:.1f} MB more while" in (
        describe_memory(spec, "bfloat16")
    )


def test_a_model_directory_of_a_latent_model(tmp_path, capsys, opened):
    output = tmp_path / "model"
    assert cli.main(["convert", "--source", str(FOLDER), "--output", str(output)]) == 0
    assert "architecture: conditional_unet" in capsys.readouterr().out
    assert dj.load_denoiser(output).fingerprint == opened.denoiser.fingerprint
    sampled = dj.open_model(output, cache=tmp_path, latent="sample")
    assert sampled.origin == "a model directory"
    model = dj.open_model(output, cache=tmp_path, lora=[lora_file(tmp_path / "x.safetensors")]).denoiser
    assert (model.name, model.fingerprint == opened.denoiser.fingerprint) == ("model + x.safetensors", False)
    denoiser = dj.Denoiser.from_function(lambda x, t: x, dj.linear_schedule(), (8, 8, 1))
    with pytest.raises(ValueError, match=r"^--lora applies only to models in files; mine is a Python object"):
        dj.open_model(denoiser, lora=["x"])
    with pytest.raises(ValueError, match="latent must be one of mean, sample, got 'median'"):
        dj.open_model(output, cache=tmp_path, latent="median")
    with pytest.raises(ValueError, match="latent_weighting must be one of none, pullback, got 'push'"):
        dj.open_model(output, cache=tmp_path, latent_weighting="push")


def test_options_of_latent_models_are_refused_elsewhere(tmp_path):
    pixel_model = GOLDEN.parent / "ddpm_secmi.pt"
    with pytest.raises(ValueError, match="must be a dime_jax adapter"):
        dj.open_model(pixel_model, cache=tmp_path, lora=[lora_file(tmp_path / "x.safetensors")])
    with pytest.raises(ValueError, match="no file or folder nowhere"):
        dj.open_model(FOLDER, cache=tmp_path / "empty", lora=["nowhere"])
    assert not (tmp_path / "empty").exists()
    with pytest.raises(ValueError, match="--latent applies only to latent models; digits takes images"):
        dj.open_model("digits", cache=tmp_path, latent="sample")
    with pytest.raises(ValueError, match="give one --lora_scale for each --lora, got 1 for 2"):
        dj.open_model(FOLDER, lora=["a", "b"], lora_scale=[1.0])


def test_a_model_of_the_hub_keeps_its_commit(tmp_path, monkeypatch):
    from checkpoints_convert import hub
    from dime_jax._util.downloads import Fetched

    commit = "0123456789" * 4
    snapshot = shutil.copytree(FOLDER, tmp_path / commit)
    monkeypatch.setattr(hub, "fetch", lambda name: Fetched(pathlib.Path(snapshot), commit, ("unet", "vae")))
    model = dj.open_model("hf:owner/name@main", cache=tmp_path / "cache")
    assert (model.commit, model.denoiser.name) == (commit, "hf:owner/name")
    assert model.origin.startswith(f"converted from hf:owner/name at commit {commit}, cached in model-")


def test_a_single_file_of_the_hub(tmp_path, monkeypatch):
    from checkpoints_convert import hub
    from dime_jax._util.downloads import Fetched

    fetched = Fetched(GOLDEN.parent, "0123456789" * 4, ("ddpm_secmi.pt",))
    monkeypatch.setattr(hub, "fetch", lambda name: fetched)
    assert dj.open_model("hf:owner/name", cache=tmp_path).denoiser.image_shape == (16, 16, 3)
