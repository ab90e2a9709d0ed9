"""Conversions of the golden checkpoints against the outputs of the original PyTorch code, and what is refused."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from checkpoints_convert import guided, torch_file, weights_file
from checkpoints_convert.convert import CONVERTER_VERSION, open_checkpoint
from checkpoints_convert.options import ConversionOptions as Options
from dime_jax.loading import model_directory, opening
from dime_jax.loading.conversion import convert
from dime_jax.loading.model_directory import describe
from tests.checkpoints_convert.torch_writer import write_zip

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 2e-5  # of the output's standard deviation
SIZE = Options(image_size=16)  # which ddim's files do not hold


def flags(name):
    return Options(model_flags=GOLDEN / f"{name}.json")


@pytest.mark.parametrize(
    ("source", "options", "expected", "output", "dialect", "weights"),
    [
        ("ddpm_secmi.pt", Options(), "ddpm_secmi", "eps_ema", "secmi", "ema"),
        ("ddpm_secmi.pt", Options(weights="ema"), "ddpm_secmi", "eps_ema", "secmi", "ema"),
        ("ddpm_secmi.pt", Options(weights="raw"), "ddpm_secmi", "eps_net", "secmi", "raw"),
        ("ddpm_secmi_bare_legacy.pt", Options(image_size=16), "ddpm_secmi", "eps_ema", "secmi", "only"),
        ("ddpm_ddim.pt", Options(image_size=16), "ddpm_ddim", "eps", "ddim", "only"),
        ("ddpm_ddim_train_list.pt", Options(image_size=16), "ddpm_ddim", "eps", "ddim", "ema"),
        ("ddpm_diffusers", Options(), "ddpm_diffusers", "eps", "diffusers", "only"),
        ("guided_cond.pt", flags("guided_cond"), "guided_cond", "out", "guided", "only"),
        pytest.param(
            *("guided_uncond.pt", flags("guided_uncond"), "guided_uncond", "out", "guided", "only"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_golden_outputs(source, options, expected, output, dialect, weights, tmp_path):
    directory = convert(GOLDEN / source, tmp_path / "model", options)
    metadata = model_directory.read_spec_file(directory)["metadata"]
    assert (metadata["dialect"], metadata["weights"], metadata["converter_version"]) == (
        dialect,
        weights,
        CONVERTER_VERSION,
    )
    assert len(metadata["sha256"]) == 64
    assert metadata["source"] == ("diffusion_pytorch_model.safetensors" if dialect == "diffusers" else source)
    denoiser = opening.load_denoiser(directory)
    golden = dict(np.load(GOLDEN / f"{expected}_expected.npz"))
    x = np.moveaxis(golden["x"], 1, -1)
    assert denoiser.image_shape == x.shape[1:]
    label = golden["y"] if denoiser.num_classes else None
    for t, wanted in zip(golden["t"], golden[output]):
        got = np.moveaxis(np.asarray(denoiser.eps(x, int(t), label)), -1, 1)
        assert np.abs(got - wanted[:, :3]).max() <= TOLERANCE * wanted[:, :3].std(), f"t={t}"


def test_the_lists_raw_weights_are_its_first_entry(tmp_path):
    directory = convert(GOLDEN / "ddpm_ddim_train_list.pt", tmp_path / "m", Options(weights="raw", image_size=16))
    assert model_directory.read_spec_file(directory)["metadata"]["weights"] == "raw"
    assert not np.any(opening.load_denoiser(directory).params["params"]["conv_in"]["kernel"])  # all zeros there


def small_state():
    return dict(torch_file.load(GOLDEN / "ddpm_ddim.pt"))


def refused(source, output, message, options=Options(), seconds=1.0):  # noqa: B008
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message) as error:
        convert(source, output, options)
    assert time.perf_counter() - start < seconds
    assert "\n" not in str(error.value)
    assert not output.exists()
    assert not list(output.parent.glob(f".{output.name}.*"))  # no unfinished directory either


def test_all_problems_in_one_error(tmp_path):
    state = small_state()
    del state["temb.dense.1.bias"], state["down.0.block.0.conv1.bias"]
    state["extra.weight"] = np.zeros(3, np.float32)
    state["conv_out.weight"] = np.zeros((3, 32, 5, 5), np.float32)
    state["mid.attn_1.q.bias"] = np.zeros(64, np.int64)
    write_zip(tmp_path / "bad.pt", state)
    with pytest.raises(ValueError, match="5 bad tensors") as error:
        convert(tmp_path / "bad.pt", tmp_path / "m", SIZE)
    for part in (
        "missing temb.dense.1.bias [128]",
        "missing down.0.block.0.conv1.bias [32]",
        "unexpected extra.weight [3]",
        "conv_out.weight must have shape [3, 32, 3, 3], got [3, 32, 5, 5]",
        "mid.attn_1.q.bias must hold floating-point numbers, got int64",
    ):
        assert part in str(error.value)
    assert not (tmp_path / "m").exists()


def test_bad_numbers_are_all_named(tmp_path):
    state = small_state()
    state["conv_in.bias"] = np.full(32, np.nan, np.float32)
    state["conv_out.bias"] = np.array([1, np.inf, 2], np.float32)
    state["norm_out.bias"] = np.full(32, 1e300)  # beyond float32
    write_zip(tmp_path / "bad.pt", state)
    with pytest.raises(ValueError, match="3 bad tensors") as error:
        convert(tmp_path / "bad.pt", tmp_path / "m", SIZE)
    for part in ("conv_in.bias: 32 of 32", "conv_out.bias: 1 of 3", "norm_out.bias: 32 of 32"):
        assert part in str(error.value)


def test_dtypes_prefixes_and_wrappers(tmp_path):
    """float16 and float64 weights, `module.`, dime-mia's names: the same model (its weights are multiples of 1/64)."""
    state = small_state()
    names = sorted(state)
    for index, name in enumerate(names):
        state[name] = state[name].astype([np.float16, np.float64, np.float32][index % 3])
    write_zip(tmp_path / "a.pt", {"model": {f"module.{name}": state[name] for name in names}, "step": 3})
    plain = open_checkpoint(GOLDEN / "ddpm_ddim.pt", SIZE)
    checkpoint = open_checkpoint(tmp_path / "a.pt", SIZE)
    assert (checkpoint.weights, checkpoint.spec) == ("only", plain.spec)
    assert checkpoint.spec.image_shape == (16, 16, 3)
    assert checkpoint.denoiser.read().keys() == plain.denoiser.read().keys()
    first = convert(tmp_path / "a.pt", tmp_path / "a", SIZE)
    second = convert(GOLDEN / "ddpm_ddim.pt", tmp_path / "ddpm_ddim", SIZE)
    assert model_directory.read_spec_file(first)["fingerprint"] == model_directory.read_spec_file(second)["fingerprint"]


