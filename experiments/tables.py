"""The paper's tables from score tables alone, as Markdown, LaTeX and CSV, with the paper's own values beside ours.

    python -m experiments.tables --runs=W1/attack,W2/attack --output=out/tables
    python -m experiments.tables --kept=docs/results --results=docs/RESULTS.md    every run kept there, as one page

One table per run, with intervals; the paper's value stands beside ours only where the run is its setting, and each of
DIME's variants is compared with the best baseline that makes no more queries: the best on the calibration half, so that
the choice is not made on the images of the comparison. Runs that differ in their seeds alone are one study, for which
the paper's three questions are answered over all its models (`experiments.questions`).
"""

import csv
import io
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags

from dime_jax.evidence import metrics
from experiments import headings, images_alone, markdown, paper_values, questions
from experiments.launch import run_app
from experiments.runs import Row, Run, RunSet, group_runs, read_run


class Lead(NamedTuple):
    """A row against the best baseline at no more queries: differences of fractions, the p-value for equal AUC."""

    baseline: Row
    auc: metrics.Estimate
    p_value: float
    tpr: metrics.Estimate


class TableLine(NamedTuple):
    """One row of a table."""

    row: Row
    paper: paper_values.Published | None
    lead: Lead | None


class Table(NamedTuple):
    """All rows of one run."""

    run: Run
    title: str
    lines: tuple[TableLine, ...]


def make_table(run: Run) -> Table:
    """The table of a run."""
    epsilon = run.config.get("dp", {}).get("epsilon")
    paper = paper_values.published(run.study, epsilon) if headings.is_papers_setting(run) else {}
    lines = tuple(TableLine(row, paper.get((row.attack, row.q)), lead(run, row)) for row in run.rows)
    privacy = "" if epsilon is None else f", ε = {epsilon:g}"
    return Table(run, f"{headings.heading(run, headings.is_papers_setting(run))}{privacy} ({run.name})", lines)


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
    header = ["method", "queries", *headings.METRICS.values(), "s / image", "AUC against the best baseline", "p"]
    aligned = ["---", "---:", "---:", "---:", "---:", "---:", "---", "---:"]
    lines = [header, aligned]
    for line in table.lines:
        cells = [_cell(line, name, "{}<br>*paper {:.2f}*") for name in headings.METRICS]
        ahead = ["", ""]
        if line.lead is not None:
            ahead = [f"{markdown.percent(line.lead.auc, '+')} {line.lead.baseline.title}", _p_value(line.lead.p_value)]
        lines.append([line.row.title, str(line.row.queries), *cells, _seconds(line.row), *ahead])
    return markdown.markdown_lines(lines)


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
        cells = [_cell(line, name, "{} ({:.2f})") for name in headings.METRICS]
        ahead = ["", ""]
        if line.lead is not None:
            ahead = [f"{markdown.percent(line.lead.auc, '+')}, {line.lead.baseline.title}", _p_value(line.lead.p_value)]
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


def _record(run: Run, line: TableLine) -> dict[str, str | int | float]:
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
        "setting": headings.setting(row),
    }
    for name in headings.METRICS:
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


def _cell(line: TableLine, name: str, with_paper: str) -> str:
    """Our value with its interval, and the paper's where there is one, as `with_paper` puts them together."""
    ours = markdown.percent(line.row.estimate(name))
    return ours if line.paper is None else with_paper.format(ours, getattr(line.paper, name))


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

<!-- Written by `make results` (`python -m experiments.tables --kept=docs/results --results=docs/RESULTS.md`);
changes by hand will be lost. -->

Every number is computed from the score tables of the run that is named with it. Rates are of the test half, in per
cent, with 95 % intervals; settings, angles and thresholds were chosen on the calibration half. A study is a set of
models, one for each seed, which differ in training and split. Intervals and p-values of a single run are about images:
they say what other images would have shown of *that* model. What other models would have shown is told by the mean over
models and its t-interval, and no significance is claimed below five of them.

