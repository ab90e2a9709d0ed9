"""The names of each network's modules in diffusers and transformers."""

from checkpoints_convert.mapping import SHORTCUT, Naming, StateDict, block_names, block_parts, trunk_names
from dime_jax.models import AutoencoderSpec, ClipTextSpec, ConditionalUnetSpec, DdpmUnetSpec, DitSpec, NetworkSpec

_BLOCK = block_parts("norm1", "conv1", "time_emb_proj", "norm2", "conv2", "conv_shortcut")
_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "out": "to_out.0"}
# Before diffusers 0.14 the attention's projections had other names.
_OLD_ATTENTION = {"query": "query", "key": "key", "value": "value", "out": "proj_attn"}
_TEXT_PREFIX = "text_model."
_POSITION_IDS = "embeddings.position_ids"


def _module_names(spec: DdpmUnetSpec | ConditionalUnetSpec) -> dict[str, str]:
    """Their name for each top-level module of a U-Net."""
    time = ("time_embedding.linear_1", "time_embedding.linear_2")
    middle = ("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1")
    trunk = trunk_names(time, "conv_in", middle, ("conv_norm_out", "conv_out"))
    return {**trunk, "label_embedding": "class_embedding", **_level_names(spec)}


def _level_names(spec: DdpmUnetSpec | ConditionalUnetSpec | AutoencoderSpec) -> dict[str, str]:
    """Their name for each module of a level, those included that only some networks have."""
    levels, blocks, names = len(spec.level_channels), range(spec.num_res_blocks + 1), dict[str, str]()
    for level in range(levels):
        down, up = f"down_blocks.{level}", f"up_blocks.{levels - 1 - level}"
        names[f"down_{level}_downsample"] = f"{down}.downsamplers.0.conv"
        names[f"up_{level}_upsample"] = f"{up}.upsamplers.0.conv"
        for way, prefix in (("down", down), ("up", up)):
            residual = [f"{prefix}.resnets.{block}" for block in blocks]
            names |= block_names(way, level, residual, [f"{prefix}.attentions.{block}" for block in blocks])
    return names


def unet_naming(spec: DdpmUnetSpec, old_attention: bool = False) -> Naming:
    """diffusers' names for a UNet2DModel."""
    attention = _OLD_ATTENTION if old_attention else _ATTENTION
    return Naming(_module_names(spec), {**_BLOCK, "norm": "group_norm", **attention}, SHORTCUT)


def conditional_unet_naming(spec: ConditionalUnetSpec) -> Naming:
    """diffusers' names for a UNet2DConditionModel."""
    parts = {
        **_BLOCK,
        **_ATTENTION,
        "norm": "norm",
        "project_in": "proj_in",
        "project_out": "proj_out",
        **{f"layer_{layer}": f"transformer_blocks.{layer}" for layer in range(spec.transformer_layers)},
        "norm_3": "norm3",
        "self_attention": "attn1",
        "cross_attention": "attn2",
        "mlp_0": "ff.net.0.proj",
        "mlp_1": "ff.net.2",
    }
    projections = () if spec.linear_projection else ("project_in", "project_out")
    return Naming(_module_names(spec), parts, {**SHORTCUT, **dict.fromkeys(projections, "conv1x1")})


def autoencoder_naming(spec: AutoencoderSpec, old_attention: bool = False) -> Naming:
    """diffusers' names for an AutoencoderKL; before 0.14 its attention had others."""
    parts = {
        **_BLOCK,
        **_level_names(spec),
        **{"conv_in": "conv_in", "norm_out": "conv_norm_out", "conv_out": "conv_out", "middle": "mid_block"},
        **{"block_0": "resnets.0", "block_1": "resnets.1", "attention": "attentions.0", "norm": "group_norm"},
        **(_OLD_ATTENTION if old_attention else _ATTENTION),
    }
    modules = {name: name for name in ("encoder", "decoder", "quant_conv", "post_quant_conv")}
    return Naming(modules, parts, {**SHORTCUT, "quant_conv": "conv1x1", "post_quant_conv": "conv1x1"})


def text_naming(spec: ClipTextSpec) -> Naming:
    """transformers' names for a CLIPTextModel, without the prefix `text_model.`."""
    modules = {
        "token_embedding": "embeddings.token_embedding",
        "position_embedding": "embeddings.position_embedding",
        **{f"layer_{layer}": f"encoder.layers.{layer}" for layer in range(spec.num_layers)},
        "norm_out": "final_layer_norm",
    }
    parts = {
        **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
        **{"out": "self_attn.out_proj", "norm_1": "layer_norm1", "norm_2": "layer_norm2"},
        **{"mlp_0": "mlp.fc1", "mlp_1": "mlp.fc2"},
    }
    return Naming(modules, parts)


def dit_naming(spec: DitSpec) -> Naming:
    """diffusers' names for a DiTTransformer2DModel."""
    blocks = {f"block_{layer}": f"transformer_blocks.{layer}" for layer in range(spec.num_layers)}
    modules = {
        "patches": "pos_embed.proj",
        "modulation_out": "proj_out_1",
        "dense_out": "proj_out_2",
        **blocks,
        **{f"{ours}_embedder": f"{theirs}.norm1.emb" for ours, theirs in blocks.items()},
    }
    parts = {
        **{"time_dense_0": "timestep_embedder.linear_1", "time_dense_1": "timestep_embedder.linear_2"},
        **{"label_embedding": "class_embedder.embedding_table", "modulation": "norm1.linear"},
        **{"query": "attn1.to_q", "key": "attn1.to_k", "value": "attn1.to_v", "out": "attn1.to_out.0"},
        **{"mlp_0": "ff.net.0.proj", "mlp_1": "ff.net.2"},
    }
    return Naming(modules, parts)


def naming_of(spec: NetworkSpec, state: StateDict) -> Naming:
    """Return the names that a state dict uses."""
    old_attention = any(name.endswith(".proj_attn.weight") for name in state)
    match spec:
        case DdpmUnetSpec():
            return unet_naming(spec, old_attention)
        case ConditionalUnetSpec():
            return conditional_unet_naming(spec)
        case AutoencoderSpec():
            return autoencoder_naming(spec, old_attention)
        case ClipTextSpec():
            return text_naming(spec)
        case DitSpec():
            return dit_naming(spec)
    raise TypeError(f"no names for {type(spec).__name__}")


def without_text_prefix(state: StateDict) -> StateDict:
    """A text encoder's tensors as transformers 5 calls them: no `text_model.`, and no numbered positions."""
    prefix = _TEXT_PREFIX if all(name.startswith(_TEXT_PREFIX) for name in state) else ""
    names = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return {name: tensor for name, tensor in names.items() if name != _POSITION_IDS}