def test_refusals_about_the_file(tmp_path):
    out = tmp_path / "m"
    refused(tmp_path / "none.pt", out, "no file or folder")
    refused(GOLDEN / "ddpm_ddim.pt", out, "not marked as EMA or raw", Options(weights="ema"))
    refused(GOLDEN / "ddpm_ddim.pt", out, "unknown dialect 'torch'", Options(dialect="torch"))
    refused(GOLDEN / "ddpm_ddim.pt", out, "--model_flags is for guided", flags("guided_cond"))
    refused(GOLDEN / "guided_cond.pt", out, "--model_flags")
    refused(GOLDEN / "ddpm_ddim.pt", out, "divisible by 2", Options(image_size=15))
    write_zip(tmp_path / "x.pt", {"fc.weight": np.zeros((2, 2), np.float32)})
    refused(tmp_path / "x.pt", out, "unknown network")
    write_zip(tmp_path / "y.pt", {"ema_model": 3, "step": 1})
    refused(tmp_path / "y.pt", out, "no weights: .* got a dict of ema_model, step")
    write_zip(tmp_path / "z.pt", [])
    refused(tmp_path / "z.pt", out, "no weights")
    unet = GOLDEN / "ddpm_diffusers" / "unet" / "diffusion_pytorch_model.safetensors"
    refused(unet, out, "name the folder that holds config.json")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 100)
    refused(tmp_path / "broken.safetensors", out, "not a safetensors file")
    out.mkdir()
    with pytest.raises(ValueError, match="exists already"):
        convert(GOLDEN / "ddpm_ddim.pt", out)
    assert list(out.iterdir()) == []


