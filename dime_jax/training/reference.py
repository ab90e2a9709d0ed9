"""A reference, trained on the spot: a second model to ask beside a model, on images that the model has not seen.

    DIR/train/                 the training, as in `loop`: the same call continues it
    DIR/trained_on-HASH.npy    sketches of the images that it is trained on, by which audits know them and their copies;
                               HASH is the images' fingerprint, which the model's metadata has too
    DIR/model/                 the model directory

The recipe is that of our own studies of small models, scaled by the number of images.
"""

import dataclasses
import os
import pathlib
import sys

import numpy as np

from dime_jax import data, models
from dime_jax._util.distributed import on_first_process
from dime_jax._util.text import printable
from dime_jax.data.batches import Unusable, refuse_too_many
from dime_jax.data.duplicates import Sketch, sketches_file, write_sketches
from dime_jax.data.role_checks import look_at
from dime_jax.data.roles import with_labels
from dime_jax.loading.opening import OpenedModel
from dime_jax.models.unet import ImageUnetSpec
from dime_jax.protocol.options import SMALL, ReferenceOptions
from dime_jax.training.loop import TrainingOptions, train
from dime_jax.training.recipe import TrainingRecipe
from dime_jax.training.records import read_records

FEWEST_IMAGES = 20
PASSES, FEWEST_STEPS, MOST_STEPS = 96, 1_000, 5_000
LARGE = 6_000_000  # weights
DEFAULTS = ReferenceOptions()

_SMALL_WIDTHS = (16, 32, 64, 128)
_LOG_EVERY, _SAVE_EVERY = 20, 200  # updates
_OTHER_SEED = 1000  # a reference begins with other weights than a model of ours did: no auditor knows a stranger's


def train_reference(
    model: OpenedModel,
    source: data.Source,
    output: str | os.PathLike[str],
    options: ReferenceOptions = DEFAULTS,
    *,
    indices: np.ndarray | None = None,
    silent: bool = False,
) -> pathlib.Path:
    """Train a model of the same architecture and schedule on other images, or continue where an earlier call stopped.

    What it costs is said before the first update, and how long it takes after the first updates.

    Args:
      model: beside which it will be asked; see `open_model`.
      source: images that this model was not trained on, with labels if it is class-conditional.
      output: the directory to write to.
      options: how to train.
      indices: of the images to train on; all of the source if None.
      silent: say nothing.

    Returns:
      The model directory, which audits take as `reference`: they leave the images that it was trained on out.

    Raises:
      ValueError: in one line, for a model that none can be trained for, images that do not fit, or an output that holds
        another training.
    """
    output, spec, name = pathlib.Path(output), reference_spec(model, options.size), model.denoiser.name
    source = with_labels(source, None, name, spec.num_classes)
    _check_labels(source, spec.num_classes, name)
    found, bad = _sketch(source, spec, np.arange(len(source)) if indices is None else np.asarray(indices))
    members = np.array(list(found), np.int64)
    if len(members) < FEWEST_IMAGES:
        raise ValueError(f"a reference must be trained on at least {FEWEST_IMAGES} images, got {len(members)}")
    recipe = recipe_for(len(members), spec, options)
    if bad and not silent:
        print(f"warning: {len(bad)} images cannot be used and are left out, such as {bad[0]}", file=sys.stderr)
    if not silent:
        print(_cost(output, len(members), spec, recipe), file=sys.stderr, flush=True)
    listed = sketches_file(output, data.fingerprint(source, members))
    begun = (output / "train").exists() or (output / "model").exists()
    if not begun:
        on_first_process(lambda: _list(listed, found))
    model.denoiser.release()
    how = TrainingOptions(log_every=_LOG_EVERY, save_every=_SAVE_EVERY, silent=silent)
    trained = train(output, spec, source, members, recipe, options=how)
    if begun and not listed.exists():
        on_first_process(lambda: _list(listed, found))
    return trained