"AUC against the best baseline" is the difference to the baseline with the best calibration AUC among those that make no
more queries, with DeLong's paired interval and p-value (not corrected for the number of rows). Seconds are those of the
run, on its machine. How our attacks relate to the paper's text and to published code:
[REPRODUCTION.md](REPRODUCTION.md).
"""


_OUR_MODEL = "A small-scale study of models that we trained ourselves, not of a published one.\n"


def results_page(tables: Sequence[Table], page: pathlib.Path) -> str:
    """The page of all tables, each with what it takes to make it again.

    Args:
      tables: in the order of the page; those of one study stand together.
      page: where it will be written, for links from there.
    """
    of_run = {table.run.directory: table for table in tables}
    studies = group_runs([table.run for table in tables])
    return "\n".join(
        [_PREAMBLE] + [_study_section(study, [of_run[run.directory] for run in study.runs], page) for study in studies]
    )


def _study_section(study: RunSet, tables: Sequence[Table], page: pathlib.Path) -> str:
    run = study.first
    facts = {
        "config": f"`{run.config_file}`" + (f", variant `{run.variant}`" if run.variant else ""),
        "models": f"{len(study.runs)} ({', '.join(study.labels)})",
        "members + held-out images of each": run.image_counts,
        "precision": run.results.precision,
    }
    commands = "\n".join(study.commands())
    ours = run.config["attack"]["model"] in ("trained", "pipeline") and not headings.is_papers_setting(run)
    return "\n".join(
        [
            f"## {tables[0].title}\n",
            *([_OUR_MODEL] if ours else []),
            markdown.facts_list(facts),
            f"\n```\n{commands}\n```\n",
            f"### The paper's questions, {run.name}\n",
            questions.to_markdown(study),
            *(_section(table, label, page) for table, label in zip(tables, study.labels)),
        ]
    )


def _section(table: Table, label: str, page: pathlib.Path) -> str:
    run, prints = table.run, table.run.results.fingerprints
    facts = {
        "seed": f"{run.config['seed']}, of split and training {label.removeprefix('seed ')}",
        "model": f"`{run.config['attack']['model']}`, fingerprint `{prints['model'][:16]}`",
        "data": f"calibration half `{prints['calibration_data'][:16]}`, test half `{prints['test_data'][:16]}`",
        "queries made": f"{run.results.queries_made:,}",
        "without the model": images_alone.describe(run.results),
        "score tables": headings.where(run.directory, page),
    }
    return "\n".join(
        [
            f"### {run.name}, {label}\n",
            markdown.facts_list(facts),
            "",
            to_markdown(table),
            f"Frozen settings: {headings.settings(run)}. At an end of their grid of timesteps: "
            f"{', '.join(headings.at_edge(run)) or 'none'}.\n",
        ]
    )


def write_tables(runs: Sequence[str | os.PathLike[str]], output: pathlib.Path) -> list[Table]:
    """Read the runs and write STUDY_VARIANT.md and .tex for each, and tables.csv for all, into `output`.

    STUDY_VARIANT_questions.md answers the paper's questions over the models of a study.
    """
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
    for study in group_runs([table.run for table in tables]):
        text = f"# The paper's questions, {study.first.name}\n\n{questions.to_markdown(study)}"
        (output / f"{names[[table.run for table in tables].index(study.first)]}_questions.md").write_text(text)
    (output / "tables.csv").write_text(to_csv(tables), encoding="utf-8")
    return tables


def dp_sections(workdirs: Sequence[str | os.PathLike[str]], page: pathlib.Path) -> list[str]:
    """A section of the results page for each study of `experiments.dp_defense`, with all its seeds."""
    from experiments import dp_table  # needs the extra `dp`, which the other tables do not

    studies = dp_table.group_tables([dp_table.read_table(workdir) for workdir in workdirs])
    return [dp_table.to_section(study, page) for study in studies]


if __name__ == "__main__":
    _RUNS = flags.DEFINE_list("runs", [], "run directories: W/attack, separated by commas")
    _OUTPUT = flags.DEFINE_string("output", "out/tables", "where their tables go")
    _KEPT = flags.DEFINE_string("kept", None, "a folder of finished runs, for --results")
    _RESULTS = flags.DEFINE_string("results", None, "write this page of all that --kept holds")

    def _main(argv: list[str]) -> None:
        del argv
        from experiments import kept  # which needs this module

        try:
            if _RESULTS.value:
                if not _KEPT.value:
                    raise ValueError("expected --kept=FOLDER with --results")
                page = pathlib.Path(_RESULTS.value)
                kept.write_page(pathlib.Path(_KEPT.value), page)
                return
            for table in write_tables(_RUNS.value, pathlib.Path(_OUTPUT.value)):
                print(f"{table.title}\n\n{to_markdown(table)}")
        except ValueError as error:
            sys.exit(f"error: {error}")

    run_app(_main)
