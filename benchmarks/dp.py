"""A DP-SGD step against a plain step at equal batch, on the network of the digits study.

    python -m benchmarks dp

Both steps get the same padded batch of as many rows as count: draw t and noise, forward, backward, clip to norm 1,
Adam, average the weights. The DP step has the gradient of every image, clips each and adds noise. Steps alternate, so
that a change in the machine's load meets both.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.timing import median_seconds
from dime_jax import training
from dime_jax._util.distributed import data_mesh, replicated
from dime_jax.training import dp
from dime_jax.training.inputs import on_devices
from dime_jax.training.keys import update_keys
from experiments.configs import dp_digits
from experiments.train import model_spec

BATCH = 64
ROUNDS = 15
COUNT = 400


def step_of(method: training.Method, recipe: training.TrainingRecipe) -> Callable[[], Any]:
    """One update by a method, from images in host memory."""
    spec, mesh = model_spec(dp_digits.get_config()), data_mesh(jax.devices()[:1])
    state = training.initial_state(spec, recipe, method.optimizer)
    state = jax.device_put(state, replicated(mesh))
    update = training.make_step(spec, recipe, method, mesh)
    images = np.random.default_rng(0).uniform(-1, 1, (BATCH, *spec.image_shape)).astype(np.float32)
    examples = training.Examples(images, None, np.ones(BATCH, bool))

    def run() -> Any:
        nonlocal state
        state, loss = update(state, on_devices(examples, mesh), update_keys(0, 1))
        return jax.block_until_ready((state, loss))

    return run


def run() -> dict[str, float]:
    """Time both steps, print them and their ratio; seconds per step."""
    recipe = training.TrainingRecipe(steps=1, batch_size=BATCH, warmup_steps=0, flips=False)
    privacy = dp.Privacy(epsilon=10, steps=1)
    steps = {
        "plain": step_of(training.shuffled_method(recipe, COUNT), recipe),
        "DP": step_of(dp.dp_method(recipe, COUNT, privacy), recipe),
    }
    seconds = median_seconds(steps, ROUNDS)
    for name, each in seconds.items():
        print(f"digits network, {name} step: {1000 * each:.1f} ms at batch {BATCH}")
    print(f"digits network, DP step / plain step: {seconds['DP'] / seconds['plain']:.2f}x (at most 3)")
    return seconds


if __name__ == "__main__":
    run()
