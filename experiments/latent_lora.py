"""A tiny Stable Diffusion and a LoRA for it, both trained: what tests of audits beside a base ask.

    python -m experiments.latent_lora --config=experiments/configs/latent_digits.py:lora --workdir=W

WORKDIR/pipeline                      trained on half of the digits, saved as diffusers saves a model, in float16
WORKDIR/lora.safetensors              of rank 8: saw 40 other digits with their captions 60 times each
WORKDIR/lora_candidates, lora_heldout 20 of the 40 and 20 that nobody saw; 150 more that nobody saw

The first two are kept in tests/golden/latent_lora.
"""

import dataclasses
import pathlib

import numpy as np
import safetensors.numpy
from ml_collections.config_dict import ConfigDict

from dime_jax import data, training
from experiments import latent_finetune, latent_study
from experiments.latent_study import Size, write_images
from experiments.launch import launch

BASE, IMAGES, PASSES, RANK = 898, 40, 60, 8
ASKED, HELDOUT = 20, 150
RECIPE = training.TrainingRecipe(steps=PASSES * IMAGES // 8, batch_size=8, learning_rate=1e-3)


def run(config: ConfigDict, workdir: str | pathlib.Path) -> pathlib.Path:
    """Train base and LoRA, or finish that; returns the LoRA's file."""
    workdir = pathlib.Path(workdir)
    file = workdir / "lora.safetensors"
    latent_study.make(workdir, Size(**config.train), config.seed)
    for weights in (workdir / "pipeline").rglob("*.safetensors"):
        halve(weights, weights)
    write_folders(workdir, config.seed)
    model, directory = latent_finetune.convert(workdir), workdir / "lora"
    source, recipe = data.open_source(f"folder:{workdir / 'lora_tuned'}"), dataclasses.replace(RECIPE, seed=config.seed)
    latent_finetune.tune_unet(model, directory, source, np.arange(IMAGES), recipe, RANK, recipe.steps)
    halve(directory / "snapshots" / f"{recipe.steps}.safetensors", file)
    return file


def halve(weights: pathlib.Path, to: pathlib.Path) -> None:
    """Store weights in float16."""
    state = safetensors.numpy.load_file(weights)
    safetensors.numpy.save_file({name: tensor.astype(np.float16) for name, tensor in state.items()}, to)


def write_folders(output: pathlib.Path, seed: int = 0) -> None:
    """Save the images of the LoRA, of which the base of this seed saw none."""
    digits = latent_study.all_digits()
    unseen = latent_study.split_order(digits, seed)[BASE:]
    tuned, rest = unseen[:IMAGES], unseen[IMAGES:]
    write_images(output / "lora_tuned", digits.part(tuned))
    write_images(output / "lora_candidates", digits.part(np.concatenate([tuned[:ASKED], rest[:ASKED]])))
    write_images(output / "lora_heldout", digits.part(rest[ASKED:][:HELDOUT]))


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Train them, and say where the LoRA is."""
    del config_file
    print(run(config, workdir))


if __name__ == "__main__":
    launch(main, "experiments/configs/latent_digits.py")
