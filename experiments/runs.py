"""Read finished attack runs: every number is computed from the score tables; and how to repeat the run."""

import importlib
import inspect
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from dime_jax._util.typing import JsonObject
from dime_jax.attacks import attack_names, describe_attack
from dime_jax.attacks.dime import FAMILY as DIME
from dime_jax.data import Halves, Pair, Split
from dime_jax.evidence import Way
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings.results import StudyFindings
from dime_jax.protocol import stages, statistics
from dime_jax.protocol.calibration import Calibration, adjust
from dime_jax.protocol.evaluation import ResultRow
from dime_jax.protocol.frozen import without_crowding
from dime_jax.scoring import score_table
from experiments import seeds, without_model
from experiments.attack import CONFIG_FILE, SOURCES

METRICS = {"asr": "ASR", "auc": "AUC", "tpr_at_1pct_fpr": "TPR@1%FPR"}

# What a config leaves open, and how it runs: no part of a run's setting.
_OPEN = {*SOURCES, "data.split_file", "attack.checkpoint", "attack.model_flags"}
_NEUTRAL = {*_OPEN, "attack.micro_batch", "attack.max_queries", "attack.max_queries_per_image"}


Scores = Pair[np.ndarray]  # of one attack on both sides of a half, lower for members


class Row(NamedTuple):
    """One frozen attack on the test half.

    Attributes:
      attack: its name in the registry.
      q: its query tier, None for attacks of fixed cost.
      calibration: what was frozen.
      result: its row of the results.
      scores: of every image of the test half [n], in the order of their positions, lower for members; NaN where the
        model had no finite answer.
      level: the same without the crowding term, at the same setting; None for attacks that have none.
      adjusted: the same attack with what the picture explains taken out, without labels, by a fit that is frozen over
        the calibration half; at its own setting, or in runs without such a calibration at the same one. None in runs
        without statistics of the pictures.
    """

    attack: str
    q: int | None
    calibration: Calibration
    result: ResultRow
    scores: np.ndarray
    level: np.ndarray | None = None
    adjusted: "Row | None" = None

    @property
    def queries(self) -> int:
        """Queries per image."""
        return self.result.queries_per_image

    @property
    def is_baseline(self) -> bool:
        """Whether DIME is compared with it."""
        return self.calibration.family != DIME

    @property
    def setting(self) -> str:
        """What was frozen: "t=50 gamma=0.4"."""
        return " ".join(f"{name}={value:g}" for name, value in self.result.setting.items())

    def estimate(self, metric: str) -> Estimate:
        """A metric of results.json, "auc", "asr" or "tpr_at_1pct_fpr", with its interval."""
        return getattr(self.result, metric)

    @property
    def title(self) -> str:
        """As the paper names its rows: "DIME 10+1", "SimA-MC (l4, vector) 30"."""
        attack = describe_attack(self.attack)
        if self.q is None or attack.name not in attack_names():
            return attack.title
        has_base_query = attack.queries({**self.calibration.setting, "q": 2}) == 3
        return f"{attack.title} {self.q}+1" if has_base_query else f"{attack.title} {self.queries}"


