"""The paper's tables from score tables alone, as Markdown, LaTeX and CSV, with the paper's own values beside ours.

    python -m experiments.tables --runs=W1/attack,W2/attack --output=out/tables [--results=docs/RESULTS.md]
      [--dp_studies=W3]

One table per run, with intervals; the paper's value stands beside ours only where the run is its setting, and each of
DIME's variants is compared with the best baseline that makes no more queries: the best on the calibration half, so that
the choice is not made on the images of the comparison.
"""

import csv
import io
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import flags

from dime_jax import metrics
from experiments import paper_values
from experiments.launch import run_app
from experiments.runs import Row, Run, read_run

METRICS = {"asr": "ASR", "auc": "AUC", "tpr_at_1pct_fpr": "TPR@1%FPR"}
TITLES = {
    "cifar10": "Table 1, CIFAR-10",
    "cifar100": "Table 1, CIFAR-100",
    "stl10u": "Table 1, STL10-U",
    "celeba": "Table 1, CelebA",
    "imagenet256": "Table 2, ImageNet",
    "dp_celeba": "Table 3, CelebA under DP-SGD",
    "digits": "Digits",
}
# Variants whose setting is the paper's: for ImageNet that includes the scrambled labels of its held-out images, for
# DP-SGD two recipes.
PAPER_VARIANTS = {"imagenet256": "as_published", "dp_celeba": "as_published"}


class Lead(NamedTuple):
    """A row against the best baseline at no more queries: differences of fractions, the p-value for equal AUC."""

    baseline: Row
    auc: metrics.Estimate
    p_value: float
    tpr: metrics.Estimate


class Line(NamedTuple):
    """One row of a table."""

    row: Row
    paper: paper_values.Published | None
    lead: Lead | None


class Table(NamedTuple):
    """All rows of one run."""

    run: Run
    title: str
    lines: tuple[Line, ...]


def make_table(run: Run) -> Table:
    """The table of a run."""
    epsilon = run.config.get("dp", {}).get("epsilon")
    paper = paper_values.published(run.study, epsilon) if is_papers_setting(run) else {}
    lines = tuple(Line(row, paper.get((row.attack, row.q)), lead(run, row)) for row in run.rows)
    kind = TITLES.get(run.study, run.study)
    privacy = "" if epsilon is None else f", ε = {epsilon:g}"
    return Table(run, f"{kind}{privacy} ({run.name})", lines)


def is_papers_setting(run: Run) -> bool:
    """Whether the paper's values belong beside this run's."""
    return run.variant == PAPER_VARIANTS.get(run.study, "paper") and run.is_unchanged


def lead(run: Run, row: Row) -> Lead | None:
    """How far one of DIME's variants is ahead of the baseline that calibration would take; None for baselines."""
    rivals = [other for other in run.rows if other.is_baseline and other.queries <= row.queries]
    if row.is_baseline or not rivals:
        return None
    best = max(rivals, key=lambda other: other.calibration.auc)
    first, second = run.paired_scores(row, best)
    comparison = metrics.compare(first, second, seed=run.results.seed)
    return Lead(best, comparison.auc_difference, comparison.p_value, comparison.tpr_difference_at_fpr[0.01])


# ------------------------------------------------------------------------------------------------------- rendering


def to_markdown(table: Table) -> str:
    """Rates in per cent with 95 % intervals, the paper's value in italics below ours where the setting is the same."""
    header = ["method", "queries", *METRICS.values(), "s / image", "AUC against the best baseline", "p"]
    aligned = ["---", "---:", "---:", "---:", "---:", "---:", "---", "---:"]
    lines = [header, aligned]
    for line in table.lines:
        cells = [_cell(line, name, "{}<br>*paper {:.2f}*") for name in METRICS]
        ahead = ["", ""]
        if line.lead is not None:
            ahead = [f"{percent(line.lead.auc, '+')} {line.lead.baseline.title}", _p_value(line.lead.p_value)]
        lines.append([line.row.title, str(line.row.queries), *cells, _seconds(line.row), *ahead])
    return markdown_lines(lines)


