"""What the terminal shows."""

import io

import pytest
import rich.console
from handmade import audit, row

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
