"""Reading finished attack runs: every number again from the score tables, and how to repeat the run."""

import importlib
import inspect
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from dime_jax import pipeline, score_table
from dime_jax.attacks import get_attack
from dime_jax.calibration import Calibration
from dime_jax.data import Split
from dime_jax.metrics import ScorePair
from experiments.attack import CONFIG_FILE, SOURCES

# What a config leaves open, and how it runs: of no influence on which setting a run is.
_OPEN = {*SOURCES, "data.split_file", "attack.checkpoint", "attack.model_flags"}
_NEUTRAL = {*_OPEN, "attack.micro_batch", "attack.max_queries", "attack.max_queries_per_image"}


class Row(NamedTuple):
    """One frozen attack on the test half.

    Attributes:
      attack: its name in the registry.
      q: its query tier, None for attacks of fixed cost.
      calibration: what was frozen.
      result: its row of results.json.
      scores: of every image of the test half [n], lower for members; NaN where the model had no finite answer.
    """

    attack: str
    q: int | None
    calibration: Calibration
    result: Mapping[str, Any]
    scores: np.ndarray

    @property
    def queries(self) -> int:
        """Queries per image."""
        return self.result["queries_per_image"]

    @property
    def title(self) -> str:
        """As the paper names its rows: "DIME 10+1", "SimA-MC (l4, vector) 30"."""
        attack = get_attack(self.attack)
        if self.q is None:
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
      sizes: members and held-out images in the calibration half, and in the test half.
      results: what results.json holds.
    """

    directory: pathlib.Path
    study: str
    variant: str
    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    member: np.ndarray
    sizes: tuple[tuple[int, int], tuple[int, int]]
    results: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The config and its variant."""
        return f"{self.study}:{self.variant}" if self.variant else self.study

    def pair(self, *rows: Row) -> list[ScorePair]:
        """Scores of members and of held-out images for each row, on the images that all of them have scores for."""
        usable = np.all([np.isfinite(row.scores) for row in rows], axis=0)
        return [(row.scores[usable & self.member], row.scores[usable & ~self.member]) for row in rows]

    def overrides(self) -> dict[str, Any]:
        """Values of the config that differ from its file's."""
        default = _get_config(self.study)(self.variant)
        before, now = dict(_flat(json.loads(default.to_json()))), dict(_flat(self.config))
        return {name: value for name, value in now.items() if name not in before or before[name] != value}

    @property
    def is_unchanged(self) -> bool:
        """Whether the run is what its config file says, up to where things lie."""
        return not self.overrides().keys() - _NEUTRAL

    def commands(self) -> list[str]:
        """What to type to repeat the run."""
        changed = config_flags(self.overrides())
        colon = f":{self.variant}" if self.variant else ""
        programs = ["attack"]
        if self.config["attack"]["model"] == "trained":
            programs.insert(0, "train")
        return [
            f"python -m experiments.{program} --config=experiments/configs/{self.study}.py{colon} --workdir=W {changed}"
            for program in programs
        ]


def read_run(directory: str | os.PathLike[str]) -> Run:
    """Open a finished run of `experiments.attack`; all metrics are computed from its score tables."""
    directory = pathlib.Path(directory)
    try:
        record = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{directory} is no run of experiments.attack: no {CONFIG_FILE} in it") from None
    file, _, variant = record["file"].partition(":")
    study = pathlib.Path(file).stem
    variant = variant or inspect.signature(_get_config(study)).parameters["variant"].default
    test, halves = score_table.read_table(directory / "test"), pipeline.read_halves(directory)
    results, frozen = pipeline.evaluation(directory), pipeline.read_calibrations(directory)
    asked = pipeline.asked_labels(directory)
    return Run(
        directory,
        study,
        variant,
        record["config"],
        tuple(
            Row(one.attack, _tier(one), one, row, pipeline.frozen_scores(test, one, test.index))
            for one, row in zip(frozen, results["results"])
            if pipeline.frozen_job(one).label in asked
        ),
        np.isin(test.index, halves.test.member),
        (_sizes(halves.calibration), _sizes(halves.test)),
        results,
    )


def _get_config(study: str) -> Callable[[str], ConfigDict]:
    try:
        return importlib.import_module(f"experiments.configs.{study}").get_config
    except ModuleNotFoundError:
        raise ValueError(f"no config experiments/configs/{study}.py, with which the run says it was made") from None


def _tier(frozen: Calibration) -> int | None:
    return int(frozen.setting["q"]) if "q" in frozen.setting else None


def _sizes(split: Split) -> tuple[int, int]:
    return len(split.member), len(split.heldout)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a nested config by their dotted names."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def config_flags(overrides: Mapping[str, Any]) -> str:
    """Values of a config by their dotted names, as one types them."""
    return " ".join(f"--config.{name}={_show(value)}" for name, value in overrides.items())


def _show(value: Any) -> str:
    return f"'{tuple(value)}'" if isinstance(value, list) else str(value)
