"""Detect damage to evidence: JSON files hold digests of the files they go with, and of themselves.

    {"seed": 0, ..., "digests": {"halves.npz": "5f0c..."}, "digest": "91ab..."}

A file is written before the JSON file that names it, so that a kill in between leaves a file that nothing names yet,
and never one that looks damaged. `digest` is over the bytes of the JSON file without it. Files are named relative to
it, and are checked before any parser sees them. A JSON file without digests is refused.
"""

import hashlib
import io
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from dime_jax._util import files as _files
from dime_jax._util.typing import JsonObject

_FILES, _OWN = "digests", "digest"
_END = b"\n}\n"
_OWN_DIGEST = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n\Z')


class Damaged(ValueError):
    """A file is missing, or is not what was written; the message names it."""


class Sealed(NamedTuple):
    """A JSON file whose own digest is right.

    Attributes:
      path: where it is.
      contents: what it holds, without digests.
      digests: of the files that it names.
    """

    path: pathlib.Path
    contents: JsonObject
    digests: Mapping[str, str]

    def read(self, name: str) -> bytes:
        """Return the bytes of a file that this one names.

        Raises:
          Damaged: if it is not there, or not the file that was named.
        """
        path = self.path.parent / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise Damaged(f"{path} is missing, but {self.path.name} lists it") from None
        if digest(content) != self.digests.get(name):
            raise Damaged(f"{path} is damaged or from another run: its digest is not the one in {self.path.name}")
        return content

    def read_arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of an .npz file that this one names, checked as by `read`."""
        return load_arrays(self.path.parent / name, self.read(name))

    def check(self) -> "Sealed":
        """Check every file that this one names."""
        for name in self.digests:
            self.read(name)
        return self


def digest(content: bytes) -> str:
    """Return the BLAKE2b digest of some bytes, 128 bits in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digests_of(directory: pathlib.Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of files in a directory."""
    return {name: digest((directory / name).read_bytes()) for name in names}


def seal(contents: Mapping[str, object], digests: Mapping[str, str]) -> bytes:
    """Return the bytes of a JSON file with its own digest and those of the files it names, which must exist."""
    if contents.keys() & {_FILES, _OWN}:
        raise ValueError(f"contents must not have the keys {_FILES!r} and {_OWN!r}, which hold the digests")
    whole = (json.dumps({**contents, _FILES: dict(digests)}, indent=1) + "\n").encode()
    return whole.removesuffix(_END) + f',\n "{_OWN}": "{digest(whole)}"'.encode() + _END


def write(path: pathlib.Path, contents: Mapping[str, object], files: Iterable[str]) -> None:
    """Write a JSON file with its digest and those of the files beside it that it goes with."""
    _files.write_atomically(path, seal(contents, digests_of(path.parent, files)))


def read(path: pathlib.Path) -> Sealed:
    """Open a JSON file and check its own digest, though not yet the files that it names.

    Raises:
      FileNotFoundError: if it is not there.
      Damaged: if it is not a JSON object, holds no digests, or has changed.
    """
    content = path.read_bytes()
    try:
        contents = json.loads(content)
    except ValueError:
        raise Damaged(f"{path} is damaged: not JSON") from None
    if not isinstance(contents, dict):
        raise Damaged(f"{path} is damaged: it must be a JSON object, got {type(contents).__name__}")
    if not contents.keys() & {_FILES, _OWN}:
        raise Damaged(f"{path} holds no digests: not written by this version of dime_jax, so it cannot be relied on")
    contents.pop(_OWN, None)
    digests = contents.pop(_FILES, None)
    if not (isinstance(digests, dict) and _has_its_digest(content)):
        raise Damaged(f"{path} is damaged: its contents do not match its own digest")
    return Sealed(path, contents, digests)


def load_arrays(path: pathlib.Path, content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays in the bytes of an .npz file; an error names the file."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception:  # a damaged archive fails in many ways
        raise Damaged(f"{path} is damaged: not an .npz file of arrays") from None


def dump_arrays(arrays: Mapping[str, np.ndarray], *, compress: bool = False) -> bytes:
    """Return the bytes of an .npz file, for `load_arrays`."""
    buffer = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _has_its_digest(content: bytes) -> bool:
    """Whether a file ends with the digest of the rest of it."""
    own = _OWN_DIGEST.search(content)
    return own is not None and digest(content[: own.start()] + _END) == own[1].decode()
