"""What the paper's tables cost: queries from the planner, times measured seconds per query.

    python -m experiments.costs                      queries of every `:paper` config
    python -m experiments.costs --measure            and time both networks on this machine (the larger takes minutes)
    python -m experiments.costs --ddpm_seconds=0.001 --guided_seconds=0.05    with measurements from elsewhere

The calibration half is scored over the whole grid with shared queries. The test half is scored at one setting for each
attack and tier; which one is known only after calibration, so it is counted at the dearest setting of each, unshared:
an upper bound. Time assumes that a query costs the same throughout the run, as it does when the network is what limits
it. Training is counted in images that pass through the network and back, and its time is in no column.
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
from dime_jax.core.denoiser import PRECISION
from dime_jax.core.schedule import linear_schedule
from dime_jax.models import ModelSpec
from dime_jax.scoring import planning
from experiments.attack import jobs_of
from experiments.launch import run_app

STUDIES = {
    **dict.fromkeys(("cifar10", "cifar100", "stl10u", "celeba", "dp_celeba"), "ddpm"),
    "imagenet256": "guided",
}
_ROUNDS = 3


class StudyCost(NamedTuple):
    """What one `:paper` study takes.

    Attributes:
      images: of both halves, for one model.
      calibration_per_image: queries.
      test_per_image: at most so many queries.
      models: that are attacked: the arms of a DP study, else one.
      trained: images that pass through the network and back in training, for all models.
    """

    study: str
    images: tuple[int, int]
    calibration_per_image: int
    test_per_image: int
    models: int = 1
    trained: int = 0

    @property
    def queries(self) -> int:
        """All together."""
        one = self.images[0] * self.calibration_per_image + self.images[1] * self.test_per_image
        return self.models * one


def cost(study: str) -> StudyCost:
    """What a study's `:paper` variant takes."""
    config = importlib.import_module(f"experiments.configs.{study}").get_config("paper")
    section = config.attack
    jobs = jobs_of(section)
    dearest: dict[tuple[str, int | float | None], int] = {}
    for job in jobs:
        tier = (job.attack.name, job.setting.get("q"))
        dearest[tier] = max(job.queries, dearest.get(tier, 0))
    plan = planning.make_plan(jobs, linear_schedule())
    images = (2 * section.calibration_size, 2 * section.test_size)
    models = 1 + len(config.dp.epsilons) if "dp" in config else 1
    trained = config.train.recipe.steps * config.train.recipe.batch_size if section.model == "trained" else 0
    return StudyCost(study, images, plan.queries_per_image, sum(dearest.values()), models, models * trained)


def networks() -> dict[str, ModelSpec]:
    """The paper's networks: the 35.7M-parameter DDPM U-Net, and Guided Diffusion's of 553.8M parameters."""
    return {
        "ddpm": ModelSpec(denoiser=models.DdpmUnetSpec(), image_shape=(32, 32, 3)),
        "guided": ModelSpec(denoiser=guided.presets()["256x256"].architecture, image_shape=(256, 256, 3)),
    }


def seconds_per_query(spec: ModelSpec) -> float:
    """Median time of a forward pass per image at the default micro-batch, on one device, without compiling."""
    size = scoring.default_micro_batch(spec.image_shape, jax.local_devices()[0].platform)
    variables = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01), models.param_shapes(spec.denoiser))
    x = jnp.zeros((size, *spec.image_shape))
    label = None if spec.denoiser.num_classes is None else jnp.zeros(size, jnp.int32)
    forward = jax.jit(models.denoise(spec))
    seconds = []
    with jax.default_matmul_precision(PRECISION):
        for _ in range(1 + _ROUNDS):
            start = time.perf_counter()
            forward(variables, x, jnp.int32(100), label).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:])) / size


def to_markdown(costs: Sequence[StudyCost], seconds: dict[str, float]) -> str:
    """A table; with hours on one device where the time of the study's network is known.

    Args:
      costs: a row each.
      seconds: measured time of a query, by network.
    """
    header = ["study", "models", "calibration: images x queries", "test: images x queries, at most", "all, at most"]
    lines = [
        f"| {' | '.join([*header, 'hours of queries', 'images of training'])} |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in costs:
        each = seconds.get(STUDIES[one.study])
        hours = "" if each is None else f"{one.queries * each / 3600:,.1f}"
        calibration = f"{one.images[0]:,} x {one.calibration_per_image:,}"
        test = f"{one.images[1]:,} x {one.test_per_image:,}"
        cells = [one.study, str(one.models), calibration, test, f"{one.queries:,}", hours, f"{one.trained:,}"]
        lines.append(f"| {' | '.join(cells)} |")
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
