"""The ideal denoiser against the two matrix products it needs, and against a dense PyTorch softmax.

n = 50,000 points of dimension 3072, 256 queries. Memory is the process's own peak while the call runs.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import dime_jax as dj
from benchmarks.timing import HAS_TORCH, median_seconds

POINTS, DIM, QUERIES = 50_000, 3072, 256
TIMES = (0, 100, 500)
ROUNDS = 5


def unrelated_images(rng: np.random.Generator) -> np.ndarray:
    """Points without structure: no landmark is near."""
    return rng.standard_normal((POINTS, DIM), np.float32) * 0.4


def clusters(rng: np.random.Generator, count: int, width: float) -> np.ndarray:
    """Equally many points around each of some centres, with noise of the given standard deviation."""
    centers = rng.uniform(-1, 1, (count, DIM)).astype(np.float32)
    points = rng.standard_normal((POINTS, DIM), np.float32) * np.float32(width)
    points += centers[np.arange(POINTS) % count]
    return points


# In tight clusters every neighbour matters at low noise; near ties are 2e-4 apart.
DATA: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "unrelated images": unrelated_images,
    "tight clusters": lambda rng: clusters(rng, 5, 1e-3),
    "near ties": lambda rng: clusters(rng, 100, 2e-4),
}


def peak_extra_bytes(run: Callable[[], Any]) -> int:
    """How much the resident memory grows at its highest while `run` runs."""
    process, done, peak = psutil.Process(), threading.Event(), 0
    before = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(0, peak - before)


def torch_dense(train: np.ndarray, g: np.ndarray, t: int, schedule: dj.NoiseSchedule) -> Callable[[], Any]:
    """softmax(-||g - a x||^2 / 2 sigma^2) x in one piece, as one would write it in PyTorch.

    Args:
      train: points x.
      g: queries.
      t: timestep.
      schedule: gives a and sigma.
    """
    import torch

    x, queries = torch.from_numpy(train), torch.from_numpy(g)
    a, sigma = schedule.sqrt_abar(t).item(), schedule.sigma(t).item()
    squares = (x**2).sum(1)

    def run() -> Any:
        with torch.inference_mode():
            logits = (a * queries @ x.T - a**2 * squares / 2) / sigma**2
            return (queries - a * torch.softmax(logits, dim=1) @ x) / sigma

    return run


def compare_on(name: str, train: np.ndarray, schedule: dj.NoiseSchedule) -> None:
    g = train[:QUERIES] * np.float32(0.95)
    built: list[dj.IdealDenoiser] = []
    start = time.perf_counter()
    memory = peak_extra_bytes(lambda: built.append(dj.IdealDenoiser(train, schedule)))
    print(f"ideal denoiser, {name}: built in {time.perf_counter() - start:.1f} s, {memory / 1e9:.2f} GB at the peak")
    denoiser = built.pop()
    memory = peak_extra_bytes(lambda: denoiser.eps(g, 100).block_until_ready())
    print(f"ideal denoiser, {name}: a call adds {memory / 1e9:.2f} GB at its peak (at most 1)")
    points, queries = jnp.asarray(train), jnp.asarray(g)
    two_products = jax.jit(lambda g, x: (g @ x.T) @ x)
    for t in TIMES:
        runs: dict[str, Callable[[], Any]] = {
            "products": lambda: two_products(queries, points).block_until_ready(),
            "ideal": lambda t=t: denoiser.eps(queries, t).block_until_ready(),
        }
        if HAS_TORCH:
            runs["torch"] = torch_dense(train, g, t, schedule)
        times = median_seconds(runs, ROUNDS)
        against = {key: times["ideal"] / value for key, value in times.items() if key != "ideal"}
        print(
            f"ideal denoiser, {name}, t = {t}: {times['ideal']:.2f} s; "
            f"{against['products']:.2f}x two bare products (at most 1.25)"
            + (f", {against['torch']:.2f}x dense PyTorch (at most 1.0)" if "torch" in against else "")
        )


def run() -> None:
    schedule = dj.linear_schedule()
    for name, make in DATA.items():
        compare_on(name, make(np.random.default_rng(0)), schedule)
