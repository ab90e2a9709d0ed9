"""CSV files that are safe to open in a spreadsheet, whatever the names of a stranger's files are."""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence

from dime_jax._util import files
from dime_jax._util.text import printable

# What makes a spreadsheet take a cell for a formula; the wide forms do so in East Asian versions.
_FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def write_csv(path: pathlib.Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows of the same columns, at least one, with a header: completely or not at all.

    Text stays text in a spreadsheet (see `as_text`), and is quoted, so that it stays one cell where cells are split at
    semicolons. Numbers are written as they are.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    for row in rows:
        writer.writerow({column: as_text(value) if isinstance(value, str) else value for column, value in row.items()})
    files.write_atomically(path, text.getvalue().encode())


def as_text(value: str) -> str:
    """Return text that no spreadsheet takes for a formula.

    Text that starts like a formula or with a control character gets an apostrophe in front; control characters are
    escaped.
    """
    start = "'" if value.startswith(_FORMULA_STARTS) or not value[:1].isprintable() else ""
    return start + printable(value)
