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
from dime_jax.training.dp import PRIVACY_FILE
from dime_jax.training.records import read_records
from experiments import headings, markdown, paper_values, questions, seeds
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
    def best(self) -> int:
        """Which row of the run calibration would take."""
        return int(np.argmax([row.calibration.auc for row in self.run.rows]))


class DpTable(NamedTuple):
    """The arms with privacy by rising ε, and then the one without, as in the paper."""

    private: tuple[ArmResult, ...]
    vanilla: ArmResult

    @property
    def arms(self) -> tuple[ArmResult, ...]:
        """All of them."""
        return (*self.private, self.vanilla)


class ArmCheck(NamedTuple):
    """The rows of an arm against TPR <= e^ε FPR + δ and its mirror image.

    Attributes:
      above: titles of rows whose measured TPR at 1 % FPR is above what ε allows at the measured FPR. By chance, that
        happens to guarantees that hold.
      refuting: titles of rows whose lower bound on ε is above ε; some row would be with probability 5 % at most.
      bound: the lower bound on ε from the attack that was best on the calibration half, at 95 %.
    """

    above: tuple[str, ...]
    refuting: tuple[str, ...]
    bound: EpsilonBound


def read_table(workdir: str | os.PathLike[str]) -> DpTable:
    """Open a finished study of `experiments.dp_defense`; every number is computed from its score tables."""
    workdir = pathlib.Path(workdir)
    found = [_read_arm(path.parent.parent) for path in sorted(workdir.glob("*/attack/results.json"))]
    vanilla = [arm for arm in found if arm.epsilon is None]
    private = sorted((arm for arm in found if arm.epsilon is not None), key=lambda arm: arm.epsilon or 0.0)
    if len(vanilla) != 1 or not private:
        raise ValueError(f"expected one arm without privacy and some with in {workdir}, got {len(found)} finished arms")
    for arm in private:
        if not np.array_equal(arm.run.member, vanilla[0].run.member) or _test_images(arm) != _test_images(vanilla[0]):
            raise ValueError(f"expected all arms in {workdir} to be attacked with the same images: {arm.title} is not")
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
    """Tables that differ in their seeds alone, together, in their order."""
    groups: dict[str, list[DpTable]] = {}
    for table in tables:
        groups.setdefault(json.dumps([table.vanilla.run.name, _overrides(table)]), []).append(table)
    return list(groups.values())


def _overrides(table: DpTable) -> JsonObject:
    """What was changed in the study's config, besides its seed and what the study sets in each arm."""
    changed = table.private[0].run.overrides()
    return {name: value for name, value in changed.items() if name not in (*_SET_BY_THE_STUDY, *seeds.FIELDS)}


# ---------------------------------------------------------------------------------------------------- what it can show


def check(arm: ArmResult) -> ArmCheck:
    """Whether anything that was measured speaks against the guarantee of a private arm."""
    assert arm.privacy is not None
    epsilon, delta, run = arm.privacy["epsilon"], arm.privacy["delta"], arm.run
    above = [
        row.title
        for row in run.rows
        if row.result.tpr_at_1pct_fpr.value > dp_tpr_bound(row.result.attained_fpr, epsilon, delta)
    ]
    each = 1 - (1 - CONFIDENCE) / len(run.rows)
    refuting = [row.title for row in run.rows if lower_bound(run, row, delta, each).epsilon > epsilon]
    return ArmCheck(tuple(above), tuple(refuting), lower_bound(run, run.rows[arm.best], delta))


def lower_bound(run: Run, row: Row, delta: float, confidence: float = CONFIDENCE) -> EpsilonBound:
    """The lower bound on ε from one attack; the study assigned membership at random, before training.

    Args:
      run: one arm's.
      row: the attack.
      delta: δ of the guarantee.
      confidence: the probability with which the bound holds.
    """
    member, heldout = run.scores(row)
    return epsilon_lower_bound(member, heldout, delta, confidence, randomised=True)


