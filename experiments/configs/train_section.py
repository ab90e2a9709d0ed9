"""What configs share: `config.train`, the network and how it is trained."""

import dataclasses

from ml_collections.config_dict import ConfigDict

from dime_jax import training


def train_section() -> ConfigDict:
    """The network of pytorch-ddpm and the recipe of DIME's authors (batch 128, Adam 2e-4, warm-up 5000, EMA 0.999).

    `steps` must be chosen: the paper says 18,000 for STL10-U and 60,000 for CelebA, its authors' README 320,000 for
    both.
    """
    train = ConfigDict()
    train.image_shape = (32, 32, 3)
    # Fields of `dime_jax.models.DdpmUnetSpec`, or of `GuidedUnetSpec` with kind "guided_unet"; image_channels is
    # image_shape's.
    train.architecture = ConfigDict({"kind": "ddpm_unet"})
    train.architecture.update(stem_channels=128, level_channels=(128, 256, 256, 256), num_res_blocks=2)
    train.architecture.update(attention_levels=(1,), norm_groups=32, norm_eps=1e-5, dropout=0.1)
    train.architecture.update(time_features=128, time_channels=512, time_table_steps=1000, time_frequency_shift=0)
    train.architecture.symmetric_downsample = True

    train.recipe = ConfigDict(dataclasses.asdict(training.TrainingRecipe(steps=320_000, ema_decay=0.999)))

    train.log_every = 100
    train.save_every = 1000
    train.sample_every = 5000
    train.snapshot_every = 0  # how many updates apart models are kept, for `experiments.memorisation`
    return train


def smoke_training(config: ConfigDict) -> None:
    """Turn the training of a config into one of seconds: a tiny network and a few updates."""
    config.train.architecture = small_unet((8,))  # the smallest network that is still a U-Net: compiled in seconds
    config.train.architecture.middle_attention = False
    config.train.recipe.update(steps=4, batch_size=4)
    config.train.update(log_every=2, save_every=2, snapshot_every=2, sample_every=0)


def reference_section(images: int, steps: int, widths: tuple[int, ...]) -> ConfigDict:
    """What `experiments.reference` trains: on how many other images, for how long, and how wide a narrow one is."""
    return ConfigDict({"images": images, "steps": steps, "small": False, "widths": widths})


def small_unet(level_channels: tuple[int, ...]) -> ConfigDict:
    """A U-Net for CPUs: one residual block a level, attention in the middle only, a computed time embedding."""
    width, architecture = level_channels[0], ConfigDict({"kind": "ddpm_unet"})
    architecture.update(stem_channels=width, level_channels=level_channels, num_res_blocks=1, attention_levels=())
    architecture.update(time_features=width, time_channels=4 * width, norm_groups=8, dropout=0.0)
    return architecture
