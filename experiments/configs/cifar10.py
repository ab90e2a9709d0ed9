"""CIFAR-10 with SecMI's split: the paper's attack, the training behind it, and a study that fits a laptop.

    python -m experiments.attack --config=experiments/configs/cifar10.py --workdir=W \\
      --config.data.source=cifar10:DIR --config.data.split_file=CIFAR10_train_ratio0.5.npz \\
      --config.attack.checkpoint=CKPT.pt

DIR is CIFAR-10 as published (binary or python version), the split and the checkpoint are SecMI's. To train such a
checkpoint instead (an accelerator's work), run `experiments.train` with the same config and workdir first, and the
attack with `--config.attack.model=trained`. `:smoke` makes its own files and takes seconds.

`--config.attack.reference=hf:google/ddpm-cifar10-32` asks that model the same and takes its answers out of every score.
It was trained on members and held-out images alike, and is a fair reference for that reason.

`:laptop` trains a small U-Net on 200 of SecMI's members and attacks it with 200 of the held-out images:

    python -m experiments.train --config=experiments/configs/cifar10.py:laptop --workdir=W \\
      --config.data.source=cifar10:DIR --config.data.split_file=CIFAR10_train_ratio0.5.npz
    python -m experiments.attack (the same)

Two cores train about 40 images a second, so 3,000 updates of batch 16 (240 passes over the members) take 20 minutes
when nothing else runs, and the attack a few more. More updates (`--config.train.recipe.steps`, the run continues)
remember more. docs/RESULTS.md has what came out.

`:overnight` trains another on 500 members, 301 passes over each in 9,400 updates, and tests on 300 + 300 images. Its
network is narrow where images are large and wide where they are small: it holds more than twice the weights of
`:laptop`'s and costs a third less, about 55 images a second on one core and 45 minutes. Models of several seeds
(`--seeds=1,2,3`) share no image with each other or with `:laptop`. `experiments.memorisation` shows when memorisation
becomes visible in either.

The paper's Table 1, in per cent (ASR / AUC / TPR@1%FPR): DIME 1+1 84.18 / 91.50.
"""

from ml_collections.config_dict import ConfigDict

from experiments.configs.attack_section import new_config, smoke
from experiments.configs.train_section import reference_section, small_unet, smoke_training, train_section


def get_config(variant: str = "paper") -> ConfigDict:
    """The authors' sizes, grids and seed; "laptop" and "overnight", studies of small models; or "smoke"."""
    config = new_config(variant, ("paper", "laptop", "overnight", "smoke"), "cifar10:")
    config.data.split = "file"
    config.train = train_section()
    config.train.recipe.update(steps=800_000, ema_decay=0.9999)  # SecMI's
    config.attack.update(model="converted", halves="as_published", calibration_size=500, test_size=12_500)

    if variant in ("laptop", "overnight"):
        config.data.update(max_members=200, max_heldout=200)
        config.train.architecture = small_unet((32, 64, 64))
        config.train.recipe.update(steps=3000, batch_size=16, learning_rate=1e-3)
        config.train.recipe.update(warmup_steps=200, ema_decay=0.995, flips=False)
        config.train.update(log_every=50, save_every=250, sample_every=1000, snapshot_every=250)
        config.attack.update(model="trained", halves="by_id", calibration_size=60, test_size=100)
        config.attack.grids = ConfigDict({"all": {"t": (30, 70), "gamma": (0.1, 0.4)}})
    if variant == "overnight":
        config.data.update(reserved=200, max_members=500, max_heldout=500)
        config.train.architecture = small_unet((16, 32, 64, 128))
        config.train.recipe.steps = 9400
        config.train.snapshot_every = 1000
        config.attack.budgets = (2, 11)
        config.attack.calibration_share = 0.4  # 200 members of 500, and 300 to test
        config.attack.update(calibration_size=None, test_size=None)
        config.attack.grids = ConfigDict({"all": {"t": (20, 50, 100, 150, 200, 300), "gamma": (0.1, 0.4)}})
        config.reference = reference_section(500, 3000, (8, 16, 32, 64))
    if variant == "smoke":
        smoke(config)
        smoke_training(config)
    return config.lock()
