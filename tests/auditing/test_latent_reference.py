"""A latent model and its reference: one makes the latents of both, and each reads captions by its own text encoder."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from checkpoints_convert.convert import open_checkpoint
from dime_jax import cli, data, models, scoring
from dime_jax.attacks import get_attack
from dime_jax.auditing import AuditConfig
from dime_jax.auditing.models import denoisers, open_models
from dime_jax.loading import conversion
from dime_jax.loading.conversion import UseOptions
from dime_jax.models import low_rank
from dime_jax.models.clip_tokenizer import open_tokenizer
from dime_jax.protocol import beside
from dime_jax.protocol.beside import Guarded
from dime_jax.scoring.planning import Job

CAPTIONS = ["the digit four", "the digit nine", ""]


@pytest.fixture(scope="module")
def heldout(latent_lora):
    return data.open_source(f"folder:{latent_lora / 'lora_heldout'}")


def other_encoder(pipeline, to, factor):
    """The pipeline with an autoencoder whose latents are so many times as large: its last layer is linear."""
    shutil.copytree(pipeline, to)
    file = to / "vae" / "diffusion_pytorch_model.safetensors"
    state = {name: tensor.astype(np.float32) for name, tensor in safetensors.numpy.load_file(file).items()}
    for name in ("quant_conv.weight", "quant_conv.bias"):
        state[name] *= np.float32(factor)
    safetensors.numpy.save_file(state, file)
    return to


def test_a_reference_with_another_encoder_is_refused_with_the_figure(latent_lora, tmp_path, capsys):
    other = other_encoder(latent_lora / "pipeline", tmp_path / "other", 1.25)
    words = [
        "audit",
        "--model",
        latent_lora / "pipeline",
        "--reference",
        other,
        "--output",
        tmp_path / "out",
        "--quiet",
    ]
    words += ["--heldout", latent_lora / "lora_heldout", "--candidates", latent_lora / "lora_candidates"]
    assert cli.main([str(word) for word in words]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line == ("dime-jax: the reference must encode images as the model does, to 1%; its latents differ by 25.0%")
    assert not list(tmp_path.glob("out/**/scores.parquet")), "nothing was asked"


def test_a_reference_whose_encoder_differs_by_rounding_goes_on(latent_lora, tmp_path, heldout):
    model, nearly = (
        denoisers(open_models(AuditConfig(tmp_path, model=folder, options=scoring.ScoringOptions(silent=True))))[0]
        for folder in (
            latent_lora / "pipeline",
            other_encoder(latent_lora / "pipeline", tmp_path / "other", 1.005),
        )
    )
    assert model.fingerprint != nearly.fingerprint
    beside.check(model, nearly, heldout, np.arange(20))


@pytest.fixture(scope="module")
def text_lora(latent_lora, tmp_path_factory):
    """A LoRA of the text encoder alone, and what the encoder's variables are with it and without."""
    checkpoint = open_checkpoint(latent_lora / "pipeline")
    without = {"text_encoder": checkpoint.variables()["text_encoder"]}
    rng = np.random.default_rng(0)
    adapter = {
        path: factors._replace(up=0.3 * rng.standard_normal(factors.up.shape, np.float32))
        for path, factors in low_rank.init(without, 2, rng).items()
    }
    file = tmp_path_factory.mktemp("lora") / "text.safetensors"
    conversion.save_adapter(file, checkpoint.spec, adapter, "")
    return file, checkpoint.spec.text_encoder, low_rank.merge(without, adapter), without


def test_each_model_embeds_captions_with_its_own_text_encoder(latent_lora, text_lora, tmp_path, heldout):
    file, spec, merged, without = text_lora
    options = scoring.ScoringOptions(silent=True, micro_batch=4)
    use, folder = UseOptions(lora=[file]), latent_lora / "pipeline"
    model, reference = denoisers(open_models(AuditConfig(tmp_path, model=folder, use=use, options=options)))
    tokens = open_tokenizer(folder / "tokenizer", spec.vocabulary, spec.max_tokens).encode(CAPTIONS)
    expected = [models.embed_tokens(spec)(own["text_encoder"], jnp.asarray(tokens)) for own in (merged, without)]
    assert float(jnp.abs(expected[0] - expected[1]).max()) > 0.1
    for denoiser, embedded in zip((model, reference), expected):
        np.testing.assert_allclose(denoiser.embed(CAPTIONS), embedded, rtol=1e-4, atol=1e-4)

    # And so they are asked: the U-Net is the same, and each table is what its model answers when it is asked alone.
    job, images = Job(get_attack("loss"), {"t": 150}), np.arange(4)
    guarded = Guarded(model, reference=Guarded(reference))
    table = beside.score(guarded, tmp_path / "run", "table", heldout, [job], indices=images, seed=0, options=options)
    alone = [
        scoring.score(one, heldout, [job], tmp_path / str(number), indices=images, seed=0, options=options).terms(job)
        for number, one in enumerate((model, reference))
    ]
    np.testing.assert_array_equal(table.terms(job), alone[0])
    np.testing.assert_array_equal(table.reference.terms(job), alone[1])
    assert np.abs(np.log(alone[0] / alone[1])).min() > 1e-4
