"""The paper's three questions and one of our own, from the score tables of a study's models.

1. Does crowding help? DIME against its level term alone: from the same answers at the same setting, and each attack at
   the setting that calibration chose for it.
2. Is DIME ahead of the baselines? Against each of them that makes no more queries.
3. How do results hold over t, γ and q? DIME against level only and against SimA with t or γ fixed and the rest chosen
   (on the calibration half, cross-fitted: the test half was asked at one setting), and each query tier against the one
   before.
4. Is the same answer read better in bands (`dime_jax.attacks.bands`)? At each budget, the reading that calibration
   chooses against the strongest of all other attacks.

Every answer is a difference of AUCs on the same images, with DeLong's paired interval, which is about images and holds
for that one model. What holds for models of the kind is told by the mean over models and its t-interval, and even that
is called no more than an observation below five models.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from dime_jax.attacks import bands
from dime_jax.evidence import metrics
from dime_jax.protocol.frozen import best_calibrated
from dime_jax.scoring import planning
from experiments import cross_fit, markdown
from experiments.runs import Row, Run, RunSet

MODELS_FOR_A_CLAIM = 5
_RIVAL = "sima_l4"
_READINGS = frozenset(attack.name for attack in bands.ATTACKS)


class Difference(NamedTuple):
    """AUC of one attack minus that of another on the same images, for each model of a study."""

    first: str
    second: str
    models: tuple[metrics.Estimate, ...]


class Crowding(NamedTuple):
    """What crowding adds to one of DIME's rows.

    Attributes:
      weights: of crowding in each model's score, sin φ of standardised terms (raw ones for the theory's weights).
      same: against its level at the same setting.
      own: against level only at no more queries, each at its own setting; None if the runs do not have it.
    """

    weights: tuple[float, ...]
    same: Difference
    own: Difference | None


class AtSetting(NamedTuple):
    """DIME's largest tier with one part of its setting fixed.

    Attributes:
      setting: "t = 50".
      auc: of DIME, for each model.
      level: against level only, fixed likewise.
      rival: against SimA at that t; None where γ is fixed.
    """

    setting: str
    auc: tuple[float, ...]
    level: Difference
    rival: Difference | None


class ReadingLead(NamedTuple):
    """DIME's answers read in another way, against the strongest of all other attacks at no more queries.

    Attributes:
      budget: queries per image, at most, in every model of the study.
      readings: the reading of best calibration AUC, for each model.
      rivals: the attack of best AUC on the test half itself, for each model: nothing could have chosen a better one.
      difference: of their AUCs.
    """

    budget: int
    readings: tuple[Row, ...]
    rivals: tuple[Row, ...]
    difference: Difference


class StudyAnswers(NamedTuple):
    """All four."""

    crowding: list[Crowding]
    baselines: list[Difference]
    settings: list[AtSetting]
    tiers: list[Difference]
    leads: list[ReadingLead]


def over_models(values: Sequence[float], confidence: float = 0.95, least: float = -1.0) -> metrics.Estimate | None:
    """The mean over models and its t-interval; None for a single model, which says nothing about others.

    Args:
      values: one for each model, between `least` and 1, beyond which no interval goes.
      confidence: of the interval.
      least: -1 for differences of rates, 0 for rates.
    """
    if len(values) < 2:
        return None
    mean, margin = float(np.mean(values)), float(stats.sem(values) * stats.t.isf((1 - confidence) / 2, len(values) - 1))
    return metrics.Estimate(mean, max(least, mean - margin), min(1.0, mean + margin))


def answers(study: RunSet) -> StudyAnswers:
    """Everything that the study's score tables say."""
    settings = at_settings(study, "t") + at_settings(study, "gamma")
    return StudyAnswers(crowding(study), against_baselines(study), settings, between_tiers(study), leads(study))


