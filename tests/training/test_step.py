"""An update against the same arithmetic in NumPy: clipping, warm-up, Adam, averaging."""

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from dime_jax._util.distributed import data_mesh, replicated
from dime_jax.training import inputs, keys, method, step

RECIPE = tiny.recipe(learning_rate=0.01, warmup_steps=3, ema_decay=0.75, clip_norm=0.5)


def pulling_to_zero(losses, params, noised, key):
    """Gradient of ||params + 1||² / 2: depends on the weights, and costs no network."""
    del losses, noised, key
    return method.Gradient(jnp.float32(0), jax.tree.map(lambda leaf: leaf + 1, params))


def test_updates_are_clipped_adam_with_warm_up_and_averaging():
    plan = method.shuffled_method(RECIPE, 10)._replace(gradient=pulling_to_zero)
    mesh = data_mesh(jax.devices()[:1])
    state = step.initial_state(tiny.spec(), RECIPE, plan.optimizer)
    params = ema = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.params)]
    first, second = ([np.zeros_like(leaf) for leaf in params] for _ in range(2))
    state = jax.device_put(state, replicated(mesh))
    update = step.make_step(tiny.spec(), RECIPE, plan, mesh)
    examples = inputs.Examples(np.zeros((4, 4, 4, 1), np.float32), None, np.ones(4, bool))
    for number in range(1, 6):
        state, _ = update(state, examples, keys.update_keys(0, number))
        gradient = [leaf + 1 for leaf in params]
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in gradient))
        gradient = [leaf * min(1, 0.5 / norm) for leaf in gradient]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradient)]
        second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, gradient)]
        rate = 0.01 * min(1, (number - 1) / 3)
        moves = [m / (1 - 0.9**number) / (np.sqrt(v / (1 - 0.999**number)) + 1e-8) for m, v in zip(first, second)]
        params = [leaf - rate * move for leaf, move in zip(params, moves)]
        ema = [0.75 * average + 0.25 * leaf for average, leaf in zip(ema, params)]
    assert int(state.step) == 5
    for tree, expected in ((state.params, params), (state.ema, ema)):
        for found, leaf in zip(jax.tree.leaves(tree), expected):
            np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-6)


def test_a_stored_time_table_is_kept_but_not_trained():
    spec = tiny.spec(time_table_steps=1000)
    plan = method.shuffled_method(RECIPE, 10)
    state = step.initial_state(spec, RECIPE, plan.optimizer)
    table = state.constants["constants"]["time_table"]
    assert table.shape == (1000, 8)
    assert not any("time_table" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.params))
    assert set(state.variables()) == {"params", "constants"}
