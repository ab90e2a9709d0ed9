"""Model directories: one writer, one reader, for models of one network and of several.

    MODEL/spec.json    {"format": "dime_jax model", "version": 1, "spec", "fingerprint", "metadata", "files"}
    MODEL/variables/   as an orbax checkpoint: those of the network, or {"denoiser", "autoencoder", "text_encoder"}
    MODEL/tokenizer/   the files of the tokenizer, if captions condition the model; spec.json then has "tokenizer", the
                       SHA-256 of each

A model directory is written atomically, and checked when it is opened. Orbax is imported when it is used.
"""

import contextlib
import hashlib
import importlib.resources
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from flax import traverse_util

from dime_jax import models
from dime_jax._util import text
from dime_jax._util.files import file_digests, read_json
from dime_jax._util.typing import JsonObject, PyTree

if TYPE_CHECKING:
    from orbax.checkpoint import v1 as ocp

FORMAT = "dime_jax model"
VERSION = 1

SHIPPED = Path(str(importlib.resources.files("dime_jax"))) / "shipped_models"
ADAPTER = "adapter.safetensors"  # of a LoRA that ships with the package, in SHIPPED/NAME

SPEC_FILE = "spec.json"
_VARIABLES = "variables"
_TOKENIZER = "tokenizer"
_MAX_SPEC_BYTES = 16 * 2**20
_MAX_TOKENIZER_BYTES = 64 * 2**20


class StoredModel(NamedTuple):
    """A model from its directory.

    Attributes:
      name: of the directory.
      spec: networks, schedule, prediction and image shape.
      variables: of its one network, or of each by its name.
      tokenizer_files: in the directory.
      fingerprint: changes with anything that changes eps, latents or text embeddings.
      metadata: about the model's origin.
    """

    name: str
    spec: models.ModelSpec
    variables: PyTree
    tokenizer_files: tuple[Path, ...]
    fingerprint: str
    metadata: JsonObject


def save_model(
    directory: str | os.PathLike[str],
    spec: models.ModelSpec,
    variables: PyTree,
    metadata: Mapping[str, object] | None = None,
    tokenizer_files: Sequence[Path] = (),
) -> Path:
    """Write a model directory, completely or not at all.

    Args:
      directory: where; must not exist yet.
      spec: networks, schedule, prediction and image shape.
      variables: of the network, `{"params": ..., "constants": ...}`, or of each by its name; NumPy or JAX arrays in
        float32.
      metadata: JSON-able facts about the model's origin, for people and reports.
      tokenizer_files: are copied.

    Returns:
      The directory.
    """
    directory = Path(directory)
    _check_variables(variables, spec)
    tokenizer = _tokenizer_digests(tokenizer_files)
    contents = {
        "format": FORMAT,
        "version": VERSION,
        "spec": spec.to_json(),
        "fingerprint": fingerprint(variables, spec, tokenizer),
        "metadata": dict(metadata or {}),
        **({} if spec.autoencoder is None else {"tokenizer": tokenizer}),
    }
    json.dumps(contents, allow_nan=False)  # refuse before anything is written
    with _new_directory(directory) as building:
        _write_variables(building / _VARIABLES, variables)
        contents["files"] = _file_sizes(building / _VARIABLES)
        for file in tokenizer_files:
            (building / _TOKENIZER).mkdir(exist_ok=True)
            shutil.copyfile(file, building / _TOKENIZER / file.name)
        (building / SPEC_FILE).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return directory


def read_model(directory: Path) -> StoredModel:
    """Read a model directory; weights and tokenizer are checked against the fingerprint that was written with them.

    Raises:
      ValueError: in one line, if it is foreign, incomplete or changed.
    """
    contents, spec = read_spec_file(directory), read_spec(directory)
    files = _file_sizes(directory / _VARIABLES)
    if files != contents["files"]:
        raise ValueError(f"{directory / _VARIABLES}: files are missing, truncated or added since the model was written")
    folder = directory / _TOKENIZER
    tokenizer_files = tuple(sorted(folder.iterdir())) if folder.is_dir() else ()
    tokenizer = _tokenizer_digests(tokenizer_files)
    if tokenizer != contents.get("tokenizer", {}):
        raise ValueError(f"{folder}: files are missing, changed or added since the model was written")
    variables = _read_variables(directory / _VARIABLES, spec, sum(files.values()))
    found = fingerprint(variables, spec, tokenizer)
    if found != contents["fingerprint"]:
        raise ValueError(f"{directory}: the weights' fingerprint must be {contents['fingerprint']!r}, got {found!r}")
    return StoredModel(directory.name, spec, variables, tokenizer_files, found, contents["metadata"])


