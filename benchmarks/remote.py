"""What asking over the network adds: a request of 64 images on loopback, beside the 35.7M-parameter U-Net's own time.

    python -m benchmarks remote

The server hosts a function that returns its input, so that all the time is that of protocol, connection and copies on
both sides. They share this process, which costs both of them more than two processes would.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.timing import median_seconds
from benchmarks.unet import NETWORKS, our_forward
from dime_jax import Denoiser, RemoteDenoiser, linear_schedule
from dime_jax.remote.serve import Server
from dime_jax.scoring import default_micro_batch

BATCH, ROUNDS = 64, 5
IMAGE = NETWORKS[0].image
MOST = 0.10


def network_pass() -> Callable[[], Any]:
    """The U-Net on 64 images, in micro-batches of the default size."""
    size = default_micro_batch(IMAGE, jax.local_devices()[0].platform)
    forward, count = our_forward()(min(size, BATCH)), max(1, BATCH // size)
    return lambda: [forward() for _ in range(count)]


def run() -> None:
    """Measure and print."""
    echo = Denoiser.from_function(lambda x, t: np.asarray(x), linear_schedule(), IMAGE, name="echo")
    x = np.random.default_rng(0).normal(size=(BATCH, *IMAGE)).astype(np.float32)
    with Server(echo) as server:
        remote = RemoteDenoiser(server.url)
        medians = median_seconds({"request": lambda: remote.eps(x, 70), "network": network_pass()}, ROUNDS)
    request, network = medians["request"], medians["network"]
    print(
        f"a request of {BATCH} images on loopback / the 35.7M U-Net on them: {request / network:.4f} (at most {MOST}); "
        f"{1000 * request:.1f} ms and {1000 * network:.0f} ms, {1000 * request / BATCH:.2f} ms a query"
    )
