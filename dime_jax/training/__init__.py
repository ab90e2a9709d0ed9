"""Training a denoiser: recipe, inputs, objective, step and loop (needs the extra `train`).

`train` is the whole job. A `Method` says how batches are drawn and how gradients become updates, so that training with
differential privacy is another Method over the same loop.
"""

from dime_jax.training.inputs import Examples
from dime_jax.training.loop import TrainingOptions, train
from dime_jax.training.method import Method, adam, mean_gradient, shuffled_method
from dime_jax.training.objective import NoisedExamples
from dime_jax.training.recipe import TrainingRecipe
from dime_jax.training.step import TrainState, initial_state, make_step

__all__ = [
    "Examples",
    "Method",
    "NoisedExamples",
    "TrainState",
    "TrainingOptions",
    "TrainingRecipe",
    "adam",
    "initial_state",
    "make_step",
    "mean_gradient",
    "shuffled_method",
    "train",
]
