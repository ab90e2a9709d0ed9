"""Every attack on the closed-form denoiser of half of scikit-learn's digits.

    python -m experiments.attack --config=experiments/configs/digits_attack.py --workdir=out/digits_attack

Below t = 300 the ideal denoiser knows its digits perfectly and every attack is right; hence these timesteps.
"""

from ml_collections.config_dict import ConfigDict, placeholder


def get_config(variant: str = "") -> ConfigDict:
    """All attacks, or with "smoke" a few of them on a tiny U-Net of random weights that it makes itself."""
    if variant not in ("", "smoke"):
        raise ValueError(f"unknown variant {variant!r}; expected one of '', smoke")
    config = ConfigDict()
    config.seed = 0

    config.attack = ConfigDict()
    config.attack.model = "closed_form"
    config.attack.image_shape = (8, 8, 1)
    config.attack.source = "digits"
    config.attack.split_file = ""
    config.attack.split_size = 898
    config.attack.halves = "by_id"
    config.attack.calibration_size = placeholder(int)
    config.attack.test_size = placeholder(int)
    config.attack.names = ()  # all
    config.attack.profile = "quick"
    config.attack.tiers = (1, 10)
    config.attack.timesteps = (300, 400, 500)  # instead of the profile's; () keeps those
    config.attack.micro_batch = placeholder(int)
    config.attack.max_queries = placeholder(int)
    config.attack.max_queries_per_image = placeholder(int)

    if variant == "smoke":
        config.attack.model = "untrained"
        config.attack.names = ("loss", "pia_l4", "dime")
        config.attack.tiers = (1,)
        config.attack.timesteps = (100,)
        config.attack.calibration_size = 30
        config.attack.test_size = 40
    return config.lock()
