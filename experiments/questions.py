"""The paper's three questions and one of our own, from the score tables of a study's models.

1. Does crowding help? DIME against its level term alone: from the same answers at the same setting, and each attack at
   the setting that calibration chose for it.
2. Is DIME ahead of the baselines? Against each of them that makes no more queries.
3. How do results hold over t, γ and q? DIME against level only and against SimA with t or γ fixed and the rest chosen
   (on the calibration half, cross-fitted: the test half was asked at one setting), and each query tier against the one
   before.
4. How much of an attack is the difficulty of the picture? Every attack plain and with that taken out
   (`evidence.difficulty`): at the frozen setting on the test half; at its own on the calibration half, cross-fitted,
   where the rule for audits without known members stands beside them. Question 1 is asked again there.

Every answer is a difference of AUCs on the same images, with DeLong's paired interval, which is about images and holds
for that one model. What holds for models of the kind is told by the mean over models and its t-interval, and even that
is called no more than an observation below five models.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from dime_jax.evidence import metrics
from dime_jax.scoring import planning
from experiments import cross_fit
from experiments.kept_statistics import has_rule, rule_job
from experiments.runs import Row, Run, RunSet

MODELS_FOR_A_CLAIM = 5
_RIVAL = "sima_l4"


class Difference(NamedTuple):
    """AUC of one attack minus that of another on the same images, for each model of a study."""

    first: str
    second: str
    models: tuple[metrics.Estimate, ...]

    @property
    def overall(self) -> metrics.Estimate:
        """The mean over models with its t-interval; of a single model, its own difference."""
        return over_models([one.value for one in self.models]) or self.models[0]

    @property
    def is_claim(self) -> bool:
        """Whether there are enough models, and the t-interval excludes 0."""
        return len(self.models) >= MODELS_FOR_A_CLAIM and not self.overall.low <= 0 <= self.overall.high


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


class Explained(NamedTuple):
    """An attack, and what the picture explains of it.

    Attributes:
      title: of the attack.
      queries: per image.
      rows: of each model, with their adjusted ones; none for the rule without members, which kept runs did not ask for.
      plain: on the calibration half at its own setting, cross-fitted, for each model.
      adjusted: the same with what the picture explains taken out, at its own setting.
    """

    title: str
    queries: int
    rows: tuple[Row, ...]
    plain: tuple[cross_fit.AucTpr, ...]
    adjusted: tuple[cross_fit.AucTpr, ...]

    @property
    def taken_out(self) -> tuple[Row, ...]:
        """The adjusted rows."""
        return tuple(_taken_out(self.rows))


class Strongest(NamedTuple):
    """The attacks of best mean AUC on the test half itself among those that make no more queries, for each model."""

    queries: int
    plain: tuple[Row, ...]
    adjusted: tuple[Row, ...]


class DifficultyAnswer(NamedTuple):
    """What the picture explains.

    Attributes:
      attacks: all that can be adjusted.
      strongest: with one query, and with as many as DIME makes at most.
      rule: that for audits without known members; None where kept tables lack a reading of it.
      crowding: what it adds to DIME's rows once the picture is taken out.
      own: theory weights against level only, the largest tier of each, at their own adjusted settings, cross-fitted;
        None where there is none of either.
    """

    attacks: list[Explained]
    strongest: list[Strongest]
    rule: Explained | None
    crowding: list[Crowding]
    own: Difference | None

    @property
    def loss(self) -> Explained | None:
        """The plainest attack of all: one query."""
        return next((one for one in self.attacks if one.rows[0].attack == "loss"), None)

    @property
    def loss_gain(self) -> float:
        """What that gains of AUC on the test half, in the mean over models."""
        return 0.0 if self.loss is None else _mean_auc(self.loss.taken_out) - _mean_auc(self.loss.rows)

    @property
    def gain(self) -> float:
        """The same of the strongest attack of one query, which may be another once it is adjusted."""
        return _mean_auc(self.strongest[0].adjusted) - _mean_auc(self.strongest[0].plain)

    @property
    def theory(self) -> Crowding | None:
        """What crowding adds to DIME with theory weights, at the largest tier."""
        return next((one for one in reversed(self.crowding) if "theory" in one.same.first), None)


class StudyAnswers(NamedTuple):
    """The four answers, and the rows that all models of the study have: for each row, that of every model."""

    rows: list[list[Row]]
    crowding: list[Crowding]
    baselines: list[Difference]
    settings: list[AtSetting]
    tiers: list[Difference]
    difficulty: DifficultyAnswer | None


def over_models(values: Sequence[float], confidence: float = 0.95, least: float = -1.0) -> metrics.Estimate | None:
    """Return the mean over models and its t-interval; None for a single model, which says nothing about others.

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
    """Answer everything that the study's score tables can."""
    settings = at_settings(study, "t") + at_settings(study, "gamma")
    return StudyAnswers(
        common_rows(study),
        crowding(study),
        against_baselines(study),
        settings,
        between_tiers(study),
        difficulty(study),
    )


