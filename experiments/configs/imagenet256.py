"""ImageNet at 256 x 256: Guided Diffusion's class-conditional model, ImageNet against ImageNetV2, Table 2.

    python -m experiments.attack --config=experiments/configs/imagenet256.py --workdir=W \\
      --config.data.source=imagenet:DIR --config.data.heldout=imagenetv2:DIR \\
      --config.attack.checkpoint=256x256_diffusion.pt

The first DIR holds folders by wnid, the second ImageNetV2's folders 0 ... 999. 3 images per class from each.

Two warnings about this table. ImageNetV2 was collected years after ImageNet, so members and held-out images differ
before any model is asked: a model-free baseline belongs beside it. And the published runs sorted ImageNetV2's folder
names as strings, which labels 12 of 1000 classes right: held-out images met a wrong class condition, members the right
one. Labels are right here; `:as_published` scrambles them as the published runs did, to reproduce their figures.

Images go through the pipeline of the published attacks (bicubic to 256, centre crop); the model's own training pipeline
is `--config.attack.transform=imagenet256_guided`. Expects an accelerator; queries and time: experiments/README.md.
`:smoke` makes its own data and checkpoint and takes seconds.

The paper's Table 2, in per cent (ASR / AUC / TPR@1%FPR), with scrambled labels: Loss 74.62 / 80.64 / 1.60, PIA 67.56 /
69.88 / 1.07, SecMI_stat 66.67 / 50.59 / 0.93, SimA 83.84 / 86.35 / 7.20, SimA-MC (10) 84.13 / 89.41 / 9.33, (30)
82.58 / 87.45 / 1.87, DIME 1+1 86.45 / 92.50 / 14.27, 10+1 86.96 / 92.58 / 15.27, 30+1 87.33 / 92.65 / 15.27.
"""

from ml_collections.config_dict import ConfigDict

from dime_jax.attacks import attack_names
from dime_jax.core.denoiser import OWN
from experiments.configs.attack_section import new_config, smoke

_BASELINE_TIMES = tuple(range(0, 191, 10))
_DIME_TIMES = (10, 50, 90, 130, 170, 190)
_GRIDS = {
    **{name: {"t": _BASELINE_TIMES} for name in ("loss", "pia_l2", "pia_l4", "pian", "sima_l4")},
    **{name: {"t": (10, 50, 90, 130, 190)} for name in ("loss_mc", "sima_mc_norms", "sima_mc_vector")},
    "secmi": {"t": (20, 50, 80, 110, 140, 170, 190), "k": (15,)},
}


def get_config(variant: str = "paper") -> ConfigDict:
    """The authors' sizes, grids and seed; "as_published" with their labels too; "smoke" on generated files."""
    config = new_config(variant, ("paper", "as_published", "smoke"), "imagenet:")
    config.seed = 2025
    config.data.update(heldout="imagenetv2:", split="per_class", split_size=3, split_seed=2025)
    config.attack.update(model="converted", halves="as_published", calibration_size=1_500, test_size=1_500)
    config.attack.grids = ConfigDict({name: _GRIDS.get(name, {"t": _DIME_TIMES}) for name in attack_names((OWN,))})
    if variant == "as_published":
        config.data.heldout_options.labels = "as_published"
    if variant == "smoke":
        smoke(config)
        config.attack.names = ("loss", "dime")
    return config.lock()
