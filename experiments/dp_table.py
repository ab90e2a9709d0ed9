"""The paper's third table from the arms of a DP-SGD study: ε as rows, methods as columns, and what it can show.

A small AUC under DP-SGD says little by itself: this module puts beside it what the same test would have found with
fair probability, the largest ε that it could have refuted, what the guarantee allows, and what the noise of an arm's
attacks does without any model. With several seeds there is a table for each, and one over all models.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from scipy import stats

from dime_jax._util.typing import JsonObject
from dime_jax.core import draws
from dime_jax.evidence import EpsilonBound, dp_tpr_bound, epsilon_lower_bound, metrics
from dime_jax.scoring import score_table
from dime_jax.training.records import PRIVACY_FILE, read_records
from experiments import paper_values, questions, seeds
from experiments.rendering import render
from experiments.run_table import TableLine
from experiments.runs import Row, Run, config_flags, read_run

SECONDS_FILE = "seconds.json"
_SET_BY_THE_STUDY = ("dp.epsilon", "attack.seed")
CONFIDENCE = 0.95
POWER = 0.8


class ArmResult(NamedTuple):
    """One model of the study and its attack; what a private one spent is its privacy.json."""

    run: Run
    privacy: JsonObject | None
    final_loss: float
    seconds: Mapping[str, JsonObject]

    @property
    def epsilon(self) -> float | None:
        """The budget; None without privacy."""
        return self.run.config["dp"]["epsilon"]

    @property
    def title(self) -> str:
        """As the paper names its rows."""
        return "Vanilla" if self.epsilon is None else f"ε = {self.epsilon:g}"

    @property
    def best_place(self) -> int:
        """Which row of the run calibration would take."""
        return int(np.argmax([row.calibration.auc for row in self.run.rows]))

    @property
    def best(self) -> Row:
        """The row of the run that calibration would take."""
        return self.run.rows[self.best_place]


class DpTable(NamedTuple):
    """The arms with privacy by rising ε, and then the one without, as in the paper."""

    private: tuple[ArmResult, ...]
    vanilla: ArmResult

    @property
    def arms(self) -> tuple[ArmResult, ...]:
        """All of them."""
        return (*self.private, self.vanilla)

    @property
    def refuting(self) -> list[str]:
        """Titles of the rows that refute the guarantee of their arm."""
        return [title for arm in self.private for title in check(arm).refuting]


class ArmCheck(NamedTuple):
    """The rows of an arm against TPR <= e^ε FPR + δ and its mirror image.

    Attributes:
      above: titles of rows whose measured TPR at 1 % FPR is above what ε allows at the measured FPR. By chance, that
        happens to guarantees that hold.
      refuting: titles of rows whose lower bound on ε is above ε; some row would be with probability 5 % at most.
      allowed_auc: the largest AUC that the guarantee allows.
      allowed_tpr: the largest TPR that it allows at 1 % FPR.
    """

    above: tuple[str, ...]
    refuting: tuple[str, ...]
    allowed_auc: float
    allowed_tpr: float


class ArmReport(NamedTuple):
    """What the page says of one arm.

    Attributes:
      arm: the arm.
      lines: its rows, with the paper's values where the setting is the paper's.
      bound: the lower bound on ε from its best attack.
      noise_alone: AUC of the noise of its Loss attack, without any model.
      drop: vanilla's AUC minus the arm's, for the arm's best attack; None for vanilla, as `check`.
      check: of its guarantee.
    """

    arm: ArmResult
    lines: list[TableLine]
    bound: EpsilonBound
    noise_alone: metrics.Estimate
    drop: metrics.Comparison | None
    check: ArmCheck | None


class SeedReport(NamedTuple):
    """What the page says of the arms of one seed.

    Attributes:
      table: of that seed.
      arms: the same arms, with what they show.
      detectable_auc: one that a test of this many images finds with fair probability.
      ceiling: the largest ε that it could refute.
    """

    table: DpTable
    arms: list[ArmReport]
    detectable_auc: float
    ceiling: float


class OverSeeds(NamedTuple):
    """Every attack over the models of all seeds: AUCs by title and arm, and vanilla's lead over each private arm."""

    aucs: dict[str, list[list[float]]]
    drops: list[questions.Difference]
    columns: list[str]


