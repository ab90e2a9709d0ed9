"""The paper's tables from score tables alone, as Markdown, LaTeX and CSV, with the paper's own values beside ours.

    python -m experiments.tables --runs=W1/attack,W2/attack --output=out/tables
    python -m experiments.tables --kept=docs/results --results=docs/RESULTS.md    the results page, and one per study

There is one table per run (`experiments.run_table`). Runs that differ in their seeds alone are one study, for which the
paper's questions are answered over all its models (`experiments.questions`). `--kept` makes the pages of the site
(`experiments.results_page`).
"""

import os
import pathlib
from collections.abc import Sequence

from absl import flags

from dime_jax._util import csv
from dime_jax.evidence.metrics import Estimate
from experiments import questions, results_page
from experiments.launch import run_app
from experiments.rendering import render
from experiments.run_table import Table, TableLine, make_table
from experiments.runs import METRICS, Run, group_runs, read_run


def csv_row(run: Run, line: TableLine) -> dict[str, str | int | float]:
    """Return every number of one row of a table, as fractions."""
    row = line.row
    record: dict[str, str | int | float] = {
        "study": run.study,
        "variant": run.variant,
        "run": run.directory.as_posix(),
        "attack": row.attack,
        "title": row.title,
        "q": "" if row.q is None else row.q,
        "queries_per_image": row.queries,
        "seconds_per_image": row.result.seconds_per_image,
        "setting": row.setting,
    }
    for name in METRICS:
        record |= _columns(name, row.estimate(name))
        record[f"paper_{name}"] = "" if line.paper is None else round(getattr(line.paper, name) / 100, 6)
    for name in ("auc", "tpr_at_1pct_fpr"):
        record |= _columns(f"adjusted_{name}", row.adjusted.estimate(name) if row.adjusted else None)
    lead = line.lead
    record |= {"baseline": lead.baseline.title if lead else ""} | _columns("auc_lead", lead.auc if lead else None)
    record |= {"p_value": lead.p_value if lead else ""} | _columns("tpr_lead", lead.tpr if lead else None)
    return record


def _columns(name: str, estimate: Estimate | None) -> dict[str, float | str]:
    values = ("", "", "") if estimate is None else estimate
    return dict(zip((name, f"{name}_low", f"{name}_high"), values))


def write_tables(runs: Sequence[str | os.PathLike[str]], output: pathlib.Path) -> list[Table]:
    """Read the runs and write STUDY_VARIANT.md and .tex for each, and tables.csv for all, into `output`.

    STUDY_VARIANT_questions.md answers the paper's questions over the models of a study.
    """
    if not runs:
        raise ValueError("--runs must name at least one run directory, got none")
    tables = [make_table(read_run(run)) for run in runs]
    output.mkdir(parents=True, exist_ok=True)
    names = [table.run.name.replace(":", "_") for table in tables]
    if len(set(names)) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names)]
    csv.write_csv(output / "tables.csv", [csv_row(table.run, line) for table in tables for line in table.lines])
    texts = {}
    for name, table in zip(names, tables):
        texts[f"{name}.md"] = f"# {table.title}\n\n{render('run_table.md', table=table)}"
        texts[f"{name}.tex"] = render("run_table.tex", table=table)
    for study in group_runs([table.run for table in tables]):
        name = names[[table.run for table in tables].index(study.first)]
        answered = render("questions.md", study=study, answers=questions.answers(study))
        texts[f"{name}_questions.md"] = f"# The paper's questions, {study.first.name}\n\n{answered}"
    for name, text in texts.items():
        (output / name).write_text(text, encoding="utf-8")
    return tables


if __name__ == "__main__":
    _RUNS = flags.DEFINE_list("runs", [], "run directories: W/attack, separated by commas")
    _OUTPUT = flags.DEFINE_string("output", "out/tables", "where their tables go")
    _KEPT = flags.DEFINE_string("kept", None, "a folder of finished runs, for --results")
    _RESULTS = flags.DEFINE_string("results", None, "write this page of all that --kept holds")

    def _main() -> None:
        if _RESULTS.value:
            if not _KEPT.value:
                raise ValueError("--results needs --kept=FOLDER")
            results_page.write_pages(pathlib.Path(_KEPT.value), pathlib.Path(_RESULTS.value))
            return
        for table in write_tables(_RUNS.value, pathlib.Path(_OUTPUT.value)):
            print(f"{table.title}\n\n{render('run_table.md', table=table)}")

    run_app(_main)
