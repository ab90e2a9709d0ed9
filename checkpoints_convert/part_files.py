"""The weights of one part of a diffusers pipeline: which files, and their tensors as views on them.

A part has one file or several shards that an index names. An index from a stranger is hostile until proven otherwise:
shards are plain file names in the index's own folder, each holding exactly the tensors that the index says.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from checkpoints_convert import weights_file
from checkpoints_convert.mapping import StateDict
from checkpoints_convert.torch_pickle import CheckpointError
from checkpoints_convert.weights_file import about
from dime_jax._util.files import read_json
from dime_jax._util.text import printable, shorten

MAX_SHARDS = 1000

# Names without variant and number, in order of preference.
DIFFUSERS_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
TRANSFORMERS_FILES = ("model.safetensors", "pytorch_model.bin")
_VARIANTS = ("", "fp16")  # full precision first


def find_weights(folder: Path, names: tuple[str, ...]) -> Path:
    """Return the weights file of a part, or the index of its shards.

    Args:
      folder: of the part.
      names: `DIFFUSERS_FILES` or `TRANSFORMERS_FILES`.
    """
    there = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    chosen = choose_weights(there, names)
    if chosen:
        return folder / chosen[0]
    others = [name for name in there if name.startswith(tuple(name.rpartition(".")[0] for name in names))]
    found = ", ".join(others[:5]) or "no weights"
    raise CheckpointError(printable(f"{folder}: must hold {' or '.join(names)}, or an fp16 variant, found {found}"))


def choose_weights(
    files: Collection[str], names: tuple[str, ...] = (*DIFFUSERS_FILES, *TRANSFORMERS_FILES)
) -> list[str]:
    """Return one set of weights of a part: its file, or the index of its shards and these; nothing if there is none.

    It prefers full precision, and safetensors.

    Args:
      files: all names in the part's folder.
      names: of weights files, in order of preference.
    """
    for variant in _VARIANTS:
        for name in names:
            stem, _, suffix = name.rpartition(".")
            whole = ".".join(filter(None, (stem, variant, suffix)))
            index = ".".join(filter(None, (name, "index", variant, "json")))
            if whole in files:
                return [whole]
            if index in files:
                number = r"-\d{5}-of-\d{5}"
                middle = rf"(\.{variant}{number}|{number}\.{variant})" if variant else number
                return [index, *(file for file in files if re.fullmatch(rf"{stem}{middle}\.{suffix}", file))]
    return []


def read_tensors(file: Path) -> StateDict:
    """Read all tensors of a weights file or an index's shards, by name, as views on the files."""
    if not file.name.endswith(".json"):
        return _read_flat(file)
    with about(file):
        shards = _shards(file)
    state: dict[str, np.ndarray] = {}
    for shard, expected in sorted(shards.items()):
        tensors = _read_flat(file.parent / shard)
        difference = sorted(tensors.keys() ^ expected)
        if difference:
            reason = f"must hold the tensors that {file.name} lists, which differ in {difference[0]}"
            raise CheckpointError(printable(f"{file.parent / shard} {reason}"))
        state |= tensors
    return state


def _shards(index: Path) -> Mapping[str, set[str]]:
    """Return the names of the tensors in each shard."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError("weight_map must be a JSON object that is not empty")
    shards: defaultdict[str, set[str]] = defaultdict(set)
    for tensor, shard in names.items():
        _check_shard(index, shard)
        shards[shard].add(tensor)
    if len(shards) > MAX_SHARDS:
        raise ValueError(f"must have at most {MAX_SHARDS} shards, got {len(shards)}")
    for shard in shards:
        if not (index.parent / shard).is_file():
            raise ValueError(f"names the shard {shorten(shard)}, which is not there")
    return shards


def _check_shard(index: Path, shard: object) -> None:
    suffix = f".{index.name.partition('.index')[0].rpartition('.')[2]}"
    plain = isinstance(shard, str) and len(shard) < 256 and not set(shard) & set("/\\:\0") and shard.isprintable()
    if not (isinstance(shard, str) and plain and shard.endswith(suffix) and not shard.startswith(".")):
        raise ValueError(f"shards must be plain names of {suffix} files beside it, got {str(shard)[:60]!r}")


def _read_flat(file: Path) -> StateDict:
    contents = weights_file.read(file)
    if not weights_file.is_state_dict(contents):
        raise CheckpointError(f"{file}: must hold tensors by name and nothing else")
    return contents