def test_schedule_option():
    def schedule(text):
        return open_checkpoint(GOLDEN / "ddpm_ddim.pt", Options(schedule=text, image_size=16)).spec.schedule

    assert schedule("cosine:50").num_steps == 50
    assert schedule("linear:10:0.1:0.2").beta_end == 0.2
    assert schedule("scaled_linear").kind == "scaled_linear"
    for text in ("linear:10", "cosine:x", "sigmoid", "linear:10:0.1:7", "none.json"):
        with pytest.raises(ValueError, match="schedule"):
            schedule(text)


def test_schedule_from_a_file(tmp_path):
    file = tmp_path / "betas.json"
    file.write_text("[0.1, 0.2, 0.3]")
    spec = open_checkpoint(GOLDEN / "ddpm_ddim.pt", Options(schedule=str(file), image_size=16)).spec
    np.testing.assert_allclose(spec.schedule.build().abar(2), 0.9 * 0.8 * 0.7, rtol=1e-6)
    for text in ('{"a": 1}', "[0.1", '["x"]'):
        file.write_text(text)
        with pytest.raises(ValueError, match="beta"):
            open_checkpoint(GOLDEN / "ddpm_ddim.pt", Options(schedule=str(file), image_size=16))


# What a file does not say is asked for, or inferred in words.


def test_the_image_size_is_never_guessed(tmp_path):
    for name in ("ddpm_ddim.pt", "ddpm_ddim_train_list.pt", "ddpm_secmi_bare_legacy.pt"):
        refused(GOLDEN / name, tmp_path / "m", rf"{name}: add --image_size .*: the checkpoint does not hold the im")
    checkpoint = open_checkpoint(GOLDEN / "ddpm_secmi.pt")
    assert checkpoint.spec.image_shape == (16, 16, 3)
    assert "image size: 16 x 16 (x_T in the file)" in checkpoint.facts
    checkpoint = open_checkpoint(GOLDEN / "ddpm_secmi.pt", Options(image_size=32))
    assert checkpoint.spec.image_shape == (32, 32, 3)
    assert "image size: 32 x 32 (as given, instead of 16 x 16)" in checkpoint.facts


@pytest.mark.parametrize(
    ("source", "options", "code"),
    [
        ("ddpm_secmi.pt", Options(), "pytorch-ddpm"),
        ("ddpm_ddim.pt", SIZE, "ermongroup/ddim"),
        ("guided_cond.pt", flags("guided_cond"), "guided-diffusion"),
    ],
)
def test_conventions_are_said_and_recorded(source, options, code, tmp_path):
    directory = convert(GOLDEN / source, tmp_path / "m", options)
    facts = model_directory.read_spec_file(directory)["metadata"]["facts"]
    convention = f"(by convention of {code}; the file does not say)"
    assert f"noise schedule: linear from 0.0001 to 0.02, 1000 steps {convention}" in facts
    assert f"prediction: epsilon {convention}" in facts
    assert all(fact in describe(directory) for fact in facts)


def test_what_is_given_replaces_the_convention():
    given = Options(image_size=16, schedule="cosine:50", prediction="v_prediction")
    checkpoint = open_checkpoint(GOLDEN / "ddpm_ddim.pt", given)
    assert (checkpoint.spec.schedule.kind, checkpoint.spec.prediction) == ("cosine", "v_prediction")
    assert "prediction: v_prediction (as given, instead of epsilon)" in checkpoint.facts
    with pytest.raises(ValueError, match="unknown prediction 'score'; expected one of epsilon, sample, v_prediction"):
        open_checkpoint(GOLDEN / "ddpm_ddim.pt", Options(image_size=16, prediction="score"))