def crowding(study: RunSet, adjusted: bool = False) -> list[Crowding]:
    """Return what crowding adds to each of DIME's rows with both terms; plain, or without what the picture explains."""
    found = []
    for plain in common_rows(study):
        rows = _taken_out(plain) if adjusted else plain
        levels = [row._replace(scores=row.level) for row in rows if row.level is not None]
        if not levels:
            continue
        same = _difference(study.runs, rows, levels, "its level, same setting")
        tiers = [run.largest_tier("level_only", row.queries) for run, row in zip(study.runs, rows)]
        alone = [row for row in tiers if row]
        alone = _taken_out(alone) if adjusted else alone
        own = _difference(study.runs, rows, alone) if len(alone) == len(rows) else None
        found.append(Crowding(tuple(row.calibration.weights[1] for row in rows), same, own))
    return found


def against_baselines(study: RunSet) -> list[Difference]:
    """Compare each tier of DIME with every baseline that makes no more queries."""
    common = common_rows(study)
    dime = [rows for rows in common if rows[0].attack == "dime"]
    baselines = [rows for rows in common if rows[0].is_baseline]
    return [
        _difference(study.runs, rows, rivals)
        for rows, rivals in itertools.product(dime, baselines)
        if max(row.queries for row in rivals) <= rows[0].queries
    ]


def between_tiers(study: RunSet) -> list[Difference]:
    """Compare each tier of DIME with the one before."""
    tiers = sorted((rows for rows in common_rows(study) if rows[0].attack == "dime"), key=lambda rows: rows[0].queries)
    return [_difference(study.runs, more, fewer) for fewer, more in itertools.pairwise(tiers)]


def difficulty(study: RunSet) -> DifficultyAnswer | None:
    """Return what the picture explains of every attack; None where a run has no statistics of the pictures."""
    parts = [cross_fit.cut(run) for run in study.runs]
    if any(part.pictures is None for part in parts):
        return None
    rows = [rows for rows in common_rows(study) if len(_taken_out(rows)) == len(rows)]
    jobs = [[_jobs_of(part, one[0]) for part in parts] for one in rows]
    rule = None
    if all(has_rule(part.table) for part in parts):
        rule = _explained(parts, [[rule_job(part.table)] for part in parts])
    largest = {one[0].attack: of for of, one in zip(jobs, rows)}  # the last tier is the largest
    own = None
    if {"dime_theory", "level_only"} <= largest.keys():
        theory = [cross_fit.scores(part, of, adjusted=True) for part, of in zip(parts, largest["dime_theory"])]
        own = _cross_fitted(parts, theory, largest["level_only"], "DIME theory weights", adjusted=True)
    attacks = [_explained(parts, of, one) for of, one in zip(jobs, rows)]
    return DifficultyAnswer(attacks, _strongest(study), rule, crowding(study, adjusted=True), own)


def _strongest(study: RunSet) -> list[Strongest]:
    common = common_rows(study)
    most = max((row.queries for rows in common for row in rows if not row.is_baseline), default=1)
    found = []
    for budget in sorted({1, most}):
        plain = [rows for rows in common if max(row.queries for row in rows) <= budget]
        adjusted = [taken for taken in map(_taken_out, plain) if len(taken) == len(study.runs)]
        if adjusted:
            best, left = max(plain, key=_mean_auc), max(adjusted, key=_mean_auc)
            found.append(Strongest(budget, tuple(best), tuple(left)))
    return found


