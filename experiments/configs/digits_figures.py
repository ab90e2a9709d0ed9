"""What `experiments.figures` asks the shipped digits model: all attacks over many timesteps, for figures over t and q.

python -m experiments.figures --output=out/figures
"""

from ml_collections.config_dict import ConfigDict

from experiments.configs.attack_section import new_config


def get_config(variant: str = "laptop") -> ConfigDict:
    """The shipped model on the split it was trained with, or with "smoke" very little of it."""
    config = new_config(variant, ("laptop", "smoke"), "digits")
    config.data.split_size = 898
    config.attack.update(model="digits", image_shape=(8, 8, 1), calibration_size=100, test_size=300)
    config.attack.grids = ConfigDict({"all": {"t": (10, 30, 70, 120, 200, 300), "gamma": (0.1, 0.4)}})

    config.figures = ConfigDict()
    config.figures.p = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, float("inf"))
    config.figures.norm_timesteps = (10, 20, 30, 50, 70, 100, 150, 200)
    config.figures.gap_timesteps = (5, 10, 20, 40, 70, 100, 150, 200, 300, 400)
    config.figures.gap_images = 64  # members, and as many held-out images

    if variant == "smoke":
        config.attack.update(names=("loss", "pia_l4", "sima_l4", "dime"), budgets=(2,))
        config.attack.update(calibration_size=16, test_size=16)
        config.attack.grids = ConfigDict({"all": {"t": (30, 100), "gamma": (0.1,)}})
        config.figures.update(p=(2.0, float("inf")), norm_timesteps=(30, 100), gap_timesteps=(30, 300), gap_images=4)
    return config.lock()