def noise_alone(run: Run) -> metrics.Estimate:
    """AUC of the norm of Loss's noise, without any model: what a network that predicts nothing leaves to Loss.

    Over seeds it is 1/2 on average; at one seed it is the luck of the draw.
    """
    table, shape = score_table.read_table(run.directory / "test"), tuple(run.config["train"]["image_shape"])
    drawn = draws.gaussian(jax.random.key(run.results.seed), draws.id_numbers(table.ids), 0, shape)
    norms = np.linalg.norm(np.asarray(drawn).reshape(len(table.ids), -1), axis=1)
    member = np.isin(table.index, run.halves.test.member)
    return metrics.auc_interval(norms[member], norms[~member])


def detectable_auc(members: int, heldout: int) -> float:
    """The AUC that a one-sided Mann-Whitney test at 5 % finds with probability 80 %, in the normal approximation.

    1/2 + (z_0.95 + z_0.8) √((m + h + 1) / (12 m h)); an attack that is really weaker is missed more often than that.
    """
    spread = np.sqrt((members + heldout + 1) / (12 * members * heldout))
    return float(0.5 + (stats.norm.ppf(CONFIDENCE) + stats.norm.ppf(POWER)) * spread)


def allowed_auc(epsilon: float, delta: float) -> float:
    """The largest AUC under (ε, δ)-DP: the area below the largest TPR at each FPR, two lines that meet and then 1."""
    growth = np.exp(epsilon)
    corner = (1 - delta) / (1 + growth)
    fpr = np.array([0.0, corner, 1 - delta, 1.0])
    return float(np.trapezoid(dp_tpr_bound(fpr, epsilon, delta), fpr))


# ------------------------------------------------------------------------------------------------------------ rendering


def to_markdown(table: DpTable) -> str:
    """Two tables, of baselines and of DIME's variants: ε as rows, methods as columns, three rates in a cell."""
    rows = table.vanilla.run.rows
    groups = (
        [number for number, row in enumerate(rows) if row.is_baseline],
        [number for number, row in enumerate(rows) if not row.is_baseline],
    )
    return "\n".join(_markdown([_header(table, group), *_lines(table, group)]) for group in groups if group)


def _header(table: DpTable, columns: Sequence[int]) -> list[str]:
    return [""] + [table.vanilla.run.rows[number].title for number in columns]


def _lines(table: DpTable, columns: Sequence[int]) -> list[list[str]]:
    return [[arm.title] + [_cell(arm, arm.run.rows[number]) for number in columns] for arm in table.arms]


def _cell(arm: ArmResult, row: Row) -> str:
    """ASR, AUC and TPR@1%FPR with intervals, and the paper's values where the setting is the paper's."""
    published = paper_values.published(arm.run.study, arm.epsilon) if is_papers_setting(arm) else {}
    paper = published.get((row.attack, row.q))
    parts = []
    for name, label in headings.METRICS.items():
        ours = f"{label} {markdown.percent(row.estimate(name))}"
        parts.append(ours if paper is None else f"{ours} *paper {getattr(paper, name):.1f}*")
    return "<br>".join(parts)


def is_papers_setting(arm: ArmResult) -> bool:
    """Whether the paper's values belong beside this arm's: its variant, with nothing changed but where data lie."""
    expected = {"data.source", *_SET_BY_THE_STUDY}
    if arm.epsilon is None:
        expected |= {f"train.recipe.{name}" for name in arm.run.config["dp"]["vanilla"]["recipe"]}
    return arm.run.variant == headings.PAPER_VARIANTS.get(arm.run.study) and not arm.run.overrides().keys() - expected


def _summary(table: DpTable) -> str:
    """A line for each arm: what it spent, what it learned, and what its best attack shows."""
    header = [
        "",
        "ε spent",
        "noise multiplier",
        "training loss at the end",
        "best attack on the calibration half",
        "its AUC",
        "below vanilla's by",
        "p",
        "ε at least",
        "training, attack (s)",
    ]
    lines = [header]
    delta = table.private[0].privacy["delta"] if table.private[0].privacy else 0.0
    for arm in table.arms:
        best, loss = arm.run.rows[arm.best], f"{arm.final_loss:.4f}"
        spent, noise, behind, p_value = "∞", "0", "", ""
        if arm.privacy is not None:
            spent, noise = f"{arm.privacy['epsilon']:.3f}", f"{arm.privacy['noise_multiplier']:g}"
            drop = _drop(table.vanilla, arm)
            behind, p_value = markdown.percent(drop.auc_difference), f"{drop.p_value:.1g}"
        bound = lower_bound(arm.run, best, delta)
        seconds = ", ".join(_duration(arm.seconds.get(stage)) for stage in ("train", "attack"))
        auc = markdown.percent(best.estimate("auc"))
        found = f"{bound.epsilon:.2f} (at most {bound.ceiling:.2f})"
        lines.append([arm.title, spent, noise, loss, best.title, auc, behind, p_value, found, seconds])
    return _markdown(lines)


