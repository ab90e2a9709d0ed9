"""Train a denoiser on the members of a split, into WORKDIR/model; states, log and pictures go to WORKDIR/train.

WORKDIR/snapshots/N is the model after N updates, where `train.snapshot_every` asks for it, for
`experiments.memorisation`.

    python -m experiments.train --config=experiments/configs/digits.py --workdir=out/digits

An interrupted run continues when it is started again, and ends with the same weights. `experiments.attack` with the
same config and workdir attacks the model.
"""

import pathlib
import shutil

import jax
from ml_collections.config_dict import ConfigDict

from dime_jax import data, models, training
from dime_jax._util import validate
from dime_jax._util.distributed import on_first_process
from experiments.launch import launch
from experiments.study_data import open_study

_SPECS = {spec.kind: spec for spec in (models.DdpmUnetSpec, models.GuidedUnetSpec)}


def model_spec(config: ConfigDict) -> models.ModelSpec:
    """Return the network that `config.train` describes."""
    fields = config.train.architecture.to_dict()
    kind = fields.pop("kind")
    validate.check_choice(kind, list(_SPECS), "config.train.architecture.kind")
    shape = tuple(config.train.image_shape)
    return models.ModelSpec(denoiser=_SPECS[kind](image_channels=shape[-1], **fields), image_shape=shape)


def training_options(section: ConfigDict) -> training.TrainingOptions:
    """Return how `config.train` says that the training is run and recorded."""
    names = ("log_every", "save_every", "sample_every", "snapshot_every")
    return training.TrainingOptions(**{name: section[name] for name in names})


def run(config: ConfigDict, workdir: str | pathlib.Path) -> pathlib.Path:
    """Run or finish the training; returns the model directory, which also gets the split and the log."""
    workdir, study = pathlib.Path(workdir), open_study(config, workdir)
    recipe, options = training.TrainingRecipe(**config.train.recipe), training_options(config.train)
    model = training.train(workdir, model_spec(config), study.source, study.split.member, recipe, options=options)
    on_first_process(lambda: add_split_and_log(workdir, study.split))
    return model


def add_split_and_log(workdir: pathlib.Path, split: data.Split) -> None:
    """Put who was a member, and the log, beside the weights of a finished training."""
    data.write_split(workdir / "model" / "split.npz", split)
    shutil.copy(workdir / "train" / "metrics.jsonl", workdir / "model" / "training_log.jsonl")


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Run, and say where the model is."""
    del config_file
    model = run(config, workdir)
    if jax.process_index() == 0:
        print(model)


if __name__ == "__main__":
    launch(main, "experiments/configs/digits.py", many=True)
