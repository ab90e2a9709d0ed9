"""A training step of the 35.7M-parameter CIFAR-10 U-Net against the same network and optimiser in PyTorch, on the CPU.

    python -m benchmarks training

A step is: draw t and noise, forward, backward, clip to norm 1, Adam, average the weights. PyTorch runs in channels_last
with its fused Adam, both in float32 with the same number of threads, each in its own process; they take turns of a
few steps, so that a change in the machine's load meets both. Without PyTorch only our side is timed.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.timing import HAS_TORCH, median_seconds, median_seconds_apart
from dime_jax import models, training
from dime_jax._util.distributed import data_mesh, replicated
from dime_jax.core.schedule import linear_schedule
from dime_jax.training.inputs import on_devices
from dime_jax.training.keys import update_keys

BATCH = 16
TURNS, STEPS = 3, 3
IMAGE = (32, 32, 3)
RECIPE = training.TrainingRecipe(steps=1, batch_size=BATCH, warmup_steps=0, flips=False)


def our_step() -> Callable[[], Any]:
    """Our step, from images in host memory."""
    spec = models.ModelSpec(denoiser=models.DdpmUnetSpec(), image_shape=IMAGE)
    return step_of(spec, RECIPE, training.shuffled_method(RECIPE, BATCH))


def step_of(spec: models.ModelSpec, recipe: training.TrainingRecipe, method: training.Method) -> Callable[[], Any]:
    """One update of a network by a method, on the first device."""
    mesh = data_mesh(jax.devices()[:1])
    state = jax.device_put(training.initial_state(spec, recipe, method.optimizer), replicated(mesh))
    update = training.make_step(spec, recipe, method, mesh)
    images = random_images(recipe.batch_size, spec.image_shape)
    examples = training.Examples(images, None, np.ones(recipe.batch_size, bool))

    def run() -> Any:
        nonlocal state
        state, loss = update(state, on_devices(examples, mesh), update_keys(0, 1))
        return jax.block_until_ready((state, loss))

    return run


def torch_step() -> Callable[[], Any]:
    """The same step in PyTorch."""
    import torch

    from benchmarks import torch_unet

    network = torch_unet.build(models.DdpmUnetSpec()).train().to(memory_format=torch.channels_last)
    average = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.Adam(network.parameters(), lr=RECIPE.learning_rate, fused=True)
    schedule = linear_schedule()
    scales, sigmas = (torch.from_numpy(np.array(table)) for table in (schedule.sqrt_abar_table, schedule.sigma_table))
    images = torch.from_numpy(random_images(BATCH, IMAGE)).permute(0, 3, 1, 2)  # channels_last as it is

    def run() -> Any:
        t = torch.randint(0, len(scales), (BATCH,))
        noise = torch.randn_like(images)
        x = scales[t][:, None, None, None] * images + sigmas[t][:, None, None, None] * noise
        loss = torch.mean((network(x, t) - noise) ** 2)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), RECIPE.clip_norm)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), 1 - RECIPE.ema_decay)
        return loss

    return run


def random_images(count: int, shape: tuple[int, ...]) -> np.ndarray:
    """As a network sees them."""
    return np.random.default_rng(0).uniform(-1, 1, (count, *shape)).astype(np.float32)


def run() -> None:
    """Time both sides, print them and their ratio; images per second."""
    sides = {"dime_jax": our_step}
    if HAS_TORCH:
        sides["torch"] = torch_step
    rates = {name: BATCH / seconds for name, seconds in median_seconds_apart(sides, TURNS, STEPS).items()}
    for name, rate in rates.items():
        print(f"training step, {name}: {rate:.2f} images/s at batch {BATCH}")
    if "torch" in rates:
        print(f"training step, dime_jax / torch: {rates['dime_jax'] / rates['torch']:.2f}x (goal 1.0, floor 0.9)")
        # The strict way: in one process, a step of each in turn, none discarded after the first.
        seconds = median_seconds({name: make() for name, make in sides.items()}, TURNS * STEPS)
        print(f"training step, step by step in one process: {seconds['torch'] / seconds['dime_jax']:.2f}x (goal 1.0)")
    else:
        print("training step: torch is not installed, nothing to compare with")
