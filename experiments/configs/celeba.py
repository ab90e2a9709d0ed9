"""CelebA at 32 x 32: a DDPM trained on 30,000 images by the authors' recipe, then every attack of Table 1.

    python -m experiments.train --config=experiments/configs/celeba.py --workdir=W --config.data.source=celeba:DIR
    python -m experiments.attack --config=experiments/configs/celeba.py --workdir=W --config.data.source=celeba:DIR

DIR is CelebA as published: img_align_celeba/, identity_CelebA.txt, list_eval_partition.txt. The split is the authors':
30,000 + 30,000 of the 162,770 training images by a permutation with seed 0. SimA's, of the first 60,000, is
`--config.data.split=sima_celeba --config.data.split_seed=42`. One person's photos may lie on both sides of either;
`--config.attack.halves=by_id` at least keeps them in one half. The paper says 60,000 training steps, the default here;
its authors' README says 320,000 (`--config.train.recipe.steps=320000`).
Expects an accelerator; queries and time of the attack: experiments/README.md. `:smoke` makes its own data and
checkpoint and takes seconds.

The paper's Table 1, in per cent (ASR / AUC / TPR@1%FPR): Loss 67.32 / 73.50 / 5.67, PIA 72.63 / 80.06 / 9.75,
SecMI_stat 71.08 / 78.03 / 8.64, SimA 71.09 / 78.21 / 8.91, SimA-MC (10) 74.33 / 82.05 / 9.91, (30) 75.03 / 82.96 /
12.91, DIME 1+1 73.54 / 81.02 / 11.63, 10+1 76.67 / 84.55 / 14.08, 30+1 78.14 / 86.31 / 18.78.
"""

from ml_collections.config_dict import ConfigDict

from experiments.configs.attack_section import new_config, smoke
from experiments.configs.train_section import smoke_training, train_section


def get_config(variant: str = "paper") -> ConfigDict:
    """The authors' recipe, sizes, grids and seed, or with "smoke" a few updates and attacks on generated files."""
    config = new_config(variant, ("paper", "smoke"), "celeba:")
    config.data.split_size = 30_000
    config.train = train_section()
    config.train.recipe.steps = 60_000
    config.attack.update(halves="as_published", calibration_size=500, test_size=12_500)
    if variant == "smoke":
        smoke(config)
        smoke_training(config)
        config.data.split_size = 30
        config.attack.halves = "by_id"
    return config.lock()
