"""Attack a model by the paper's protocol: score the calibration half, calibrate, score the test half, evaluate.

    python -m experiments.attack --config=experiments/configs/digits_attack.py --workdir=out/digits_attack

An interrupted run continues when it is started again. Start one process per host, or several, with JAX's own
environment variables for `jax.distributed`, and `--distributed`.
"""

import pathlib
from typing import Any

import jax
import numpy as np
import rich.console
from absl import app, flags
from ml_collections import config_flags
from ml_collections.config_dict import ConfigDict

from dime_jax import checkpoints, data, models, pipeline, planning, scoring
from dime_jax.denoiser import Denoiser
from dime_jax.ideal import IdealDenoiser
from dime_jax.query_ledger import Budget
from dime_jax.report import tables
from dime_jax.schedule import linear_schedule


def tiny_unet(image_shape: tuple[int, int, int]) -> models.ModelSpec:
    """A U-Net small enough to compile in seconds, for smoke runs."""
    architecture = models.DdpmUnetSpec(
        image_channels=image_shape[-1],
        stem_channels=8,
        time_features=8,
        time_channels=16,
        level_channels=(8,),
        num_res_blocks=1,
        attention_levels=(),
        norm_groups=4,
    )
    return models.ModelSpec(architecture=architecture, image_shape=image_shape)


def load_model(config: ConfigDict, workdir: pathlib.Path, source: data.Source, members: np.ndarray) -> Denoiser:
    """The model that `config.attack.model` names.

    "closed_form" is the ideal denoiser of the members; "untrained" a tiny U-Net of random weights, written to the
    workdir; everything else a model directory or a shipped model.
    """
    name = config.attack.model
    shape = tuple(config.attack.image_shape)
    if name == "closed_form":
        transform = data.transform_for(source, shape)
        return IdealDenoiser(np.stack([transform(source[i].image) for i in members]), linear_schedule())
    if name == "untrained":
        directory = workdir / "model"
        if not directory.exists():
            spec = tiny_unet(shape)
            rng = np.random.default_rng(config.seed)
            variables = jax.tree.map(
                lambda leaf: 0.1 * rng.normal(size=leaf.shape).astype(np.float32),
                models.param_shapes(spec.architecture),
            )
            checkpoints.save_model(directory, spec, variables)
        return checkpoints.load_denoiser(directory)
    return checkpoints.load_denoiser(name)


def run(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Run or finish the experiment; everything it makes is in `workdir`. Returns results.json."""
    workdir = pathlib.Path(workdir)
    attack = config.attack
    source = data.open_source(attack.source)
    if attack.split_file:
        split = data.read_split(attack.split_file, source)
    else:
        split = data.random_split(source, attack.split_size, config.seed)
    halves = data.halves(
        split,
        source.ids,
        mode=attack.halves,
        seed=config.seed,
        calibration_size=attack.calibration_size,
        test_size=attack.test_size,
    )
    denoiser = load_model(config, workdir, source, split.member)
    settings = [{"t": t} for t in attack.timesteps] or None
    jobs = planning.grid_jobs(attack.names or None, attack.profile, attack.tiers or None, settings)
    options = scoring.Options(
        micro_batch=attack.micro_batch,
        budget=Budget(attack.max_queries, attack.max_queries_per_image),
    )
    return pipeline.run(workdir, denoiser, source, halves, jobs, seed=config.seed, options=options)


def main(config: ConfigDict, workdir: str) -> None:
    """Run, and print the table in the first process."""
    results = run(config, workdir)
    if jax.process_index() == 0:
        tables.print_results(results, rich.console.Console())


if __name__ == "__main__":
    # Here and not at the top, so that programs and tests can import several experiments: flag names are global.
    _CONFIG = config_flags.DEFINE_config_file("config", help_string="experiments/configs/digits_attack.py[:smoke]")
    _WORKDIR = flags.DEFINE_string("workdir", None, "where score tables and results go", required=True)
    _DISTRIBUTED = flags.DEFINE_bool("distributed", False, "join the other processes of jax.distributed")
    flags.mark_flag_as_required("config")

    def _main(argv: list[str]) -> None:
        del argv
        if _DISTRIBUTED.value:
            jax.distributed.initialize()
        main(_CONFIG.value, _WORKDIR.value)

    app.run(_main)
