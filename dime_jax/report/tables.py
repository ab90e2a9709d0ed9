"""Result tables for the terminal."""

from collections.abc import Sequence

import rich.console
import rich.table

from dime_jax.attacks import describe_attack
from dime_jax.evidence import Way
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings.results import Headline
from dime_jax.protocol.evaluation import Evaluation


def print_results(results: Evaluation, console: rich.console.Console | None = None) -> None:
    """Print the results as the paper lays out its tables: attacks as rows, metrics in per cent with intervals.

    The last columns are those of the same attack at its own best setting, minus what the picture explains, what the
    reference does, or both.
    """
    table = rich.table.Table(title="Test half, per cent, with 95 % intervals", title_justify="left", pad_edge=False)
    others = ways(results)
    of_others = [f"{way.value.replace('_', ' ')} {metric}" for way in others for metric in ("AUC", "TPR")]
    for column in ("attack", "queries", "setting", "AUC", "ASR", "TPR@1%FPR", *of_others):
        table.add_column(column, justify="left" if column in ("attack", "setting") else "right", overflow="fold")
    for row in results.results:
        estimates: list[Estimate | None] = []
        for one in map(row.read, others):
            estimates += [None, None] if one is None else [one.auc, one.tpr_at_1pct_fpr]
        table.add_row(
            describe_attack(row.attack).heading,
            str(row.queries_per_image),
            " ".join(f"{key}={value:.3g}" for key, value in row.setting.items() if key != "q"),
            *(_interval(estimate) for estimate in (row.auc, row.asr, row.tpr_at_1pct_fpr)),
            *("–" if one is None else f"{100 * one.value:.1f}" for one in estimates),
        )
    (console or rich.console.Console()).print(table)


def ways(results: Evaluation) -> list[Way]:
    """What is taken out of scores in columns of their own: always what the picture explains, and what else there is."""
    return [way for way in list(Way)[1:] if way is Way.ADJUSTED or any(row.read(way) for row in results.results)]


def print_headline(headline: Headline, warnings: Sequence[str], console: rich.console.Console) -> None:
    """Print the answer, what puts it in doubt, and the warnings."""
    console.print(headline.answer, style="bold", markup=False, highlight=False)
    print_alarms(headline.alarms, console)
    for text in (headline.detail, headline.candidates):
        if text:
            console.print(text, markup=False, highlight=False)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def print_alarms(alarms: Sequence[str], console: rich.console.Console) -> None:
    """Print what puts an answer in doubt."""
    for alarm in alarms:
        console.print(f"Read this first: {alarm}", style="bold red", markup=False, highlight=False)


def _interval(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
