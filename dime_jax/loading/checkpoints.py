"""Model directories, and training states.

    MODEL/spec.json    {"format": "dime_jax model", "version": 1, "spec", "fingerprint", "metadata", "files"}
    MODEL/variables/   the network's variables, as an orbax checkpoint
    STATE/1000/        the training state after 1000 updates, as orbax's Checkpointer lays it out

A model directory is written atomically, and checked when it is opened. This is the only module that imports orbax, and
only when it is used.
"""

import contextlib
import functools
import hashlib
import importlib.resources
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dime_jax import models
from dime_jax.core.denoiser import Denoiser

FORMAT = "dime_jax model"
VERSION = 1

SPEC_FILE = "spec.json"
_VARIABLES = "variables"
_MAX_SPEC_BYTES = 16 * 2**20


def save_model(
    directory: str | os.PathLike[str], spec: models.ModelSpec, variables: Any, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write a model directory, completely or not at all.

    Args:
      directory: where; must not exist yet.
      spec: architecture, schedule, prediction and image shape.
      variables: the network's variables, `{"params": ..., "constants": ...}`, NumPy or JAX arrays in float32.
      metadata: JSON-able facts about the model's origin, for people and reports.

    Returns:
      The directory.
    """
    directory = Path(directory)
    _check_variables(variables, spec)
    contents = {
        "format": FORMAT,
        "version": VERSION,
        "spec": spec.to_json(),
        "fingerprint": fingerprint(variables, spec),
        "metadata": dict(metadata or {}),
    }
    json.dumps(contents, allow_nan=False)  # refuse before anything is written
    with _new_directory(directory) as building:
        _write_variables(building / _VARIABLES, variables)
        contents["files"] = _file_sizes(building / _VARIABLES)
        (building / SPEC_FILE).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return directory


def load_denoiser(path: str | os.PathLike[str]) -> Denoiser:
    """Open a model directory, or a shipped model by its name ("digits"), as a Denoiser.

    The weights are checked against the fingerprint that was written with them.

    Raises:
      ValueError: in one line, if there is no such model, or it is foreign, incomplete or changed.
    """
    directory = find_model(path)
    contents = read_spec_file(directory)
    try:
        spec = models.ModelSpec.from_json(contents["spec"])
    except ValueError as error:
        raise ValueError(f"{directory / SPEC_FILE}: {error}") from None
    files = _file_sizes(directory / _VARIABLES)
    if files != contents["files"]:
        raise ValueError(f"{directory / _VARIABLES}: files are missing, truncated or added since the model was written")
    _check_size(directory, spec, sum(files.values()))
    variables = _read_variables(directory, spec)
    found = fingerprint(variables, spec)
    if found != contents["fingerprint"]:
        raise ValueError(f"{directory}: expected weights of fingerprint {contents['fingerprint']!r}, found {found!r}")
    return Denoiser(
        models.denoise(spec),
        variables,
        spec.schedule.build(),
        spec.image_shape,
        num_classes=spec.architecture.num_classes,
        fingerprint=found,
        name=directory.name,
    )


def read_spec_file(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a model directory's spec.json: format, version, spec, fingerprint, metadata and files."""
    file = Path(directory) / SPEC_FILE
    if not file.is_file():
        raise ValueError(f"{directory} is not a model directory: no {SPEC_FILE} in it")
    if file.stat().st_size > _MAX_SPEC_BYTES:
        raise ValueError(f"{file}: {file.stat().st_size} bytes, more than the {_MAX_SPEC_BYTES} allowed")
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise ValueError(f"{file}: not written by dime_jax (expected format {FORMAT!r})")
    if contents.get("version") != VERSION:
        raise ValueError(f"{file}: expected version {VERSION}, got {contents.get('version')!r}")
    missing = {"spec", "fingerprint", "metadata", "files"} - contents.keys()
    if missing:
        raise ValueError(f"{file}: missing {', '.join(sorted(missing))}")
    if not isinstance(contents["metadata"], dict):
        raise ValueError(f"{file}: expected metadata to be a JSON object")
    return contents


class TrainingCheckpoints:
    """The states of one training run, as a context manager. A state is there completely or not at all.

    Args:
      directory: where; made if needed.
      keep: how many of the latest states stay.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2):
        from orbax.checkpoint import v1 as ocp

        context = ocp.Context()
        context.array.saving.use_compression = False  # weights do not compress
        self._directory = Path(directory).absolute()
        with _one_line(self._directory, "used for training states"):
            self._checkpointer = ocp.training.Checkpointer(
                self._directory,
                context=context,
                preservation_policy=ocp.training.preservation_policies.LatestN(keep),
                cleanup_tmp_directories=True,
            )

    def __enter__(self) -> "TrainingCheckpoints":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._checkpointer.close()
        except Exception:  # a failed save, which has been reported when it happened, is raised again here
            if error[0] is None:
                raise

    @property
    def latest_step(self) -> int | None:
        """The number of updates in the latest state, None if there is none yet."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, step: int, state: Any, inputs: Any) -> None:
        """Write the state and the JSON-able position of the input pipeline; returns when they are on disk."""
        needed, free = _bytes(state), shutil.disk_usage(self._directory).free
        if free < needed:
            raise ValueError(f"expected {needed:,} bytes free in {self._directory} for a training state, got {free:,}")
        with _one_line(self._directory / str(step), "written"):
            self._checkpointer.save(step, state, custom_metadata={"inputs": inputs}, force=True)

    def restore(self, like: Any) -> tuple[Any, Any]:
        """The latest state and input position; `like` has the shapes, dtypes and shardings to restore to."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
        with _one_line(self._directory / str(self.latest_step), "read"):
            state = self._checkpointer.load(abstract_state=shapes)
            return state, self._checkpointer.metadata().custom_metadata["inputs"]


def fingerprint(variables: Any, spec: models.ModelSpec) -> str:
    """SHA-256 over the spec and every variable's name, shape and bytes: changes with anything that changes eps."""
    digest = hashlib.sha256(json.dumps(spec.to_json(), sort_keys=True).encode())
    for path, array in jax.tree_util.tree_leaves_with_path(variables):
        array = np.ascontiguousarray(array)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file under a directory. (Orbax finds a truncated file too, but says so in a thousand lines.)"""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _check_size(directory: Path, spec: models.ModelSpec, held: int) -> None:
    """Refuse a spec of a much larger network than the files hold, before anything of that size is built or traced.

    Weights are stored as they are, four bytes each; the factor is for what orbax packs more tightly in a small model.
    """
    needed = 4 * models.num_values(spec.architecture)
    if needed > 2 * held:
        raise ValueError(f"{directory}: expected {needed:,} bytes of weights for the network of its spec, got {held:,}")


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _check_variables(variables: Any, spec: models.ModelSpec) -> None:
    """Require exactly the variables of the architecture."""

    def shapes(tree: Any) -> set[str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {f"{jax.tree_util.keystr(path)} {leaf.dtype} {list(leaf.shape)}" for path, leaf in leaves}

    difference = shapes(variables) ^ shapes(models.param_shapes(spec.architecture))
    if difference:
        raise ValueError(f"variables differ from the architecture's: {', '.join(sorted(difference)[:5])}")


def find_model(path: str | os.PathLike[str]) -> Path:
    """The model directory at `path`, or the shipped model of that name."""
    directory = Path(path)
    if directory.is_dir():
        return directory
    shipped = Path(str(importlib.resources.files("dime_jax"))) / "shipped_models"
    names = sorted(model.name for model in shipped.iterdir()) if shipped.is_dir() else []
    if str(path) in names:
        return shipped / str(path)
    raise ValueError(
        f"no model directory {str(path)!r}, and no shipped model of that name ({', '.join(names) or 'none'})"
    )


@contextlib.contextmanager
def _one_line(path: Path, done: str) -> Iterator[None]:
    """Say in one line what orbax and tensorstore raise, in many types and lines, for damaged files and full disks."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
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


def _alone() -> Any:
    """An orbax context for one process of several: models are read by each, with no one waiting."""
    from orbax.checkpoint import v1 as ocp

    process = jax.process_index()
    context = ocp.Context()
    context.multiprocessing.primary_host = process
    context.multiprocessing.active_processes = {process}
    context.multiprocessing.barrier_sync_key_prefix = f"process_{process}_"
    return context


def _write_variables(path: Path, variables: Any) -> None:
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


def _write_variables_apart(path: Path, variables: Any) -> None:
    """Write from a process outside of a run of several: orbax's `save` waits for all of them, whatever its context."""
    leaves = {"/".join(key.key for key in keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(variables)}
    file = path.with_name("variables.npz")
    np.savez(file, allow_pickle=False, **leaves)
    script = "import sys; from dime_jax.loading import checkpoints; checkpoints._write_variables_of(*sys.argv[1:])"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}  # devices are taken
    command = [sys.executable, "-c", script, str(file), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    file.unlink()
    if done.returncode:
        raise ValueError(f"{path} cannot be written: {done.stderr.strip().rpartition(chr(10))[2]}")


def _write_variables_of(file: str, path: str) -> None:
    tree: dict[str, Any] = {}
    with np.load(file, allow_pickle=False) as leaves:
        for name in leaves.files:
            *parents, last = name.split("/")
            functools.reduce(lambda inner, key: inner.setdefault(key, {}), parents, tree)[last] = leaves[name]
    _write_variables(Path(path), tree)


def _read_variables(directory: Path, spec: models.ModelSpec) -> Any:
    from orbax.checkpoint import v1 as ocp

    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        models.param_shapes(spec.architecture),
    )
    path = directory / _VARIABLES
    with _one_line(path, "read"), _alone():
        _check_variables(ocp.metadata(path.absolute()).metadata, spec)  # before anything is read
        return ocp.load(path.absolute(), shapes)
