"""CSV files hold what they were given, and no cell of them is a formula to a spreadsheet."""

import csv

import pytest

from dime_jax._csv import write_csv


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\x00", '=HYPERLINK("x")'])
def test_text_that_would_run_is_made_text(tmp_path, text):
    write_csv(tmp_path / "rows.csv", [{"id": text, "score": -1.5}])
    assert read(tmp_path / "rows.csv") == [{"id": f"'{text}", "score": "-1.5"}]


def test_everything_else_is_as_it_was(tmp_path):
    rows = [
        {"id": "a,b", "score": -1e-3, "count": -2, "flag": True, "none": None},
        {"id": 'é "quoted"', "score": 2.0, "count": 0, "flag": False, "none": ""},
    ]
    write_csv(tmp_path / "rows.csv", rows)
    expected = [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]
    assert read(tmp_path / "rows.csv") == expected
