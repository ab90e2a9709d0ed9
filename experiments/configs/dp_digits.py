"""Does DP-SGD stop the attacks? The study of `dp_celeba` on scikit-learn's digits, for two CPU cores.

    python -m experiments.dp_defense --config=experiments/configs/dp_digits.py --workdir=W

A small U-Net is trained on 400 digits without privacy and at ε = 1, 4, 10, δ = 1e-5, by one recipe and on one sequence
of batches, and attacked with 400 others. `:smoke` takes seconds.
"""

from ml_collections.config_dict import ConfigDict

from dime_jax._util import validate
from experiments.configs.attack_section import attack_section, data_section
from experiments.configs.dp_section import dp_section
from experiments.configs.train_section import small_unet, smoke_training, train_section


def get_config(variant: str = "laptop") -> ConfigDict:
    """The study, or with "smoke" a tiny network and a few updates."""
    validate.check_choice(variant, ("laptop", "smoke"), "variant")
    config = ConfigDict()
    config.seed = 0
    config.data = data_section("digits")
    config.data.split_size = 400

    config.train = train_section()
    config.train.image_shape = (8, 8, 1)
    config.train.architecture = small_unet((16, 32))
    config.train.recipe.steps = 1500
    config.train.recipe.batch_size = 64
    config.train.recipe.learning_rate = 1e-3
    config.train.recipe.warmup_steps = 100
    config.train.recipe.ema_decay = 0.99
    config.train.recipe.flips = False
    config.train.log_every = 50
    config.train.save_every = 250
    config.train.sample_every = 0
    config.dp = dp_section(steps=1500)

    config.attack = attack_section()
    config.attack.budgets = (2, 11)
    config.attack.grids = ConfigDict({"all": {"t": (10, 30, 50, 75, 120), "gamma": (0.1, 0.4)}})

    if variant == "smoke":
        config.data.split_size = 60
        smoke_training(config)
        config.train.recipe.batch_size = 16
        config.train.snapshot_every = 0
        config.dp.steps = 4
        config.dp.epsilons = (0.2, 0.4)
        config.attack.names = ("loss", "pia_l2", "dime")
        config.attack.budgets = (2,)
        config.attack.grids = ConfigDict({"all": {"t": (100,), "gamma": (0.4,)}})
    return config.lock()
