"""What a user may say about a checkpoint, in Python and on the command line.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from dime_jax._util.files import file_digests


@dataclasses.dataclass(frozen=True)
class ConversionOptions:
    """What is to be converted, and what the checkpoint does not say itself; None: what it says.

    Attributes:
      dialect: whose tensor names the checkpoint has: "secmi", "ddim", "diffusers", "guided", "dit", or "auto".
      weights: "ema", "raw" or the name of one set of weights in the file; None takes the EMA if there is one.
      model_flags: JSON file with the constructor arguments of a guided-diffusion network.
      image_size: height and width of the images.
      schedule: "linear", "scaled_linear" or "cosine", optionally with its numbers ("linear:1000:0.0001:0.02",
        "cosine:1000"), or a JSON file with the list of betas.
      prediction: what the network predicts: "epsilon", "sample" or "v_prediction".
      autoencoder: the folder of an AutoencoderKL, for a DiT that comes without one.
    """

    dialect: str = "auto"
    weights: str | None = None
    model_flags: str | os.PathLike[str] | None = None
    image_size: int | None = None
    schedule: str | None = None
    prediction: str | None = None
    autoencoder: str | os.PathLike[str] | None = None

    def given(self) -> dict[str, str | int]:
        """Return the options that were given, by name, as JSON takes them."""
        options = {name: value for name, value in vars(self).items() if value != getattr(NO_OPTIONS, name)}
        return {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in options.items()}

    def arguments(self) -> list[str]:
        """Return the given options as a command line has them."""
        return [word for name, value in self.given().items() for word in (f"--{name}", str(value))]

    def identity(self) -> str:
        """Return a text that is the same for options of the same effect: files count by what they hold."""
        values = {
            name: list(file_digests(Path(str(value))).values()) if name in _FILES or _is_json(value) else value
            for name, value in self.given().items()
        }
        return json.dumps(values, sort_keys=True)


NO_OPTIONS = ConversionOptions()
_FILES = ("model_flags", "autoencoder")


def _is_json(value: str | int) -> bool:
    return isinstance(value, str) and value.endswith(".json")


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `ConversionOptions`."""
    group = parser.add_argument_group(
        "converting a checkpoint", "what the checkpoint does not say, or what you want instead"
    )
    group.add_argument(
        "--dialect",
        default=NO_OPTIONS.dialect,
        help="secmi, ddim, diffusers, guided or dit (default: recognised by the names of its tensors)",
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
    group.add_argument("--autoencoder", metavar="FOLDER", help="the autoencoder of a DiT that comes without one")


def conversion_options(args: argparse.Namespace) -> ConversionOptions:
    """Return the options of a parser with `add_conversion_arguments`."""
    return ConversionOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(NO_OPTIONS)})
