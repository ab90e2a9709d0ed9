"""What a user may say about a checkpoint, in Python and on the command line.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import argparse
import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ConversionOptions:
    """What is to be converted, and what the checkpoint does not say itself; None: what it says.

    Attributes:
      dialect: whose tensor names the checkpoint has: "secmi", "ddim", "diffusers", "guided", or "auto".
      weights: "ema", "raw" or the name of one set of weights in the file; None takes the EMA if there is one.
      model_flags: JSON file with the constructor arguments of a guided-diffusion network.
      image_size: height and width of the images.
      schedule: "linear", "scaled_linear" or "cosine", optionally with its numbers ("linear:1000:0.0001:0.02",
        "cosine:1000"), or a JSON file with the list of betas.
      prediction: what the network predicts: "epsilon", "sample" or "v_prediction".
      lora: LoRA files to merge into a Stable Diffusion model, in this order.
      lora_scale: times their updates, in the same order; 1 each if none are given.
      autoencoder: the folder of an AutoencoderKL, for a DiT that comes without one.
      latent: "mean" of what an autoencoder says about an image, or a "sample" of it.
      latent_weighting: "pullback" leaves the coordinates of a latent that the decoder hardly shows out of the norms.
      hold: the type in which a latent model's weights are kept: "float32", "bfloat16" or "float16".
    """

    dialect: str = "auto"
    weights: str | None = None
    model_flags: str | os.PathLike[str] | None = None
    image_size: int | None = None
    schedule: str | None = None
    prediction: str | None = None
    lora: Sequence[str | os.PathLike[str]] = ()
    lora_scale: Sequence[float] = ()
    autoencoder: str | os.PathLike[str] | None = None
    latent: str = "mean"
    latent_weighting: str = "none"
    hold: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora", tuple(self.lora))
        object.__setattr__(self, "lora_scale", tuple(self.lora_scale))
        if self.lora_scale and len(self.lora_scale) != len(self.lora):
            raise ValueError(
                f"expected one --lora_scale for each --lora, got {len(self.lora_scale)} for {len(self.lora)}"
            )

    def given(self) -> dict[str, str | int]:
        """The options that were given, by name, as JSON takes them."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        default = dataclasses.asdict(NO_OPTIONS)
        return {name: _plain(value) for name, value in options.items() if value != default[name]}

    def conversion(self) -> dict[str, str | int]:
        """Those of the given options that change what a checkpoint is converted to."""
        return {name: value for name, value in self.given().items() if name not in _USE}

    def use(self) -> dict[str, str]:
        """Those that say how a latent model is used, converted or not."""
        return {name: str(value) for name, value in self.given().items() if name in _USE}

    def without_use(self) -> "ConversionOptions":
        """Those of the conversion alone."""
        return dataclasses.replace(self, **{name: getattr(NO_OPTIONS, name) for name in _USE})

    def identity(self) -> str:
        """A text that is the same for options of the same effect: files count by what they hold."""
        values = {name: _contents(value) for name, value in self.conversion().items()}
        if self.lora:
            values |= {"lora": json.dumps([_digest(Path(file)) for file in self.lora])}
        if self.autoencoder is not None:
            values |= {"autoencoder": _digest(Path(self.autoencoder))}
        return json.dumps(values, sort_keys=True)


_USE = ("latent", "latent_weighting", "hold")
NO_OPTIONS = ConversionOptions()


def _plain(value: object) -> str | int:
    """An option as JSON has it; of several values, all in one text."""
    if isinstance(value, tuple):
        return ", ".join(str(_plain(one)) for one in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if isinstance(value, str | int) else str(value)


def _digest(path: Path) -> str:
    """Of what a file holds, and the files of its folder that say how it is to be read; or of a whole folder."""
    if not path.exists():
        raise ValueError(f"no file or folder {path}")
    folder = path if path.is_dir() else path.parent
    files = sorted(file for file in folder.rglob("*") if file.is_file()) if path.is_dir() else [path]
    settings = [] if path.is_dir() else [file for file in (folder / "adapter_config.json",) if file.is_file()]
    digest = hashlib.sha256()
    for file in [*files, *settings]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _contents(value: str | int) -> str | int:
    if isinstance(value, str) and value.endswith(".json") and os.path.isfile(value):
        return hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return value


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `ConversionOptions`."""
    group = parser.add_argument_group(
        "converting a checkpoint", "what the checkpoint does not say, or what you want instead"
    )
    group.add_argument(
        "--dialect",
        default=NO_OPTIONS.dialect,
        help="secmi, ddim, diffusers or guided (default: recognised by the names of its tensors)",
    )
    group.add_argument(
        "--weights", help="which weights to take: ema, raw, or a key of the file (default: the EMA if there is one)"
    )
    group.add_argument(
        "--model_flags", metavar="JSON", help="a file with the constructor arguments of a guided-diffusion network"
    )
    group.add_argument("--image_size", type=int, help="height and width of the images")
    group.add_argument(
        "--schedule", help="linear[:T:START:END], scaled_linear[:…], cosine[:T], or a JSON file of betas"
    )
    group.add_argument("--prediction", help="what the network predicts: epsilon, sample or v_prediction")
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE",
        help="a LoRA to merge into a Stable Diffusion model; may be given more than once",
    )
    group.add_argument(
        "--lora_scale",
        action="append",
        default=[],
        type=float,
        metavar="W",
        help="how strongly to apply the LoRA, one number for each --lora (default: 1)",
    )
    group.add_argument("--autoencoder", metavar="FOLDER", help="the autoencoder of a DiT that comes without one")
    group.add_argument(
        "--latent",
        default=NO_OPTIONS.latent,
        help="for latent models: encode each image as the mean of its latents, or as a sample (default: %(default)s)",
    )
    group.add_argument(
        "--latent_weighting",
        default=NO_OPTIONS.latent_weighting,
        metavar="HOW",
        help="of latent models: pullback counts only the latents' coordinates that the decoder shows (default: none)",
    )
    group.add_argument(
        "--hold",
        default=NO_OPTIONS.hold,
        help="for latent models: keep the weights in float32, bfloat16 or float16 (default: %(default)s)",
    )


def conversion_options(args: argparse.Namespace) -> ConversionOptions:
    """The options of a parser with `add_conversion_arguments`."""
    return ConversionOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(NO_OPTIONS)})
