"""Name tables of latent models' networks: what diffusers, transformers and the authors of DiT call each variable.

The tables are total in both directions, and used with `mapping.to_variables` and `mapping.to_state_dict`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from checkpoints_convert import diffusers
from checkpoints_convert.mapping import LAYOUTS, Entry, Shape, StateDict, tensor_shape
from dime_jax.models import AutoencoderSpec, ClipTextSpec, ConditionalUnetSpec, DitSpec, NetworkSpec, param_shapes

_LEAF_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
_OLD_ATTENTION = {"query": "query", "key": "key", "value": "value", "out": "proj_attn"}
_TEXT_PREFIX = "text_model."
_POSITION_IDS = "embeddings.position_ids"


class Naming(NamedTuple):
    """How a file calls the modules of a network.

    Attributes:
      modules: names of top-level modules, and of variables that are in none.
      parts: names of modules inside them; "" is left out.
      convolutions: modules with a matrix that the file holds as a 1×1 convolution.
    """

    modules: Mapping[str, str]
    parts: Mapping[str, str]
    convolutions: frozenset[str] = frozenset()


def name_table(spec: NetworkSpec, naming: Naming) -> list[Entry]:
    """One entry for each variable of the network of `spec`."""
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(spec))
    return [_entry(tuple(key.key for key in path), leaf.shape, naming) for path, leaf in leaves]


def _entry(path: tuple[str, ...], shape: Shape, naming: Naming) -> Entry:
    if len(path) == 2:
        return Entry(naming.modules[path[1]], shape, path, LAYOUTS["same"])
    names = [naming.modules[path[1]], *(naming.parts[name] for name in path[2:-1]), _LEAF_NAMES[path[-1]]]
    layout = LAYOUTS[_layout(path, len(shape), naming)]
    return Entry(".".join(filter(None, names)), tensor_shape(shape, layout), path, layout)


def _layout(path: tuple[str, ...], rank: int, naming: Naming) -> str:
    if path[-1] != "kernel":
        return "same"
    if rank == 4:
        return "conv"
    return "conv1x1" if path[-2] in naming.convolutions else "linear"


def unet_naming(spec: ConditionalUnetSpec) -> Naming:
    """diffusers' names for a UNet2DConditionModel."""
    parts = {
        **diffusers.DIALECT.part_names,
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
    return Naming(diffusers.module_names(spec), parts, frozenset({"shortcut", *projections}))


def autoencoder_naming(spec: AutoencoderSpec, old_attention: bool = False) -> Naming:
    """diffusers' names for an AutoencoderKL; before 0.14 its attention had others."""
    levels = len(spec.level_channels)
    parts = {
        **{part: diffusers.DIALECT.part_names[part] for part in ("norm_1", "conv_1", "norm_2", "conv_2", "shortcut")},
        **{"conv_in": "conv_in", "norm_out": "conv_norm_out", "conv_out": "conv_out", "middle": "mid_block"},
        **{"block_0": "resnets.0", "block_1": "resnets.1", "attention": "attentions.0", "norm": "group_norm"},
        **{part: diffusers.DIALECT.part_names[part] for part in _OLD_ATTENTION},
        **(_OLD_ATTENTION if old_attention else {}),
    }
    for level in range(levels):
        down, up = f"down_blocks.{level}", f"up_blocks.{levels - 1 - level}"
        parts[f"down_{level}_downsample"] = f"{down}.downsamplers.0.conv"
        parts[f"up_{level}_upsample"] = f"{up}.upsamplers.0.conv"
        for block in range(spec.num_res_blocks + 1):
            parts[f"down_{level}_block_{block}"] = f"{down}.resnets.{block}"
            parts[f"up_{level}_block_{block}"] = f"{up}.resnets.{block}"
    modules = {name: name for name in ("encoder", "decoder", "quant_conv", "post_quant_conv")}
    return Naming(modules, parts, frozenset({"shortcut", "quant_conv", "post_quant_conv"}))


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
    """The names of a DiT, by its layout."""
    return _original_dit(spec) if spec.is_original else _diffusers_dit(spec)


def _original_dit(spec: DitSpec) -> Naming:
    modules = {
        "patches": "x_embedder.proj",
        "embedder": "",
        "positions": "pos_embed",
        "modulation_out": "final_layer.adaLN_modulation.1",
        "dense_out": "final_layer.linear",
        **{f"block_{layer}": f"blocks.{layer}" for layer in range(spec.num_layers)},
    }
    parts = {
        **{"time_dense_0": "t_embedder.mlp.0", "time_dense_1": "t_embedder.mlp.2"},
        **{"label_embedding": "y_embedder.embedding_table", "modulation": "adaLN_modulation.1"},
        **{"qkv": "attn.qkv", "out": "attn.proj", "mlp_0": "mlp.fc1", "mlp_1": "mlp.fc2"},
    }
    return Naming(modules, parts)


def _diffusers_dit(spec: DitSpec) -> Naming:
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
    """The names that a state dict uses."""
    if isinstance(spec, ConditionalUnetSpec):
        return unet_naming(spec)
    if isinstance(spec, AutoencoderSpec):
        return autoencoder_naming(spec, any(name.endswith(".proj_attn.weight") for name in state))
    if isinstance(spec, ClipTextSpec):
        return text_naming(spec)
    assert isinstance(spec, DitSpec)
    return dit_naming(spec)


def without_text_prefix(state: StateDict) -> StateDict:
    """A text encoder's tensors as transformers 5 calls them: no `text_model.`, and no numbered positions."""
    prefix = _TEXT_PREFIX if all(name.startswith(_TEXT_PREFIX) for name in state) else ""
    names = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return {name: tensor for name, tensor in names.items() if name != _POSITION_IDS}
