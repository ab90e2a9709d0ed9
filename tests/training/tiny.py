"""The smallest network that is still a U-Net, and what the training tests feed it."""

import numpy as np

from dime_jax import data, models, training


def spec(image_shape=(4, 4, 1), prediction="epsilon", **architecture):
    fields = {
        "image_channels": image_shape[-1],
        "stem_channels": 8,
        "time_features": 8,
        "time_channels": 16,
        "level_channels": (8,),
        "num_res_blocks": 1,
        "attention_levels": (),
        "norm_groups": 4,
        "middle_attention": False,
    }
    network = models.DdpmUnetSpec(**{**fields, **architecture})
    return models.ModelSpec(denoiser=network, image_shape=image_shape, prediction=prediction)


def images(count=10, shape=(4, 4, 1), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def source(count=10, shape=(4, 4, 1), **columns):
    return data.from_images(images(count, shape), **columns)


def recipe(**fields):
    defaults = {"steps": 8, "batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 4, "ema_decay": 0.9}
    return training.TrainingRecipe(**{**defaults, **fields})
