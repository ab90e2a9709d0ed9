"""Training a denoiser: recipe, inputs, objective, step and loop (needs the extra `train`).

`train` is the whole job. A `Method` says how batches are drawn and how gradients become updates, so that training with
differential privacy is another Method over the same loop.
"""

try:
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise ImportError(f"training needs the extra dime_jax[train], which is not installed: {error}") from None

from dime_jax.training.inputs import Examples as Examples
from dime_jax.training.loop import TrainingOptions as TrainingOptions
from dime_jax.training.loop import train as train
from dime_jax.training.method import Method as Method
from dime_jax.training.method import adam as adam
from dime_jax.training.method import mean_gradient as mean_gradient
from dime_jax.training.method import shuffled_method as shuffled_method
from dime_jax.training.objective import NoisedExamples as NoisedExamples
from dime_jax.training.recipe import TrainingRecipe as TrainingRecipe
from dime_jax.training.reference import train_reference as train_reference
from dime_jax.training.step import TrainState as TrainState
from dime_jax.training.step import initial_state as initial_state
from dime_jax.training.step import make_step as make_step
