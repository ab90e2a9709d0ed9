"""What a run remembers of the models it asks: a sealed JSON file {fingerprint: entry} for each guard.

Queries are entered before they are asked, so that those of a killed run count as well.
"""

import pathlib
from typing import NamedTuple, TypeVar

from dime_jax._util import digests, files
from dime_jax._util.records import parse, plain_object
from dime_jax._util.typing import JsonObject
from dime_jax.scoring.query_ledger import LedgerUnwritable

Entry = TypeVar("Entry")


def recall(path: pathlib.Path, fingerprint: str, kind: type[Entry]) -> Entry:
    """Return what a file says about a model, or `kind()` if it says nothing.

    Args:
      path: of the file, which need not exist.
      fingerprint: of the model.
      kind: a record whose fields all have defaults.

    Raises:
      ValueError: if the file is damaged.
    """
    entries = _read(path)
    return parse(kind, entries[fingerprint], f"{path}: {fingerprint}") if fingerprint in entries else kind()


def remember(path: pathlib.Path, fingerprint: str, entry: NamedTuple) -> None:
    """Write what is known about a model, in place of what the file said about it.

    Raises:
      LedgerUnwritable: if that fails; it is not the model's fault, so the query is not tried again.
    """
    content = digests.seal({**_read(path), fingerprint: plain_object(entry)}, {})
    try:
        files.write_atomically(path, content)
    except OSError as error:
        raise LedgerUnwritable(error.errno, error.strerror, error.filename) from None


def _read(path: pathlib.Path) -> JsonObject:
    return digests.read(path).contents if path.is_file() else {}
