"""Pipeline folders of latent models: each file layout gives the same variables; what cannot be honoured is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from checkpoints_convert import diffusers_names, dit, mapping, weights_file
from checkpoints_convert.convert import open_checkpoint
from checkpoints_convert.options import ConversionOptions
from dime_jax.loading import model_directory
from dime_jax.loading.conversion import convert
from dime_jax.models import AutoencoderSpec, ClipTextSpec, ConditionalUnetSpec, DitSpec
from dime_jax.models.spec import ScheduleSpec
from tests.checkpoints_convert.torch_writer import write_zip

GOLDEN = Path(__file__).parents[1] / "golden" / "latent"
VAE = GOLDEN / "stable_diffusion" / "vae"
WEIGHTS = {
    "unet": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}


def open_pipeline(source, options=ConversionOptions(), autoencoder=None):  # noqa: B008
    return open_checkpoint(source, dataclasses.replace(options, autoencoder=autoencoder))


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GOLDEN / "stable_diffusion", tmp_path / "pipeline"))


@pytest.fixture(scope="module")
def expected():
    return open_pipeline(GOLDEN / "stable_diffusion").variables()


def state_of(folder, part):
    return dict(safetensors.numpy.load_file(folder / part / WEIGHTS[part]))


def edit(file, **changes):
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def assert_equal(got, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 0, "atol": 0, **tolerance}), got, expected)


def refused(source, message, **options):
    with pytest.raises(ValueError, match=message) as error:
        open_pipeline(source, **options).variables()
    assert "\n" not in str(error.value)


def test_what_a_folder_says():
    pipeline = open_pipeline(GOLDEN / "stable_diffusion")
    spec = pipeline.spec
    assert (spec.image_shape, spec.shape, spec.prediction) == ((16, 16, 3), (8, 8, 4), "epsilon")
    assert spec.schedule == ScheduleSpec(kind="scaled_linear", beta_start=0.00085, beta_end=0.012)
    assert spec.denoiser.level_heads == (2, 2)
    assert (spec.autoencoder.scaling_factor, spec.autoencoder.shift_factor) == (0.18215, 0.0)
    assert [file.name for file in pipeline.tokenizer_files] == ["vocab.json", "merges.txt"]
    how = "(scheduler_config.json, with diffusers' defaults for rescale_betas_zero_snr)"
    assert f"noise schedule: scaled_linear from 0.00085 to 0.012, 1000 steps {how}" in pipeline.facts


def test_published_configs():
    """Stable Diffusion's own config files, as they are on the Hub."""
    from checkpoints_convert.diffusers_configs import (
        parse_autoencoder,
        parse_conditional_unet,
        parse_dit,
        parse_text_encoder,
    )

    unet = {
        **{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.6.0", "act_fn": "silu"},
        **{"attention_head_dim": 8, "block_out_channels": [320, 640, 1280, 1280], "center_input_sample": False},
        **{"cross_attention_dim": 768, "downsample_padding": 1, "flip_sin_to_cos": True, "freq_shift": 0},
        **{"down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"], "in_channels": 4, "layers_per_block": 2},
        **{"mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32, "out_channels": 4, "sample_size": 64},
        **{"up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3},
    }
    assert parse_conditional_unet(unet) == ConditionalUnetSpec()
    version_2 = {"attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024, "use_linear_projection": True}
    version_2 |= {"dual_cross_attention": False, "num_class_embeds": None, "upcast_attention": True}
    assert parse_conditional_unet({**unet, **version_2}) == ConditionalUnetSpec(
        level_heads=(5, 10, 20, 20), context_channels=1024, linear_projection=True
    )
    vae = {
        **{"_class_name": "AutoencoderKL", "act_fn": "silu", "block_out_channels": [128, 256, 512, 512]},
        **{"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4},
        **{"in_channels": 3, "latent_channels": 4, "layers_per_block": 2, "norm_num_groups": 32, "out_channels": 3},
    }
    assert parse_autoencoder(vae) == AutoencoderSpec()
    text = {
        **{
            "architectures": ["CLIPTextModel"],
            "model_type": "clip_text_model",
            "hidden_size": 768,
            "vocab_size": 49408,
        },
        **{"intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "hidden_act": "quick_gelu"},
        **{"projection_dim": 768, "torch_dtype": "float32", "layer_norm_eps": 1e-05, "max_position_embeddings": 77},
    }
    assert parse_text_encoder(text) == ClipTextSpec()
    dit = {
        **{"_class_name": "Transformer2DModel", "activation_fn": "gelu-approximate", "attention_bias": True},
        **{"attention_head_dim": 72, "cross_attention_dim": None, "dropout": 0.0, "in_channels": 4, "num_layers": 28},
        **{"norm_elementwise_affine": False, "norm_num_groups": 32, "norm_type": "ada_norm_zero", "out_channels": 8},
        **{"num_attention_heads": 16, "num_embeds_ada_norm": 1000, "num_vector_embeds": None, "patch_size": 2},
        **{"only_cross_attention": False, "sample_size": 32, "upcast_attention": False, "use_linear_projection": False},
    }
    assert parse_dit(dit) == DitSpec(layout="diffusers", mlp_norm_eps=1e-5)


@pytest.mark.parametrize("part", WEIGHTS)
def test_name_tables_go_both_ways(part):
    """Every tensor is used once; the way back gives the file again."""
    pipeline = open_pipeline(GOLDEN / "stable_diffusion")
    one = {part.name: part for part in pipeline.parts.values()}[part]
    state = one.read()
    table = one.name_table(state)
    assert sorted(entry.tensor for entry in table) == sorted(state)
    back = mapping.to_state_dict(one.variables(), table)
    assert_equal(back, {name: np.asarray(tensor) for name, tensor in state.items()})


@pytest.fixture
def small_dit(monkeypatch):
    """The number of heads of the golden file's network, which is none of the published ones."""
    monkeypatch.setitem(dit._HEADS_BY_WIDTH, 24, 3)


@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.usefixtures("small_dit")
def test_dit_name_tables_go_both_ways(layout):
    source = GOLDEN / ("dit" if layout == "diffusers" else "dit_original.pt")
    part = open_pipeline(source, autoencoder=VAE).denoiser
    state = part.read()
    back = mapping.to_state_dict(part.variables(), part.name_table(state))
    assert_equal(back, {name: np.asarray(tensor) for name, tensor in state.items()})


@pytest.mark.parametrize("spec", [ConditionalUnetSpec(), ConditionalUnetSpec(linear_projection=True), DitSpec()])
def test_names_are_unique_at_full_size(spec):
    naming = dit.naming(spec) if isinstance(spec, DitSpec) else diffusers_names.naming_of(spec, {})
    names = [entry.tensor for entry in mapping.name_table(spec, naming)]
    assert len(set(names)) == len(names)


def test_pytorch_files(folder, expected):
    for part, name in WEIGHTS.items():
        state = state_of(folder, part)
        (folder / part / name).unlink()
        write_zip(folder / part / ("pytorch_model.bin" if part == "text_encoder" else Path(name).stem + ".bin"), state)
    assert_equal(open_pipeline(folder).variables(), expected)


def test_half_precision(folder, expected):
    """An fp16 variant alone is taken; beside full precision it is not."""
    for part, name in WEIGHTS.items():
        state = {key: tensor.astype(np.float16) for key, tensor in state_of(folder, part).items()}
        safetensors.numpy.save_file(state, folder / part / name.replace(".safetensors", ".fp16.safetensors"))
    assert_equal(open_pipeline(folder).variables(), expected)
    for part, name in WEIGHTS.items():
        (folder / part / name).unlink()
    pipeline = open_pipeline(folder)
    assert "unet: unet/diffusion_pytorch_model.fp16.safetensors" in pipeline.facts
    assert_equal(pipeline.variables(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", ["", "fp16."])
def test_shards(folder, expected, variant):
    shard(folder / "unet", state_of(folder, "unet"), variant)
    assert_equal(open_pipeline(folder).variables(), expected)
    assert open_pipeline(folder).denoiser.file.name.startswith("diffusion_pytorch_model.safetensors.index.")


def shard(folder, state, variant=""):
    """The weights in two files with an index, in place of one."""
    names = sorted(state)
    (folder / WEIGHTS["unet"]).unlink()
    index = {}
    for number, half in enumerate((names[::2], names[1::2])):
        file = f"diffusion_pytorch_model.{variant}0000{number + 1}-of-00002.safetensors"
        safetensors.numpy.save_file({name: state[name] for name in half}, folder / file)
        index |= dict.fromkeys(half, file)
    path = folder / f"diffusion_pytorch_model.safetensors.index.{variant}json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "x.bin",
        ".x.safetensors",
        3,
        None,
    ],
)
def test_hostile_shard_names(folder, name):
    index = shard(folder / "unet", state_of(folder, "unet"))
    contents = json.loads(index.read_text())
    contents["weight_map"]["conv_in.weight"] = name
    index.write_text(json.dumps(contents))
    refused(folder, "shards must be plain names of .safetensors files")


def test_index_and_shards_disagree(folder):
    index = shard(folder / "unet", state_of(folder, "unet"))
    contents = json.loads(index.read_text())
    first = contents["weight_map"]["conv_in.weight"]
    for changes, message in [
        ({"conv_in.weight": "absent.safetensors"}, "names the shard absent.safetensors, which is not there"),
        ({"more.weight": first}, "which differ in more.weight"),
    ]:
        index.write_text(json.dumps({"weight_map": contents["weight_map"] | changes}))
        refused(folder, message)
    index.write_text("{}")
    refused(folder, "weight_map must be a JSON object")


def test_older_names(folder, expected):
    """The VAE's attention before diffusers 0.14; the text encoder's prefix and positions before transformers 5."""
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def old(name):
        for new, older in names.items():
            name = name.replace(f".{new}.", f".{older}.")
        return name

    state = {old(name): tensor for name, tensor in state_of(folder, "vae").items()}
    assert any(name.endswith("mid_block.attentions.0.proj_attn.weight") for name in state)
    safetensors.numpy.save_file(state, folder / "vae" / WEIGHTS["vae"])
    state = {
        f"text_model.{name.removeprefix('text_model.')}": t for name, t in state_of(folder, "text_encoder").items()
    }
    state["text_model.embeddings.position_ids"] = np.arange(13)[None]
    safetensors.numpy.save_file(state, folder / "text_encoder" / WEIGHTS["text_encoder"])
    assert_equal(open_pipeline(folder).variables(), expected)


def test_ema_weights(folder):
    """unet_ema/ is preferred, and --weights=raw takes the other."""
    shutil.copytree(folder / "unet", folder / "unet_ema")
    assert open_pipeline(folder).denoiser.file.parent.name == "unet_ema"
    assert open_pipeline(folder, ConversionOptions(weights="raw")).denoiser.file.parent.name == "unet"
    shutil.rmtree(folder / "unet_ema")
    refused(folder, "omit --weights=ema", options=ConversionOptions(weights="ema"))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("unet", {"addition_embed_type": "text_time"}, "not supported, because .* SDXL"),
        ("unet", {"num_class_embeds": 7}, "not supported, because .* class"),
        ("unet", {"class_embed_type": "projection"}, "not supported, because .* class"),
        ("unet", {"encoder_hid_dim_type": "ip_image_proj"}, "not supported, because .* IP-adapter"),
        ("unet", {"time_cond_proj_dim": 256}, "not supported, because .* consistency"),
        ("unet", {"in_channels": 9}, "not supported, because it is an inpainting network"),
        ("unet", {"out_channels": 8}, "cannot honour out_channels=8"),
        ("unet", {"dual_cross_attention": True}, "cannot honour dual_cross_attention"),
        ("unet", {"resnet_time_scale_shift": "scale_shift"}, "cannot honour resnet_time_scale_shift"),
        ("unet", {"mid_block_type": None}, "cannot honour mid_block_type"),
        ("unet", {"down_block_types": ["SimpleCrossAttnDownBlock2D", "DownBlock2D"]}, "block type 'SimpleCross"),
        ("unet", {"down_block_types": ["DownBlock2D"]}, "one for each level"),
        ("unet", {"layers_per_block": [1, 2]}, "num_res_blocks must be an integer"),
        ("unet", {"new_key": 1}, "cannot honour unknown keys: new_key='1'"),
        ("unet", {"quantization_config": {}}, "unknown keys: quantization_config"),
        ("unet", {"auto_map": {"x": "y"}}, "names code to run"),
        ("unet", {"_class_name": "UNetMotionModel"}, "cannot honour _class_name='UNetMotionModel'"),
        ("unet", {"attention_head_dim": 3}, "divisible by level_heads"),
        ("unet", {"block_out_channels": [1024, 2048]}, "must hold the [0-9,]+ values of the network that it describes"),
        ("unet", {"sample_size": None}, "add --image_size"),
        ("unet", {"cross_attention_dim": 32}, "text_encoder must have width 32"),
        ("vae", {"_class_name": "VQModel"}, "must be AutoencoderKL"),
        ("vae", {"latents_mean": [0, 0, 0, 0]}, "cannot honour latents_mean"),
        ("vae", {"down_block_types": ["AttnDownEncoderBlock2D"] * 2}, "block type 'AttnDown"),
        ("vae", {"scaling_factor": "x"}, "scaling_factor must be a number"),
        ("text_encoder", {"architectures": ["T5EncoderModel"]}, "must be CLIPTextModel"),
        ("text_encoder", {"hidden_act": "relu"}, "unknown activation"),
        ("text_encoder", {"use_attention_mask": True}, "cannot honour use_attention_mask"),
        ("text_encoder", {"quantization_config": {"bits": 4}}, "cannot honour quantization_config"),
    ],
)
def test_configs_that_cannot_be_honoured(folder, part, changes, message):
    edit(folder / part / "config.json", **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    "file", ["unet/config.json", "vae/config.json", "text_encoder/config.json", "scheduler/scheduler_config.json"]
)
def test_nonsense_in_configs(folder, file):
    """Whatever a config holds, it is opened or refused in one line."""
    config = json.loads((folder / file).read_text())
    for key in config:
        for value in (None, True, -1, 0, 10**30, 0.5, float("inf"), "x", [], [[]], [None], {}, {"a": []}, [1] * 999):
            (folder / file).write_text(json.dumps({**config, key: value}))
            assert "\n" not in problem(folder), (key, value)


def problem(folder):
    try:
        open_pipeline(folder)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "StableDiffusionXLPipeline"}, "not supported, because it is an SDXL model"),
        ({"_class_name": "StableDiffusion3Pipeline"}, "not supported, because it is a Stable Diffusion 3"),
        ({"_class_name": "FluxPipeline"}, "not supported, because it is a Flux model"),
        ({"_class_name": "StableDiffusionInpaintPipeline"}, "not supported, because it is an inpainting model"),
        ({"image_encoder": ["transformers", "CLIPVisionModel"]}, "not supported, because it has an image encoder"),
        ({"text_encoder_2": ["transformers", "CLIPTextModel"]}, "not supported, because it has a second text encoder"),
        ({"_class_name": "MyPipeline"}, "cannot honour _class_name='MyPipeline'"),
    ],
)
def test_other_pipelines(folder, changes, message):
    edit(folder / "model_index.json", **changes)
    refused(folder, message)


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "UniPCMultistepScheduler", "SomebodysScheduler"])
def test_any_sampler(folder, name):
    """Its own settings change nothing; betas and prediction count."""
    file = folder / "scheduler" / "scheduler_config.json"
    edit(file, _class_name=name, use_karras_sigmas=True, prediction_type="v_prediction")
    spec = open_pipeline(folder).spec
    assert (spec.schedule.beta_end, spec.prediction) == (0.012, "v_prediction")
    edit(file, beta_end="absent")
    if name == "SomebodysScheduler":
        refused(folder, "the config of the sampler 'SomebodysScheduler' has no beta_end")
    else:
        assert open_pipeline(folder).spec.schedule.beta_end == 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, "flow matching"),
        ({"use_flow_sigmas": True}, "flow matching"),
        ({"prediction_type": "flow_prediction"}, "cannot honour prediction_type"),
        ({"beta_schedule": "sigmoid"}, "cannot honour beta_schedule"),
    ],
)
def test_samplers_without_a_noise_schedule(folder, changes, message):
    edit(folder / "scheduler" / "scheduler_config.json", **changes)
    refused(folder, message)


