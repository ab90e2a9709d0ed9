"""Reads small JSON files from strangers."""

from pathlib import Path

from checkpoints_convert.torch_pickle import CheckpointError
from dime_jax._util import files
from dime_jax._util.files import unique as unique
from dime_jax._util.typing import JsonObject


def read_json(file: Path) -> JsonObject:
    """Return the JSON object in a small file; errors name it."""
    try:
        return files.read_json(file)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
