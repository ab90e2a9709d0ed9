"""What a user may say about a checkpoint, in Python and on the command line.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from dime_jax._util.files import file_digests
from dime_jax._util.flags import add_options, changed, option

Place = str | os.PathLike[str] | None


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

    dialect: str = option("auto", "secmi, ddim, diffusers, guided or dit (default: recognised by the tensors' names)")
    weights: str | None = option(
        None, "which weights to take: ema, raw, or a key of the file (default: the EMA if there is one)"
    )
    model_flags: Place = option(  # noqa: RUF009 (a field, whose default is None)
        None, "a file with the constructor arguments of a guided-diffusion network", metavar="JSON"
    )
    image_size: int | None = option(None, "height and width of the images", type=int)
    schedule: str | None = option(None, "linear[:T:START:END], scaled_linear[:…], cosine[:T], or a JSON file of betas")
    prediction: str | None = option(None, "what the network predicts: epsilon, sample or v_prediction")
    autoencoder: Place = option(  # noqa: RUF009
        None, "the autoencoder of a DiT that comes without one", metavar="FOLDER"
    )

    def given(self) -> dict[str, str | int]:
        """Return the options that were given, by name, as JSON takes them."""
        return {name: value for name, (value,) in changed(self).items()}

    def identity(self) -> str:
        """Return a text that is the same for options of the same effect: files count by what they hold."""
        values = {
            name: list(file_digests(Path(str(value))).values())
            if name in _FILES or str(value).endswith(".json")
            else value
            for name, value in self.given().items()
        }
        return json.dumps(values, sort_keys=True)


NO_OPTIONS = ConversionOptions()
_FILES = ("model_flags", "autoencoder")


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `ConversionOptions`."""
    text = "what the checkpoint does not say, or what you want instead"
    add_options(parser.add_argument_group("converting a checkpoint", text), ConversionOptions)
