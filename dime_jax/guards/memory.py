"""What a guard remembers of each model of a run: a sealed file of {fingerprint: entry} in the run's directory."""

import pathlib
from typing import TypeVar

from dime_jax._util import digests, files
from dime_jax._util.records import parse, plain_object
from dime_jax.scoring.query_ledger import LedgerUnwritable

Entry = TypeVar("Entry")


def recall(path: pathlib.Path, kind: type[Entry]) -> dict[str, Entry]:
    """All entries of a file, none if there is no file.

    Raises:
      ValueError: if it is damaged.
    """
    if not path.is_file():
        return {}
    return {name: parse(kind, entry, f"{path}: {name}") for name, entry in digests.read(path).contents.items()}


def remember(path: pathlib.Path, fingerprint: str, entry: Entry) -> None:
    """Write one model's entry, in place of the one it had.

    Raises:
      LedgerUnwritable: if that is impossible: the fault is ours, not the model's, so it is not tried again.
    """
    entries = {**recall(path, type(entry)), fingerprint: entry}
    try:
        files.write_atomically(path, digests.seal(plain_object(entries), {}))
    except OSError as error:
        raise LedgerUnwritable(error.errno, error.strerror, error.filename) from None