def read_table(workdir: str | os.PathLike[str]) -> DpTable:
    """Open a finished study of `experiments.dp_defense`; every number is computed from its score tables."""
    workdir = pathlib.Path(workdir)
    found = [_read_arm(path.parent.parent) for path in sorted(workdir.glob("*/attack/results.json"))]
    vanilla = [arm for arm in found if arm.epsilon is None]
    private = sorted((arm for arm in found if arm.epsilon is not None), key=lambda arm: arm.epsilon or 0.0)
    if len(vanilla) != 1 or not private:
        raise ValueError(
            f"{workdir} must have one arm without privacy and some with it, got {len(found)} finished arms"
        )
    for arm in private:
        if not np.array_equal(arm.run.member, vanilla[0].run.member) or _test_images(arm) != _test_images(vanilla[0]):
            raise ValueError(f"all arms in {workdir} must be attacked with the same images, {arm.title} is not")
    return DpTable(tuple(private), vanilla[0])


def _read_arm(directory: pathlib.Path) -> ArmResult:
    def read(path: pathlib.Path) -> JsonObject | None:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    run = read_run(directory / "attack")
    return ArmResult(
        run,
        read(directory / "model" / PRIVACY_FILE),
        (read_records(directory / "train") or [{"loss": np.nan}])[-1]["loss"],
        read(directory / SECONDS_FILE) or {},
    )


def _test_images(arm: ArmResult) -> str:
    return arm.run.results.fingerprints["test_data"]


def group_tables(tables: Sequence[DpTable]) -> list[list[DpTable]]:
    """Group tables that differ in their seeds alone, in their order."""
    groups: dict[str, list[DpTable]] = {}
    for table in tables:
        groups.setdefault(json.dumps([table.vanilla.run.name, _overrides(table)]), []).append(table)
    return list(groups.values())


def _overrides(table: DpTable) -> JsonObject:
    """Return what was changed in the study's config, besides its seed and what the study sets in each arm."""
    changed = table.private[0].run.overrides()
    return {name: value for name, value in changed.items() if name not in (*_SET_BY_THE_STUDY, *seeds.FIELDS)}


# ---------------------------------------------------------------------------------------------------- what it can show


def check(arm: ArmResult) -> ArmCheck:
    """Check whether anything that was measured speaks against the guarantee of a private arm."""
    assert arm.privacy is not None
    epsilon, delta, run = arm.privacy["epsilon"], arm.privacy["delta"], arm.run
    above = [
        row.title
        for row in run.rows
        if row.result.tpr_at_1pct_fpr.value > dp_tpr_bound(row.result.attained_fpr, epsilon, delta)
    ]
    each = 1 - (1 - CONFIDENCE) / len(run.rows)
    refuting = [row.title for row in run.rows if lower_bound(run, row, delta, each).epsilon > epsilon]
    allowed_tpr = float(dp_tpr_bound(0.01, epsilon, delta))
    return ArmCheck(tuple(above), tuple(refuting), allowed_auc(epsilon, delta), allowed_tpr)


def lower_bound(run: Run, row: Row, delta: float, confidence: float = CONFIDENCE) -> EpsilonBound:
    """Return the lower bound on ε from one attack; the study assigned membership at random, before training.

    Args:
      run: one arm's.
      row: the attack.
      delta: δ of the guarantee.
      confidence: the probability with which the bound holds.
    """
    member, heldout = run.scores(row)
    return epsilon_lower_bound(member, heldout, delta, confidence, randomised=True)


def noise_alone(run: Run) -> metrics.Estimate:
    """Return the AUC of the norm of Loss's noise alone: what a network that predicts nothing leaves to Loss.

    Over seeds it is 1/2 on average; at one seed it is the luck of the draw.
    """
    table, shape = score_table.read_table(run.directory / "test"), tuple(run.config["train"]["image_shape"])
    drawn = draws.gaussian(jax.random.key(run.results.seed), draws.id_numbers(table.ids), 0, shape)
    norms = np.linalg.norm(np.asarray(drawn).reshape(len(table.ids), -1), axis=1)
    member = np.isin(table.index, run.halves.test.member)
    return metrics.auc_interval(norms[member], norms[~member])


def detectable_auc(members: int, heldout: int) -> float:
    """Return the AUC that a one-sided Mann-Whitney test at 5 % finds with probability 80 % (normal approximation).

    1/2 + (z_0.95 + z_0.8) √((m + h + 1) / (12 m h)); an attack that is really weaker is missed more often than that.
    """
    spread = np.sqrt((members + heldout + 1) / (12 * members * heldout))
    return float(0.5 + (stats.norm.ppf(CONFIDENCE) + stats.norm.ppf(POWER)) * spread)