def test_damaged_weights(folder):
    state = state_of(folder, "unet")
    file = folder / "unet" / WEIGHTS["unet"]
    for name, tensor, message in [
        ("conv_in.weight", None, "missing conv_in.weight"),
        ("conv_in.extra", np.zeros(3, np.float32), "unexpected conv_in.extra"),
        ("conv_in.bias", np.full(8, np.nan, np.float32), "conv_in.bias: 8 of 8 values NaN"),
        ("conv_in.bias", np.zeros(7, np.float32), r"conv_in.bias must have shape \[8\], got \[7\]"),
    ]:
        changed = {key: value for key, value in {**state, name: tensor}.items() if value is not None}
        safetensors.numpy.save_file(changed, file)
        refused(folder, message)
    file.unlink()
    refused(folder, "found no weights")


def test_no_tokenizer(folder):
    (folder / "tokenizer" / "merges.txt").unlink()
    refused(folder, "must hold tokenizer.json, or vocab.json and merges.txt")


def test_original_dit_files(monkeypatch):
    """The architecture is read off the tensors; heads are those of the published widths."""
    state = weights_file.read(GOLDEN / "dit_original.pt")
    with pytest.raises(ValueError, match="cannot tell the number of heads of a DiT of width 24"):
        dit.infer_spec(state)
    monkeypatch.setitem(dit._HEADS_BY_WIDTH, 24, 3)
    assert dit.infer_spec(state) == DitSpec(
        latent_size=4, width=24, num_layers=1, num_heads=3, mlp_width=96, num_classes=5
    )
    refused(GOLDEN / "dit_original.pt", "holds no autoencoder")
    refused(
        GOLDEN.parent / "ddpm_ddim.pt",
        "--autoencoder applies only to latent models; .* is not one",
        autoencoder=VAE,
        options=ConversionOptions(image_size=16),
    )
    with pytest.raises(ValueError, match="not a DiT of its authors' code"):
        dit.infer_spec({name: tensor for name, tensor in state.items() if name != "pos_embed"})


