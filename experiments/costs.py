"""What the paper's tables cost: queries from the planner, times measured seconds per query.

    python -m experiments.costs                      queries of every `:paper` config
    python -m experiments.costs --measure            and time both networks on this machine (the larger takes minutes)
    python -m experiments.costs --ddpm_seconds=0.001 --guided_seconds=0.05    with measurements from elsewhere

The calibration half is scored over the whole grid with shared queries. The test half is scored at one setting for each
attack and tier; which one is known only after calibration, so it is counted at the dearest setting of each, unshared:
an upper bound. Time assumes that a query costs the same throughout the run, as it does when the network is what limits
it.
"""

import importlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from checkpoints_convert import guided
from dime_jax import models, scoring
from dime_jax.denoiser import PRECISION
from dime_jax.models import ModelSpec
from dime_jax.schedule import linear_schedule
from dime_jax.scoring import planning
from experiments.attack import jobs_of
from experiments.launch import run_app

STUDIES = {"cifar10": "ddpm", "cifar100": "ddpm", "stl10u": "ddpm", "celeba": "ddpm", "imagenet256": "guided"}
_ROUNDS = 3


class Cost(NamedTuple):
    """Queries of one `:paper` attack; those on the test half are at most so many."""

    study: str
    images: tuple[int, int]
    calibration_per_image: int
    test_per_image: int

    @property
    def queries(self) -> int:
        """All together."""
        return self.images[0] * self.calibration_per_image + self.images[1] * self.test_per_image


def cost(study: str) -> Cost:
    """Queries of a study's `:paper` attack."""
    section = importlib.import_module(f"experiments.configs.{study}").get_config("paper").attack
    jobs = jobs_of(section)
    dearest: dict[tuple[str, int | float | None], int] = {}
    for job in jobs:
        tier = (job.attack.name, job.setting.get("q"))
        dearest[tier] = max(job.queries, dearest.get(tier, 0))
    plan = planning.make_plan(jobs, linear_schedule())
    images = (2 * section.calibration_size, 2 * section.test_size)
    return Cost(study, images, plan.queries_per_image, sum(dearest.values()))


def networks() -> dict[str, ModelSpec]:
    """The paper's networks: the 35.7M-parameter DDPM U-Net, and Guided Diffusion's of 553.8M parameters."""
    return {
        "ddpm": ModelSpec(architecture=models.DdpmUnetSpec(), image_shape=(32, 32, 3)),
        "guided": ModelSpec(architecture=guided.presets()["256x256"].architecture, image_shape=(256, 256, 3)),
    }


def seconds_per_query(spec: ModelSpec) -> float:
    """Median time of a forward pass per image at the default micro-batch, on one device, without compiling."""
    size = scoring.default_micro_batch(spec.image_shape, jax.local_devices()[0].platform)
    variables = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01), models.param_shapes(spec.architecture))
    x = jnp.zeros((size, *spec.image_shape))
    label = None if spec.architecture.num_classes is None else jnp.zeros(size, jnp.int32)
    forward = jax.jit(models.denoise(spec))
    seconds = []
    with jax.default_matmul_precision(PRECISION):
        for _ in range(1 + _ROUNDS):
            start = time.perf_counter()
            forward(variables, x, jnp.int32(100), label).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:])) / size


def to_markdown(costs: Sequence[Cost], seconds: dict[str, float]) -> str:
    """A table; with hours on one device where the time of the study's network is known.

    Args:
      costs: a row each.
      seconds: measured time of a query, by network.
    """
    lines = ["| study | calibration: images x queries | test: images x queries, at most | all, at most | hours |"]
    lines.append("|---|---:|---:|---:|---:|")
    for one in costs:
        each = seconds.get(STUDIES[one.study])
        hours = "" if each is None else f"{one.queries * each / 3600:,.1f}"
        calibration = f"{one.images[0]:,} x {one.calibration_per_image:,}"
        test = f"{one.images[1]:,} x {one.test_per_image:,}"
        lines.append(f"| {one.study} | {calibration} | {test} | {one.queries:,} | {hours} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    _MEASURE = flags.DEFINE_bool("measure", False, "time both networks on this machine")
    _SECONDS = {
        "ddpm": flags.DEFINE_float("ddpm_seconds", None, "seconds per query of the DDPM U-Net"),
        "guided": flags.DEFINE_float("guided_seconds", None, "seconds per query of Guided Diffusion's network"),
    }

    def _main(argv: list[str]) -> None:
        del argv
        seconds = {name: flag.value for name, flag in _SECONDS.items() if flag.value is not None}
        if _MEASURE.value:
            device = jax.local_devices()[0].device_kind
            for name, spec in networks().items():
                seconds[name] = seconds_per_query(spec)
                print(f"{name}: {seconds[name]:.4g} s per query on one {device}")
        print(to_markdown([cost(study) for study in STUDIES], seconds))

    run_app(_main)
