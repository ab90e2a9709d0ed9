"""STL10-U at 32 x 32: a DDPM trained on 10,000 images by the authors' recipe, then every attack of Table 1.

    python -m experiments.train --config=experiments/configs/stl10u.py --workdir=W --config.data.source=stl10u:DIR
    python -m experiments.attack --config=experiments/configs/stl10u.py --workdir=W --config.data.source=stl10u:DIR

DIR holds unlabeled_X.bin. The split is the authors': 10,000 + 10,000 by a permutation with seed 0. The paper says
18,000 training steps, the default here; its authors' README says 320,000 (`--config.train.recipe.steps=320000`).
Expects an accelerator; queries and time of the attack: experiments/README.md. `:smoke` makes its own data and
checkpoint and takes seconds.

The paper's Table 1, in per cent (ASR / AUC / TPR@1%FPR): Loss 93.85 / 97.95 / 52.14, PIA 95.28 / 98.77 / 70.54,
SecMI_stat 93.98 / 98.20 / 57.76, SimA 95.42 / 98.61 / 62.68, SimA-MC (10) 97.25 / 99.31 / 80.92, (30) 96.74 / 99.23 /
79.84, DIME 1+1 96.87 / 99.39 / 86.16, 10+1 98.65 / 99.78 / 97.78 (its text says 97.44), 30+1 98.80 / 99.80 / 98.00.
"""

from ml_collections.config_dict import ConfigDict

from experiments.configs.attack_section import new_config, smoke
from experiments.configs.train_section import smoke_training, train_section


def get_config(variant: str = "paper") -> ConfigDict:
    """The authors' recipe, sizes, grids and seed, or with "smoke" a few updates and attacks on generated files."""
    config = new_config(variant, ("paper", "smoke"), "stl10u:")
    config.data.split_size = 10_000
    config.train = train_section()
    config.train.recipe.steps = 18_000
    config.attack.update(halves="as_published", calibration_size=500, test_size=5_000)
    if variant == "smoke":
        smoke(config)
        smoke_training(config)
        config.data.split_size = 30
    return config.lock()
