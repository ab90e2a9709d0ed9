"""A DP-SGD step against a plain step at equal batch, on the network of the digits study.

    python -m benchmarks dp

Both steps get the same padded batch of as many rows as count: draw t and noise, forward, backward, clip to norm 1,
Adam, average the weights. The DP step has the gradient of every image, clips each and adds noise. Steps alternate, so
that a change in the machine's load meets both.
"""

from benchmarks.timing import median_seconds
from benchmarks.training import step_of
from dime_jax import training
from dime_jax.training import dp
from experiments.configs import dp_digits
from experiments.train import model_spec

BATCH = 64
ROUNDS = 15
COUNT = 400


def run() -> None:
    """Time both steps, print them and their ratio."""
    recipe = training.TrainingRecipe(steps=1, batch_size=BATCH, warmup_steps=0, flips=False)
    spec, privacy = model_spec(dp_digits.get_config()), dp.Privacy(epsilon=10, steps=1)
    methods = {"plain": training.shuffled_method(recipe, COUNT), "DP": dp.dp_method(recipe, COUNT, privacy)}
    seconds = median_seconds({name: step_of(spec, recipe, method) for name, method in methods.items()}, ROUNDS)
    for name, each in seconds.items():
        print(f"digits network, {name} step: {1000 * each:.1f} ms at batch {BATCH}")
    print(f"digits network, DP step / plain step: {seconds['DP'] / seconds['plain']:.2f}x (at most 3)")
