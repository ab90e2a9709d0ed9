"""A fine-tune beside its base: after how many passes over its images does it give them away?

    python -m experiments.train --config=experiments/configs/cifar10.py:overnight --workdir=W --seeds=21,22,23 ...
    python -m experiments.finetune (the same)

fine-tunes each model on 100 held-out images that are set aside for that, fully and by LoRAs of rank 16 and 4, and asks
every attack after 5 to 80 passes, of the fine-tune alone and beside the model that it was made from, with the same
noise. Everything is fitted to 100 other held-out images, without labels and without any member; the images of the
fine-tune and 1,000 more held-out images are counted.

    WORKDIR/finetune/KIND/train, snapshots        the fine-tunes: "full", "rank-16", "rank-4"
    WORKDIR/finetune/base, KIND/asked-PASSES      score tables
    WORKDIR/finetune/KIND.json                    what came out
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
from ml_collections.config_dict import ConfigDict

import dime_jax as dj
from dime_jax import data, training
from dime_jax._util import files, records
from dime_jax.core.denoiser import Denoiser
from dime_jax.data.roles import own_transforms
from dime_jax.loading import model_directory
from dime_jax.protocol import statistics
from dime_jax.training.loop import SNAPSHOTS
from experiments import beside
from experiments.attack import load_model
from experiments.beside import Found, ImageRoles, study_name
from experiments.launch import launch
from experiments.study_data import open_study

PASSES = (5, 10, 20, 40, 80)
RANKS = {"full": None, "rank-16": 16, "rank-4": 4}
IMAGES, FITTED, BATCH = 100, 100, 20
LEARNING_RATES = {"full": 2e-4, "rank-16": 1e-3, "rank-4": 1e-3}


class BesideBase(NamedTuple):
    """What attacks achieve on a fine-tune alone, and beside its base.

    Attributes:
      file: config and variant of the base's study.
      seed: of base and fine-tune.
      kind: "full", or "rank-R" for a LoRA.
      members: images that it was fine-tuned on; all are counted.
      fitted: held-out images of the fits.
      counted: held-out images that are counted.
      passes: over the members.
      found: after each number of passes.
    """

    file: str
    seed: int
    kind: str
    members: int
    fitted: int
    counted: int
    passes: list[int]
    found: list[Found]

    @property
    def study(self) -> str:
        """Its config and variant."""
        return study_name(self.file)

    @property
    def title(self) -> str:
        """Of what it is about."""
        return f"{self.study}, seed {self.seed}: {self.tuned} beside its base"

    @property
    def tuned(self) -> str:
        """In words, how it was fine-tuned."""
        return "full fine-tune" if self.kind == "full" else f"LoRA of {self.kind.replace('-', ' ')}"

    @property
    def steps(self) -> list[tuple[str, Found]]:
        """What was found, under what it was found after."""
        return [(f"{passes} passes over its images", of) for passes, of in zip(self.passes, self.found)]


# (base, directory, source, members, recipe, rank, every) -> DIRECTORY/snapshots
Tune = Callable[[pathlib.Path, pathlib.Path, data.Source, np.ndarray, training.TrainingRecipe, int | None, int], object]


def tune_images(
    base: pathlib.Path,
    directory: pathlib.Path,
    source: data.Source,
    members: np.ndarray,
    recipe: training.TrainingRecipe,
    rank: int | None,
    every: int,
) -> None:
    """Fine-tune a model of images on one device, since batches are small, or finish that.

    Args:
      base: the model directory.
      directory: of the fine-tune, which is kept in DIRECTORY/snapshots.
      source: images as they are stored.
      members: those that it is tuned on.
      recipe: how.
      rank: of a LoRA; None to train all weights.
      every: updates after which it is kept.
    """
    devices = jax.local_devices()[:1]
    options = training.TrainingOptions(log_every=every, save_every=every, snapshot_every=every, devices=devices)
    spec = model_directory.read_spec(base)
    training.train(directory, spec, source, members, recipe, options=options, start=base, rank=rank)


def run(
    config: ConfigDict, workdir: str | pathlib.Path, config_file: str = "", tune: Tune = tune_images
) -> list[BesideBase]:
    """Fine-tune a model of a study in every way, or finish that, and judge every attack beside the base.

    Args:
      config: the study's.
      workdir: of the study; WORKDIR/model is the base.
      config_file: where the config came from, for the record.
      tune: how, see `tune_images`.
    """
    workdir = pathlib.Path(workdir)
    directory, study, model = workdir / "finetune", open_study(config, workdir), workdir / "model"
    base = load_model(config, workdir, study)
    source, jobs = own_transforms(study.source, base.image_shape), beside.fixed_jobs(base.schedule)
    fitted, counted, members = beside.cut(config, workdir, IMAGES, FITTED)
    roles = ImageRoles(members, counted, fitted)
    statistics.make(directory, source, roles.all, data.transform_for(source, base.image_shape))
    pictures = statistics.read(directory)
    answers = beside.ask(base, source, roles, jobs, directory / "base", config.seed)
    results = []
    for kind, rank in RANKS.items():
        tune(model, directory / kind, study.source, members, _recipe(config, kind), rank, _updates(PASSES[0]))
        found = []
        for passes in PASSES:
            tuned = _load(model, directory / kind / SNAPSHOTS / str(_updates(passes)), rank)
            table = beside.ask(tuned, source, roles, jobs, directory / kind / f"asked-{passes}", config.seed)
            found.append(beside.count(table, answers, roles, pictures, config.seed))
        counts = len(members), len(fitted), len(counted)
        results.append(BesideBase(config_file, config.seed, kind, *counts, list(PASSES), found))
    return results


def _updates(passes: int) -> int:
    return passes * IMAGES // BATCH


def _recipe(config: ConfigDict, kind: str) -> training.TrainingRecipe:
    """As the study's models are trained, if they are of images, with fewer updates of fewer images."""
    steps = _updates(PASSES[-1])
    return dataclasses.replace(
        training.TrainingRecipe(**config.train.get("recipe", {"steps": steps})),
        steps=steps,
        batch_size=BATCH,
        learning_rate=LEARNING_RATES[kind],
        warmup_steps=0,
        ema_decay=0.99,
        seed=config.seed,
    )


def _load(base: pathlib.Path, snapshot: pathlib.Path, rank: int | None) -> Denoiser:
    if rank is None:
        return dj.load_denoiser(snapshot)
    return dj.open_model(base, lora=[snapshot.with_suffix(".safetensors")]).denoiser


def report(results: Iterable[BesideBase], workdir: str | pathlib.Path) -> None:
    """Write what came out, and print it."""
    for found in results:
        plain = records.plain(found)
        files.write_json(pathlib.Path(workdir) / "finetune" / f"{found.kind}.json", plain)
        print(json.dumps(plain, indent=1))


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Run, write what came out, and print it."""
    report(run(config, workdir, config_file), workdir)


if __name__ == "__main__":
    launch(main, "experiments/configs/cifar10.py", many=True)
