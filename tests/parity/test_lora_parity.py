"""Live comparison of LoRA merges with diffusers and peft: each spelling, read and merged by their code and by ours.

Run with `make parity`; needs torch, diffusers, transformers and peft.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from checkpoints_convert.diffusers_names import without_text_prefix
from checkpoints_convert.lora import Lora

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

import latent_networks as networks  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "checkpoints_convert"))
import lora_spellings as spellings  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]  # diffusers warns of its older spellings

SCALE = 0.7


def numpy_state(network):
    return {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}


@pytest.fixture
def unet():
    return networks.unet(networks.UNET_1)


@pytest.fixture
def text():
    return networks.text_encoder(networks.TEXT_1)


def fused(network):
    """The weights of a network with its adapters merged and taken out."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    state = {}
    for name, module in network.named_modules():
        if isinstance(module, BaseTunerLayer):
            module.scale_layer(SCALE)
            module.merge()
            state[f"{name}.weight"] = module.get_base_layer().weight.detach().numpy()
    return state


def assert_merged(network, merged, reference, count):
    assert len(reference) == count
    before = numpy_state(network)
    for name, tensor in reference.items():
        name = name if name in merged else name.removeprefix("text_model.")
        assert np.abs(merged[name] - tensor).max() <= 2e-6 * np.abs(tensor).max(), name
        assert not np.array_equal(merged[name], before.get(name)), name


@pytest.mark.parametrize("spelling", ["kohya", "peft", "older", "oldest"])
def test_spellings(spelling, unet, text, tmp_path):
    """diffusers reads all four for the U-Net; its text encoder reads the first three."""
    unet_state, text_state = numpy_state(unet), without_text_prefix(numpy_state(text))
    modules = spellings.ATTENTION if spelling == "oldest" else [*spellings.UNET, *spellings.CONVOLUTIONS]
    pairs = spellings.factors(unet_state, modules)
    text_pairs = spellings.factors(text_state, spellings.TEXT_ATTENTION, seed=1)
    write = {
        "kohya": lambda *pairs: spellings.kohya(*pairs, 2.0),
        **{"peft": spellings.peft, "older": spellings.older, "oldest": spellings.oldest},
    }[spelling]
    safetensors.numpy.save_file(write(pairs, text_pairs), tmp_path / "x.safetensors")
    updates = Lora(tmp_path / "x.safetensors", SCALE).updates
    merged = spellings.merged(unet_state, updates, "unet")
    merged_text = spellings.merged(text_state, updates, "text_encoder")

    loader = diffusers.StableDiffusionPipeline
    state, alphas = loader.lora_state_dict(str(tmp_path / "x.safetensors"), unet_config=unet.config)
    loader.load_lora_into_unet(state, alphas, unet)
    assert_merged(networks.unet(networks.UNET_1), merged, fused(unet), len(pairs))
    loader.load_lora_into_text_encoder(state, alphas, text)
    assert_merged(networks.text_encoder(networks.TEXT_1), merged_text, fused(text), len(text_pairs))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"alpha_pattern": {"attn2.to_k": 9}}])
def test_pefts_own_folder(options, unet, tmp_path):
    state = numpy_state(unet)
    targets = ["to_q", "to_k", "to_out.0", "proj_in", "conv1", "ff.net.0.proj"]
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False, **options)
    torch.manual_seed(5)
    adapted = peft.get_peft_model(unet, config)
    adapted.save_pretrained(tmp_path)
    merged = spellings.merged(state, Lora(tmp_path).updates, "unet")
    reference = numpy_state(adapted.merge_and_unload())
    changed = [name for name in state if not np.array_equal(merged[name], state[name])]
    assert len(changed) > 20
    for name, tensor in reference.items():
        assert np.abs(merged[name] - tensor).max() <= 2e-6 * np.abs(tensor).max(), name


def test_diffusers_own_file(unet, tmp_path):
    """Written by `save_lora_weights`, with its settings in the file's header."""
    from peft.utils import get_peft_model_state_dict

    state = numpy_state(unet)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "to_out.0"], init_lora_weights=False)
    unet.add_adapter(config)
    metadata = {"unet_lora_adapter_metadata": config.to_dict()}
    layers = get_peft_model_state_dict(unet)
    diffusers.StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=layers, **metadata)
    merged = spellings.merged(state, Lora(tmp_path, SCALE).updates, "unet")
    assert_merged(networks.unet(networks.UNET_1), merged, fused(unet), len(layers) // 2)
