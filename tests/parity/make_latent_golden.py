"""Makes tests/golden/latent: tiny latent models saved by diffusers and transformers, and what these compute with them.

python tests/parity/make_latent_golden.py        # needs torch, diffusers and transformers

stable_diffusion/  a pipeline folder with cross-attention
dit/               a pipeline folder with classes, and without an autoencoder: it is the other's
dit_original.pt    the same network in its authors' layout
expected.npz       inputs and outputs: NHWC, float32; the outputs computed in float64
"""

import json
import shutil
from pathlib import Path

import diffusers
import latent_networks as networks
import numpy as np
import torch

GOLDEN = Path(__file__).parents[1] / "golden" / "latent"
UNET = {**networks.UNET_1, "block_out_channels": (8, 16)}
AUTOENCODER = {**networks.AUTOENCODER_1, "block_out_channels": (8, 16), "norm_num_groups": 4}
DIT = {
    **{"sample_size": 4, "num_layers": 1, "num_attention_heads": 3, "attention_head_dim": 8, "out_channels": 8},
    **{"num_embeds_ada_norm": 5, "norm_eps": 1e-6},
}


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with torch.no_grad():
        arrays = {**stable_diffusion(), **dit()}
    np.savez(GOLDEN / "expected.npz", **{name: nhwc(array) for name, array in arrays.items()})
    for file in GOLDEN.rglob("*"):
        if file.name == "config.json" or file.name == "scheduler_config.json":
            scrub(file)


def nhwc(array):
    array = array.float().numpy() if array.is_floating_point() else array.int().numpy()
    return np.moveaxis(array, 1, -1) if array.ndim == 4 else array


def scrub(file):
    """The same config without the place that it was made at."""
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "_name_or_path"}
    file.write_text(json.dumps(config, indent=1) + "\n")


def stable_diffusion():
    unet, vae = networks.unet(UNET), networks.autoencoder(AUTOENCODER)
    text = networks.text_encoder(networks.TEXT_1)
    folder = networks.save_pipeline(GOLDEN / "stable_diffusion", unet, vae, text)
    parts = ["unet", "vae", "scheduler"]
    index = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": diffusers.__version__}
    index |= {part: ["diffusers", "X"] for part in parts}
    index |= {"text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    index |= {"image_encoder": [None, None], "safety_checker": [None, None], "requires_safety_checker": True}
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
    unet, vae, text = unet.double(), vae.double(), text.double()
    tokens = torch.randint(0, 99, (2, 13))
    embeddings = text(tokens).last_hidden_state
    x, t = torch.randn(2, 4, 8, 8).double(), torch.tensor([3, 900])
    images = (torch.rand(2, 3, 16, 16) * 2 - 1).double()
    latents = vae.encode(images).latent_dist.mean * vae.config.scaling_factor
    outputs = {
        **{"tokens": tokens, "embeddings": embeddings, "x": x, "t": t, "eps": unet(x, t, embeddings).sample},
        **{"images": images, "latents": latents, "decoded": vae.decode(latents / vae.config.scaling_factor).sample},
    }
    return {**outputs, **faint(unet, vae, text, outputs)}


def faint(unet, vae, text, inputs):
    """Outputs where all that is normalised is small, so that the eps of every norm shows: weights of 1/16."""
    for network in (unet, vae, text):
        for name, parameter in network.named_parameters():
            parameter.mul_(1 if "norm" in name else 2**-4)
    return {
        "faint_embeddings": text(inputs["tokens"]).last_hidden_state,
        "faint_eps": unet(inputs["x"], inputs["t"], inputs["embeddings"]).sample,
        "faint_mean": vae.encode(inputs["images"]).latent_dist.mean,
        "faint_decoded": vae.decode(inputs["latents"]).sample,
    }


def dit():
    network = networks.dit(DIT)
    networks.save_pipeline(GOLDEN / "dit", network, None, scheduler=diffusers.DDIMScheduler())
    original = networks.original_dit(network.state_dict())
    original["pos_embed"] = network.pos_embed.pos_embed
    torch.save(original, GOLDEN / "dit_original.pt")
    network = network.double()
    x, t, labels = torch.randn(2, 4, 4, 4).double(), torch.tensor([3, 900]), torch.tensor([1, 5])
    outputs = {"dit_x": x, "dit_t": t, "dit_labels": labels, "dit_eps": network(x, t, labels).sample[:, :4]}
    # the authors' frequencies, 10000^(-i / 128), in place of diffusers' 10000^(-i / 127)
    for block in network.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    return {**outputs, "dit_original_eps": network(x, t, labels).sample[:, :4]}


if __name__ == "__main__":
    main()
