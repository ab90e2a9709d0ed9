"""Forward pass of the 35.7M-parameter CIFAR-10 U-Net against the same network in PyTorch, on the CPU.

    python -m benchmarks.unet

PyTorch runs in channels_last and inference mode, both in float32 with the same number of threads, each side at its best
micro-batch; runs alternate, so that a change in the machine's load meets both. Without PyTorch only our side is timed.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.timing import median_seconds
from dime_jax import models

MICRO_BATCHES = (4, 8, 16)
ROUNDS = 5
IMAGE = (32, 32, 3)


class Timing(NamedTuple):
    """Median throughput at the best micro-batch."""

    images_per_second: float
    micro_batch: int


def our_forward() -> Callable[[int], Callable[[], Any]]:
    """Our network: micro-batch -> function that runs it once."""
    spec = models.DdpmUnetSpec()
    variables = models.init(spec, jax.random.key(0))
    network = models.build(spec)
    forward = jax.jit(network.apply)

    def prepare(batch: int) -> Callable[[], Any]:
        x = jax.random.normal(jax.random.key(1), (batch, *IMAGE))
        t = jnp.full((batch,), 100)

        def run() -> Any:
            with jax.default_matmul_precision("highest"):
                return forward(variables, x, t).block_until_ready()

        return run

    return prepare


def torch_forward() -> Callable[[int], Callable[[], Any]]:
    """The same network in PyTorch: micro-batch -> function that runs it once."""
    import torch

    from benchmarks import torch_unet

    network = torch_unet.Unet().eval().to(memory_format=torch.channels_last)
    count = sum(parameter.numel() for parameter in network.parameters())
    if count != 35_746_307:
        raise ValueError(f"expected the network of 35,746,307 parameters, got {count}")

    def prepare(batch: int) -> Callable[[], Any]:
        x = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
        t = torch.full((batch,), 100)

        def run() -> Any:
            with torch.inference_mode():
                return network(x, t)

        return run

    return prepare


def measure(sides: dict[str, Callable[[int], Callable[[], Any]]]) -> dict[str, Timing]:
    """Median throughput of each side at its best micro-batch, over interleaved rounds."""
    runs = {(name, batch): prepare(batch) for name, prepare in sides.items() for batch in MICRO_BATCHES}
    rates = {key: key[1] / seconds for key, seconds in median_seconds(runs, ROUNDS).items()}
    best = {name: max((key for key in rates if key[0] == name), key=lambda key: rates[key]) for name in sides}
    return {name: Timing(rates[key], key[1]) for name, key in best.items()}


def run() -> dict[str, Timing]:
    """Time both sides, print them and their ratio."""
    sides = {"dime_jax": our_forward()}
    if importlib.util.find_spec("torch"):
        sides["torch"] = torch_forward()
    timings = measure(sides)
    for name, timing in timings.items():
        print(f"U-Net forward, {name}: {timing.images_per_second:.2f} images/s at micro-batch {timing.micro_batch}")
    if "torch" in timings:
        ratio = timings["dime_jax"].images_per_second / timings["torch"].images_per_second
        print(f"U-Net forward, dime_jax / torch: {ratio:.2f}x (goal 1.4)")
    else:
        print("U-Net forward: torch is not installed, nothing to compare with")
    return timings


if __name__ == "__main__":
    run()
