"""Convert a PyTorch checkpoint of a diffusion model to a dime_jax model directory.

python -m checkpoints_convert --source FILE_OR_DIR --output DIR
"""

import sys
from collections.abc import Sequence

from absl import app, flags

from checkpoints_convert.convert import DIALECTS, Options, convert, describe

_SOURCE = flags.DEFINE_string(
    "source", None, "Checkpoint file (.pt, .ckpt, .safetensors) or diffusers folder.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Model directory to write; must not exist.", required=True)
_DIALECT = flags.DEFINE_enum("dialect", "auto", ["auto", *DIALECTS], "Whose tensor names the checkpoint has.")
_WEIGHTS = flags.DEFINE_enum("weights", None, ["ema", "raw"], "Which weights; by default the EMA if there is one.")
_MODEL_FLAGS = flags.DEFINE_string(
    "model_flags", None, "JSON file with a guided-diffusion network's constructor arguments."
)
_IMAGE_SIZE = flags.DEFINE_integer("image_size", None, "Height and width, where the checkpoint does not hold them.")
_SCHEDULE = flags.DEFINE_string(
    "schedule", None, "linear[:T:BETA_START:BETA_END], scaled_linear[:…], cosine[:T], or a JSON file with the betas."
)


def main(argv: Sequence[str]) -> None:
    """Convert as the flags say; print what was made, or one line about what is wrong."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    options = Options(_DIALECT.value, _WEIGHTS.value, _MODEL_FLAGS.value, _IMAGE_SIZE.value, _SCHEDULE.value)
    try:
        directory = convert(_SOURCE.value, _OUTPUT.value, options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(describe(directory))


if __name__ == "__main__":
    app.run(main)
