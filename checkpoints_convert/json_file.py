"""Reads small JSON files from strangers."""

import json
from pathlib import Path

from checkpoints_convert.torch_pickle import CheckpointError
from dime_jax._util.typing import JsonObject

_MAX_BYTES = 2**20


def read_json(file: Path) -> JsonObject:
    """A JSON object from a small file; repeated keys are refused."""
    if not file.is_file():
        raise CheckpointError(f"no file {file}")
    if file.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{file}: {file.stat().st_size} bytes, more than the {_MAX_BYTES} allowed")
    try:
        contents = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(contents, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return contents


def unique(pairs: list[tuple[str, object]]) -> JsonObject:
    """For `object_pairs_hook`: a dict, unless a key occurs twice."""
    result: JsonObject = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the key {name!r} occurs twice")
        result[name] = value
    return result
