"""What a user may say about a checkpoint, in Python and on the command line.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import argparse
import dataclasses
import hashlib
import json
import os
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
    """

    dialect: str = "auto"
    weights: str | None = None
    model_flags: str | os.PathLike[str] | None = None
    image_size: int | None = None
    schedule: str | None = None
    prediction: str | None = None

    def given(self) -> dict[str, str | int]:
        """The options that were given, by name, as JSON takes them."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        default = dataclasses.asdict(NO_OPTIONS)
        return {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in options.items()
            if value != default[name]
        }

    def identity(self) -> str:
        """A text that is the same for options of the same effect: files count by what they hold."""
        return json.dumps({name: _contents(value) for name, value in self.given().items()}, sort_keys=True)


NO_OPTIONS = ConversionOptions()


def _contents(value: str | int) -> str | int:
    if isinstance(value, str) and value.endswith(".json") and os.path.isfile(value):
        return hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return value


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `ConversionOptions`."""
    group = parser.add_argument_group("converting a checkpoint", "what it does not say itself, or not as you want it")
    group.add_argument(
        "--dialect", default=NO_OPTIONS.dialect, help="secmi, ddim, diffusers or guided (default: told by its tensors)"
    )
    group.add_argument("--weights", help="ema, raw, or a key of the file (default: the EMA if there is one)")
    group.add_argument("--model_flags", metavar="JSON", help="constructor arguments of a guided-diffusion network")
    group.add_argument("--image_size", type=int, help="height and width of the images")
    group.add_argument(
        "--schedule", help="linear[:T:START:END], scaled_linear[:…], cosine[:T], or a JSON file of betas"
    )
    group.add_argument("--prediction", help="what the network predicts: epsilon, sample or v_prediction")


def conversion_options(args: argparse.Namespace) -> ConversionOptions:
    """The options of a parser with `add_conversion_arguments`."""
    return ConversionOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(NO_OPTIONS)})