def to_latex(table: Table) -> str:
    """A booktabs table; the paper's value in brackets."""
    lines = [
        rf"% {table.title}; per cent with 95\% intervals, the paper's values in brackets",
        r"\begin{tabular}{l r lll r l r}",
        r"\toprule",
        r"Method & \#Query & ASR & AUC & TPR@1\%FPR & s/image & $\Delta$AUC, baseline & $p$ \\",
        r"\midrule",
    ]
    for before, line in zip((None, *table.lines), table.lines):
        if before is not None and before.row.is_baseline != line.row.is_baseline:
            lines.append(r"\midrule")
        cells = [_cell(line, name, "{} ({:.2f})") for name in METRICS]
        ahead = ["", ""]
        if line.lead is not None:
            ahead = [f"{percent(line.lead.auc, '+')}, {line.lead.baseline.title}", _p_value(line.lead.p_value)]
        row = [line.row.title, str(line.row.queries), *cells, _seconds(line.row), *ahead]
        lines.append(" & ".join(_escaped(cell) for cell in row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def to_csv(tables: Sequence[Table]) -> str:
    """Every number of every table, as fractions, one line per row."""
    records = [_record(table.run, line) for table in tables for line in table.lines]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def _record(run: Run, line: Line) -> dict[str, str | int | float]:
    row, result = line.row, line.row.result
    record: dict[str, str | int | float] = {
        "study": run.study,
        "variant": run.variant,
        "run": run.directory.as_posix(),
        "attack": row.attack,
        "title": row.title,
        "q": "" if row.q is None else row.q,
        "queries_per_image": row.queries,
        "seconds_per_image": result.seconds_per_image,
        "setting": " ".join(f"{name}={value:g}" for name, value in result.setting.items()),
    }
    for name in METRICS:
        record |= {
            name if key == "value" else f"{name}_{key}": number
            for key, number in getattr(result, name)._asdict().items()
        }
        record[f"paper_{name}"] = "" if line.paper is None else round(getattr(line.paper, name) / 100, 6)
    record |= dict.fromkeys(("baseline", "auc_lead", "auc_lead_low", "auc_lead_high", "p_value"), "")
    record |= dict.fromkeys(("tpr_lead", "tpr_lead_low", "tpr_lead_high"), "")
    if line.lead is not None:
        record |= {"baseline": line.lead.baseline.title, "p_value": line.lead.p_value}
        for name, estimate in (("auc_lead", line.lead.auc), ("tpr_lead", line.lead.tpr)):
            record |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return record


def _cell(line: Line, name: str, with_paper: str) -> str:
    """Our value with its interval, and the paper's where there is one, as `with_paper` puts them together."""
    ours = percent(line.row.estimate(name))
    return ours if line.paper is None else with_paper.format(ours, getattr(line.paper, name))


def percent(estimate: metrics.Estimate, sign: str = "") -> str:
    """A fraction and its interval in per cent; "+" as `sign` shows the sign of positive numbers too."""
    return f"{100 * estimate.value:{sign}.1f} [{100 * estimate.low:{sign}.1f}, {100 * estimate.high:{sign}.1f}]"


def markdown_lines(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table from its cells, of which the second line aligns the columns."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def facts_list(facts: Mapping[str, object]) -> str:
    """A Markdown list of what was done, by its names."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def _seconds(row: Row) -> str:
    return f"{row.result.seconds_per_image:.2g}"


def _escaped(text: str) -> str:
    for character, latex in (("_", r"\_"), ("%", r"\%"), ("²", "$^2$"), ("ε", r"$\varepsilon$")):
        text = text.replace(character, latex)
    return text


# ----------------------------------------------------------------------------------------------------- the results page

_PREAMBLE = """# Results

<!-- Written by `python -m experiments.tables --results=docs/RESULTS.md`; changes by hand will be lost. -->

Every number is computed from the score tables of the run that is named above its table. Rates are of the test half, in
per cent, with 95 % intervals; settings, angles and thresholds were chosen on the calibration half. "AUC against the
best baseline" is the difference to the baseline with the best calibration AUC among those that make no more queries,
with DeLong's paired interval and p-value (not corrected for the number of rows). Seconds are those of the run, on its
machine. How our attacks relate to the paper's text and to published code: [REPRODUCTION.md](REPRODUCTION.md).
"""


_OUR_MODEL = "A small-scale study of a model that we trained ourselves, not of a published one.\n"


def results_page(tables: Sequence[Table], page: pathlib.Path) -> str:
    """The page of all tables, each with what it takes to make it again.

    Args:
      tables: in the order of the page.
      page: where it will be written, for links from there.
    """
    return "\n".join([_PREAMBLE] + [_section(table, page) for table in tables])


def _section(table: Table, page: pathlib.Path) -> str:
    run, attack, prints = table.run, table.run.config["attack"], table.run.results.fingerprints
    facts = {
        "config": f"`{run.config_file}`" + (f", variant `{run.variant}`" if run.variant else ""),
        "seed": run.config["seed"],
        "model": f"`{attack['model']}`, fingerprint `{prints['model'][:16]}`",
        "data": f"calibration half `{prints['calibration_data'][:16]}`, test half `{prints['test_data'][:16]}`",
        "members + held-out images": run.image_counts,
        "queries made": f"{run.results.queries_made:,}",
        "precision": run.results.precision,
        "score tables": _where(run.directory, page),
    }
    commands = "\n".join(run.commands())
    ours = [_OUR_MODEL] if attack["model"] == "trained" and run.variant != "paper" else []
    settings = "; ".join(f"{line.row.title}: {_record(run, line)['setting']}" for line in table.lines)
    return "\n".join(
        [
            f"## {table.title}\n",
            *ours,
            facts_list(facts),
            f"\n```\n{commands}\n```\n",
            to_markdown(table),
            f"Frozen settings: {settings}.\n",
        ]
    )


def _where(directory: pathlib.Path, page: pathlib.Path) -> str:
    """A link if the run lies near the page, else where the commands put it."""
    beside = page.resolve().parent
    if directory.resolve().is_relative_to(beside):
        path = directory.resolve().relative_to(beside).as_posix()
        return f"[calibration]({path}/calibration), [test]({path}/test)"
    return "`W/attack/calibration`, `W/attack/test`"


def write_tables(runs: Sequence[str | os.PathLike[str]], output: pathlib.Path) -> list[Table]:
    """Read the runs and write STUDY_VARIANT.md and .tex for each, and tables.csv for all, into `output`."""
    if not runs:
        raise ValueError("expected at least one run directory, got none")
    tables = [make_table(read_run(run)) for run in runs]
    output.mkdir(parents=True, exist_ok=True)
    names = [table.run.name.replace(":", "_") for table in tables]
    if len(set(names)) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names)]
    for name, table in zip(names, tables):
        (output / f"{name}.md").write_text(f"# {table.title}\n\n{to_markdown(table)}", encoding="utf-8")
        (output / f"{name}.tex").write_text(to_latex(table), encoding="utf-8")
    (output / "tables.csv").write_text(to_csv(tables), encoding="utf-8")
    return tables


def dp_sections(workdirs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """A section of the results page for each study of `experiments.dp_defense`."""
    from experiments import dp_table  # needs the extra `dp`, which the other tables do not

    return [dp_table.to_section(dp_table.read_table(workdir)) for workdir in workdirs]


if __name__ == "__main__":
    _RUNS = flags.DEFINE_list("runs", None, "run directories: W/attack, separated by commas", required=True)
    _OUTPUT = flags.DEFINE_string("output", "out/tables", "where the tables go")
    _RESULTS = flags.DEFINE_string("results", None, "also write this page, such as docs/RESULTS.md")
    _DP = flags.DEFINE_list("dp_studies", [], "workdirs of experiments.dp_defense, whose tables end the page")

    def _main(argv: list[str]) -> None:
        del argv
        try:
            tables = write_tables(_RUNS.value, pathlib.Path(_OUTPUT.value))
            studies = dp_sections(_DP.value)
        except ValueError as error:
            sys.exit(f"error: {error}")
        for table in tables:
            print(f"{table.title}\n\n{to_markdown(table)}")
        if _RESULTS.value:
            page = pathlib.Path(_RESULTS.value)
            page.write_text("\n".join([results_page(tables, page), *studies]), encoding="utf-8")

    run_app(_main)
