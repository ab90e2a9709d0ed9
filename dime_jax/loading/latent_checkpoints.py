"""Model directories of latent models: those of `checkpoints`, with a spec of kind "latent" and the tokenizer's files.

MODEL/spec.json    as in `checkpoints`; "tokenizer" has the SHA-256 of each file in tokenizer/
MODEL/variables/   {"denoiser", "autoencoder", "text_encoder"} as an orbax checkpoint
MODEL/tokenizer/   the files of the tokenizer, if captions condition the model
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dime_jax.loading import checkpoints
from dime_jax.models import ModelSpec, count_values, model_shapes

_TOKENIZER = "tokenizer"
_MAX_TOKENIZER_BYTES = 64 * 2**20


class LatentModel(NamedTuple):
    """A latent model from its directory.

    Attributes:
      name: of the directory.
      spec: networks, schedule, prediction and image size.
      variables: of each network: {"denoiser", "autoencoder", and "text_encoder" if it has one}.
      tokenizer_files: in the directory.
      fingerprint: changes with anything that changes eps, latents or text embeddings.
      metadata: about the model's origin.
    """

    name: str
    spec: ModelSpec
    variables: Any
    tokenizer_files: tuple[Path, ...]
    fingerprint: str
    metadata: Mapping[str, Any]


def save_latent_model(
    directory: str | os.PathLike[str],
    spec: ModelSpec,
    variables: Any,
    tokenizer_files: Sequence[Path] = (),
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model directory, completely or not at all.

    Args:
      directory: where; must not exist yet.
      spec: of the model.
      variables: of each network, NumPy or JAX arrays in float32.
      tokenizer_files: are copied.
      metadata: JSON-able facts about the model's origin, for people and reports.
    """
    directory = Path(directory)
    _check_variables(variables, spec)
    tokenizer = {file.name: _sha256(file) for file in tokenizer_files}
    contents = {
        "format": checkpoints.FORMAT,
        "version": checkpoints.VERSION,
        "spec": spec.to_json(),
        "fingerprint": latent_fingerprint(variables, spec, tokenizer),
        "metadata": dict(metadata or {}),
        "tokenizer": tokenizer,
    }
    json.dumps(contents, allow_nan=False)  # refuse before anything is written
    with checkpoints._new_directory(directory) as building:
        checkpoints._write_variables(building / checkpoints._VARIABLES, variables)
        contents["files"] = checkpoints._file_sizes(building / checkpoints._VARIABLES)
        for file in tokenizer_files:
            (building / _TOKENIZER).mkdir(exist_ok=True)
            shutil.copyfile(file, building / _TOKENIZER / file.name)
        text = json.dumps(contents, indent=1) + "\n"
        (building / checkpoints.SPEC_FILE).write_text(text, encoding="utf-8")
    return directory


def is_latent_model(directory: str | os.PathLike[str]) -> bool:
    """Whether the spec of a model directory is that of a latent model."""
    spec = checkpoints.read_spec_file(directory)["spec"]
    return isinstance(spec, dict) and spec.get("kind") == "latent"


def load_latent_model(directory: str | os.PathLike[str]) -> LatentModel:
    """Open a model directory; weights and tokenizer are checked against the fingerprint that was written with them.

    Raises:
      ValueError: in one line, if it is foreign, incomplete or changed.
    """
    directory = Path(directory)
    contents = checkpoints.read_spec_file(directory)
    try:
        spec = ModelSpec.from_json(contents["spec"])
    except ValueError as error:
        raise ValueError(f"{directory / checkpoints.SPEC_FILE}: {error}") from None
    path = directory / checkpoints._VARIABLES
    files = checkpoints._file_sizes(path)
    if files != contents["files"]:
        raise ValueError(f"{path}: files are missing, truncated or added since the model was written")
    tokenizer = _read_tokenizer(directory, contents.get("tokenizer"))
    variables = _read_variables(path, spec, sum(files.values()))
    found = latent_fingerprint(variables, spec, tokenizer)
    if found != contents["fingerprint"]:
        raise ValueError(f"{directory}: expected weights of fingerprint {contents['fingerprint']!r}, found {found!r}")
    paths = tuple(directory / _TOKENIZER / name for name in tokenizer)
    return LatentModel(directory.name, spec, variables, paths, found, contents["metadata"])


def latent_fingerprint(variables: Any, spec: ModelSpec, tokenizer: Mapping[str, str]) -> str:
    """SHA-256 over the spec, every variable's name, shape and bytes, and the digests of the tokenizer's files."""
    parts = [checkpoints.fingerprint(variables, spec), dict(sorted(tokenizer.items()))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _sha256(file: Path) -> str:
    if file.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise ValueError(f"{file}: {file.stat().st_size} bytes, more than the {_MAX_TOKENIZER_BYTES} allowed")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read_tokenizer(directory: Path, expected: Any) -> dict[str, str]:
    """The digests of the tokenizer's files, which must be those that were written."""
    folder = directory / _TOKENIZER
    found = {file.name: _sha256(file) for file in sorted(folder.iterdir())} if folder.is_dir() else {}
    if found != expected:
        raise ValueError(f"{folder}: files are missing, changed or added since the model was written")
    return found


def _shapes_of(tree: Any) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{jax.tree_util.keystr(path)} {leaf.dtype} {list(leaf.shape)}" for path, leaf in leaves}


def _check_variables(variables: Any, spec: ModelSpec) -> None:
    difference = _shapes_of(variables) ^ _shapes_of(model_shapes(spec))
    if difference:
        raise ValueError(f"variables differ from the networks': {', '.join(sorted(difference)[:5])}")


def _read_variables(path: Path, spec: ModelSpec, held: int) -> Any:
    from orbax.checkpoint import v1 as ocp

    needed = 4 * count_values(model_shapes(spec))
    if needed > 2 * held:  # orbax packs a small model more tightly
        raise ValueError(f"{path}: expected {needed:,} bytes of weights for the networks of its spec, got {held:,}")
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), model_shapes(spec)
    )
    with checkpoints._one_line(path, "read"), checkpoints._alone():
        _check_variables(ocp.metadata(path.absolute()).metadata, spec)  # before anything is read
        return ocp.load(path.absolute(), shapes)