def _drop(vanilla: ArmResult, arm: ArmResult) -> metrics.Comparison:
    """Vanilla's AUC minus the arm's, for the attack that is the arm's best, on the same images."""
    theirs, ours = arm.run.paired_scores(vanilla.run.rows[arm.best], arm.run.rows[arm.best])
    return metrics.compare(theirs, ours, seed=arm.run.config["seed"])


def verdict(table: DpTable) -> str:
    """What was checked, and what the test could have found at this size."""
    test = table.vanilla.run.halves.test
    members, heldout = len(test.member), len(test.heldout)
    ceiling = check(table.private[0]).bound.ceiling
    lines = [
        f"With {members} + {heldout} test images an attack is found (one-sided test at 5 %) with probability 80 % if "
        f"its true AUC is {100 * detectable_auc(members, heldout):.1f} % or more; a weaker one may be there and be "
        "missed.",
        f"Perfect separation of so many images would prove ε >= {ceiling:.2f} with 95 % confidence. No attack can show "
        "more here, so guarantees above that cannot be refuted by this test, however much a model leaks.",
    ]
    for arm in table.private:
        assert arm.privacy is not None
        epsilon, delta, found = arm.privacy["epsilon"], arm.privacy["delta"], check(arm)
        allowed = f"AUC up to {100 * allowed_auc(epsilon, delta):.1f} %, TPR@1%FPR up to "
        allowed += f"{100 * float(dp_tpr_bound(0.01, epsilon, delta)):.1f} %"
        above = f"{len(found.above)} of {len(arm.run.rows)} attacks are above TPR <= e^ε FPR + δ as measured"
        above += f" ({', '.join(found.above)})" if found.above else ""
        refuted = f"refuted by {', '.join(found.refuting)}" if found.refuting else "none significantly so"
        reach = "" if ceiling > epsilon else " (it could not be, at this size)"
        lines.append(f"{arm.title} allows {allowed}. {above}, {refuted}{reach}.")
    if table.vanilla.run.config["data"]["split"] == "identity":
        lines.append(
            "People, not photos, were assigned to sides, and two photos of a person are counted as independent here: "
            "intervals and bounds are somewhat too narrow."
        )
    lines.append(
        "One model was trained for each row, so differences between rows include the luck of training. ε is per image."
    )
    shared = len({arm.run.results.seed for arm in table.arms}) == 1
    lines.append(
        "Loss asks about one draw of noise per image"
        + (
            ", the same in all rows, so that the luck of that draw is in all of them"
            if shared
            else ", another in each row"
        )
        + ": the AUC of the noise alone is what a model that knows nothing would show."
    )
    return "".join(f"- {line}\n" for line in lines)


