"""What the terminal shows."""

import io

import pytest
import rich.console
from handmade import audit, beside, row, with_ways

from dime_jax.findings.results import Headline
from dime_jax.report import tables


@pytest.fixture
def console():
    return rich.console.Console(file=io.StringIO(), width=160, color_system=None)


def test_results_are_in_per_cent_with_intervals(console):
    tables.print_results(audit((row(), row(attack="dime", queries=11, auc=(0.9, 0.85, 0.95)))), console)
    lines = [" ".join(line.split()) for line in console.file.getvalue().replace("│", " ").splitlines()]
    (sima,) = [line for line in lines if "SimA" in line]
    assert sima.endswith("1 t=70 80.0 [70.0, 90.0] 75.0 [65.0, 85.0] 40.0 [30.0, 50.0] – –")
    (dime,) = [line for line in lines if line.startswith("DIME")]
    assert "11 t=70 90.0 [85.0, 95.0]" in dime


def test_the_answer_comes_first_and_markup_stays_text(console):
    headline = Headline("[red]Answer[/red]", "Detail of [/]", "", ("[blink]doubt[/blink]",))
    tables.print_headline(headline, ["about [link=x]y[/link]"], console)
    assert console.file.getvalue().splitlines() == [
        "[red]Answer[/red]",
        "Read this first: [blink]doubt[/blink]",
        "Detail of [/]",
        "warning: about [link=x]y[/link]",
    ]


def test_what_is_taken_out_has_columns_of_its_own(console):
    console.width = 240
    tables.print_results(audit((with_ways(), row(attack="dime", queries=11)), **beside()), console)
    lines = [" ".join(line.split()) for line in console.file.getvalue().replace("│", " ").splitlines()]
    (sima,) = [line for line in lines if "SimA" in line]
    assert sima.endswith("40.0 [30.0, 50.0] 60.0 50.0 70.0 50.0 75.0 50.0")
    (dime,) = [line for line in lines if line.startswith("DIME")]
    assert dime.endswith("40.0 [30.0, 50.0] – – – – – –")
    assert [way.value for way in tables.ways(audit((with_ways(),)))] == ["adjusted", "beside", "beside_adjusted"]
    assert [way.value for way in tables.ways(audit())] == ["adjusted"]
