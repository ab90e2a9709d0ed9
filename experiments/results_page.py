"""The results page, and a page of full tables for each folder of finished work: `experiments.tables --kept`.

    FOLDER/seed_N/...                 W/seed_N/attack of `experiments.attack`, a model each
    FOLDER/seed_N/ARM/attack/...      W/seed_N of `experiments.dp_defense`, without weights and states
    FOLDER/.../progress.json          of `experiments.memorisation`
    FOLDER/dataset_size.json, query_budget.json         of `experiments.synthetic`
    FOLDER/ideal_gap.json             of `experiments.figures --model`
    fresh_models/*.json               WORKDIR/fresh/fresh.json of `experiments.fresh_models`, one for each model
    reference/*.json                  WORKDIR/reference/*.json of `experiments.reference`
    finetune/*.json                   WORKDIR/finetune/*.json of `experiments.finetune`

What lies in docs/results/FOLDER is reported in full on docs/results_FOLDER.md, what was found beside a second model on
docs/results_beside.md, and all of it in short on docs/RESULTS.md, which also has what was found on fresh models.
Nothing on these pages comes from anywhere else. `experiments/templates` has their prose.
"""

import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from matplotlib.figure import Figure

from dime_jax._util import files, records
from dime_jax.evidence import Way
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings.results import BlindFinding
from dime_jax.report import figures
from experiments import dp_table, fresh_models, memorisation, model_figures, questions, synthetic
from experiments.attack import CONFIG_FILE
from experiments.beside import study_name
from experiments.finetune import BesideBase
from experiments.reference import BesideReference
from experiments.rendering import auc_tpr, render
from experiments.run_table import Table, is_papers_setting, make_table
from experiments.runs import Row, RunSet, group_runs, read_run

_DPI = 130
FRESH, REFERENCE, FINETUNE = "fresh_models", "reference", "finetune"
_BESIDE_PAGE = "results_beside.md"
_Kind = TypeVar("_Kind", BesideReference, BesideBase)


class NoiseLead(NamedTuple):
    """DIME's lead over a rival in one panel of the closed form.

    Attributes:
      name: of the panel, "n = 10".
      t: noise levels, and their ᾱ.
      abar: the same.
      leads: differences of AUC.
      correlation: Spearman's, with the noise; None if the lead does not vary.
      asr_behind: the noise levels at which DIME's ASR is below the rival's.
    """

    name: str
    t: list[int]
    abar: list[float]
    leads: list[Estimate]
    correlation: float | None
    asr_behind: list[int]

    @property
    def mean(self) -> float:
        """Over the noise levels."""
        return float(np.mean([lead.value for lead in self.leads]))

    @property
    def peak(self) -> int:
        """Where the lead is largest."""
        return int(np.argmax([lead.value for lead in self.leads]))


class Drawing(NamedTuple):
    """A kind of JSON file below the folder.

    Attributes:
      kind: its type.
      draw: its figure.
      template: of its section.
      values: what the template uses besides `numbers` and `picture`.
    """

    kind: object
    draw: Callable[..., Figure]
    template: str
    values: Callable[..., dict[str, object]] = lambda numbers: {}


class DrawnFile(NamedTuple):
    """A JSON file of some kind: its name without ".json", where it is, and what it holds."""

    name: str
    file: pathlib.Path
    numbers: object

    def values(self, page: pathlib.Path) -> dict[str, object]:
        """Return what the templates of a page use of it."""
        picture = self.file.with_suffix(".png").resolve().relative_to(page.resolve().parent).as_posix()
        return {"numbers": self.numbers, "picture": picture, **DRAWINGS[self.name].values(self.numbers)}


class AucRange(NamedTuple):
    """The least and the largest AUC, means over models, and how far they are apart."""

    low: float
    high: float
    width: float