class Run(NamedTuple):
    """A finished run.

    Attributes:
      directory: of the run.
      study: name of its config, such as "cifar10".
      variant: of its config; "" if it has no name.
      config: all values.
      rows: every attack that was asked for at every tier, in the registry's order.
      member: which images of the test half are members [n].
      halves: which images chose the settings, and which were then tested.
      results: every row, and where they come from.
    """

    directory: pathlib.Path
    study: str
    variant: str
    config: JsonObject
    rows: tuple[Row, ...]
    member: np.ndarray
    halves: Halves
    results: StudyFindings

    @property
    def name(self) -> str:
        """The config and its variant."""
        return f"{self.study}:{self.variant}" if self.variant else self.study

    @property
    def config_file(self) -> str:
        """Where its config lies."""
        return f"experiments/configs/{self.study}.py"

    @property
    def image_counts(self) -> str:
        """How many members and held-out images each half has, in words."""
        return f"calibration {_counts(self.halves.calibration)}, test {_counts(self.halves.test)}"

    def largest_tier(self, attack: str, queries: float = np.inf) -> Row | None:
        """Return the row of an attack that makes the most queries within `queries`; None if the run has none."""
        tiers = [row for row in self.rows if row.attack == attack and row.queries <= queries]
        return max(tiers, key=lambda row: row.queries, default=None)

    def scores(self, row: Row) -> Scores:
        """Return the scores of a row, on the images that it has scores for."""
        return self._scores(row, np.isfinite(row.scores))

    def paired_scores(self, first: Row, second: Row) -> tuple[Scores, Scores]:
        """Return the scores of two rows on the images that both have scores for, in one order.

        The second may be of another run with the same test half.
        """
        usable = np.isfinite(first.scores) & np.isfinite(second.scores)
        return self._scores(first, usable), self._scores(second, usable)

    def _scores(self, row: Row, usable: np.ndarray) -> Scores:
        return Scores(row.scores[usable & self.member], row.scores[usable & ~self.member])

    def overrides(self, seed: int | None = None) -> JsonObject:
        """Return the values of the config that differ from its file's, or from what `--seeds` makes of that."""
        default = _get_config(self.study)(self.variant)
        if seed is not None:
            default = seeds.with_seed(default, seed)
        before, now = dict(_flat(json.loads(default.to_json()))), dict(_flat(self.config))
        return {name: value for name, value in now.items() if name not in before or before[name] != value}

    def images_config(self) -> ConfigDict:
        """Return what `study_data.open_study` needs, as recorded: without the places that only flags can give."""
        config = _get_config(self.study)(self.variant).copy_and_resolve_references()
        with config.unlocked():
            config.seed = self.config["seed"]
            config.data.update(self.config["data"])
        return config

    @property
    def is_unchanged(self) -> bool:
        """Whether the run is what its config file says, up to where things lie."""
        return not self.overrides().keys() - _NEUTRAL

    def at_edge(self) -> list[str]:
        """List rows whose timestep is the first or last of their grid, where a wider one might have done better."""
        times: dict[str, set[float]] = {}
        for job in stages.read_jobs(self.directory):
            times.setdefault(job.attack.name, set()).add(job.setting.get("t", 0))
        return [
            row.title
            for row in self.rows
            if row.calibration.setting.get("t", 0) in (min(times[row.attack]), max(times[row.attack]))
            and len(times[row.attack]) > 1
        ]

    def row(self, attack: str, q: int | None) -> Row | None:
        """Return the row of an attack at a tier; None if the run does not have it."""
        return next((row for row in self.rows if (row.attack, row.q) == (attack, q)), None)

    def commands(self, flags: str | None = None) -> list[str]:
        """Return the commands that repeat the run, with these flags or else with those that give its config."""
        changed = config_flags(self.overrides()) if flags is None else flags
        colon = f":{self.variant}" if self.variant else ""
        programs = {"pipeline": ["latent_study"], "trained": ["train", "attack"]}
        return [
            f"python -m experiments.{program} --config={self.config_file}{colon} --workdir=W {changed}".rstrip()
            for program in programs.get(self.config["attack"]["model"], ["attack"])
        ]


