"""One random LoRA in every spelling, for the tests of `lora` and their comparison with diffusers."""

import numpy as np

from checkpoints_convert import lora

BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
ATTENTION = [f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn2.to_k", f"{BLOCK}.attn1.to_out.0"]
CONVOLUTIONS = ["down_blocks.0.attentions.0.proj_in", "down_blocks.0.resnets.0.conv1"]  # 1×1 and 3×3
UNET = [*ATTENTION, f"{BLOCK}.ff.net.0.proj"]
TEXT_ATTENTION = ["encoder.layers.0.self_attn.q_proj", "encoder.layers.1.self_attn.out_proj"]
TEXT = [*TEXT_ATTENTION, "encoder.layers.1.mlp.fc1"]
RANK = 3
_OLD_TEXT = {"q_proj": "to_q_lora", "out_proj": "to_out_lora"}


def factors(state, modules, seed=0):
    """{module: (down, up)} for the weights of these modules."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for module in modules:
        out, inputs, *window = state[f"{module}.weight"].shape
        down = rng.normal(size=(RANK, inputs, *window)).astype(np.float32)
        up = rng.normal(size=(out, RANK, *(1 for _ in window))).astype(np.float32)
        pairs[module] = (down, up)
    return pairs


def updated(state, pairs, factor):
    """The definition, one output and input at a time over the window: W + factor * Σ_r up[o, r] down[r, i]."""
    state = {name: np.asarray(tensor, np.float64) for name, tensor in state.items()}
    for module, (down, up) in pairs.items():
        delta = np.einsum("or,ri...->oi...", up.reshape(len(up), -1).astype(np.float64), down.astype(np.float64))
        state[f"{module}.weight"] = state[f"{module}.weight"] + factor * delta
    return state


def merged(state, updates, part):
    """The tensors of one part with the updates of that part added."""
    state, names = dict(state), lora.layer_names(state, part)
    for update in (update for update in updates if update.part == part):
        name = lora.find_layer(update, names)
        state[name] = lora.merge(state[name], update)
    return state


def kohya(unet, text, alpha):
    tensors = {}
    for prefix, pairs in (("lora_unet_", unet), ("lora_te_text_model_", text)):
        for module, (down, up) in pairs.items():
            name = prefix + module.replace(".", "_")
            tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
            tensors[f"{name}.alpha"] = np.array(alpha, np.float32)
    return tensors


def peft(unet, text, unet_prefix="unet.", text_prefix="text_encoder.text_model."):
    return _dotted(unet, text, unet_prefix, text_prefix, "{}.lora_A.weight", "{}.lora_B.weight")


def older(unet, text):
    tensors = _dotted(unet, {}, "unet.", "", "{}.lora.down.weight", "{}.lora.up.weight")
    ending = "{}.lora_linear_layer.%s.weight"
    return tensors | _dotted({}, text, "", "text_encoder.text_model.", ending % "down", ending % "up")


def oldest(unet, text, prefix="unet."):
    """Of attention only."""
    unet = {_processor(module): pair for module, pair in unet.items()}
    text = {module.rpartition(".")[0] + "." + _OLD_TEXT[module.rpartition(".")[2]]: p for module, p in text.items()}
    return _dotted(unet, text, prefix, "text_encoder.text_model.", "{}.down.weight", "{}.up.weight")


def _processor(module):
    stem, _, last = module.removesuffix(".0").rpartition(".")
    return f"{stem}.processor.{last}_lora"


def _dotted(unet, text, unet_prefix, text_prefix, down_name, up_name):
    tensors = {}
    for prefix, pairs in ((unet_prefix, unet), (text_prefix, text)):
        for module, (down, up) in pairs.items():
            tensors |= {down_name.format(prefix + module): down, up_name.format(prefix + module): up}
    return tensors