class StudyResults(NamedTuple):
    """A study of `experiments.attack`: its models, their tables, and its answers to the questions."""

    runs: RunSet
    tables: list[Table]
    answers: questions.StudyAnswers

    @property
    def title(self) -> str:
        """The data, with config and variant."""
        return self.tables[0].title

    @property
    def dime(self) -> list[Row]:
        """DIME with the most probes, for each model; none where it is not run."""
        tiers = [rows for rows in self.answers.rows if rows[0].attack == "dime"]
        return max(tiers, key=lambda rows: rows[0].queries, default=[])

    @property
    def crowding(self) -> questions.Crowding | None:
        """What crowding adds to that."""
        titles = [row.title for row in self.dime]
        return next((one for one in self.answers.crowding if one.same.first in titles), None)

    @property
    def strongest_baseline(self) -> questions.Difference:
        """The same against the baseline over which its lead is smallest, at no more queries."""
        differences = [one for one in self.answers.baselines if one.first == self.dime[0].title]
        return min(differences, key=lambda one: one.overall.value)

    @property
    def over_t(self) -> AucRange:
        """DIME's AUC over timesteps."""
        return self._range("t")

    @property
    def over_gamma(self) -> AucRange:
        """DIME's AUC over step sizes."""
        return self._range("γ")

    def _range(self, axis: str) -> AucRange:
        aucs = [float(np.mean(one.auc)) for one in self.answers.settings if one.setting.startswith(axis)]
        return AucRange(min(aucs), max(aucs), max(aucs) - min(aucs))

    @property
    def blind(self) -> list[BlindFinding]:
        """What a classifier that never saw the model finds, for each model where one could be fitted."""
        return [run.results.blind_baseline for run in self.runs.runs if run.results.blind_baseline is not None]


class FreshReading(NamedTuple):
    """What one reading of a fresh model's answers achieves."""

    auc: Estimate
    tpr_at_1pct_fpr: Estimate


class FreshModel(NamedTuple):
    """A model that was trained after the rule for audits without known members was frozen: fresh.json.

    Attributes:
      file: its config and variant.
      seed: of the model.
      members: how many there are; all are counted.
      fitted: held-out images that the pictures' difficulty was fitted to.
      counted: held-out images that were counted.
      queries_made: in all.
      readings: by name.
      lead_over_plain_loss: of the rule, AUC on the same images.
    """

    file: str
    seed: int
    members: int
    fitted: int
    counted: int
    queries_made: int
    readings: Mapping[str, FreshReading]
    lead_over_plain_loss: Estimate

    @property
    def study(self) -> str:
        """Its config and variant."""
        return study_name(self.file)

    @property
    def rule(self) -> FreshReading:
        """The rule's."""
        return self.readings[fresh_models.RULE]

    @property
    def plain(self) -> FreshReading:
        """Plain loss of the same queries."""
        return self.readings[fresh_models.PLAIN]


class FreshStudy(NamedTuple):
    """The fresh models of one config."""

    name: str
    models: list[FreshModel]

    @property
    def lead(self) -> Estimate | None:
        """The mean lead over models, with its t-interval; None for a single model."""
        return questions.over_models([one.lead_over_plain_loss.value for one in self.models])


class FinetuneRow(NamedTuple):
    """What Loss finds after so many passes: means over models of every kind of fine-tune, alone and beside the base."""

    passes: int
    reached: list[str]


