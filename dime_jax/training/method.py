"""Method: how batches are drawn, how a batch becomes a gradient, and how gradients become updates."""

from collections.abc import Callable
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import optax

from dime_jax._util.typing import PyTree
from dime_jax.training import inputs
from dime_jax.training.objective import ImageLosses, NoisedExamples
from dime_jax.training.recipe import TrainingRecipe


class Gradient(NamedTuple):
    """The loss of a batch, for the log, and the gradient that the optimiser gets."""

    loss: jax.Array
    gradient: PyTree


class Method(NamedTuple):
    """A way of training.

    Attributes:
      name: for people and for the check that a run is continued as it was begun.
      draws: positions in the training set for each update, int [rows], -1 for padding; the same number of rows always.
        Element k depends on k alone.
      gradient: (losses function, params, noised batch, key) -> Gradient. It runs inside the jitted step; rows with mask
        False must not count. Numbers that `jax.tree_util.Partial` has bound are arguments of the step, so that methods
        which differ in these alone have one program.
      optimizer: what it does with gradients.
    """

    name: str
    draws: grain.MapDataset
    gradient: Callable[[ImageLosses, PyTree, NoisedExamples, jax.Array], Gradient]
    optimizer: optax.GradientTransformation


def shuffled_method(recipe: TrainingRecipe, count: int) -> Method:
    """Plain training on `count` images: shuffled passes, the mean gradient, Adam."""
    draws = inputs.shuffled(count, recipe.batch_size, recipe.seed)
    return Method("adam", draws, mean_gradient, adam(recipe))


def adam(recipe: TrainingRecipe) -> optax.GradientTransformation:
    """Gradients clipped to a norm, then Adam with a linear warm-up."""
    if recipe.warmup_steps:
        rate: optax.ScalarOrSchedule = optax.linear_schedule(0.0, recipe.learning_rate, recipe.warmup_steps)
    else:
        rate = recipe.learning_rate
    return optax.chain(optax.clip_by_global_norm(recipe.clip_norm), optax.adam(rate))


def mean_gradient(losses: ImageLosses, params: PyTree, noised: NoisedExamples, key: jax.Array) -> Gradient:
    """The mean loss over the rows that count, and its gradient; 0 if none does."""

    def mean(params: PyTree) -> jax.Array:
        kept = jnp.where(noised.mask, losses(params, noised, key), 0.0)
        return kept.sum() / jnp.maximum(noised.mask.sum(), 1).astype(kept.dtype)

    return Gradient(*jax.value_and_grad(mean)(params))
