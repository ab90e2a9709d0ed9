"""CSV files that a spreadsheet shows as they are: no cell of them is taken for a formula."""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dime_jax.score_table import write_atomically

_FORMULA = "=+-@"


def write_csv(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of the same columns, at least one, with a header.

    Text that begins with = + - @, a tab or another control character gets an apostrophe before it, since spreadsheets
    would run it as a formula. Numbers are written as they are, negative ones too.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows({name: _escape(value) for name, value in row.items()} for row in rows)
    write_atomically(path, text.getvalue().encode())


def _escape(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return value
    return f"'{value}" if value[0] in _FORMULA or not value[0].isprintable() else value
