"""TrainingRecipe: everything besides the network, the images and the method that decides what training ends with."""

import dataclasses

from dime_jax._util import validate
from dime_jax._util.typing import JsonObject

COMPUTE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """How to train; the defaults are the CIFAR-10 recipe of Ho et al. 2020 as SecMI's authors ran it, without dropout.

    Attributes:
      steps: updates in all. More of them continue a run; nothing else may change in one.
      batch_size: images in an update, over all devices.
      learning_rate: Adam's, constant after the warm-up.
      warmup_steps: over which the learning rate rises linearly from 0.
      clip_norm: the gradient's largest l2 norm.
      ema_decay: d in ema ← d ema + (1 - d) params, after every update; the averaged weights are the model.
      flips: mirror every image left to right with probability 1/2.
      compute_dtype: of convolutions and matmuls; weights, statistics and losses are float32 always.
      remat: compute blocks again in the backward pass, to save memory.
      seed: of the initial weights, the order of images, the noise, the flips and dropout.
    """

    steps: int
    batch_size: int = 128
    learning_rate: float = 2e-4
    warmup_steps: int = 5000
    clip_norm: float = 1.0
    ema_decay: float = 0.9999
    flips: bool = True
    compute_dtype: str = "float32"
    remat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        validate.check_at_least(self.steps, 1, "steps")
        validate.check_at_least(self.batch_size, 1, "batch_size")
        validate.check_positive(self.learning_rate, "learning_rate")
        validate.check_at_least(self.warmup_steps, 0, "warmup_steps")
        validate.check_positive(self.clip_norm, "clip_norm")
        validate.check_choice(self.compute_dtype, COMPUTE_DTYPES, "compute_dtype")
        validate.check_unit(self.ema_decay, "ema_decay", "[)")

    def identity(self) -> JsonObject:
        """What may not change when a run is continued: all but the number of steps."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "steps"}