class Beside(NamedTuple):
    """What was found beside a second model."""

    references: list[BesideReference]
    finetunes: list[BesideBase]

    @property
    def judged(self) -> list[BesideReference]:
        """The references of each study that most models have, to be told in short."""
        most = [[one for one in self.references if one.study == name] for name in _unique(self.references)]
        return [one for of in most for one in of if (one.small, one.reference_images) == _commonest(of)]

    @property
    def kinds(self) -> list[str]:
        """How models were fine-tuned."""
        return list(dict.fromkeys(one.tuned for one in self.finetunes))

    @property
    def rows(self) -> list[FinetuneRow]:
        """The table of fine-tunes."""
        passes = self.finetunes[0].passes if self.finetunes else []
        return [FinetuneRow(number, self._reached(place)) for place, number in enumerate(passes)]

    def _reached(self, place: int) -> list[str]:
        cells = []
        for kind, way in itertools.product(self.kinds, (Way.PLAIN, Way.BESIDE)):
            found = [one.found[place]["loss"][way.value] for one in self.finetunes if one.tuned == kind]
            cells.append(auc_tpr([(of.auc.value, of.tpr_at_1pct_fpr.value) for of in found]))
        return cells


def _unique(references: Sequence[BesideReference]) -> list[str]:
    return list(dict.fromkeys(one.study for one in references))


def _commonest(references: Sequence[BesideReference]) -> tuple[bool, int]:
    kinds = [(one.small, one.reference_images) for one in references]
    return max(kinds, key=kinds.count)


class Folder(NamedTuple):
    """What one folder of finished work holds.

    Attributes:
      name: of the folder.
      page: where its full tables are written.
      studies: of `experiments.attack`.
      dp_studies: of `experiments.dp_defense`, the table of each seed.
      drawn: other files, in the order of `DRAWINGS`.
    """

    name: str
    page: pathlib.Path
    studies: list[StudyResults]
    dp_studies: list[list[dp_table.DpTable]]
    drawn: list[DrawnFile]


def noise_leads(panels: Sequence[synthetic.Panel], by: str, rival: str) -> list[NoiseLead]:
    """Return DIME's lead in each panel.

    Args:
      panels: over n or q.
      by: which of the two.
      rival: "sima_mc_shared", DIME's own level, or "sima_mc_gaussian", the baseline.
    """
    found = []
    for panel in panels:
        leads = panel.auc_lead if rival == "sima_mc_shared" else panel.gaussian_lead
        asr = zip(panel.t, panel.curves["dime"].asr, panel.curves[rival].asr)
        behind = [t for t, ours, theirs in asr if ours.value < theirs.value]
        correlation = synthetic.rank_correlation([lead.value for lead in leads], panel.sigma)
        found.append(NoiseLead(f"{by} = {getattr(panel, by)}", panel.t, panel.abar, leads, correlation, behind))
    return found


def _closed_form(by: str) -> Drawing:
    def values(panels: Sequence[synthetic.Panel]) -> dict[str, object]:
        over = {"over_level": "sima_mc_shared", "over_baseline": "sima_mc_gaussian"}
        return {"by": by, **{name: noise_leads(panels, by, rival) for name, rival in over.items()}}

    return Drawing(list[synthetic.Panel], synthetic.draw_attack_panels, "synthetic.md", values)


DRAWINGS = {
    "progress": Drawing(memorisation.TrainingProgress, memorisation.draw, "progress.md"),
    "dataset_size": _closed_form("n"),
    "query_budget": _closed_form("q"),
    "ideal_gap": Drawing(model_figures.IdealGap, model_figures.draw_ideal_gap, "ideal_gap.md"),
}


def read_folder(folder: pathlib.Path, page: pathlib.Path) -> Folder:
    """Read everything below a folder, by name."""
    runs, dp_workdirs = [], dict[pathlib.Path, None]()
    for file in sorted(folder.rglob(CONFIG_FILE)):
        record = json.loads(file.read_text(encoding="utf-8"))
        if "dp" in record.get("config", {}):
            dp_workdirs[file.parents[2]] = None  # FOLDER/seed_N/ARM/attack/config.json
        elif "file" in record:
            runs.append(make_table(read_run(file.parent)))
    of_run = {table.run.directory: table for table in runs}
    studies = [
        StudyResults(study, [of_run[run.directory] for run in study.runs], questions.answers(study))
        for study in group_runs([table.run for table in runs])
    ]
    dp_studies = dp_table.group_tables([dp_table.read_table(workdir) for workdir in dp_workdirs])
    return Folder(folder.name, page.with_name(f"results_{folder.name}.md"), studies, dp_studies, find_drawn(folder))