class RunSet(NamedTuple):
    """The runs of one study: the same config, a model for each seed."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """Stands for what is the same in all."""
        return self.runs[0]

    @property
    def labels(self) -> list[str]:
        """What the models are called: by their seeds."""
        return [f"seed {_seed(run)}" for run in self.runs]

    @property
    def columns(self) -> list[str]:
        """The models, and their mean if there are several."""
        return [*self.labels, *([f"mean of {len(self.runs)} models"] if len(self.runs) > 1 else [])]

    def commands(self) -> list[str]:
        """Return the commands that repeat all runs: with `--seeds`, if these made them."""
        if len(self.runs) > 1:
            changed = [run.overrides(_seed(run)) for run in self.runs]
            if all(one == changed[0] for one in changed) and not changed[0].keys() & set(seeds.FIELDS):
                numbers = ",".join(str(_seed(run)) for run in self.runs)
                return self.first.commands(f"--seeds={numbers} {config_flags(changed[0])}")
        return [command for run in self.runs for command in run.commands()]


def group_runs(runs: Sequence[Run]) -> list[RunSet]:
    """Group finished runs into studies, in their order: those that differ in their seeds alone are one."""
    sets: dict[str, list[Run]] = {}
    for run in runs:
        rest = {name: value for name, value in run.overrides().items() if name not in seeds.FIELDS}
        sets.setdefault(json.dumps([run.name, rest]), []).append(run)
    return [RunSet(tuple(sorted(same, key=_seed))) for same in sets.values()]


def read_run(directory: str | os.PathLike[str]) -> Run:
    """Open a finished run of `experiments.attack`; all metrics are computed from its score tables."""
    directory = pathlib.Path(directory)
    try:
        record = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{directory} is not a run of experiments.attack: it has no {CONFIG_FILE}") from None
    file, _, variant = record["file"].partition(":")
    study = pathlib.Path(file).stem
    variant = variant or inspect.signature(_get_config(study)).parameters["variant"].default
    reader, asked = _Reader(directory), stages.asked_labels(directory)
    results, frozen = without_model.results(directory), stages.read_calibrations(directory)
    return Run(
        directory,
        study,
        variant,
        record["config"],
        tuple(reader.row(one, row) for one, row in zip(frozen, results.results) if one.label in asked),
        np.isin(reader.index, reader.halves.test.member),
        reader.halves,
        results,
    )


class _Reader:
    """What the rows of a run are read from."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.test, self.calibration = (score_table.read_table(directory / half) for half in ("test", "calibration"))
        self.halves, self.groups = stages.read_halves(directory), stages.read_groups(directory)
        self.index, self.seed = np.sort(self.test.index), self.test.manifest["identity"]["seed"]
        self.pictures = statistics.read(directory) if statistics.exist(directory) else None
        self.own = {frozen.label: frozen for frozen in stages.read_calibrations(directory, Way.ADJUSTED)}

    def row(self, frozen: Calibration, result: ResultRow) -> Row:
        """Read a row, and the same adjusted if it can be."""
        level = without_crowding(frozen)
        row = self._row(frozen, result, level)
        if self.pictures is None:
            return row
        adjusted = self.own.get(frozen.label) or self._adjust(frozen)
        if adjusted is None:
            return row
        if level is not None:
            level = self._adjust(level._replace(setting=adjusted.setting))
        split, seconds = self.halves.test, result.seconds_per_image
        found = stages.outcome(self.test, adjusted, split, self.seed, self.groups, self.pictures)
        return row._replace(adjusted=self._row(adjusted, stages.result_row(found, seconds, {}), level))

    def _row(self, frozen: Calibration, result: ResultRow, level: Calibration | None) -> Row:
        q = int(frozen.setting["q"]) if "q" in frozen.setting else None
        alone = None if level is None else self._scores(level)
        return Row(frozen.attack, q, frozen, result, self._scores(frozen), alone)

    def _scores(self, frozen: Calibration) -> np.ndarray:
        return stages.frozen_scores(self.test, frozen, self.index, self.pictures)

    def _adjust(self, frozen: Calibration) -> Calibration | None:
        """Fit the same score over the calibration half; None if that was published without what it takes."""
        assert self.pictures is not None
        index, asked = self.calibration.index, stages.frozen_job(frozen).recipe.readings
        if any(str(reading) not in self.calibration.readings for reading in asked):
            return None
        fitted = adjust(frozen, stages.terms_of(self.calibration, frozen, index), self.pictures.of(index))
        return fitted._replace(tau=-np.inf)


def _get_config(study: str) -> Callable[[str], ConfigDict]:
    try:
        return importlib.import_module(f"experiments.configs.{study}").get_config
    except ModuleNotFoundError:
        raise ValueError(f"no config experiments/configs/{study}.py, which the run was made with") from None


def _seed(run: Run) -> int:
    """Return the seed of the training, or of the draws where nothing was trained."""
    return run.config.get("train", {}).get("recipe", run.config)["seed"]


def _counts(split: Split) -> str:
    return f"{len(split.member)} + {len(split.heldout)}"


def _flat(config: JsonObject, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Return the values of a nested config by their dotted names."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def config_flags(overrides: Mapping[str, object]) -> str:
    """Return values of a config, given by their dotted names, as flags."""
    shown = {name: f"'{tuple(value)}'" if isinstance(value, list) else value for name, value in overrides.items()}
    return " ".join(f"--config.{name}={value}" for name, value in shown.items())
