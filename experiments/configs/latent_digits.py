"""A tiny Stable Diffusion, trained on digits with captions and attacked through its folder as diffusers would write it.

    python -m experiments.latent_study --config=experiments/configs/latent_digits.py --workdir=W

The autoencoder learns from all digits, the U-Net from the members alone, each with its caption ("the digit three"); the
text encoder keeps its random weights, as Stable Diffusion's keeps those it came with. "laptop" trains the U-Net for
2,000 updates, 213 passes over its images, "smoke" for 600. "finetune" and "lora" are bases of half of the digits, for
`experiments.latent_finetune` and `experiments.latent_lora`; they see each image about 107 times.
"""

from ml_collections.config_dict import ConfigDict

from dime_jax.attacks import attack_names
from dime_jax.attacks.loss_level import NAME
from dime_jax.core.denoiser import TEXT_CONDITIONS
from experiments.configs.attack_section import new_config

# The kept study was made before the rule for audits without known members.
_NAMES = tuple(name for name in attack_names(TEXT_CONDITIONS) if name != NAME)


def get_config(variant: str = "laptop") -> ConfigDict:
    """All attacks on a model that remembers, or with "smoke" a few on one that has barely begun to; or a base."""
    config = new_config(variant, ("laptop", "smoke", "finetune", "lora"), "folder:DIR")  # WORKDIR/members
    config.data.update(heldout="folder:DIR", split="joined")  # WORKDIR/heldout
    config.train = ConfigDict()  # fields of `experiments.latent_study.Size`
    config.train.update(images=300, autoencoder_steps=1500, unet_steps=2000, width=64)
    config.attack.model = "pipeline"  # WORKDIR/pipeline
    config.attack.update(names=_NAMES, budgets=(2, 11))
    config.attack.grids.all = ConfigDict({"t": (10, 30, 50, 100, 150, 200, 300), "gamma": (0.1, 0.4)})
    config.attack.grids.clid = ConfigDict({"t": (50, 195, 345, 495), "step": (10,)})

    if variant in ("finetune", "lora"):
        config.train.update(images=898, unet_steps=3000, width=64 if variant == "finetune" else 32)
    if variant == "smoke":
        config.train.update(images=70, autoencoder_steps=30, unet_steps=600, width=16)
        config.attack.update(names=("sima_l4", "dime", "clid"), budgets=(2,))
        config.attack.grids.all.update(t=(70,), gamma=(0.1,))
        config.attack.grids.clid.t = (495,)
    return config.lock()