def to_section(tables: Sequence[DpTable], page: pathlib.Path | None = None) -> str:
    """The section of the results page: settings, the table over all models, and all there is about each seed.

    Args:
      tables: of one study, a seed each.
      page: where the section will stand, for links from there.
    """
    first = tables[0]
    run = first.vanilla.run
    recipe, section, overrides = run.config["train"]["recipe"], run.config["dp"], _overrides(first)
    privacy = first.private[0].privacy or {}
    one_recipe = section["vanilla"]["batches"] == "poisson" and not section["vanilla"]["recipe"]
    numbers = [str(table.vanilla.run.config["seed"]) for table in tables]
    facts = {
        "config": f"`{run.config_file}`, variant `{run.variant}`",
        "changed": ", ".join(f"`{name}={value}`" for name, value in overrides.items()) or "nothing",
        "training": f"{privacy.get('images')} images, {recipe['steps']:,} updates, Poisson batches of "
        f"{recipe['batch_size']} expected images, clip norm {section['clip_norm']:g}, δ = {section['delta']:g}, "
        f"{privacy.get('accountant')}",
        "recipes": "one for all rows, which differ in clipping and noise only"
        if one_recipe
        else "the authors', which differ between the private rows and vanilla",
        "members + held-out images": run.image_counts,
        "seeds": ", ".join(numbers),
    }
    flags = [f"--seeds={','.join(numbers)}"] if len(tables) > 1 or numbers != ["0"] else []
    command = f"python -m experiments.dp_defense --config={run.config_file}:{run.variant} --workdir=W"
    title = headings.heading(run, all(is_papers_setting(arm) for arm in first.arms))
    return "\n".join(
        [
            f"## {title} ({run.name})\n",
            markdown.facts_list(facts),
            "\n```",
            " ".join([command, *flags, config_flags(overrides)]).rstrip(),
            "```\n",
            *([over_seeds(tables)] if len(tables) > 1 else []),
            *(_seed_section(table, page) for table in tables),
        ]
    )


def over_seeds(tables: Sequence[DpTable]) -> str:
    """The mean AUC of every attack over the models of all seeds, and how far the best attack falls below vanilla's."""
    names = [arm.title for arm in tables[0].arms]
    rows = []
    for number, row in enumerate(tables[0].vanilla.run.rows):
        aucs = [[table.arms[arm].run.rows[number].result.auc.value for table in tables] for arm in range(len(names))]
        rows.append([row.title, *(_mean(values) for values in aucs)])
    drops = []
    for place, arm in enumerate(tables[0].private):
        found = [_drop(table.vanilla, table.private[place]).auc_difference for table in tables]
        difference = questions.Difference("Vanilla", arm.title, tuple(found))
        drops.append([arm.title, *(markdown.percent(one, "+") for one in found), *questions.mean_cell(difference)])
    labels = [f"seed {table.vanilla.run.config['seed']}" for table in tables]
    return "\n".join(
        [
            f"### AUC over {len(tables)} seeds of training and split\n",
            "Means in per cent with t-intervals over models.\n",
            markdown.table(["", *names], rows),
            "Vanilla's AUC minus the arm's, for the attack that is the arm's best on its calibration half, paired on "
            "the same images:\n",
            markdown.table(["", *labels, f"mean of {len(tables)} models"], drops),
            questions.claim(len(tables)),
        ]
    )


def _mean(values: Sequence[float]) -> str:
    mean = questions.over_models(values, least=0.0)
    return "" if mean is None else markdown.percent(mean)


def _seed_section(table: DpTable, page: pathlib.Path | None) -> str:
    return "\n".join(
        [
            f"### {table.vanilla.run.name}, seed {table.vanilla.run.config['seed']}\n",
            to_markdown(table),
            _summary(table),
            verdict(table),
            origins(table, page),
        ]
    )


def origins(table: DpTable, page: pathlib.Path | None) -> str:
    """Where each arm's numbers come from: model, noises, queries, score tables and frozen settings."""
    header = ["", "model", "seed of noises and probes", "AUC of Loss's noise alone", "queries made", "score tables"]
    lines, settings = [], []
    for arm in table.arms:
        run = arm.run
        tables = headings.where(run.directory, page) if page else "`attack/calibration`, `attack/test`"
        lines.append(
            [
                arm.title,
                f"`{run.results.fingerprints['model'][:16]}`",
                str(run.results.seed),
                markdown.percent(noise_alone(run)),
                f"{run.results.queries_made:,}",
                tables,
            ]
        )
        settings.append(f"- Frozen settings, {arm.title}: {headings.settings(run)}.\n")
    data = table.vanilla.run.results.fingerprints
    halves = f"calibration half `{data['calibration_data'][:16]}`, test half `{data['test_data'][:16]}`"
    return "\n".join([markdown.table(header, lines), f"- Data: {halves}.\n" + "".join(settings)])


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return markdown.table(lines[0], lines[1:])


def _duration(stage: JsonObject | None) -> str:
    if stage is None:
        return "?"
    return f"{stage['seconds']:,.0f}" + (" (continued)" if stage["continued"] else "")
