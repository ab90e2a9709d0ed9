"""Does DP-SGD stop the attacks? CelebA, 1000 images: a network without privacy and at ε = 1, 4, 10, δ = 1e-5.

    python -m experiments.dp_defense --config=experiments/configs/dp_celeba.py --workdir=W \\
      --config.data.source=celeba:DIR

DIR is CelebA as published: img_align_celeba/, identity_CelebA.txt, list_eval_partition.txt. 1000 members and 1000
held-out images, no person on both sides and at most two photos of each; 500 epochs; 500 + 500 images of the test half.
Expects an accelerator: four trainings of the 35.7M-parameter U-Net over 7,812 batches of 64.

All four arms share one recipe and one sequence of batches, and differ in clipping and noise. The authors' arms differ
in more, and `:as_published` is theirs: without privacy 15,625 updates of batch 32 with flips, bfloat16, 5,000 updates
of warm-up, gradients clipped to 1 and averaged weights; under DP-SGD the same number with none of these. `:smoke` makes
its own data and takes seconds.

The paper's Table 3, in per cent (ASR / AUC / TPR@1%FPR): without privacy Loss 69.0 / 75.4 / 10.20, PIA 75.3 / 82.9 /
15.40, SecMI_stat 71.0 / 77.7 / 13.60, SimA 74.5 / 82.7 / 16.20, DIME 10+1 79.8 / 86.9 / 22.40; under DP-SGD every AUC
lies between 48.1 and 52.9 at each ε.
"""

from ml_collections.config_dict import ConfigDict

from experiments.configs.attack_section import new_config, smoke
from experiments.configs.dp_section import dp_section
from experiments.configs.train_section import smoke_training, train_section


def get_config(variant: str = "paper") -> ConfigDict:
    """One recipe for all arms; "as_published", the authors' two; or "smoke"."""
    config = new_config(variant, ("paper", "as_published", "smoke"), "celeba:")
    config.data.update(split="identity", split_size=1000)

    config.train = train_section()
    config.train.recipe.update(batch_size=64, steps=7812, warmup_steps=500, flips=False)
    config.dp = dp_section(steps=7812)
    config.attack.update(halves="as_published", calibration_size=500, test_size=500, budgets=(2, 11))

    if variant == "as_published":
        config.train.recipe.update(batch_size=32, steps=15_625, warmup_steps=0, ema_decay=0.0, clip_norm=1e9)
        config.dp.steps = 15_625
        config.dp.vanilla.batches = "shuffled"
        config.dp.vanilla.recipe.update(warmup_steps=5000, ema_decay=0.999, clip_norm=1.0)
        config.dp.vanilla.recipe.update(flips=True, compute_dtype="bfloat16")
    if variant == "smoke":
        smoke(config)
        smoke_training(config)
        config.data.split_size = 30
        config.dp.update(steps=config.train.recipe.steps, epsilons=(1.0,))
        config.attack.update(model="trained", halves="by_id")
    return config.lock()
