"""Beside another model of the same kind: what is left of every attack once a reference's answers are taken out.

    python -m experiments.train --config=experiments/configs/cifar10.py:overnight --workdir=W --seeds=21,22,23 ...
    python -m experiments.reference (the same)

trains references on held-out images of the study that are set aside for that, and asks model and reference the same
queries with the same noise. `config.reference` says what: `images` and `steps` (a reference is judged after each
`train.snapshot_every` of them), and `small` for a narrower network. Everything is fitted to 200 other held-out images,
without labels and without any member; all members and up to 1,000 more held-out images are counted.

    WORKDIR/reference/NAME/train, snapshots, model    the reference
    WORKDIR/reference/target, NAME/asked-STEPS        score tables
    WORKDIR/reference/NAME.json                       what came out
"""

import json
import pathlib
from typing import NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

import dime_jax as dj
from dime_jax import data, training
from dime_jax._util import files, records
from dime_jax.data.roles import own_transforms
from dime_jax.protocol import statistics
from dime_jax.training.loop import SNAPSHOTS
from experiments import beside
from experiments.attack import load_model
from experiments.beside import Found, ImageRoles, study_name
from experiments.configs.train_section import small_unet
from experiments.launch import launch
from experiments.study_data import open_study
from experiments.train import model_spec, training_options

FITTED = 200
_OTHER_SEED = 1000  # no auditor knows the weights that a model began with


class BesideReference(NamedTuple):
    """What attacks achieve alone, and beside a reference after some of its updates.

    Attributes:
      file: config and variant of the study.
      seed: of the model.
      members: how many there are; all are counted.
      fitted: held-out images of the fits.
      counted: held-out images that are counted.
      reference_images: what the reference was trained on.
      small: whether it is narrower than the model.
      updates: of the reference.
      found: after each number of updates.
    """

    file: str
    seed: int
    members: int
    fitted: int
    counted: int
    reference_images: int
    small: bool
    updates: list[int]
    found: list[Found]

    @property
    def study(self) -> str:
        """Its config and variant."""
        return study_name(self.file)

    @property
    def title(self) -> str:
        """Of what it is about."""
        kind = "narrower model" if self.small else "model of its architecture"
        return f"{self.study}, seed {self.seed}, beside a {kind} trained on {self.reference_images:,} others"

    @property
    def steps(self) -> list[tuple[str, Found]]:
        """What was found, under what it was found after."""
        return [(f"{updates:,} updates of the reference", of) for updates, of in zip(self.updates, self.found)]


def run(config: ConfigDict, workdir: str | pathlib.Path, config_file: str = "") -> BesideReference:
    """Train a reference for a model of a study, or finish that, and judge every attack beside it."""
    workdir, asked = pathlib.Path(workdir), config.reference
    directory, name = workdir / "reference", f"{asked.images}{'-small' if asked.small else ''}"
    study = open_study(config, workdir)
    denoiser = load_model(config, workdir, study)
    source = own_transforms(study.source, denoiser.image_shape)
    fitted, counted, apart = beside.cut(config, workdir, asked.images, FITTED)
    roles, jobs = ImageRoles(study.split.member, counted, fitted), beside.fixed_jobs(denoiser.schedule)
    updates = train(config, directory / name, study.source, apart)
    statistics.make(directory, source, roles.all, data.transform_for(source, denoiser.image_shape))
    table = beside.ask(denoiser, source, roles, jobs, directory / "target", config.seed)
    found = []
    for steps in updates:
        reference = dj.load_denoiser(directory / name / SNAPSHOTS / str(steps))
        answers = beside.ask(reference, source, roles, jobs, directory / name / f"asked-{steps}", config.seed)
        found.append(beside.count(table, answers, roles, statistics.read(directory), config.seed))
    counts = len(roles.member), len(fitted), len(counted), asked.images
    return BesideReference(config_file, config.seed, *counts, asked.small, updates, found)


def train(config: ConfigDict, directory: pathlib.Path, source: data.Source, images: np.ndarray) -> list[int]:
    """Train a reference as the study's models are, but from other weights; returns the updates after which it was kept.

    Args:
      config: of the study.
      directory: of the reference.
      source: images as they are stored.
      images: which of them it is trained on.
    """
    own = config.copy_and_resolve_references().unlock()
    own.train.recipe.update(steps=config.reference.steps, seed=_OTHER_SEED + config.seed)
    if config.reference.small:
        own.train.architecture = small_unet(tuple(config.reference.widths))
    recipe, options = training.TrainingRecipe(**own.train.recipe), training_options(own.train)
    training.train(directory, model_spec(own), source, images, recipe, options=options)
    return list(range(options.snapshot_every, recipe.steps + 1, options.snapshot_every))


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Run, write what came out, and print it."""
    found = run(config, workdir, config_file)
    name = f"{found.reference_images}{'-small' if found.small else ''}.json"
    files.write_json(pathlib.Path(workdir) / "reference" / name, records.plain(found))
    print(json.dumps(records.plain(found), indent=1))


if __name__ == "__main__":
    launch(main, "experiments/configs/cifar10.py", many=True)