@pytest.mark.usefixtures("small_dit")
def test_a_training_checkpoint_of_dit(tmp_path):
    """The EMA is taken; another table of positions in it would be too."""
    state = dict(weights_file.read(GOLDEN / "dit_original.pt"))
    other = {name: tensor + 1 for name, tensor in state.items()}
    write_zip(tmp_path / "x.pt", {"model": other, "ema": state})
    part = open_pipeline(tmp_path / "x.pt", autoencoder=VAE).denoiser
    assert_equal({name: np.asarray(tensor) for name, tensor in part.read().items()}, state)


def test_model_directories(tmp_path, expected):
    """A pipeline written to a model directory and read again is the same, and damage is noticed."""
    pipeline = open_pipeline(GOLDEN / "stable_diffusion")
    directory = convert(GOLDEN / "stable_diffusion", tmp_path / "model")
    model = model_directory.read_model(directory)
    assert model.spec == pipeline.spec
    assert_equal(jax.tree.map(np.asarray, model.variables), expected)
    assert [file.read_bytes() for file in sorted(model.tokenizer_files)] == [
        file.read_bytes() for file in sorted(pipeline.tokenizer_files)
    ]
    assert model.metadata["facts"] == list(pipeline.facts)
    with pytest.raises(ValueError, match="exists already"):
        convert(GOLDEN / "stable_diffusion", directory)
    (directory / "tokenizer" / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer: files are missing, changed or added"):
        model_directory.read_model(directory)
