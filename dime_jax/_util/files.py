"""Files of a run: written completely or not at all, by one process at a time."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator

import filelock


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a file so that it is there completely or not at all, whenever the machine stops."""
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


def printable(text: str) -> str:
    """Return a text for people; names in a file may hold anything, line breaks and terminal escapes included."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextlib.contextmanager
def locked(directory: pathlib.Path, what: str) -> Iterator[None]:
    """Hold the directory's lock; the operating system lets go of it when the process ends, however it ends.

    Args:
      directory: made if it is not there.
      what: is in it, for messages, such as "score table".
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(directory / "lock").acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(f"another run is writing the {what} {directory}; wait for it or stop it") from None
    except OSError as error:
        raise OSError(error.errno, f"cannot write a {what}: {error.strerror}", str(directory)) from None
    with held:
        yield


def _sync_directory(directory: pathlib.Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no directories, and keeps renamed files without this
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
