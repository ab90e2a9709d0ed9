"""A latent model's fine-tunes and LoRAs beside their base: `experiments.finetune` with captions.

    python -m experiments.latent_finetune --config=experiments/configs/latent_digits.py:finetune --workdir=W

trains the tiny Stable Diffusion of `experiments.latent_study` on half of the digits, and then does what
`experiments.finetune` does: its U-Net sees 100 held-out digits with their captions, 5 to 80 times. The text encoder and
the autoencoder stay as they are. WORKDIR/pipeline is the base as diffusers saves it, WORKDIR/model the same converted.
"""

import pathlib

import jax
import numpy as np
from ml_collections.config_dict import ConfigDict

import dime_jax as dj
from dime_jax import data, training
from dime_jax._util.typing import PyTree
from dime_jax.loading import conversion, model_directory
from dime_jax.models import low_rank
from dime_jax.training.loop import SNAPSHOTS
from experiments import finetune, latent_study
from experiments.finetune import BesideBase
from experiments.launch import launch


def run(config: ConfigDict, workdir: str | pathlib.Path, config_file: str = "") -> list[BesideBase]:
    """Train the base, or finish that, and judge its fine-tunes as `experiments.finetune` does."""
    workdir = pathlib.Path(workdir)
    located = latent_study.prepare(config, workdir)
    located.attack.model = str(convert(workdir))
    return finetune.run(located, workdir, config_file, tune_unet)


def convert(workdir: pathlib.Path) -> pathlib.Path:
    """WORKDIR/model, converted from WORKDIR/pipeline if it is not there."""
    model = workdir / "model"
    return model if model.exists() else conversion.convert(workdir / "pipeline", model)


def tune_unet(
    base: pathlib.Path,
    directory: pathlib.Path,
    source: data.Source,
    members: np.ndarray,
    recipe: training.TrainingRecipe,
    rank: int | None,
    every: int,
) -> None:
    """Fine-tune a latent model's U-Net on captioned images, or finish that; see `finetune.tune_images`.

    Of the recipe count steps, batch size, learning rate and seed. LoRAs are kept in peft's names.
    """
    model, denoiser, captions = model_directory.read_model(base), dj.load_denoiser(base), source.captions
    assert captions is not None
    transform = data.transform_for(source, denoiser.image_shape)
    x = denoiser.encode(np.stack([transform(source.read(index)) for index in members]))
    told, empty = denoiser.embed([captions[index] for index in members]), denoiser.embed([""])
    loss = latent_study.unet_loss(model.spec, x, told, empty, recipe.batch_size)
    network = {"denoiser": model.variables["denoiser"]}
    started = network if rank is None else low_rank.init(network, rank, np.random.default_rng(recipe.seed))

    def keep(number: int, average: PyTree) -> None:
        place, average = directory / SNAPSHOTS / str(number), jax.device_get(average)
        if rank is not None:
            conversion.save_adapter(place.with_suffix(".safetensors"), model.spec, average, model.fingerprint)
        elif not place.exists():
            variables = {**model.variables, **average}
            model_directory.save_model(place, model.spec, variables, tokenizer_files=model.tokenizer_files)

    latent_study.fit(
        lambda variables, key: loss(variables["denoiser"], key),
        started,
        recipe.steps,
        jax.random.key(recipe.seed),
        directory / "train",
        base=None if rank is None else network,
        rate=recipe.learning_rate,
        batch=recipe.batch_size,
        every=every,
        keep=keep,
    )


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Run, write what came out, and print it."""
    finetune.report(run(config, workdir, config_file), workdir)


if __name__ == "__main__":
    launch(main, "experiments/configs/latent_digits.py")
