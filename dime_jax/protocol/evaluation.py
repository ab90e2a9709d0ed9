"""What the test half shows, as `stages.evaluation` gives it and results.json has it."""

import dataclasses
import pathlib
from collections.abc import Mapping

from dime_jax._util.records import Absent
from dime_jax._util.typing import JsonObject
from dime_jax.attacks import Setting
from dime_jax.evidence import NOT_CHECKED, Direction, Way
from dime_jax.evidence.metrics import Estimate
from dime_jax.guards.wiring import DenoiserCheck

SCHEMA_VERSION = 1


def check_version(path: pathlib.Path, contents: JsonObject) -> None:
    """Require the schema version of this package in the contents of a file.

    Raises:
      ValueError: naming the file, the version that it has, and the one that is read.
    """
    found = contents.get("schema_version")
    if found != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version must be {SCHEMA_VERSION}, got {found!r}")


@dataclasses.dataclass(frozen=True)
class AtThreshold:
    """The frozen threshold, None where none beats calling nobody a member, and the rates that its user sees."""

    tau: float | None
    tpr: float
    fpr: float


@dataclasses.dataclass(frozen=True)
class AdjustedRow:
    """An attack with something taken out of its score, at its own setting; see `ResultRow`."""

    setting: Setting
    auc: Estimate
    asr: Estimate
    tpr_at_1pct_fpr: Estimate
    at_threshold: AtThreshold


@dataclasses.dataclass(frozen=True)
class ResultRow:
    """One frozen attack on the test half.

    Attributes:
      attack: its name in the registry.
      setting: what calibration froze, with the angle φ where there is one.
      auc: with its interval, as the others.
      asr: attack success rate, the best balanced accuracy.
      tpr_at_1pct_fpr: members found at no more than 1 % false positives.
      attained_fpr: the rate of false positives behind that.
      false_positives: how many these are.
      at_threshold: the rates at the frozen threshold.
      queries_per_image: what the attack costs by itself.
      seconds_per_image: what it took here.
      adjusted: the same attack with what the picture explains taken out; absent where that was not calibrated.
      beside: with what the reference's score explains taken out; absent without a reference.
      beside_adjusted: with both taken out.
    """

    attack: str
    setting: Setting
    auc: Estimate
    asr: Estimate
    tpr_at_1pct_fpr: Estimate
    attained_fpr: float
    false_positives: int
    at_threshold: AtThreshold
    queries_per_image: int
    seconds_per_image: float
    adjusted: Absent[AdjustedRow] = None
    beside: Absent[AdjustedRow] = None
    beside_adjusted: Absent[AdjustedRow] = None

    @property
    def label(self) -> str:
        """ "attack@queries"."""
        return f"{self.attack}@{self.queries_per_image}"

    def read(self, way: Way) -> "ResultRow | AdjustedRow | None":
        """Return the row with something taken out of the score; None where that was not calibrated."""
        return self if way is Way.PLAIN else getattr(self, way.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Every frozen attack on the test half.

    Attributes:
      schema_version: of results.json.
      results: a row for each attack and query tier.
      fingerprints: of the model and of the images, by name.
      precision: of matrix products.
      seed: of draws and resampling.
      queries_made: what the run really spent.
      reference_queries_made: what it spent on the reference; absent if there is none.
      model_check: whether the model predicts noise; None if that was not checked.
      direction: what the witness says about which set is which.
      reference_direction: what the reference's own answers say, which should tell nothing; absent if there is none.
      warnings: for the reader.
    """

    schema_version: int = SCHEMA_VERSION
    results: tuple[ResultRow, ...]
    fingerprints: Mapping[str, str]
    precision: str
    seed: int
    queries_made: int
    reference_queries_made: Absent[int] = None
    model_check: DenoiserCheck | None = None
    direction: Direction = NOT_CHECKED
    reference_direction: Absent[Direction] = None
    warnings: tuple[str, ...]

    def row(self, label: str) -> ResultRow | None:
        """Return the row of that label, if there is one."""
        return next((row for row in self.results if row.label == label), None)