def find_drawn(folder: pathlib.Path) -> list[DrawnFile]:
    """Read the JSON files below a folder that `DRAWINGS` names."""
    found = []
    for name, drawing in DRAWINGS.items():
        for file in sorted(folder.rglob(f"{name}.json")):
            kind: type = drawing.kind  # type: ignore[assignment]
            found.append(DrawnFile(name, file, records.parse(kind, json.loads(file.read_bytes()), str(file))))
    return found


def read_fresh(folder: pathlib.Path) -> list[FreshStudy]:
    """Read what was found on fresh models, by config and seed; nothing if there is no such folder."""
    models = [records.parse(FreshModel, json.loads(file.read_bytes()), str(file)) for file in folder.glob("*.json")]
    models.sort(key=lambda one: (one.study, one.seed))
    return [FreshStudy(name, list(of)) for name, of in itertools.groupby(models, key=lambda one: one.study)]


def read_beside(kept: pathlib.Path) -> Beside:
    """Read what was found beside a second model, by study and seed."""

    def read(kind: type[_Kind], folder: str) -> list[_Kind]:
        found = [
            records.parse(kind, json.loads(file.read_bytes()), str(file))
            for file in sorted((kept / folder).glob("*.json"))
        ]
        return sorted(found, key=lambda one: (one.study, one.seed))

    return Beside(read(BesideReference, REFERENCE), read(BesideBase, FINETUNE))


def study_section(study: StudyResults, page: pathlib.Path) -> str:
    """Return the section of one study, with the tables of all its models and what it takes to make them again."""
    run = study.runs.first
    is_ours = run.config["attack"]["model"] in ("trained", "pipeline") and not is_papers_setting(run)
    return render("study.md", study=study.runs, tables=study.tables, answers=study.answers, is_ours=is_ours, page=page)


def folder_page(folder: Folder) -> str:
    """Return the page of full tables of one folder."""
    sections = [study_section(study, folder.page) for study in folder.studies]
    sections += [dp_table.to_section(tables, folder.page) for tables in folder.dp_studies]
    sections += [render(DRAWINGS[one.name].template, **one.values(folder.page)) for one in folder.drawn]
    return render("folder.md", folder=folder, sections=sections)


def to_pages(kept: pathlib.Path, page: pathlib.Path) -> dict[pathlib.Path, str]:
    """Return the results page and the pages that it links to, by where they are written.

    Args:
      kept: the folder of folders, see the module.
      page: of the short answers; the others lie beside it.
    """
    others = (FRESH, REFERENCE, FINETUNE)
    kept_folders = [folder for folder in sorted(kept.iterdir()) if folder.is_dir() and folder.name not in others]
    folders, beside = [read_folder(folder, page) for folder in kept_folders], read_beside(kept)
    drawn = [one for folder in folders for one in folder.drawn]
    values = {"over_seeds": dp_table.over_seeds, "fresh": read_fresh(kept / FRESH), "beside": beside}
    pages = {page: render("results.md", page=page, folders=folders, drawn=drawn, **values)}
    pages |= {folder.page: folder_page(folder) for folder in folders}
    if any(beside):
        pages[page.with_name(_BESIDE_PAGE)] = render("beside.md", found=[*beside.references, *beside.finetunes])
    return pages


def write_pages(kept: pathlib.Path, page: pathlib.Path) -> None:
    """Write all pages, and draw the figures that they show beside their numbers."""
    with figures.style(**{"savefig.dpi": _DPI}):
        for one in find_drawn(kept):
            DRAWINGS[one.name].draw(one.numbers).savefig(one.file.with_suffix(".png"))
    for path, text in to_pages(kept, page).items():
        files.write_atomically(path, text.encode())
