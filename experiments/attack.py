"""Attack a model by the paper's protocol: score the calibration half, calibrate, score the test half, evaluate.

    python -m experiments.attack --config=experiments/configs/cifar10.py:smoke --workdir=out/cifar10_smoke

    WORKDIR/model     the model directory from `experiments.train`; model-HASH, one converted from a checkpoint
    WORKDIR/attack    the run (see `dime_jax.protocol`); config.json, from which `experiments.tables` repeats it;
                      images_alone.json, what the images show without the model

An interrupted run continues when it is started again. For several hosts see `experiments.launch`.
"""

import json
import pathlib

import jax
import numpy as np
import rich.console
from ml_collections.config_dict import ConfigDict

from dime_jax import data, scoring, training
from dime_jax._util import files
from dime_jax._util.distributed import on_first_process, together
from dime_jax._util.typing import JsonObject
from dime_jax.attacks import attack_names
from dime_jax.attacks.base import grid
from dime_jax.core.denoiser import OWN, TEXT_CONDITIONS, Denoiser
from dime_jax.core.ideal import IdealDenoiser
from dime_jax.core.schedule import linear_schedule
from dime_jax.data.roles import own_transforms
from dime_jax.findings import json_files
from dime_jax.findings.results import StudyFindings
from dime_jax.loading import model_directory, opening
from dime_jax.protocol import stages
from dime_jax.report import tables
from dime_jax.scoring import planning
from dime_jax.scoring.query_ledger import Budget
from experiments import generated, without_model
from experiments.launch import launch
from experiments.study_data import Study, generated_directory, open_study

CONFIG_FILE = "config.json"
SOURCES = ("data.source", "data.heldout")
FILES = ("data.split_file", "attack.checkpoint", "attack.model_flags", "attack.model", "attack.reference")


def load_model(config: ConfigDict, workdir: pathlib.Path, study: Study) -> Denoiser:
    """Load the model that `config.attack.model` names (see `configs.attack_section`).

    Args:
      config: the study's.
      workdir: where a trained or converted model is.
      study: whose members a trained model, or the closed form, has seen.
    """
    attack = config.attack
    if attack.model == "closed_form":
        source = own_transforms(study.source, tuple(attack.image_shape))
        transform = data.transform_for(source, tuple(attack.image_shape))
        members = np.stack([transform(source[i].image) for i in study.split.member])
        return IdealDenoiser(members, linear_schedule())
    options: JsonObject = {}
    if attack.model == "converted":
        model, options = checkpoint(config, workdir)
    elif attack.model == "trained":
        model = workdir / "model"
        on_first_process(lambda: check_trained(config, model, study))
    else:
        model = attack.model
    return _open(model, workdir, options)


def load_reference(config: ConfigDict, workdir: pathlib.Path, model: Denoiser) -> Denoiser | None:
    """The second model that `config.attack.reference` names, if any; a checkpoint is opened at the model's size."""
    named = config.attack.reference
    if not named:
        return None
    return _open(named, workdir, {"image_size": model.image_shape[0]} if opening.is_converted(named) else {})


def _open(model: str | pathlib.Path, workdir: pathlib.Path, options: JsonObject) -> Denoiser:
    if jax.process_count() > 1:  # one of them converts what has to be converted
        on_first_process(lambda: opening.open_model(model, cache=workdir, **options))
    return together(lambda: opening.open_model(model, cache=workdir, **options)).denoiser


def check_trained(config: ConfigDict, model: pathlib.Path, study: Study) -> None:
    """Refuse a model that was trained on other images than the config's members, or by another recipe.

    Args:
      config: with the recipe that is expected.
      model: the model directory.
      study: whose members are expected.
    """
    if not model.exists():
        raise ValueError(f"no model in {model}: run experiments.train with the same config and workdir first")
    metadata, recipe = model_directory.read_spec_file(model)["metadata"], training.TrainingRecipe(**config.train.recipe)
    images = {"count": len(study.split.member), "fingerprint": data.fingerprint(study.source, study.split.member)}
    for name, now in (("images", images), ("recipe", recipe.identity()), ("steps", recipe.steps)):
        if metadata.get(name) != now:
            raise ValueError(f"{model} must be trained with the config's {name}, {now}, got {metadata.get(name)}")


