"""One network's tensors out of every common wrapping, and nothing taken where two could be meant."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from checkpoints_convert import torch_file, weights_file
from checkpoints_convert.convert import open_checkpoint
from checkpoints_convert.options import ConversionOptions
from dime_jax.loading import model_directory
from dime_jax.loading.conversion import convert
from tests.checkpoints_convert.torch_writer import Global, PickledCall, write_zip

GOLDEN = Path(__file__).parents[1] / "golden"
SIZE = ConversionOptions(image_size=16)
STATE = dict(torch_file.load(GOLDEN / "ddpm_ddim.pt"))
OTHER = {name: tensor + 1 for name, tensor in STATE.items()}
OPTIMISER = {
    "state": {0: {"step": np.ones(1, np.float32), "exp_avg": np.ones(3, np.float32)}},
    "param_groups": [{"lr": 0.1, "params": [0]}],
}
BETAS = np.linspace(1e-3, 0.01, 50).astype(np.float32)


def prefixed(prefix, state):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def lit_ema(state, prefix="model."):
    """LitEma's copy of a module's parameters: names relative to the module, without dots."""
    names = {name.removeprefix(prefix).replace(".", ""): tensor for name, tensor in state.items()}
    counters = {"decay": np.float32(0.999), "num_updates": np.int32(7)}
    return prefixed("model_ema.", names | {name: np.array(value) for name, value in counters.items()})


LIGHTNING = {"epoch": 3, "global_step": 7, "pytorch-lightning_version": "2.1.0", "optimizer_states": [OPTIMISER]}


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "net", "net_model", "unet", "model", "params"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module."])
def test_the_only_weights_in_a_wrapper(key, prefix):
    contents = {key: prefixed(prefix, STATE), "optimizer": OPTIMISER, "step": 7}
    weights = weights_file.choose(Path("x.pt"), contents, None)
    assert (weights.which, weights.facts) == ("only", ())
    assert weights.state.keys() == STATE.keys()
    assert weights_file.choose(Path("x.pt"), prefixed(prefix, STATE), None).state.keys() == STATE.keys()


@pytest.mark.parametrize("prefix", ["model.", "net.", "model.diffusion_model.", "diffusion_model."])
def test_lightning(prefix, tmp_path):
    """Its prefix is taken off; a schedule that the module keeps is used, and other buffers are left out in words."""
    state = prefixed(prefix, STATE) | {"betas": BETAS, "logvar": BETAS}
    write_zip(tmp_path / "x.ckpt", {**LIGHTNING, "state_dict": state})
    checkpoint = open_checkpoint(tmp_path / "x.ckpt", SIZE)
    assert checkpoint.denoiser.read().keys() == STATE.keys()
    np.testing.assert_allclose(checkpoint.spec.schedule.build().abar(49), np.prod(1 - BETAS.astype(float)), rtol=1e-5)
    assert "noise schedule: betas, 50 steps (betas in the file)" in checkpoint.facts
    assert "not the network's, and left out: betas, logvar" in checkpoint.facts


@pytest.mark.parametrize(
    "contents",
    [
        {"model": OTHER, "ema": STATE},
        {"params": OTHER, "params_ema": STATE},
        {"net_model": OTHER, "ema_model": STATE},
        {"state_dict": OTHER, "ema_state_dict": STATE, "optimizer": OPTIMISER},
        {"state_dict": OTHER, "state_dict_ema": prefixed("module.", STATE)},
        {"model": OTHER, "ema": {"decay": 0.999, "shadow": STATE}},
        {"model": OTHER, "ema": {"module": prefixed("_orig_mod.", STATE), "updates": 3}},
        {"model": OTHER, "ema": prefixed("online_model.", OTHER) | prefixed("ema_model.", STATE)},
        {**LIGHTNING, "state_dict": prefixed("model.", OTHER) | prefixed("model_ema.", STATE)},
        {**LIGHTNING, "state_dict": prefixed("model.", OTHER) | lit_ema(STATE) | {"betas": BETAS}},
        {"state_dict": prefixed("model.diffusion_model.", OTHER) | lit_ema(prefixed("model.diffusion_model.", STATE))},
        {**LIGHTNING, "state_dict": OTHER, "callbacks": {"EMA": {"ema_state_dict": STATE}}},
        [OTHER, OPTIMISER, 3, 7, STATE],
    ],
)
def test_the_ema_is_found(contents):
    weights = weights_file.choose(Path("x.pt"), contents, None)
    assert weights.which == "ema"
    assert weights.state.keys() == STATE.keys()
    for name, tensor in STATE.items():
        np.testing.assert_array_equal(weights.state[name], tensor)
    assert "(EMA); the file also holds" in weights.facts[0]


def test_the_model_of_an_ema_is_the_emas(tmp_path):
    write_zip(tmp_path / "both.pt", {"model": OTHER, "ema": STATE})
    write_zip(tmp_path / "ema.pt", STATE)
    both = convert(tmp_path / "both.pt", tmp_path / "both", SIZE)
    ema = convert(tmp_path / "ema.pt", tmp_path / "ema", SIZE)
    assert model_directory.read_spec_file(both)["fingerprint"] == model_directory.read_spec_file(ema)["fingerprint"]
    assert model_directory.read_spec_file(both)["metadata"]["weights"] == "ema"


def refused(contents, message, wanted=None):
    with pytest.raises(ValueError, match=message) as error:
        weights_file.choose(Path("x.pt"), contents, wanted)
    assert "\n" not in str(error.value)


def test_two_sets_of_which_none_is_marked_are_asked_about():
    two = {"model": OTHER, "net": STATE}
    refused(two, r"holds 2 sets of weights not marked as EMA: --weights must be one of model, net")
    refused(two, r"holds 2 sets of weights not marked as EMA", "raw")
    refused(two, r"has no ema weights, only model, net", "ema")
    refused(two, r"has no weights other: --weights must be ema, raw or a key of the file: model, net", "other")
    chosen = weights_file.choose(Path("x.pt"), two, "net")
    assert chosen.which == "raw"
    np.testing.assert_array_equal(chosen.state["conv_in.bias"], STATE["conv_in.bias"])
    two = {"ema_0.99": OTHER, "ema_0.9999": STATE, "model": OTHER}
    refused(two, r"holds 2 sets of weights marked as EMA: --weights must be one of ema_0.99, ema_0.9999")
    chosen = weights_file.choose(Path("x.pt"), two, "ema_0.9999")
    np.testing.assert_array_equal(chosen.state["conv_in.bias"], STATE["conv_in.bias"])


def test_an_ema_that_cannot_be_read_is_not_passed_over():
    nameless = {"model": STATE, "ema": {"decay": 0.999, "shadow_params": list(OTHER.values())}}
    refused(nameless, r"the EMA weights under ema have no names .*: give --weights=model to take the others")
    assert weights_file.choose(Path("x.pt"), nameless, "model").which == "only"
    refused({"state_dict": lit_ema(STATE)}, r"EMA weights model_ema\.\* have names without dots")
    unlike = prefixed("model.", STATE) | lit_ema({"model.another.weight": BETAS})
    refused(unlike, r"EMA weights model_ema\.\* have names without dots")
    alike = {"model.a.1.11.weight": BETAS, "model.a.11.1.weight": BETAS}
    refused(alike | lit_ema({"model.a.1.11.weight": BETAS}), r"no other weights explain one to one")


def test_no_weights_are_refused_with_what_was_found():
    refused({"epoch": 3, "history": [1, 2]}, r"no weights: .* got a dict of epoch, history")
    refused({}, "got an empty dict")
    refused(3, "got a int")
    refused([], "no weights")
    refused({"only": {"deep": {"down": {"in": {"there": STATE}}}}}, "got a dict of only")


def test_a_pickled_module_is_told_to_save_its_state_dict(tmp_path):
    module = PickledCall(Global("my_models.unet", "UNet"), (), {"training": False})
    for contents in (module, {"model": module}):
        write_zip(tmp_path / "x.pt", contents)
        with pytest.raises(ValueError, match=r"my_models.unet.UNet is not allowed .* save the model's state_dict\(\)"):
            weights_file.read(tmp_path / "x.pt")


def test_formats_are_told_by_their_contents(tmp_path):
    safetensors.numpy.save_file(STATE, tmp_path / "weights.bin")
    assert weights_file.read(tmp_path / "weights.bin").keys() == STATE.keys()
    write_zip(tmp_path / "weights.pt", STATE)
    assert weights_file.read(tmp_path / "weights.pt").keys() == STATE.keys()


def test_names_from_a_file_are_printed_safely(tmp_path):
    write_zip(tmp_path / "x.pt", {"\x1b[2J\nfc.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ValueError, match="unknown network") as error:
        open_checkpoint(tmp_path / "x.pt")
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["down.99999999999.block.0.conv1.bias", "down.7.block", "down.²."])
def test_hostile_names_end_in_one_line(name, tmp_path):
    write_zip(tmp_path / "x.pt", STATE | {name: np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"x\.pt: ") as error:
        convert(tmp_path / "x.pt", tmp_path / "m", SIZE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (2, r"must hold the [0-9,]+ values of the network that it describes, got [0-9,]+"),
        (16, r"number of residual blocks must be an integer in \[1, 128\], got 330"),
    ],
)
def test_a_network_far_larger_than_its_weights_is_not_built(tmp_path, blocks, message):
    names = [f"down.{level}.block.{block}.conv1.bias" for level in range(10) for block in range(blocks)]
    rest = ("conv_in.weight", "conv_in.bias", "conv_out.bias", "temb.dense.0.weight", "temb.dense.0.bias")
    few = {name: STATE[name] for name in rest}
    write_zip(tmp_path / "x.pt", few | {name: np.zeros(32, np.float32) for name in names})
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "x.pt", tmp_path / "m", ConversionOptions(image_size=512))
