"""Forward passes of U-Nets against the same networks in PyTorch, on the CPU.

    python -m benchmarks unet

PyTorch runs in channels_last and inference mode, both in float32 with the same number of threads, each side at its best
micro-batch; runs alternate, so that a change in the machine's load meets both. Without PyTorch only our side is timed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.timing import HAS_TORCH, median_seconds
from checkpoints_convert import guided
from dime_jax import models
from dime_jax.core.xla_options import network_options
from experiments.configs import cifar10, digits
from experiments.train import model_spec

Spec = models.DdpmUnetSpec | models.GuidedUnetSpec
Forward = Callable[[int], Callable[[], Any]]  # micro-batch -> function that runs the network once
TIME = 100


class Network(NamedTuple):
    """What to time, and how much faster than PyTorch it shall be."""

    name: str
    spec: Spec
    image: tuple[int, int, int]
    micro_batches: tuple[int, ...]
    goal: float
    rounds: int = 7


DIGITS, CIFAR10 = (model_spec(one).denoiser for one in (digits.get_config(), cifar10.get_config("overnight")))
GUIDED = guided.presets()["256x256"].architecture
NETWORKS = (
    Network("35.7M U-Net", models.DdpmUnetSpec(), (32, 32, 3), (4, 8, 16), 1.4),
    Network("shipped digits network", DIGITS, (8, 8, 1), (64, 128, 256), 1.0, rounds=25),
    Network("CIFAR-10 network of 2.5M", CIFAR10, (32, 32, 3), (16, 32, 64), 1.0, rounds=15),
    Network("553.8M guided U-Net at 64x64", GUIDED, (64, 64, 3), (1, 2), 1.0, rounds=3),
    Network("553.8M guided U-Net at 256x256", GUIDED, (256, 256, 3), (1,), 1.0, rounds=3),
)


def our_forward(network: Network = NETWORKS[0]) -> Forward:
    """Our network."""
    variables = models.init(network.spec, jax.random.key(0))
    forward = jax.jit(models.build(network.spec).apply, compiler_options=network_options())

    def prepare(batch: int) -> Callable[[], Any]:
        x = jax.random.normal(jax.random.key(1), (batch, *network.image))
        t = jnp.full((batch,), TIME)
        label = () if network.spec.num_classes is None else (jnp.zeros(batch, jnp.int32),)

        def run() -> Any:
            with jax.default_matmul_precision("highest"):
                return forward(variables, x, t, *label).block_until_ready()

        return run

    return prepare


def torch_forward(network: Network = NETWORKS[0]) -> Forward:
    """The same network in PyTorch."""
    import torch

    from benchmarks import torch_unet

    module = torch_unet.build(network.spec).eval().to(memory_format=torch.channels_last)
    count = sum(leaf.size for leaf in jax.tree.leaves(models.param_shapes(network.spec)["params"]))
    if abs(torch_unet.parameters(module) - count) > 1e-5 * count:  # diffusers' guided network has one norm less
        raise ValueError(f"expected the network of {count:,} parameters, got {torch_unet.parameters(module):,}")

    def prepare(batch: int) -> Callable[[], Any]:
        height, width, channels = network.image
        x = torch.randn(batch, channels, height, width).to(memory_format=torch.channels_last)
        t = torch.full((batch,), TIME)
        label = () if network.spec.num_classes is None else (torch.zeros(batch, dtype=torch.long),)

        def run() -> Any:
            with torch.inference_mode():
                return module(x, t, *label)

        return run

    return prepare


def measure(sides: dict[str, Forward], micro_batches: tuple[int, ...], rounds: int) -> dict[str, tuple[float, int]]:
    """Median images per second of each side at its best micro-batch, and that, over interleaved rounds."""
    runs = {(name, batch): prepare(batch) for name, prepare in sides.items() for batch in micro_batches}
    rates = {key: key[1] / seconds for key, seconds in median_seconds(runs, rounds).items()}
    best = {name: max((key for key in rates if key[0] == name), key=lambda key: rates[key]) for name in sides}
    return {name: (rates[key], key[1]) for name, key in best.items()}


def compare(network: Network) -> None:
    """Time both sides, print them and their ratio."""
    sides = {"dime_jax": our_forward(network)}
    if HAS_TORCH:
        sides["torch"] = torch_forward(network)
    timings = measure(sides, network.micro_batches, network.rounds)
    what = f"forward pass, {network.name}"
    for name, (rate, batch) in timings.items():
        print(f"{what}, {name}: {rate:.4g} images/s at micro-batch {batch}")
    if "torch" in timings:
        ratio = timings["dime_jax"][0] / timings["torch"][0]
        print(f"{what}, dime_jax / torch: {ratio:.2f}x (goal {network.goal})")
    else:
        print(f"{what}: torch is not installed, nothing to compare with")


def run() -> None:
    """Time both sides of every network, print them and their ratio."""
    for network in NETWORKS:
        compare(network)
