"""One update: noise a batch, get its gradient, apply the optimiser, average the weights."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from dime_jax import models
from dime_jax._util.distributed import replicated
from dime_jax._util.typing import PyTree
from dime_jax.models import low_rank
from dime_jax.training.inputs import Examples
from dime_jax.training.keys import Keys, as_key
from dime_jax.training.method import Method
from dime_jax.training.objective import image_losses, network_variables, noise_examples
from dime_jax.training.recipe import TrainingRecipe


class TrainState(NamedTuple):
    """Everything an update changes, and the network's constants, which it does not.

    Where an adapter is trained, `params` is the adapter, and the network that it is for is no part of the state.
    """

    step: jax.Array  # int32, updates made
    params: PyTree
    ema: PyTree  # the average of params that becomes the model
    constants: PyTree  # variables other than "params"
    optimizer: PyTree

    def variables(self, base: PyTree = None) -> PyTree:
        """The averaged weights and the constants on the host, as `save_model` takes them; a base, with the adapter."""
        return network_variables(*jax.device_get((self.ema, self.constants, base)))


def initial_state(
    spec: models.ModelSpec,
    recipe: TrainingRecipe,
    optimizer: optax.GradientTransformation,
    start: PyTree = None,
    rank: int | None = None,
) -> TrainState:
    """Return the weights to start with, which are their own average.

    Args:
      spec: the network.
      recipe: its seed is that of fresh weights.
      optimizer: whose state there is too.
      start: variables to start at; fresh ones if None.
      rank: of an adapter for them, which is then what is trained.
    """
    if rank is None:
        constants = dict(models.init(spec.denoiser, jax.random.key(recipe.seed)) if start is None else start)
        params = constants.pop("params")
    else:
        constants, params = {}, low_rank.init(start, rank, np.random.default_rng(recipe.seed))
    # The average is a copy, since the step gives its arguments' memory away.
    ema, moments = jax.jit(lambda params: (jax.tree.map(jnp.copy, params), optimizer.init(params)))(params)
    return TrainState(jnp.zeros((), jnp.int32), params, ema, constants, moments)


def make_step(
    spec: models.ModelSpec, recipe: TrainingRecipe, method: Method, mesh: jax.sharding.Mesh, base: PyTree = None
) -> Callable[[TrainState, Examples, Keys], tuple[TrainState, jax.Array]]:
    """The jitted update (state, examples, keys) -> (state, loss); the state is donated.

    The state is a copy on every device of the mesh, the examples are cut along their rows. All randomness comes from
    `keys`, hence from the seed and the number of the update: a run continues as if it had never stopped, on any number
    of devices.

    Args:
      spec: the network.
      recipe: how to train.
      method: how batches become updates.
      mesh: the devices.
      base: the variables that the state's adapter is for, on every device of the mesh; None if there is no adapter.
    """
    network = models.build(spec.denoiser, dtype=jnp.dtype(recipe.compute_dtype), remat=recipe.remat)
    schedule = spec.schedule.build()

    def step(
        gradient_of: Partial, base: PyTree, state: TrainState, examples: Examples, keys: Keys
    ) -> tuple[TrainState, jax.Array]:
        noised = noise_examples(keys, examples, schedule, spec.prediction, recipe.flips)
        losses = image_losses(network, state.constants, base)
        loss, gradient = gradient_of(losses, state.params, noised, as_key(keys.dropout))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes floats and integers, which strict callers forbid
            updates, optimizer = method.optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = optax.incremental_update(params, state.ema, 1 - recipe.ema_decay)
        return TrainState(state.step + 1, params, ema, state.constants, optimizer), loss

    update = jax.jit(step, donate_argnums=2, out_shardings=replicated(mesh))
    # A Partial of a Partial would hide the numbers that the inner one has bound.
    gradient_of = method.gradient if isinstance(method.gradient, Partial) else Partial(method.gradient)
    return functools.partial(update, gradient_of, base)