def _mean_auc(rows: Sequence[Row]) -> float:
    return float(np.mean([row.result.auc.value for row in rows]))


def _taken_out(rows: Sequence[Row]) -> list[Row]:
    return [row.adjusted for row in rows if row.adjusted]


def _jobs_of(part: cross_fit.Parts, row: Row) -> list[planning.Job]:
    """List every setting that calibration chose a row's from."""
    return [job for job in part.jobs if (job.attack.name, job.setting.get("q")) == (row.attack, row.q)]


def _explained(
    parts: Sequence[cross_fit.Parts], jobs: Sequence[Sequence[planning.Job]], rows: Sequence[Row] = ()
) -> Explained:
    """Cross-fit an attack at the settings at which each model was asked."""
    plain, adjusted = (
        tuple(cross_fit.rates(part, cross_fit.scores(part, of, way)) for part, of in zip(parts, jobs))
        for way in (False, True)
    )
    first = jobs[0][0]
    title = rows[0].title if rows else first.attack.title
    return Explained(title, max((row.queries for row in rows), default=first.queries), tuple(rows), plain, adjusted)


def at_settings(study: RunSet, axis: str) -> list[AtSetting]:
    """Measure DIME's largest tier at each value of t or γ that all runs have, everything else chosen."""
    parts = [cross_fit.cut(run) for run in study.runs]
    dime, level, rival = (
        [jobs_by_value(part.jobs, name, axis) for part in parts] for name in ("dime", "level_only", _RIVAL)
    )
    found = []
    for value in sorted(set.intersection(*(set(one) & set(other) for one, other in zip(dime, level)))):
        scores = [cross_fit.scores(part, jobs[value]) for part, jobs in zip(parts, dime)]
        against_level = _cross_fitted(parts, scores, [jobs[value] for jobs in level])
        rivals = [jobs[value] for jobs in rival if value in jobs]
        against_rival = _cross_fitted(parts, scores, rivals) if len(rivals) == len(parts) else None
        auc = tuple(cross_fit.auc(part, one) for part, one in zip(parts, scores))
        found.append(AtSetting(f"{'γ' if axis == 'gamma' else axis} = {value:g}", auc, against_level, against_rival))
    return found


def _cross_fitted(
    parts: Sequence[cross_fit.Parts],
    scores: Sequence[np.ndarray],
    rivals: Sequence[Sequence[planning.Job]],
    title: str = "DIME",
    adjusted: bool = False,
) -> Difference:
    """Compare an attack's scores with another attack at the settings left to it, for each model."""
    models = [
        cross_fit.difference(part, one, cross_fit.scores(part, jobs, adjusted))
        for part, one, jobs in zip(parts, scores, rivals)
    ]
    return Difference(title, rivals[0][0].attack.title, tuple(models))


def jobs_by_value(jobs: Sequence[planning.Job], name: str, axis: str) -> dict[float, list[planning.Job]]:
    """Return the jobs of an attack at its largest tier, by the value of one part of their setting."""
    own = [job for job in jobs if job.attack.name == name and axis in job.setting]
    largest = max((job.setting.get("q", 1) for job in own), default=1)
    found: dict[float, list[planning.Job]] = {}
    for job in own:
        if job.setting.get("q", 1) == largest:
            found.setdefault(job.setting[axis], []).append(job)
    return found


def common_rows(study: RunSet) -> list[list[Row]]:
    """Return, for each row that all runs have, the row of every run."""
    every = [[run.row(row.attack, row.q) for run in study.runs] for row in study.first.rows]
    return [[row for row in rows if row] for rows in every if all(rows)]


def _difference(runs: Sequence[Run], first: Sequence[Row], second: Sequence[Row], name: str = "") -> Difference:
    models = []
    for run, one, other in zip(runs, first, second):
        models.append(metrics.compare(*run.paired_scores(one, other), fprs=()).auc_difference)
    return Difference(first[0].title, name or second[0].title, tuple(models))
