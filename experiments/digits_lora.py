"""The LoRA that ships beside the digits model: 50 digits that the model never saw, 80 passes over them.

    python -m experiments.digits_lora --config=experiments/configs/digits.py --workdir=W

`dime_jax/shipped_models/digits_lora` is W/adapter.safetensors, with W/split.npz: who the 50 are, and which digits
neither model nor LoRA has seen. On the same machine training gives the same file to the bit.

All was fixed beforehand: 80 passes are the most of `experiments.finetune`, with its learning rate, averages and number
of updates per pass, and rank 8 is the largest power of two whose file stays below 500 kB. No attack, rule or constant
was chosen by it.
"""

import dataclasses
import pathlib

import numpy as np
from ml_collections.config_dict import ConfigDict

from dime_jax import data, training
from dime_jax.loading import model_directory
from experiments.finetune import LEARNING_RATES, tune_images
from experiments.launch import launch
from experiments.study_data import open_study

IMAGES, PASSES, RANK, BATCH = 50, 80, 8, 10


def run(config: ConfigDict, workdir: str | pathlib.Path) -> pathlib.Path:
    """Train the LoRA, or finish that; returns its file, beside which the split is."""
    workdir, base = pathlib.Path(workdir), model_directory.find_model("digits")
    source = open_study(config, workdir).source
    split = cut(data.read_split(base / "split.npz", source), config.seed)
    recipe = dataclasses.replace(
        training.TrainingRecipe(**config.train.recipe),
        steps=PASSES * IMAGES // BATCH,
        batch_size=BATCH,
        learning_rate=LEARNING_RATES["rank-16"],
        warmup_steps=0,
        ema_decay=0.99,
    )
    tune_images(base, workdir, source, split.member, recipe, RANK, recipe.steps)
    data.write_split(workdir / "split.npz", split)
    return workdir / model_directory.ADAPTER


def cut(base: data.Split, seed: int) -> data.Split:
    """Who is trained on, and whom nobody has seen, from the split of the base."""
    unseen = np.random.default_rng(seed).permutation(base.heldout)
    return data.Split(np.sort(unseen[:IMAGES]), np.sort(unseen[IMAGES:]))


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Train it, and say where it is."""
    del config_file
    print(run(config, workdir))


if __name__ == "__main__":
    launch(main, "experiments/configs/digits.py")