def crowding(study: RunSet) -> list[Crowding]:
    """What crowding adds, for each of DIME's rows that has both terms."""
    found = []
    for rows in _common_rows(study):
        if rows[0].level is None:
            continue
        levels = [row._replace(scores=row.level) for row in rows if row.level is not None]
        same = _difference(study.runs, rows, levels, "its level, same setting")
        alone = [_level_only(run, row.queries) for run, row in zip(study.runs, rows)]
        own = None
        if all(alone):
            own = _difference(study.runs, rows, [row for row in alone if row])
        found.append(Crowding(tuple(row.calibration.weights[1] for row in rows), same, own))
    return found


def against_baselines(study: RunSet) -> list[Difference]:
    """Each tier of DIME against every baseline that makes no more queries."""
    common = _common_rows(study)
    dime = [rows for rows in common if rows[0].attack == "dime"]
    baselines = [rows for rows in common if rows[0].is_baseline]
    return [
        _difference(study.runs, rows, rivals)
        for rows, rivals in itertools.product(dime, baselines)
        if max(row.queries for row in rivals) <= rows[0].queries
    ]


def between_tiers(study: RunSet) -> list[Difference]:
    """Each tier of DIME against the one before."""
    tiers = sorted((rows for rows in _common_rows(study) if rows[0].attack == "dime"), key=lambda rows: rows[0].queries)
    return [_difference(study.runs, more, fewer) for fewer, more in itertools.pairwise(tiers)]


def leads(study: RunSet) -> list[ReadingLead]:
    """The reading that calibration chooses at each budget that one of them uses up, against the strongest rival."""
    common = _common_rows(study)
    ours = [rows for rows in common if rows[0].attack in _READINGS]
    others = [rows for rows in common if rows[0].attack not in _READINGS]
    found = []
    for budget in sorted({rows[0].queries for rows in ours}):
        readings = [_chosen(rows) for rows in _of_each_model(ours, budget)]
        rivals = [max(rows, key=lambda row: row.result.auc.value) for rows in _of_each_model(others, budget)]
        if rivals:
            difference = _difference(study.runs, readings, rivals)
            found.append(ReadingLead(budget, tuple(readings), tuple(rivals), difference))
    return found


def _of_each_model(common: Sequence[Sequence[Row]], budget: int) -> list[tuple[Row, ...]]:
    """For each model: its rows that make no more queries."""
    return list(zip(*(rows for rows in common if max(row.queries for row in rows) <= budget)))


def _chosen(rows: Sequence[Row]) -> Row:
    """The row of best calibration AUC, as an audit would decide with it."""
    best = best_calibrated([row.calibration for row in rows])
    return next(row for row in rows if row.calibration == best)


def at_settings(study: RunSet, axis: str) -> list[AtSetting]:
    """DIME's largest tier at each value of t or γ that all runs have, everything else chosen."""
    halves = [run.calibration_half() for run in study.runs]
    parts = [cross_fit.cut(half, run.results.seed) for half, run in zip(halves, study.runs)]
    dime, level, rival = (
        [_by_value(half.jobs, name, axis) for half in halves] for name in ("dime", "level_only", _RIVAL)
    )
    found = []
    for value in sorted(set.intersection(*(set(one) & set(other) for one, other in zip(dime, level)))):
        scores = [cross_fit.scores(part, jobs[value]) for part, jobs in zip(parts, dime)]
        against_level = _cross_fitted(parts, scores, [jobs[value] for jobs in level])
        against_rival = None
        if all(value in jobs for jobs in rival):
            against_rival = _cross_fitted(parts, scores, [jobs[value] for jobs in rival])
        auc = tuple(cross_fit.auc(part, one) for part, one in zip(parts, scores))
        found.append(AtSetting(f"{'γ' if axis == 'gamma' else axis} = {value:g}", auc, against_level, against_rival))
    return found