def read_spec(directory: Path) -> models.ModelSpec:
    """Return the spec of a model directory."""
    contents = read_spec_file(directory)
    try:
        return models.ModelSpec.from_json(contents["spec"])
    except ValueError as error:
        raise ValueError(f"{directory / SPEC_FILE}: {error}") from None


def read_spec_file(directory: str | os.PathLike[str]) -> JsonObject:
    """Return the contents of a model directory's spec.json: format, version, spec, fingerprint, metadata and files."""
    file = Path(directory) / SPEC_FILE
    if not file.is_file():
        raise ValueError(f"{directory} is not a model directory: no {SPEC_FILE} in it")
    contents = read_json(file, _MAX_SPEC_BYTES)
    if contents.get("format") != FORMAT:
        raise ValueError(f"{file}: not written by dime_jax (its format is not {FORMAT!r})")
    if contents.get("version") != VERSION:
        raise ValueError(f"{file}: version must be {VERSION}, got {contents.get('version')!r}")
    missing = {"spec", "fingerprint", "metadata", "files"} - contents.keys()
    if missing:
        raise ValueError(f"{file}: missing {', '.join(sorted(missing))}")
    if not isinstance(contents["metadata"], dict):
        raise ValueError(f"{file}: metadata must be a JSON object")
    return contents


def describe(directory: str | os.PathLike[str]) -> str:
    """Return a few lines on a model directory, for people."""
    contents = read_spec_file(directory)
    spec, metadata = contents["spec"], dict(contents["metadata"])
    network = spec["architecture"] if "architecture" in spec else spec["denoiser"]
    facts = metadata.pop("facts", [])
    values = metadata | {
        "architecture": network["kind"],
        "image_shape": spec["image_shape"],
        "num_classes": network.get("num_classes"),
        "fingerprint": contents["fingerprint"],
    }
    lines = [f"{name}: {value}" for name, value in values.items() if value is not None]
    return "\n  ".join([f"wrote {directory}", *lines, *facts])


def fingerprint(variables: PyTree, spec: models.ModelSpec, tokenizer: Mapping[str, str] | None = None) -> str:
    """Return a SHA-256 that changes with anything that changes eps, latents or text embeddings.

    It is over the spec and every variable's name, shape and bytes; of latent models also over the tokenizer's files.

    Args:
      variables: of the model.
      spec: of the model.
      tokenizer: the digests of the tokenizer's files.
    """
    digest = hashlib.sha256(json.dumps(spec.to_json(), sort_keys=True).encode())
    for path, array in jax.tree_util.tree_leaves_with_path(variables):
        array = np.ascontiguousarray(array)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    if spec.autoencoder is None:
        return digest.hexdigest()
    parts = [digest.hexdigest(), dict(sorted((tokenizer or {}).items()))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def fingerprint_of(model: StoredModel) -> str:
    """Return the fingerprint of a model as it is."""
    return fingerprint(model.variables, model.spec, _tokenizer_digests(model.tokenizer_files))


def _tokenizer_digests(files: Sequence[Path]) -> dict[str, str]:
    for file in files:
        if file.stat().st_size > _MAX_TOKENIZER_BYTES:
            raise ValueError(f"{file}: {file.stat().st_size} bytes, more than the {_MAX_TOKENIZER_BYTES} allowed")
    return {file.name: digest for file in files for digest in file_digests(file).values()}


def _file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file under a directory. (Orbax finds a truncated file too, but says so in a thousand lines.)"""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _check_variables(variables: PyTree, spec: models.ModelSpec) -> None:
    """Require exactly the variables of the networks."""

    def shapes(tree: PyTree) -> set[str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {f"{jax.tree_util.keystr(path)} {leaf.dtype} {list(leaf.shape)}" for path, leaf in leaves}

    difference = shapes(variables) ^ shapes(models.model_shapes(spec))
    if difference:
        raise ValueError(f"variables differ from the architecture's: {', '.join(sorted(difference)[:5])}")


def find_model(path: str | os.PathLike[str]) -> Path:
    """The model directory at `path`, or the shipped model of that name."""
    directory = Path(path)
    if directory.is_dir():
        return directory
    names = _shipped(SPEC_FILE)
    if str(path) in names:
        return SHIPPED / str(path)
    raise ValueError(f"no model directory {str(path)!r}, and no shipped model of that name ({', '.join(names)})")


def find_adapter(path: str | os.PathLike[str]) -> Path:
    """The file or folder at `path`, which need not be there, or the shipped LoRA of that name."""
    return SHIPPED / str(path) if not Path(path).exists() and str(path) in _shipped(ADAPTER) else Path(path)


def _shipped(file: str) -> list[str]:
    """The names of what ships with the package and has such a file."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{file}"))


