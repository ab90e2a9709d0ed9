"""Cells, tables and lists of the results page."""

from collections.abc import Mapping, Sequence

from dime_jax.evidence import metrics


def percent(estimate: metrics.Estimate, sign: str = "") -> str:
    """A fraction and its interval in per cent; "+" as `sign` shows the sign of positive numbers too."""
    return f"{100 * estimate.value:{sign}.1f} [{100 * estimate.low:{sign}.1f}, {100 * estimate.high:{sign}.1f}]"


def markdown_lines(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table from its cells, of which the second line aligns the columns."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, all columns aligned to the left."""
    return markdown_lines([header, ["---"] * len(header), *rows])


def facts_list(facts: Mapping[str, object]) -> str:
    """A Markdown list of what was done, by its names."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())