def _cross_fitted(
    parts: Sequence[cross_fit.Parts], dime: Sequence[np.ndarray], rivals: Sequence[Sequence[planning.Job]]
) -> Difference:
    """DIME's scores against another attack at the settings that are left to it, for each model."""
    models = [
        cross_fit.difference(part, scores, cross_fit.scores(part, jobs))
        for part, scores, jobs in zip(parts, dime, rivals)
    ]
    return Difference("DIME", rivals[0][0].attack.title, tuple(models))


def _by_value(jobs: Sequence[planning.Job], name: str, axis: str) -> dict[float, list[planning.Job]]:
    """The jobs of an attack at its largest tier, by the value of one part of their setting."""
    own = [job for job in jobs if job.attack.name == name and axis in job.setting]
    largest = max((job.setting.get("q", 1) for job in own), default=1)
    found: dict[float, list[planning.Job]] = {}
    for job in own:
        if job.setting.get("q", 1) == largest:
            found.setdefault(job.setting[axis], []).append(job)
    return found


def _common_rows(study: RunSet) -> list[list[Row]]:
    """For each row that all runs have: the row of every run."""
    every = [[run.row(row.attack, row.q) for run in study.runs] for row in study.first.rows]
    return [[row for row in rows if row] for rows in every if all(rows)]


def _level_only(run: Run, queries: int) -> Row | None:
    tiers = [row for row in run.rows if row.attack == "level_only" and row.queries <= queries]
    return max(tiers, key=lambda row: row.queries, default=None)


def _difference(runs: Sequence[Run], first: Sequence[Row], second: Sequence[Row], name: str = "") -> Difference:
    models = []
    for run, one, other in zip(runs, first, second):
        models.append(metrics.compare(*run.paired_scores(one, other), fprs=()).auc_difference)
    return Difference(first[0].title, name or second[0].title, tuple(models))


# ------------------------------------------------------------------------------------------------------------ rendering

_PREFACE = """\
Differences of AUC in points, on the same images of the test half, with DeLong's paired interval for each model{over}.
"""


_ABOUT_CROWDING = """\
DIME against its level term alone, from the same answers at the setting that was chosen for DIME, and against level only
at its own setting. Where calibration gave crowding no weight the two are one attack, and the interval is what equal
ranks of so many images can show. Weights are of standardised terms, those of theory of raw ones.
"""

_ABOUT_LEADS = """\
At each budget, the reading of DIME's answers in bands of frequency or in another norm that calibration chooses, against
the strongest other attack that makes no more queries. The rival is picked on the test half itself, which favours it.
"""


def to_markdown(study: RunSet) -> str:
    """The questions as tables."""
    found, labels = answers(study), study.labels
    over = "" if len(labels) < 2 else ", and the mean over models with its t-interval"
    parts = [auc_table(study)] if len(labels) > 1 else []
    parts += [_PREFACE.format(over=over), claim(len(labels))]
    if found.crowding:
        parts += ["#### Does crowding help?\n", _ABOUT_CROWDING, _crowding_table(found.crowding, labels)]
    if found.baselines:
        parts += ["#### Is DIME ahead of the baselines?\n", _table(found.baselines, labels)]
    if found.settings:
        parts += ["#### How do results hold over t, γ and q?\n", _settings_table(found.settings, labels)]
    if found.tiers:
        parts.append(_table(found.tiers, labels))
    if found.leads:
        parts += ["#### Is the same answer read better in bands?\n", _ABOUT_LEADS, _leads_table(found.leads, labels)]
    return "\n".join(parts)


def auc_table(study: RunSet) -> str:
    """The AUC of every attack for each model, with intervals about images, and its mean over models."""
    rows = []
    for found in _common_rows(study):
        mean = over_models([row.result.auc.value for row in found], least=0.0)
        cells = [markdown.percent(row.result.auc) for row in found] + ([markdown.percent(mean)] if mean else [])
        rows.append([found[0].title, str(max(row.queries for row in found)), *cells])
    return markdown.table(["AUC", "queries", *_header(study.labels)], rows)