def reference_spec(model: OpenedModel, size: str = "same") -> models.ModelSpec:
    """What is trained beside a model: its own architecture, or one of our widths and as many levels, if smaller.

    Raises:
      ValueError: if its architecture is not known, or is none that is trained here.
    """
    spec, name = model.spec, model.denoiser.name
    if spec is None:
        raise ValueError(f"no reference can be trained for {name}: it is {model.origin}, of unknown architecture")
    if spec.autoencoder is not None:
        raise ValueError(f"{name} is a latent model: its reference is the base of the fine-tune, --reference MODEL")
    if not isinstance(spec.denoiser, ImageUnetSpec):
        raise ValueError(f"references are trained for U-Nets on images, and {name} is a {spec.denoiser.kind}")
    if size != SMALL:
        return spec
    widths = [_SMALL_WIDTHS[min(level, 3)] for level in range(len(spec.denoiser.level_channels))]
    small = models.DdpmUnetSpec(
        image_channels=spec.denoiser.image_channels,
        stem_channels=widths[0],
        time_features=widths[0],
        time_channels=4 * widths[0],
        level_channels=tuple(widths),
        num_res_blocks=1,
        attention_levels=(),
        norm_groups=8,
        num_classes=spec.num_classes,
    )
    return dataclasses.replace(spec, denoiser=min(spec.denoiser, small, key=_count_weights))


def recipe_for(count: int, spec: models.ModelSpec, options: ReferenceOptions) -> TrainingRecipe:
    """The recipe for so many images: what the options say, and else that of our studies."""
    steps, rate = options.steps, options.learning_rate
    if steps is None:
        steps = min(max(PASSES * count // max(options.batch_size, 1), FEWEST_STEPS), MOST_STEPS)
    if rate is None:
        rate = 1e-3 if _count_weights(spec.denoiser) < LARGE else 2e-4
    return TrainingRecipe(
        steps=steps,
        batch_size=options.batch_size,
        learning_rate=rate,
        warmup_steps=200,
        ema_decay=0.995,
        flips=False,
        seed=_OTHER_SEED + options.seed,
    )


def _count_weights(spec: models.DenoiserSpec) -> int:
    return models.count_values(models.param_shapes(spec)["params"])


def _check_labels(source: data.Source, num_classes: int | None, name: str) -> None:
    if num_classes is not None and source.labels is not None:
        low, high = int(source.labels.min()), int(source.labels.max())
        if low < 0 or high >= num_classes:
            raise ValueError(f"labels must be >= 0 and < {num_classes}, the classes of {name}, got {low} to {high}")


def _sketch(source: data.Source, spec: models.ModelSpec, indices: np.ndarray) -> tuple[dict[int, Sketch], list[str]]:
    """The sketches of the images that can be used, by their positions, and why the others cannot."""
    looks = dict(zip(indices.tolist(), look_at(source, spec.image_shape, indices)))
    unusable = {source.ids[index]: look.reason for index, look in looks.items() if isinstance(look, Unusable)}
    bad = [f"{printable(id)}: {reason}" for id, reason in unusable.items()]
    refuse_too_many(len(bad), len(looks), "images that cannot be used", lambda: f", such as {bad[0]}")
    return {index: look.sketch for index, look in looks.items() if not isinstance(look, Unusable)}, bad


def _cost(output: pathlib.Path, count: int, spec: models.ModelSpec, recipe: TrainingRecipe) -> str:
    weights, times = _count_weights(spec.denoiser), recipe.steps * recipe.batch_size / count
    made = max((int(line["step"]) for line in read_records(output / "train")), default=0)
    if made >= recipe.steps:
        return f"all {made:,} updates of the reference in {output} are made"
    begun = f", {made:,} of which are made" if made else ""
    return (
        f"training a reference on {count:,} images: {recipe.steps:,} updates of {recipe.batch_size} images{begun}, "
        f"each image {times:.3g} times in all, of a network of {weights:,} weights"
        f"{' (a small one takes less)' if weights >= LARGE else ''}; the first updates show how long that takes"
    )


def _list(file: pathlib.Path, found: dict[int, Sketch]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_sketches(file, list(found.values()))