def allowed_auc(epsilon: float, delta: float) -> float:
    """Return the largest AUC under (ε, δ)-DP: the area below the largest TPR at each FPR, two lines and then 1."""
    growth = np.exp(epsilon)
    corner = (1 - delta) / (1 + growth)
    fpr = np.array([0.0, corner, 1 - delta, 1.0])
    return float(np.trapezoid(dp_tpr_bound(fpr, epsilon, delta), fpr))


def drop(vanilla: ArmResult, arm: ArmResult) -> metrics.Comparison:
    """Compare vanilla's AUC with the arm's, for the attack that is the arm's best, on the same images."""
    theirs, ours = arm.run.paired_scores(vanilla.run.rows[arm.best_place], arm.best)
    return metrics.compare(theirs, ours, seed=arm.run.config["seed"])


def is_papers_setting(arm: ArmResult) -> bool:
    """Whether the paper's values belong beside this arm's: its variant, with nothing changed but where data lie."""
    expected = {"data.source", *_SET_BY_THE_STUDY}
    if arm.epsilon is None:
        expected |= {f"train.recipe.{name}" for name in arm.run.config["dp"]["vanilla"]["recipe"]}
    return arm.run.variant == paper_values.VARIANTS.get(arm.run.study) and not arm.run.overrides().keys() - expected


# ------------------------------------------------------------------------------------------------------- for the pages


def report(table: DpTable) -> SeedReport:
    """Return everything that the page says of one seed."""
    test, delta = table.vanilla.run.halves.test, table.private[0].privacy["delta"] if table.private[0].privacy else 0.0
    arms = []
    for arm in table.arms:
        paper = paper_values.published(arm.run.study, arm.epsilon) if is_papers_setting(arm) else {}
        lines = [TableLine(row, paper.get((row.attack, row.q)), None) for row in arm.run.rows]
        bound, private = lower_bound(arm.run, arm.best, delta), arm.privacy is not None
        compared = (drop(table.vanilla, arm), check(arm)) if private else (None, None)
        arms.append(ArmReport(arm, lines, bound, noise_alone(arm.run), *compared))
    return SeedReport(table, arms, detectable_auc(len(test.member), len(test.heldout)), arms[0].bound.ceiling)


def over_seeds(tables: Sequence[DpTable]) -> OverSeeds:
    """Return the AUC of every attack over the models of all seeds, and how far the best falls below vanilla's."""
    aucs = {
        row.title: [
            [arm.run.rows[place].result.auc.value for arm in arms] for arms in zip(*(table.arms for table in tables))
        ]
        for place, row in enumerate(tables[0].vanilla.run.rows)
    }
    drops = []
    for place, arm in enumerate(tables[0].private):
        found = [drop(table.vanilla, table.private[place]).auc_difference for table in tables]
        drops.append(questions.Difference("Vanilla", arm.title, tuple(found)))
    labels = [f"seed {table.vanilla.run.config['seed']}" for table in tables]
    return OverSeeds(aucs, drops, [*labels, f"mean of {len(tables)} models"])


def to_section(tables: Sequence[DpTable], page: pathlib.Path | None = None) -> str:
    """Return the section of a page: settings, the table over all models, and all there is about each seed.

    Args:
      tables: of one study, a seed each.
      page: where the section will stand, for links from there.
    """
    first = tables[0]
    run, overrides = first.vanilla.run, _overrides(first)
    numbers = ",".join(str(table.vanilla.run.config["seed"]) for table in tables)
    seed_flags = [f"--seeds={numbers}"] if len(tables) > 1 or numbers != "0" else []
    command = f"python -m experiments.dp_defense --config={run.config_file}:{run.variant} --workdir=W"
    return render(
        "dp_study.md",
        title=paper_values.heading(run.study, all(is_papers_setting(arm) for arm in first.arms)),
        run=run,
        overrides=overrides,
        privacy=first.private[0].privacy,
        command=" ".join([command, *seed_flags, config_flags(overrides)]).rstrip(),
        reports=[report(table) for table in tables],
        over_seeds=over_seeds(tables) if len(tables) > 1 else None,
        page=page,
    )