def claim(models: int) -> str:
    """What the number of models allows to say."""
    if models == 1:
        return "One model: what is found here may be this model's, and no significance is claimed.\n"
    if models < MODELS_FOR_A_CLAIM:
        return f"{models} models: no significance is claimed below {MODELS_FOR_A_CLAIM}.\n"
    return f"{models} models: * marks means whose t-interval excludes 0 (not corrected for the number of rows).\n"


def _header(labels: Sequence[str]) -> list[str]:
    return [*labels, *([f"mean of {len(labels)} models"] if len(labels) > 1 else [])]


def _cells(difference: Difference | None, labels: Sequence[str]) -> list[str]:
    """Every model's difference, and their mean."""
    if difference is None:
        return [""] * len(_header(labels))
    return [*(markdown.percent(one, "+") for one in difference.models), *mean_cell(difference)]


def mean_cell(difference: Difference) -> list[str]:
    """The mean over models, marked where it is a claim; no cell for a single model."""
    mean = over_models([one.value for one in difference.models])
    if mean is None:
        return []
    sure = len(difference.models) >= MODELS_FOR_A_CLAIM and not mean.low <= 0 <= mean.high
    return [markdown.percent(mean, "+") + (" *" if sure else "")]


def _table(differences: Sequence[Difference], labels: Sequence[str]) -> str:
    rows = [[one.first, one.second, *_cells(one, labels)] for one in differences]
    return markdown.table(["", "against", *_header(labels)], rows)


def _crowding_table(found: Sequence[Crowding], labels: Sequence[str]) -> str:
    rows = []
    for one in found:
        weights = ", ".join(f"{weight + 0.0:+.2f}" for weight in one.weights)
        rows.append([one.same.first, weights, one.same.second, *_cells(one.same, labels)])
        if one.own is not None:
            rows.append(["", "", f"{one.own.second}, own setting", *_cells(one.own, labels)])
    return markdown.table(["", "weight of crowding", "against", *_header(labels)], rows)


def _settings_table(found: Sequence[AtSetting], labels: Sequence[str]) -> str:
    rows = []
    for one in found:
        aucs = ", ".join(f"{100 * auc:.1f}" for auc in one.auc)
        rows.append([one.setting, aucs, one.level.second, *_cells(one.level, labels)])
        if one.rival is not None:
            rows.append(["", "", one.rival.second, *_cells(one.rival, labels)])
    return markdown.table(["calibration half, cross-fitted", "AUC of DIME", "against", *_header(labels)], rows)


def _leads_table(found: Sequence[ReadingLead], labels: Sequence[str]) -> str:
    """A line for each budget and model, and one for the mean over models."""
    rows = []
    for lead in found:
        budget = f"{lead.budget} {'query' if lead.budget == 1 else 'queries'}"
        for label, ours, rival, gap in zip(labels, lead.readings, lead.rivals, lead.difference.models):
            cells = [cell for row in (ours, rival) for cell in (row.title, *_rates([row]))]
            rows.append([budget, label, *cells, markdown.percent(gap, "+")])
        if len(labels) > 1:
            means = [cell for side in (lead.readings, lead.rivals) for cell in ("", *_rates(side))]
            rows.append([budget, f"mean of {len(labels)}", *means, *mean_cell(lead.difference)])
    header = ["", "", "reading", "AUC", "TPR@1%FPR", "strongest rival", "AUC", "TPR@1%FPR", "difference of AUC"]
    return markdown.table(header, rows)


def _rates(rows: Sequence[Row]) -> list[str]:
    """Mean AUC and TPR@1%FPR of some rows."""
    means = [np.mean([row.estimate(metric).value for row in rows]) for metric in ("auc", "tpr_at_1pct_fpr")]
    return [f"{100 * mean:.1f}" for mean in means]