def test_a_bare_unet_folder_needs_schedule_and_prediction(tmp_path):
    unet, out = GOLDEN / "ddpm_diffusers" / "unet", tmp_path / "m"
    refused(unet, out, r"add --schedule \(.*\) and --prediction \(epsilon or sample or v_prediction\)")
    refused(
        unet,
        out,
        r"add --prediction [^-]*: the checkpoint does not hold the prediction",
        Options(schedule="linear"),
    )
    refused(unet, out, r"add --schedule [^-]*: .* the noise schedule", Options(prediction="sample"))


# diffusers folders


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN / "ddpm_diffusers", tmp_path / "pipeline")


def edit(file, **changes):
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "DELETE"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "UNet2DConditionModel"}, "cannot honour _class_name=.DDPMPipeline."),
        ({"_class_name": "DELETE"}, "_class_name=None"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "auto_map"),
        ({"num_frames": 8}, "num_frames='8'"),
        ({"block_out_channels": [10**9, 10**9]}, "block_out_channels"),
        ({"block_out_channels": [32, 2**40]}, "block_out_channels"),
        ({"block_out_channels": "32"}, "block_out_channels"),
        ({"block_out_channels": [32, 64, 64]}, "down_block_types"),
        ({"layers_per_block": 10**8}, "num_res_blocks"),
        ({"act_fn": "mish"}, "act_fn='mish'"),
        ({"center_input_sample": True}, "center_input_sample"),
        ({"time_embedding_type": "fourier"}, "time_embedding_type"),
        ({"resnet_time_scale_shift": "scale_shift"}, "resnet_time_scale_shift"),
        ({"class_embed_type": "timestep"}, "class_embed_type"),
        ({"mid_block_type": None}, "mid_block_type"),
        ({"downsample_padding": 2}, "downsample_padding"),
        ({"downsample_type": "resnet"}, "downsample_type"),
        ({"attn_norm_num_groups": 8}, "attn_norm_num_groups"),
        ({"down_block_types": ["DownBlock2D", "SkipDownBlock2D"]}, "SkipDownBlock2D"),
        ({"out_channels": 6}, r"out_channels=6: must be in_channels = 3, as its variance is not learned"),
        ({"in_channels": "3"}, r"in_channels must be an integer in \[1, 8192\], got '3'"),
        ({"attention_head_dim": 48}, "head_channels=48"),
        ({"norm_eps": None}, "norm_eps"),
        ({"sample_size": 10**9}, "image size"),
        ({"sample_size": "16"}, "image size"),
    ],
)
def test_unet_configs_that_cannot_be_honoured(folder, tmp_path, change, message):
    edit(folder / "unet" / "config.json", **change)
    refused(folder, tmp_path / "m", message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "EulerDiscreteScheduler"}, "EulerDiscreteScheduler"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule='sigmoid'"),
        ({"beta_schedule": ["linear"]}, "beta_schedule="),
        ({"variance_type": "learned"}, r"out_channels=3: must be 2 \* in_channels = 6, as its variance is learned"),
        ({"prediction_type": "flow"}, "prediction_type='flow'"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas"),
        ({"num_train_timesteps": 10**9}, "num_steps"),
        ({"trained_betas": [0.1, "x"]}, "beta"),
        ({"beta_end": 3}, "beta_end"),
        ({"auto_map": {}}, "auto_map"),
    ],
)
def test_scheduler_configs_that_cannot_be_honoured(folder, tmp_path, change, message):
    edit(folder / "scheduler" / "scheduler_config.json", **change)
    refused(folder, tmp_path / "m", message)


@pytest.mark.parametrize(
    ("change", "kind", "prediction"),
    [
        ({"beta_schedule": "scaled_linear", "prediction_type": "v_prediction"}, "scaled_linear", "v_prediction"),
        ({"beta_schedule": "squaredcos_cap_v2", "prediction_type": "sample"}, "cosine", "sample"),
        ({"trained_betas": [0.1, 0.2], "rescale_betas_zero_snr": True}, "betas", "epsilon"),
    ],
)
def test_schedulers(folder, change, kind, prediction):
    edit(folder / "scheduler" / "scheduler_config.json", **change)
    spec = open_checkpoint(folder, Options()).spec
    assert (spec.schedule.kind, spec.prediction) == (kind, prediction)
    assert spec.schedule.zero_terminal_snr == change.get("rescale_betas_zero_snr", False)


