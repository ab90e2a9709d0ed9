"""Does DP-SGD stop the attacks? Train without privacy and at several ε, attack every model, and make the table.

    python -m experiments.dp_defense --config=experiments/configs/dp_digits.py --workdir=W

    WORKDIR/vanilla, WORKDIR/epsilon_1, …   one arm each: train/, model/ (with privacy.json) and attack/, as written by
                                            `experiments.train` and `experiments.attack`, and seconds.json
    WORKDIR/dp_table.md                     the paper's third table, and what it can and cannot show

An interrupted study continues when it is started again, without spending any budget twice. With `--seeds=0,1,2` there
is a study for each seed in WORKDIR/seed_N. `experiments.tables` puts those that are kept on the results page.
"""

import json
import pathlib
import time
import zlib
from collections.abc import Callable

import jax
from ml_collections.config_dict import ConfigDict

from dime_jax import training
from dime_jax._util import files, validate
from dime_jax._util.distributed import on_first_process
from dime_jax.training import dp
from experiments import attack, dp_table
from experiments.launch import launch
from experiments.study_data import open_study
from experiments.train import add_split_and_log, model_spec, training_options


def arms(config: ConfigDict) -> dict[str, ConfigDict]:
    """Return the configs of a study's arms by name: vanilla first, then as `config.dp.epsilons` lists them.

    Every arm is attacked with noises and probes of its own, so that the luck of one draw is not read as an effect that
    all arms share.
    """
    validate.check_choice(config.dp.vanilla.batches, ("poisson", "shuffled"), "config.dp.vanilla.batches")
    found = {}
    for epsilon in (None, *config.dp.epsilons):
        name = "vanilla" if epsilon is None else f"epsilon_{epsilon:g}"
        found[name] = config.copy_and_resolve_references()
        found[name].dp.epsilon = None if epsilon is None else float(epsilon)
        found[name].attack.seed = draw_seed(config.seed, name)
    found["vanilla"].train.recipe.update(config.dp.vanilla.recipe)
    return found


def draw_seed(seed: int, arm: str) -> int:
    """Return the seed of an arm's noises and probes: another for each arm and each seed of the study."""
    return zlib.crc32(f"{seed} {arm}".encode()) >> 1  # below 2³¹, as JAX takes them everywhere


def train_arm(config: ConfigDict, workdir: pathlib.Path) -> pathlib.Path:
    """Train an arm, or finish its training; returns the model directory."""
    section, budget = config.train, config.dp
    study = open_study(config, workdir)
    spec, recipe, members = model_spec(config), training.TrainingRecipe(**section.recipe), study.split.member
    options = training_options(section)
    if budget.epsilon is not None:
        privacy = dp.Privacy(epsilon=budget.epsilon, steps=budget.steps, delta=budget.delta, clip_norm=budget.clip_norm)
        model = dp.train_privately(
            workdir, spec, study.source, members, recipe, privacy, microbatch=budget.microbatch, options=options
        )
    else:
        shuffled = budget.vanilla.batches == "shuffled"
        method = None if shuffled else dp.poisson_method(recipe, len(members), budget.steps)
        model = training.train(workdir, spec, study.source, members, recipe, method=method, options=options)
    on_first_process(lambda: add_split_and_log(workdir, study.split))
    return model


def run(config: ConfigDict, workdir: str | pathlib.Path, config_file: str = "") -> dp_table.DpTable:
    """Run or finish the study; returns the table, which is also in WORKDIR/dp_table.md."""
    workdir = pathlib.Path(workdir)
    for name, arm in arms(config).items():
        directory = workdir / name
        _timed(directory, "train", train_arm, arm, directory)
        _timed(directory, "attack", attack.run, arm, directory, config_file)
    table = dp_table.read_table(workdir)
    on_first_process(lambda: files.write_atomically(workdir / "dp_table.md", dp_table.to_section([table]).encode()))
    return table


def _timed(directory: pathlib.Path, stage: str, work: Callable[..., object], *args: object) -> None:
    """Do the work, and record the time of the call that finished it in DIRECTORY/seconds.json.

    `continued` says that an earlier call, whose time is not counted, had begun it.
    """
    path = directory / dp_table.SECONDS_FILE
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    continued, start = (directory / stage).exists(), time.monotonic()
    work(*args)
    if stage not in known and jax.process_index() == 0:
        known[stage] = {"seconds": round(time.monotonic() - start, 1), "continued": continued}
        files.write_atomically(path, (json.dumps(known, indent=1) + "\n").encode())


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Run, and print the table."""
    table = run(config, workdir, config_file)
    if jax.process_index() == 0:
        print(dp_table.to_section([table]))


if __name__ == "__main__":
    launch(main, "experiments/configs/dp_digits.py", many=True)
