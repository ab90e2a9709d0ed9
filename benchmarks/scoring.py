"""The scoring engine against bare forward passes of the same network, and what sharing queries saves.

    python -m benchmarks scoring

DIME with q = 10 on the 35.7M-parameter U-Net of CIFAR-10, against as many jitted forward passes at the same
micro-batch; rounds alternate, so that a change in the machine's load meets both, and medians are compared.
"""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import HAS_TORCH, median_seconds
from dime_jax import data, models, scoring
from dime_jax.attacks import get_attack
from dime_jax.core.denoiser import PRECISION, Denoiser
from dime_jax.core.schedule import linear_schedule
from dime_jax.core.xla_options import network_options
from dime_jax.scoring import planning

IMAGE = (32, 32, 3)
PROBES = 10
ROUNDS = 3
BATCHES = 2
TORCH_MICRO_BATCHES = (4, 8, 16)
METHODS = ("loss", "pia_l2", "pia_l4", "pian", "secmi", "sima_l4", "sima_mc_norms", "sima_mc_vector", "dime")


def unet() -> Denoiser:
    """The network with fresh weights: its speed does not depend on them."""
    spec = models.ModelSpec(denoiser=models.DdpmUnetSpec(), image_shape=IMAGE)
    variables = models.init(spec.denoiser, jax.random.key(0))
    return Denoiser(models.denoise(spec), variables, linear_schedule(), IMAGE, fingerprint="benchmark", name="U-Net")


def bare_passes(model: Denoiser, micro_batch: int, calls: int) -> Callable[[], Any]:
    """`calls` forward passes, dispatched without waiting in between."""
    forward = jax.jit(model.apply, compiler_options=network_options())
    x = jax.random.normal(jax.random.key(1), (micro_batch, *IMAGE))

    def run() -> Any:
        with jax.default_matmul_precision(PRECISION):
            return jax.block_until_ready(
                [forward(model.params, x, jnp.int32(100), None)[0, 0, 0] for _ in range(calls)]
            )

    return run


def engine_run(model: Denoiser, micro_batch: int, images: int) -> Callable[[], Any]:
    """A whole DIME run into a fresh score table, data and files included."""
    pixels = np.random.default_rng(0).integers(0, 256, (images, *IMAGE), dtype=np.uint8)
    source = data.from_images(pixels)
    jobs = [planning.Job(get_attack("dime"), {"t": 100, "gamma": 0.1, "q": PROBES})]
    options = scoring.ScoringOptions(micro_batch=micro_batch, devices=jax.local_devices()[:1], silent=True)

    def run() -> Any:
        with tempfile.TemporaryDirectory() as directory:
            return scoring.score(model, source, jobs, pathlib.Path(directory) / "table", options=options)

    return run


def torch_loop(images: int) -> Callable[[int], Callable[[], Any]]:
    """DIME with the same network and queries as one would write it in PyTorch: micro-batch -> function to time."""
    import torch

    from benchmarks import torch_unet

    network = torch_unet.build(models.DdpmUnetSpec()).eval().to(memory_format=torch.channels_last)
    schedule = linear_schedule()
    scale, step = schedule.sqrt_abar(100).item(), 0.1 * schedule.sigma(100).item()
    data = torch.rand(images, 3, 32, 32).to(memory_format=torch.channels_last) * 2 - 1

    def prepare(micro_batch: int) -> Callable[[], Any]:
        def run() -> Any:
            terms = []
            with torch.inference_mode():
                for x in data.split(micro_batch):
                    t = torch.full((len(x),), 100)
                    center = network(scale * x, t)
                    for _ in range(PROBES):
                        z = torch.randint(0, 2, x.shape) * 2.0 - 1
                        eps = network(scale * x + step * z, t)
                        terms.append((eps.flatten(1).norm(dim=1), ((eps - center) * z).flatten(1).sum(1) / step))
            return terms

        return run

    return prepare


def run() -> None:
    """Measure and print."""
    model = unet()
    micro_batch = scoring.default_micro_batch(IMAGE, jax.local_devices()[0].platform)
    images = BATCHES * micro_batch
    sides = {
        "bare": bare_passes(model, micro_batch, BATCHES * (PROBES + 1)),
        "engine": engine_run(model, micro_batch, images),
    }
    if HAS_TORCH:
        loop = torch_loop(images)
        sides.update({f"torch at {size}": loop(size) for size in TORCH_MICRO_BATCHES})
    medians = median_seconds(sides, ROUNDS)
    engine, bare = medians["engine"], medians["bare"]
    print(
        f"DIME q = {PROBES} on the 35.7M U-Net, engine / bare passes: {engine / bare:.3f}x (at most 1.05); "
        f"{engine:.2f} s and {bare:.2f} s at micro-batch {micro_batch}"
    )
    loops = {name: seconds for name, seconds in medians.items() if name.startswith("torch")}
    if loops:
        best = min(loops, key=lambda name: loops[name])
        print(f"the same, engine / PyTorch loop: {engine / loops[best]:.3f}x (at most 1.0); {best}")
    plan = planning.make_plan(planning.grid_jobs(METHODS), model.schedule)
    saved = plan.queries_per_image / plan.naive_queries_per_image
    print(f"queries of the paper's grid, planned / one by one: {saved:.3f} (at most 0.70)")
