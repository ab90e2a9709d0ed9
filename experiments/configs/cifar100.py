"""CIFAR-100: SecMI's checkpoint and split, every attack of Table 1.

    python -m experiments.attack --config=experiments/configs/cifar100.py --workdir=W \\
      --config.data.source=cifar100:DIR --config.data.split_file=CIFAR100_train_ratio0.5.npz \\
      --config.attack.checkpoint=CKPT.pt

DIR is CIFAR-100 as published (binary or python version), the split and the checkpoint are SecMI's.
`:smoke` makes its own and takes seconds. Queries and time of `:paper`: experiments/README.md.

The paper's Table 1, in per cent (ASR / AUC / TPR@1%FPR): Loss 75.31 / 82.51 / 9.44, PIA 79.14 / 86.34 / 15.26,
SecMI_stat 80.85 / 88.05 / 13.34, SimA 82.40 / 89.40 / 13.64, SimA-MC (10) 83.22 / 90.55 / 19.03, (30) 83.74 / 90.99 /
18.87, DIME 1+1 83.00 / 90.02 / 22.79, 10+1 85.01 / 91.75 / 26.93, 30+1 85.20 / 91.92 / 24.83.
"""

from ml_collections.config_dict import ConfigDict

from experiments.configs.attack_section import new_config, smoke


def get_config(variant: str = "paper") -> ConfigDict:
    """The authors' sizes, grids and seed, or with "smoke" a few attacks on generated files."""
    config = new_config(variant, ("paper", "smoke"), "cifar100:")
    config.data.split = "file"
    config.attack.update(model="converted", halves="as_published", calibration_size=500, test_size=12_500)
    if variant == "smoke":
        smoke(config)
    return config.lock()
