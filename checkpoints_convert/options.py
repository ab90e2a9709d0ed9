"""What a user may say about a checkpoint, in Python and on the command line.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import dataclasses
import json
import os
from pathlib import Path

from dime_jax._util.files import file_digests
from dime_jax._util.flags import changed, documented, option

Place = str | os.PathLike[str] | None
CONVERTING = "converting a checkpoint"


@documented
@dataclasses.dataclass(frozen=True)
class ConversionOptions:
    """What is to be converted, and what the checkpoint does not say itself; None: what it says."""

    dialect: str = option(
        "auto", "the code that wrote the checkpoint: secmi, ddim, diffusers, guided or dit", CONVERTING, "NAME"
    )
    weights: str | None = option(
        None, "ema, raw, or the name of a set of weights in the file (default: ema if it has them)", CONVERTING, "NAME"
    )
    model_flags: Place = option(None, "the constructor arguments of a guided-diffusion network", CONVERTING, "JSON")
    image_size: int | None = option(None, "the height and width of the images", CONVERTING, type=int)
    schedule: str | None = option(
        None,
        "the noise schedule, of a hosted model too: linear[:T:START:END], scaled_linear[:T:START:END], cosine[:T], or "
        "a JSON file of betas",
        CONVERTING,
        "SCHEDULE",
    )
    prediction: str | None = option(
        None, "what the network, or a hosted model, predicts: epsilon, sample or v_prediction", CONVERTING, "WHAT"
    )
    autoencoder: Place = option(None, "the AutoencoderKL of a DiT that comes without one", CONVERTING, "FOLDER")

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
