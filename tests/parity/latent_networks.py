"""Small latent networks with random weights, made by diffusers and transformers, for parity tests and golden files.

Weights and biases of norms are away from 1 and 0, and nothing is left at its zero initialisation.
"""

import json
import string

import diffusers
import torch
import transformers

# Version 1: heads by number, convolutions around the transformers.
UNET_1 = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "cross_attention_dim": 24,
    "norm_num_groups": 4,
}
# Version 2: heads by level, matrices around the transformers; cross-attention on different levels down and up.
UNET_2 = {
    "sample_size": 8,
    "block_out_channels": (32, 64, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 2,
    "attention_head_dim": (2, 4, 8),
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "norm_eps": 1e-4,
    "use_linear_projection": True,
    "upcast_attention": True,
    "transformer_layers_per_block": 2,
    "time_embedding_dim": 48,
    "downsample_padding": 0,
    "freq_shift": 1,
    "flip_sin_to_cos": False,
}
# All levels of Stable Diffusion 1, narrower.
UNET_MID = {
    "sample_size": 8,
    "block_out_channels": (64, 128, 256, 256),
    "attention_head_dim": 8,
    "cross_attention_dim": 192,
}
AUTOENCODER_1 = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 16,
}
AUTOENCODER_2 = {
    "block_out_channels": (32, 32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 2,
    "norm_num_groups": 16,
    "latent_channels": 6,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
AUTOENCODER_MID = {
    "block_out_channels": (32, 64, 128, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
TEXT_1 = {
    "vocab_size": 99,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 13,
    "hidden_act": "quick_gelu",
    "bos_token_id": 97,
    "eos_token_id": 98,
}
TEXT_2 = {**TEXT_1, "hidden_size": 32, "num_attention_heads": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-4}
TEXT_MID = {
    **{"vocab_size": 5000, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4},
    **{"num_attention_heads": 6, "max_position_embeddings": 77, "hidden_act": "quick_gelu"},
    **{"bos_token_id": 4998, "eos_token_id": 4999},
}
DIT_1 = {
    **{"sample_size": 8, "num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 8, "out_channels": 8},
    **{"num_embeds_ada_norm": 10},
}
DIT_MID = {
    **{"sample_size": 16, "num_layers": 4, "num_attention_heads": 6, "attention_head_dim": 32, "out_channels": 8},
    **{"num_embeds_ada_norm": 100, "norm_eps": 1e-4},
}


def randomised(network):
    """The network with weights that are nowhere degenerate, such that signals neither vanish nor explode."""
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(noise * (parameter.shape[1:].numel()) ** -0.5)
            else:
                parameter.add_(0.2 * noise)
    return network.eval()


def unet(config):
    torch.manual_seed(0)
    return randomised(diffusers.UNet2DConditionModel(**config))


def autoencoder(config):
    torch.manual_seed(1)
    return randomised(diffusers.AutoencoderKL(**config))


def text_encoder(config):
    torch.manual_seed(2)
    return randomised(transformers.CLIPTextModel(transformers.CLIPTextConfig(**config)))


def dit(config):
    torch.manual_seed(3)
    return randomised(diffusers.DiTTransformer2DModel(**config))


def vocabulary():
    """Letters and digits, within and at the end of a word: captions that differ have tokens that differ."""
    letters = string.ascii_lowercase + string.digits
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    return {token: number for number, token in enumerate(tokens)} | {"<|startoftext|>": 97, "<|endoftext|>": 98}


def save_pipeline(folder, network, vae, text=None, scheduler=None, **options):
    """A pipeline folder as diffusers lays it out; `options` of `save_pretrained`."""
    name = "unet" if isinstance(network, diffusers.UNet2DConditionModel) else "transformer"
    network.save_pretrained(folder / name, **options)
    if vae is not None:
        vae.save_pretrained(folder / "vae", **options)
    if text is not None:
        text.save_pretrained(folder / "text_encoder", **options)
        (folder / "tokenizer").mkdir(parents=True)
        (folder / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary()))
        (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    (scheduler or stable_diffusion_scheduler()).save_pretrained(folder / "scheduler")
    return folder


def stable_diffusion_scheduler(**options):
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return diffusers.PNDMScheduler(**{**betas, **options})


def original_dit(state):
    """A DiT's tensors, from diffusers, under the names of its authors' code; the blocks' embedders must be copies."""
    names = {
        "pos_embed.proj": "x_embedder.proj",
        "proj_out_1": "final_layer.adaLN_modulation.1",
        "proj_out_2": "final_layer.linear",
        "transformer_blocks.0.norm1.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "transformer_blocks.0.norm1.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "transformer_blocks.0.norm1.emb.class_embedder.embedding_table": "y_embedder.embedding_table",
    }
    parts = {"norm1.linear": "adaLN_modulation.1", "attn1.to_out.0": "attn.proj"}
    parts |= {"ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2"}
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks."))
    for layer in range(layers):
        names |= {f"transformer_blocks.{layer}.{old}": f"blocks.{layer}.{new}" for old, new in parts.items()}
    original = {
        f"{new}.{leaf}": state[f"{old}.{leaf}"]
        for old, new in names.items()
        for leaf in ("weight", "bias")
        if f"{old}.{leaf}" in state
    }
    for layer in range(layers):
        for leaf in ("weight", "bias"):
            maps = [state[f"transformer_blocks.{layer}.attn1.to_{part}.{leaf}"] for part in "qkv"]
            original[f"blocks.{layer}.attn.qkv.{leaf}"] = torch.cat(maps)
    return original
