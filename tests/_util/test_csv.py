"""CSV files of names that strangers chose."""

import csv
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dime_jax._util import csv as _csv


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("=1+1.png", "'=1+1.png"),
        ("+a", "'+a"),
        ("-a", "'-a"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("＝1", "'＝1"),
        ("\t=1", r"'\t=1"),
        ("\r=1", r"'\r=1"),
        ("a\nb", r"a\nb"),
        ("\x1b[31mred", r"'\x1b[31mred"),
        ("a=b+c-d@e.png", "a=b+c-d@e.png"),
        ("élan <b>.png", "élan <b>.png"),
        ("", ""),
    ],
)
def test_names_stay_text(tmp_path, name, shown):
    _csv.write_csv(tmp_path / "a.csv", [{"id": name, "score": 1.0}])
    assert read(tmp_path / "a.csv") == [{"id": shown, "score": "1.0"}]


def test_numbers_stay_numbers_and_nothing_stays_empty(tmp_path):
    _csv.write_csv(tmp_path / "a.csv", [{"score": -0.5, "p": 1, "flag": True, "q": None}])
    assert read(tmp_path / "a.csv") == [{"score": "-0.5", "p": "1", "flag": "True", "q": ""}]


@given(st.text(st.characters(codec="utf-8")))
@example("a;=1+1")
@example('"\n=1')
def test_no_cell_starts_a_formula_however_cells_are_split(tmp_path_factory, name):
    path = tmp_path_factory.getbasetemp() / "names.csv"
    _csv.write_csv(path, [{"id": name, "score": -1.0}])
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    for delimiter in (",", ";", "\t"):
        cells = next(csv.reader([lines[1]], delimiter=delimiter))
        assert len(cells) == (2 if delimiter == "," else 1)
        assert not cells[0].startswith(("=", "+", "-", "@"))
        assert not any(unicodedata.category(c) == "Cc" for c in cells[0])