def test_defaults_of_diffusers_are_said(folder):
    edit(folder / "scheduler" / "scheduler_config.json", prediction_type="DELETE", beta_end="DELETE")
    edit(folder / "unet" / "config.json", dropout="DELETE", sample_size="DELETE")
    facts = open_checkpoint(folder, SIZE).facts
    assert "image size: 16 x 16 (as given)" in facts
    assert "prediction: epsilon (diffusers' default; scheduler_config.json does not say)" in facts
    assert any("1000 steps (scheduler_config.json, with diffusers' defaults for beta_end" in fact for fact in facts)
    assert any("defaults, where config.json does not say: " in fact and "dropout=0.0" in fact for fact in facts)


def test_a_learned_variance_without_a_scheduler_is_told_by_the_channels(folder):
    edit(folder / "unet" / "config.json", out_channels=6)
    checkpoint = open_checkpoint(folder / "unet", Options(schedule="linear", prediction="epsilon"))
    assert checkpoint.spec.denoiser.learned_sigma
    assert any(fact.startswith("variance: learned (out_channels is twice in_channels") for fact in checkpoint.facts)


def test_paths_are_named_once(folder, tmp_path):
    flags_file = tmp_path / "flags.json"
    flags_file.write_text("{}")
    for file, text in [("unet/config.json", "{"), ("scheduler/scheduler_config.json", "{"), ("model_index.json", "[]")]:
        whole = (folder / file).read_text()
        (folder / file).write_text(text)
        with pytest.raises(ValueError, match=f"{file}: ") as error:
            convert(folder, tmp_path / "m")
        assert str(error.value).count(str(folder)) == 1
        (folder / file).write_text(whole)
    with pytest.raises(ValueError, match=r"^[^:]*flags.json: missing model flags") as error:
        convert(GOLDEN / "guided_cond.pt", tmp_path / "m", Options(model_flags=flags_file))
    edit(folder / "model_index.json", unet=3)
    refused(folder, tmp_path / "m", "model_index.json: unet must be from the library 'diffusers', got 3")


def test_layouts_of_diffusers_folders(folder, tmp_path):
    """unet/ alone, everything in the root (as google/ddpm-cifar10-32), .bin weights, old attention names, EMA."""
    wanted = open_checkpoint(folder, Options())
    alone = open_checkpoint(folder / "unet", Options(schedule="linear", prediction="epsilon"))
    assert alone.spec == wanted.spec

    flat = shutil.copytree(folder / "unet", tmp_path / "flat")
    shutil.copy(folder / "model_index.json", flat)
    shutil.copy(folder / "scheduler" / "scheduler_config.json", flat)
    weights = flat / "diffusion_pytorch_model.safetensors"
    state = safetensors.numpy.load_file(weights)
    weights.unlink()
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for new_name, old_name in old.items():
        state = {name.replace(f".{new_name}.", f".{old_name}."): tensor for name, tensor in state.items()}
    write_zip(flat / "diffusion_pytorch_model.bin", state)
    assert any(name.endswith("proj_attn.weight") for name in open_checkpoint(flat, Options()).denoiser.read())
    first = model_directory.read_spec_file(convert(folder, tmp_path / "m0"))
    second = model_directory.read_spec_file(convert(flat, tmp_path / "m1"))
    assert first["fingerprint"] == second["fingerprint"]

    refused(folder, tmp_path / "m", "not marked as EMA or raw", Options(weights="ema"))
    shutil.copytree(folder / "unet", folder / "unet_ema")
    edit(folder / "unet_ema" / "config.json", decay=0.9999, power=0.75)
    assert open_checkpoint(folder, Options()).weights == "ema"
    assert open_checkpoint(folder, Options(weights="raw")).weights == "raw"
    refused(flat.parent, tmp_path / "m", "not a diffusers folder")
    (flat / "diffusion_pytorch_model.bin").rename(flat / "diffusion_pytorch_model-00001-of-00002.bin")
    refused(flat, tmp_path / "m", "found diffusion_pytorch_model-00001-of-00002.bin")
    edit(flat / "model_index.json", _class_name="LDMPipeline")
    refused(flat, tmp_path / "m", "not supported, because its autoencoder is a VQ model")