@contextlib.contextmanager
def one_line(path: Path, done: str) -> Iterator[None]:
    """Say in one line what orbax and tensorstore raise, in many types and lines, for damaged files and full disks."""
    try:
        yield
    except Exception as error:
        reason = text.one_line(error, None)
        reason = reason if len(reason) <= 300 else f"{reason[:150]} ... {reason[-150:]}"  # the cause is at either end
        raise ValueError(f"{path} cannot be {done}: {reason}") from None


@contextlib.contextmanager
def _new_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory that becomes `directory` when the block ends well, and vanishes when it does not."""
    if directory.exists() or directory.is_symlink():
        raise ValueError(f"output {directory} exists already; nothing was written")
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield building
        building.chmod(0o755)
        building.rename(directory)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _alone() -> "ocp.Context":
    """An orbax context for one process of several: models are read by each, with no one waiting."""
    from orbax.checkpoint import v1 as ocp

    process = jax.process_index()
    context = ocp.Context()
    context.multiprocessing.primary_host = process
    context.multiprocessing.active_processes = {process}
    context.multiprocessing.barrier_sync_key_prefix = f"process_{process}_"
    return context


def _write_variables(path: Path, variables: PyTree) -> None:
    if jax.process_count() > 1:
        _write_variables_apart(path, variables)
        return
    from orbax.checkpoint import v1 as ocp

    context = _alone()
    context.memory.deepcopy_host_arrays = False  # nothing changes them meanwhile: no second copy of a 2 GB model
    context.array.saving.use_compression = False  # weights do not compress, and the attempt holds all of them in memory
    with context:
        ocp.save(path.absolute(), variables)
    marker = path / "commit_success.txt"
    if marker.exists():
        marker.write_text("complete\n")  # orbax names the directory it wrote to, which is nobody's business


def _write_variables_apart(path: Path, variables: PyTree) -> None:
    """Write from a process outside of a run of several: orbax's `save` waits for all of them, whatever its context."""
    file = path.with_name("variables.npz")
    np.savez(file, allow_pickle=False, **traverse_util.flatten_dict(variables, sep="/"))
    script = "import sys; from dime_jax.loading import model_directory as m; m._write_variables_of(*sys.argv[1:])"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}  # devices are taken
    command = [sys.executable, "-c", script, str(file), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    file.unlink()
    if done.returncode:
        raise ValueError(f"{path} cannot be written: {done.stderr.strip().rpartition(chr(10))[2]}")


def _write_variables_of(file: str, path: str) -> None:
    with np.load(file, allow_pickle=False) as leaves:
        _write_variables(Path(path), traverse_util.unflatten_dict(dict(leaves), sep="/"))


def _read_variables(path: Path, spec: models.ModelSpec, held: int) -> PyTree:
    from orbax.checkpoint import v1 as ocp

    # A spec of a much larger network than the files hold is refused before anything of that size is made. Weights are
    # stored as they are, four bytes each; the factor is for what orbax packs more tightly in a small model.
    shapes = models.model_shapes(spec)
    needed = 4 * models.count_values(shapes)
    if needed > 2 * held:
        raise ValueError(f"{path}: the network of its spec needs {needed:,} bytes of weights, got {held:,}")
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    with one_line(path, "read"), _alone():
        _check_variables(ocp.metadata(path.absolute()).metadata, spec)  # before anything is read
        return ocp.load(path.absolute(), shapes)
