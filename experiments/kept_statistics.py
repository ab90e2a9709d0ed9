"""Add to kept runs what their pictures say, so that tables are computed again without the images.

    python -m experiments.kept_statistics --run=docs/results/digits/seed_0
    python -m experiments.kept_statistics --run=docs/results/cifar10_overnight/seed_1 \\
      --source=cifar10:DIR --split_file=CIFAR10_train_ratio0.5.npz

    RUN/statistics.npz, .json    statistics of the pictures of both halves (`protocol.statistics`)
    RUN/classical.npz, .json     index [n] of the calibration half, errors [4, n]: how far two classical denoisers of
                                 the same noisy images are from the truth (`attacks.loss_level.Classical`); for runs
                                 that were made before the rule of three queries, and have its other readings

No model is asked. Images are checked against the fingerprints of the run's score tables. Those of a latent study are
made again; the denoisers would need its latents, and are left out.
"""

import dataclasses
import pathlib
import tempfile

import numpy as np
from absl import flags

from dime_jax import data, scoring
from dime_jax._util import digests, files
from dime_jax.attacks import Attack, get_attack
from dime_jax.attacks.base import Recipe
from dime_jax.attacks.loss_level import NAME, Classical, setting_for
from dime_jax.core.denoiser import Denoiser
from dime_jax.data.roles import own_transforms
from dime_jax.protocol import statistics
from dime_jax.scoring import score_table
from dime_jax.scoring.planning import Job
from dime_jax.scoring.score_table import ScoreTable
from experiments import latent_study
from experiments.launch import run_app
from experiments.runs import Run, read_run
from experiments.study_data import open_study

FILE = "classical.json"
_ARRAYS = "classical.npz"
QUIET = scoring.ScoringOptions(silent=True)


def rule_job(table: ScoreTable) -> Job:
    """Return the rule for audits without known members, at the setting that the schedule of a table calls for."""
    return Job(get_attack(NAME), setting_for(table.schedule))


def _classical(table: ScoreTable) -> Recipe:
    """Return the readings of the rule that ask nothing."""
    readings = rule_job(table).recipe.readings
    return Recipe(tuple(one for one in readings if isinstance(one.call, Classical)), lambda answers: answers)


def has_rule(table: ScoreTable) -> bool:
    """Whether a table has all readings of the rule that ask the model."""
    return {str(one) for one in rule_job(table).recipe.readings} <= {*table.readings, *map(str, _classical(table)[0])}


def with_classical(table: ScoreTable, directory: pathlib.Path) -> ScoreTable:
    """Return the table of a run's calibration half with the denoisers' errors among its readings, if they are kept."""
    if not (directory / FILE).exists():
        return table
    columns = digests.read(directory / FILE).read_arrays(_ARRAYS)
    if not np.array_equal(columns["index"], table.index):
        raise ValueError(f"{directory / _ARRAYS} is of other images than {table.directory}")
    errors = dict(zip(map(str, _classical(table).readings), columns["errors"], strict=True))
    return dataclasses.replace(table, readings={**table.readings, **errors})


def add(directory: pathlib.Path, places: dict[str, str] | None = None) -> None:
    """Write the files of one run, unless they are there.

    Args:
      directory: of the run.
      places: values of `config.data` that the run's config leaves open.

    Raises:
      ValueError: if these are not the images of the run.
    """
    run, table = read_run(directory), score_table.read_table(directory / "calibration")
    config = run.images_config()
    shape, latent = tuple(config.attack.image_shape), config.attack.model == "pipeline"
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        if latent:
            shape = (latent_study.IMAGE_SIZE, latent_study.IMAGE_SIZE, 3)
            latent_study.write_folders(scratch, latent_study.all_digits(), config.train.images, config.seed)
        config.data.update(latent_study.places(scratch) if latent else places or {})
        source = own_transforms(open_study(config, scratch).source, shape)
        _check(run, source, captions=latent)
        both = np.concatenate([side for half in run.halves for side in half.sides])
        statistics.make(directory, source, both, data.transform_for(source, shape))
        if not latent and has_rule(table) and not (directory / FILE).exists():
            _write_classical(run, table, source, shape, scratch)


def _check(run: Run, source: data.Source, captions: bool) -> None:
    for half, key in zip(run.halves, ("calibration_data", "test_data")):
        found = data.fingerprint(source, np.concatenate(half.sides), captions=captions)
        if found != run.results.fingerprints[key]:
            wanted = run.results.fingerprints[key]
            raise ValueError(f"{run.directory}: the images of its {key} have fingerprint {wanted}, got {found}")


def _write_classical(
    run: Run, table: ScoreTable, source: data.Source, shape: tuple[int, ...], scratch: pathlib.Path
) -> None:
    nobody = Denoiser.from_function(lambda x, t: x, table.schedule, shape, name="nobody", traceable=True)
    job = Job(Attack("classical", "Classical", "", recipe=lambda setting: _classical(table), signs=(0,) * 4), {})
    place, seed = scratch / "table", run.results.seed
    asked = scoring.score(nobody, source, [job], place, indices=table.index, seed=seed, options=QUIET)
    if asked.queries_made:
        raise AssertionError(f"no model is asked, got {asked.queries_made} queries")
    columns = {"index": table.index, "errors": asked.terms(job).astype(np.float32)}
    files.write_atomically(run.directory / _ARRAYS, digests.dump_arrays(columns, compress=True))
    digests.write(run.directory / FILE, {"readings": [str(one) for one in _classical(table).readings]}, [_ARRAYS])


if __name__ == "__main__":
    _RUN = flags.DEFINE_string("run", None, "a kept run, such as docs/results/digits/seed_0", required=True)
    _SOURCE = flags.DEFINE_string("source", None, "of its images, where its config leaves that open")
    _SPLIT_FILE = flags.DEFINE_string("split_file", None, "the same of its split")

    def _main() -> None:
        given = {"source": _SOURCE.value, "split_file": _SPLIT_FILE.value}
        add(pathlib.Path(_RUN.value), {name: value for name, value in given.items() if value})

    run_app(_main)
