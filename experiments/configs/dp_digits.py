"""Does DP-SGD stop the attacks? The study of `dp_celeba` on scikit-learn's digits, for two CPU cores.

    python -m experiments.dp_defense --config=experiments/configs/dp_digits.py --workdir=W

A small U-Net is trained on 400 digits without privacy and at ε = 1, 4, 10, δ = 1e-5, by one recipe and on one sequence
of batches, and attacked with 400 others. `:smoke` takes seconds.
"""

from ml_collections.config_dict import ConfigDict

from experiments.configs.attack_section import new_config
from experiments.configs.dp_section import dp_section
from experiments.configs.train_section import small_unet, smoke_training, train_section


def get_config(variant: str = "laptop") -> ConfigDict:
    """The study, or with "smoke" a tiny network and a few updates."""
    config = new_config(variant, ("laptop", "smoke"), "digits")
    config.data.split_size = 400

    config.train = train_section()
    config.train.architecture = small_unet((16, 32))
    config.train.recipe.update(steps=1500, batch_size=64, learning_rate=1e-3)
    config.train.recipe.update(warmup_steps=100, ema_decay=0.99, flips=False)
    config.train.update(image_shape=(8, 8, 1), log_every=50, save_every=250, sample_every=0)
    config.dp = dp_section(steps=1500)

    config.attack.budgets = (2, 11)
    config.attack.grids = ConfigDict({"all": {"t": (10, 30, 50, 75, 120), "gamma": (0.1, 0.4)}})

    if variant == "smoke":
        config.data.split_size = 60
        smoke_training(config)
        config.train.recipe.batch_size = 16
        config.train.snapshot_every = 0
        config.dp.update(steps=4, epsilons=(0.2, 0.4))
        config.attack.update(names=("loss", "pia_l2", "dime"), budgets=(2,))
        config.attack.grids = ConfigDict({"all": {"t": (100,), "gamma": (0.4,)}})
    return config.lock()
