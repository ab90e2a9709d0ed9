"""The weights of one part of a diffusers pipeline: which files, and their tensors as views on them.

A part has one file or several shards that an index names. An index from a stranger is hostile until proven otherwise:
shards are plain file names in the index's own folder, each holding exactly the tensors that the index says.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from checkpoints_convert import weights_file
from checkpoints_convert.json_file import read_json
from checkpoints_convert.mapping import StateDict
from checkpoints_convert.torch_file import printable
from checkpoints_convert.torch_pickle import CheckpointError, shorten
from checkpoints_convert.weights_file import about

MAX_SHARDS = 1000

# Names without variant and number, in the order in which they are preferred.
DIFFUSERS_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
TRANSFORMERS_FILES = ("model.safetensors", "pytorch_model.bin")
_VARIANTS = ("", "fp16")  # full precision first


def find_weights(folder: Path, names: tuple[str, ...]) -> Path:
    """The weights file of a part, or the index of its shards; full precision, and safetensors, where there is a choice.

    Args:
      folder: of the part.
      names: `DIFFUSERS_FILES` or `TRANSFORMERS_FILES`.
    """
    for candidate in _candidates(names):
        if (folder / candidate).is_file():
            return folder / candidate
    stems = {name.rpartition(".")[0] for name in names}
    others = sorted(file.name for stem in stems for file in folder.glob(f"{stem}*")) if folder.is_dir() else []
    found = ", ".join(others[:5]) or "no weights"
    raise CheckpointError(printable(f"{folder}: expected {' or '.join(names)}, or an fp16 variant, found {found}"))


def _candidates(names: tuple[str, ...]) -> Iterator[str]:
    for variant in _VARIANTS:
        for name in names:
            stem, _, suffix = name.rpartition(".")
            yield ".".join(filter(None, (stem, variant, suffix)))
            yield ".".join(filter(None, (name, "index", variant, "json")))


def read_tensors(file: Path) -> StateDict:
    """All tensors of a weights file or an index's shards, by name, as views on the files."""
    if not file.name.endswith(".json"):
        return _read_flat(file)
    with about(file):
        shards = _shards(file)
    state: dict[str, np.ndarray] = {}
    for shard, expected in sorted(shards.items()):
        tensors = _read_flat(file.parent / shard)
        difference = sorted(tensors.keys() ^ expected)
        if difference:
            raise CheckpointError(
                printable(f"{file.parent / shard}: expected the tensors that {file.name} lists, not so {difference[0]}")
            )
        state |= tensors
    return state


def _shards(index: Path) -> Mapping[str, set[str]]:
    """The names of the tensors in each shard."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError("expected weight_map to be a JSON object that is not empty")
    shards: defaultdict[str, set[str]] = defaultdict(set)
    for tensor, shard in names.items():
        _check_shard(index, shard)
        shards[shard].add(tensor)
    if len(shards) > MAX_SHARDS:
        raise ValueError(f"expected at most {MAX_SHARDS} shards, got {len(shards)}")
    for shard in shards:
        if not (index.parent / shard).is_file():
            raise ValueError(f"names the shard {shorten(shard)}, which is not there")
    return shards


def _check_shard(index: Path, shard: object) -> None:
    suffix = f".{index.name.partition('.index')[0].rpartition('.')[2]}"
    plain = isinstance(shard, str) and len(shard) < 256 and not set(shard) & set("/\\:\0") and shard.isprintable()
    if not (isinstance(shard, str) and plain and shard.endswith(suffix) and not shard.startswith(".")):
        raise ValueError(f"expected shards to be plain names of {suffix} files beside it, got {str(shard)[:60]!r}")


def _read_flat(file: Path) -> StateDict:
    contents = weights_file.read(file)
    if not weights_file.is_state_dict(contents):
        raise CheckpointError(f"{file}: expected tensors by name and nothing else")
    return contents