def test_safetensors_with_bfloat16_and_repeated_names(tmp_path):
    header = {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    data = np.array([1.5, -2], ml_dtypes.bfloat16).tobytes()

    def write(text):
        (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
        return weights_file.read(tmp_path / "x.safetensors")

    np.testing.assert_array_equal(write(json.dumps(header))["a"].astype(np.float32), [1.5, -2])
    text = json.dumps(header["a"])
    with pytest.raises(ValueError, match="'a' occurs twice"):
        write(f'{{"a": {text}, "a": {text}}}')
    with pytest.raises(ValueError, match="not a safetensors file"):
        write(json.dumps({"a": header["a"] | {"shape": [10**12]}}))
    with pytest.raises(ValueError, match="got I16"):
        write(json.dumps({"a": header["a"] | {"dtype": "I16"}}))


def test_json_with_repeated_or_endless_contents(folder, tmp_path):
    config = folder / "unet" / "config.json"
    for text, message in [('{"a": 1, "a": 2}', "'a' occurs twice"), ("[1]", "JSON object"), ("{", "config.json")]:
        config.write_text(text)
        refused(folder, tmp_path / "m", message)
    config.write_text("[" * 100_000)
    refused(folder, tmp_path / "m", "config.json")
    config.write_text(" " * 2**21)
    refused(folder, tmp_path / "m", "bytes, more than")


# guided-diffusion flags


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_channels": 32}, "num_channels"),
        ({"model_channels": None}, "missing model flags: model_channels"),
        ({"model_channels": 10**9}, "model_channels"),
        ({"channel_mult": [1, 1e9]}, "channel_mult"),
        ({"channel_mult": "1,2"}, "channel_mult"),
        ({"attention_resolutions": "16,8"}, "attention_resolutions"),
        ({"dims": 3}, "dims=3"),
        ({"conv_resample": False}, "conv_resample"),
        ({"num_head_channels": 5}, "head_channels=5"),
        ({"class_cond": False}, "class_cond"),
        ({"out_channels": 4}, "out_channels=4"),
        ({"out_channels": 3}, "learn_sigma"),
        ({"num_heads_upsample": 2, "num_head_channels": -1}, "num_heads_upsample"),
    ],
)
def test_model_flags_that_cannot_be_honoured(tmp_path, change, message):
    file = tmp_path / "flags.json"
    file.write_text(json.dumps(json.loads((GOLDEN / "guided_cond.json").read_text()) | change))
    refused(GOLDEN / "guided_cond.pt", tmp_path / "m", message, Options(model_flags=file))


def test_published_presets():
    presets = guided.presets()
    assert list(presets) == ["64x64", "128x128", "256x256", "256x256_uncond", "512x512"]
    assert presets["64x64"].architecture.new_attention_order
    assert presets["64x64"].schedule.kind == "cosine"
    assert presets["128x128"].architecture.heads(1024) == 4
    assert presets["512x512"].architecture.stem_channels == 128
    assert presets["512x512"].architecture.attention_levels == (4, 5, 6)


# the command line


def run(*arguments):
    command = [sys.executable, "-m", "checkpoints_convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_line(tmp_path):
    done = run("--source", GOLDEN / "ddpm_secmi.pt", "--output", tmp_path / "m")
    assert done.returncode == 0, done.stderr
    for part in (
        *("dialect: secmi", "weights: ema", "image_shape: [16, 16, 3]", "weights: ema_model (EMA)"),
        "noise schedule: linear from 0.0001 to 0.02, 1000 steps (by convention of pytorch-ddpm; the file does not say)",
    ):
        assert part in done.stdout
    again = run("--source", GOLDEN / "ddpm_secmi.pt", "--output", tmp_path / "m")
    assert again.returncode == 2
    assert again.stderr.strip() == f"dime-jax: output {tmp_path / 'm'} exists already; nothing was written"