def checkpoint(config: ConfigDict, workdir: pathlib.Path) -> tuple[pathlib.Path, JsonObject]:
    """Return the config's checkpoint, or the generated one, and its model flags if it has any."""
    if config.data.generate:
        directory = generated_directory(workdir)
        file, flags = directory / generated.CHECKPOINT, directory / generated.MODEL_FLAGS
        return file, {"model_flags": flags if flags.is_file() else None}
    attack = config.attack
    if not attack.checkpoint:
        raise ValueError("config.attack.checkpoint must be set: --config.attack.checkpoint=FILE")
    return pathlib.Path(attack.checkpoint), {"model_flags": attack.model_flags or None}


def jobs_of(attack: ConfigDict) -> list[planning.Job]:
    """List every attack at every setting of its grid, from `config.attack`."""
    jobs = []
    for name in attack.names or attack_names((OWN,)):
        values = attack.grids.get(name, attack.grids.get("all"))
        settings = grid(**values) if values else None
        jobs += planning.grid_jobs([name], attack.profile, attack.budgets or None, settings, conditions=TEXT_CONDITIONS)
    return jobs


def without_places(config: ConfigDict) -> JsonObject:
    """Return the config's values for the record: files by their names and sources by their kinds, not their paths here.

    The fingerprints in the score tables identify their contents.
    """
    values = json.loads(config.to_json())
    for name in (*SOURCES, *FILES):
        section, key = name.split(".")
        place = values[section][key]
        if name in SOURCES and place.partition(":")[2]:
            place = f"{place.partition(':')[0]}:DIR"
        values[section][key] = place.rpartition("/")[2]
    return values


def halves_of(config: ConfigDict, study: Study) -> data.Halves:
    """Return which images choose the settings, and which are tested."""
    mode = config.attack.halves
    groups = study.source.identities if mode == "by_id" else None
    sizes = {name: config.attack[name] for name in ("calibration_size", "test_size", "calibration_share")}
    return data.halves(study.split, study.source.ids, mode=mode, seed=config.seed, groups=groups, **sizes)


def run(config: ConfigDict, workdir: str | pathlib.Path, config_file: str = "") -> StudyFindings:
    """Run or finish the experiment; everything it makes is in `workdir`. Returns what results.json holds.

    Args:
      config: with the sections of `configs.attack_section`.
      workdir: shared by all processes.
      config_file: where the config came from, "experiments/configs/X.py:variant", for the record.
    """
    workdir = pathlib.Path(workdir)
    directory, attack = workdir / "attack", config.attack
    study = open_study(config, workdir)
    jobs = jobs_of(attack)
    denoiser = load_model(config, workdir, study)
    reference = load_reference(config, workdir, denoiser)
    if attack.transform:
        transform = data.get_transform(attack.transform, denoiser.image_shape)
    else:  # the source's own
        study = study._replace(source=own_transforms(study.source, denoiser.image_shape))
        transform = data.transform_for(study.source, denoiser.image_shape)
    budget = Budget(attack.max_queries, attack.max_queries_per_image)
    options = scoring.ScoringOptions(micro_batch=attack.micro_batch, budget=budget)
    halves, looked = halves_of(config, study), list[without_model.Looked]()
    seed = config.seed if attack.seed is None else attack.seed

    def look() -> None:
        if not stages.is_begun(directory):
            looked.append(without_model.look(study.source, halves, transform, config.seed))

    def record() -> None:
        for alone, _ in looked:
            without_model.write(directory, alone)
        made_from = {"file": config_file, "config": without_places(config)}
        files.write_atomically(directory / CONFIG_FILE, (json.dumps(made_from, indent=1) + "\n").encode())

    on_first_process(look)
    groups = looked[0][1] if looked else None
    stages.begin(directory, jobs, halves, seed, groups=groups, reference=reference)
    on_first_process(record)
    # That the model is not a denoiser is only recorded: the networks of :smoke are random.
    stages.run(
        directory,
        denoiser,
        study.source,
        halves,
        jobs,
        reference=reference,
        heldout=study.split.heldout,
        seed=seed,
        transform=transform,
        options=options,
        take=("calibration", "calibrate", "test"),
    )
    on_first_process(lambda: without_model.look_once(directory, study.source, transform, config.seed))
    on_first_process(lambda: without_model.write_results(directory))
    results = json_files.read_results(directory)
    assert isinstance(results, StudyFindings)
    return results


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Run, and print the table in the first process."""
    print_results(run(config, workdir, config_file))


def print_results(results: StudyFindings) -> None:
    """Print the table, and what the images show without the model, in the first process."""
    if jax.process_index() == 0:
        tables.print_results(results, rich.console.Console())
        print(f"Without the model: {without_model.describe(results)}.")


if __name__ == "__main__":
    launch(main, "experiments/configs/cifar10.py", many=True)
