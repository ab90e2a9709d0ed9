"""Files of a run: written completely or not at all, by one process at a time."""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import filelock

from dime_jax._util.text import shorten

if TYPE_CHECKING:
    from dime_jax._util.typing import JsonObject  # imports JAX, which takes a while

CACHE, OFF = "DIME_JAX_CACHE", "off"


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a file so that it is there completely or not at all, even if the machine stops."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from None
    _sync_directory(path.parent)


def write_json(path: pathlib.Path, contents: object) -> None:
    """Write a JSON file that can be made again, completely or not at all."""
    write_atomically(path, (json.dumps(contents, indent=2) + "\n").encode())


def read_json(file: pathlib.Path, most: int = 2**20) -> "JsonObject":
    """Return the JSON object in a small file from a stranger; a key that occurs twice is refused.

    Raises:
      ValueError: in one line that names the file.
    """
    text = read_text(file, most)
    try:
        contents = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{file}: must be a JSON object")
    return contents


def read_text(file: pathlib.Path, most: int) -> str:
    """Return the text of a file from a stranger, of at most `most` bytes; errors are those of `read_json`."""
    if not file.is_file():
        raise ValueError(f"no file {file}")
    if file.stat().st_size > most:
        raise ValueError(f"{file} must have at most {most} bytes, got {file.stat().st_size}")
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file}: not UTF-8") from None


def unique(pairs: list[tuple[str, object]]) -> "JsonObject":
    """For `object_pairs_hook`: return a dict, unless a key occurs twice."""
    result: JsonObject = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the key {shorten(name)!r} occurs twice")
        result[name] = value
    return result


def file_digests(path: pathlib.Path) -> dict[pathlib.Path, str]:
    """Return the SHA-256 of a file, or of every file in a folder, in the order of their paths."""
    if not path.exists():
        raise ValueError(f"no file or folder {path}")
    digests = {}
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        with file.open("rb") as stream:
            digests[file] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


@contextlib.contextmanager
def locked(directory: pathlib.Path, what: str, name: str = "lock", wait: bool = False) -> Iterator[None]:
    """Hold a lock in a directory; the operating system releases it when the process ends, however it ends.

    Args:
      directory: made if it is not there.
      what: what the directory holds, for messages, such as "score table".
      name: of the lock's file.
      wait: whether to wait while another process holds it; if not, that is an error.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(directory / name).acquire(timeout=-1 if wait else 0)
    except filelock.Timeout:
        raise ValueError(f"another run is writing the {what} {directory}; wait for it or stop it") from None
    except OSError as error:
        raise OSError(error.errno, f"cannot write a {what}: {error.strerror}", str(directory)) from None
    with held:
        yield


def user_cache(environment: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Return the user's cache directory: DIME_JAX_CACHE, unless that is "off", or the usual place."""
    if environment.get(CACHE, OFF) not in (OFF, ""):
        return pathlib.Path(environment[CACHE]).expanduser()
    name = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    home = environment.get("HOME") or str(pathlib.Path.home())
    return pathlib.Path(environment.get(name) or pathlib.Path(home) / ".cache") / "dime_jax"


def _sync_directory(directory: pathlib.Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no directories, and keeps renamed files without this
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
