"""A small U-Net trained on a random half of scikit-learn's digits: the model that ships with the package.

    python -m experiments.train --config=experiments/configs/digits.py --workdir=W
    python -m experiments.attack --config=experiments/configs/digits.py --workdir=W

`dime_jax/shipped_models/digits` is W/model, with W/attack/results.json beside it as metrics.json. On the same machine
training gives the same weights to the bit.

It was trained until the example shows what an audit is for: 9,000 updates, in which it saw each of its 898 members 641
times, are the first at which the rule of `experiments.stopping`, written down beforehand, was satisfied. What an
attack achieves on it says little about models that were trained for their own sake.

AUC on the test half, in per cent: DIME central 2 96.2, PIA l4 95.8, DIME 10+1 95.7, SimA l4 95.6, DIME bands 95.5,
DIME 1+1 95.4, SecMI 93.8, SimA-MC (10) of the mean vector 93.5 and of norms 71.2, Loss 77.0, crowding alone 63.8.
"""

from ml_collections.config_dict import ConfigDict

from experiments.configs.attack_section import new_config
from experiments.configs.train_section import reference_section, small_unet, smoke_training, train_section


def get_config(variant: str = "laptop") -> ConfigDict:
    """The shipped model, or with "smoke" a tiny network, a few updates and a few attacks."""
    config = new_config(variant, ("laptop", "smoke"), "digits")
    config.data.split_size = 898

    config.train = train_section()
    config.train.architecture = small_unet((32, 64))
    config.train.recipe.update(steps=9000, batch_size=64, learning_rate=1e-3, warmup_steps=200, flips=False)
    config.train.update(image_shape=(8, 8, 1), log_every=50, save_every=250, sample_every=1000, snapshot_every=1000)

    config.attack.update(image_shape=(8, 8, 1), calibration_size=200, budgets=(2, 11))
    config.attack.grids = ConfigDict({"all": {"t": (10, 30, 50, 70, 100, 150, 200), "gamma": (0.1, 0.4)}})

    config.reference = reference_section(400, 3000, (16, 32))
    if variant == "smoke":
        smoke_training(config)
        config.train.sample_every = 2
        config.reference.update(images=40, steps=4)
        config.attack.update(names=("loss", "pia_l4", "dime"), budgets=(2,), calibration_size=30, test_size=40)
        config.attack.grids = ConfigDict({"all": {"t": (100,)}})
    return config.lock()
