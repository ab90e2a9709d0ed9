"""What was audited, and how, recorded once all queries are made: audit.json, and the facts of compare.json."""

import dataclasses
from collections.abc import Mapping
from typing import Generic, TypeVar

from dime_jax._util.records import Absent, Json, field_names
from dime_jax.attacks import Setting
from dime_jax.attacks.modules import ModuleFacts
from dime_jax.data.role_checks import DuplicateFacts, RoleCounts, UnusableCandidate
from dime_jax.evidence import Way
from dime_jax.evidence.metrics import Estimate
from dime_jax.protocol.evaluation import SCHEMA_VERSION
from dime_jax.protocol.options import AuditOptions

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(AuditOptions):
    """What the user asked for, everything by its name; what was left open is None, and absent from JSON.

    Attributes:
      conversion: the options of conversion and of use that were given.
      remote: the options of a hosted model that were given.
      after: of a comparison: the model after the deletion.
    """

    conversion: Mapping[str, str | int] | None = None
    remote: Mapping[str, str | int | float] | None = None
    after: str | None = None

    def to_json(self) -> dict[str, Json]:
        """Return what was asked for; variations are absent if there were none."""
        given = {name: getattr(self, name) for name in field_names(self)}
        open_or_off = [name for name in given if given[name] is None or (name == "variations" and not given[name])]
        return {name: value for name, value in given.items() if name not in open_or_off}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model: its name, where it comes from, and what was found out about it when it was opened.

    Attributes:
      commit: of a model from the Hugging Face Hub: exactly which files it was made from.
    """

    name: str
    origin: str
    facts: tuple[str, ...]
    commit: Absent[str] = None
    fingerprint: str
    image_shape: tuple[int, ...]
    num_classes: int | None
    num_steps: int


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where the audit ran."""

    devices: str
    platform: str
    python: str
    jax: str
    numpy: str


@dataclasses.dataclass(frozen=True)
class HalfCounts:
    """How many images a half has."""

    members: int
    heldout: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageCounts:
    """How many images there were.

    Attributes:
      members: known ones; 0 if none were known.
      heldout: of an audit all that could be used, of a comparison those that candidates were compared with.
      calibration: the half that chose the settings, with known members.
      test: the other half.
      candidates: also those that could not be used.
      unusable: images that could not be used.
      no_finite_answer: images that the model gave no finite answer for.
    """

    members: int
    heldout: int
    calibration: Absent[HalfCounts] = None
    test: Absent[HalfCounts] = None
    candidates: int
    unusable: RoleCounts
    no_finite_answer: Absent[RoleCounts] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What audits and comparisons both record.

    Attributes:
      settings: what was asked for.
      images: how many there were.
      unusable_candidates: candidates that could not be used.
      attack_module: the file that a user's own attacks come from.
      decided_by: label of the attack that decides.
      chosen: why that one, in words.
      adjusted: whether something is taken out of the scores before they are compared.
      way: what is taken out; absent if it is what the picture explains.
      reference: the second model that was asked the same.
      fixed_setting: of the rule that decides without known members; None if the setting was calibrated.
      duplicates: copies that were found.
      environment: where it ran.
      captions: the captions with which a text-conditioned model was asked: "own" or "none"; None for other models.
    """

    settings: Settings
    images: ImageCounts
    unusable_candidates: tuple[UnusableCandidate, ...]
    attack_module: Absent[ModuleFacts] = None
    decided_by: str
    chosen: str
    adjusted: bool
    fixed_setting: Setting | None
    duplicates: DuplicateFacts
    environment: Environment
    captions: Absent[str] = None
    way: Absent[Way] = None
    reference: Absent[ModelFacts] = None

    @property
    def taken_out(self) -> Way:
        """What is taken out of the scores before they are compared."""
        return self.way or (Way.ADJUSTED if self.adjusted else Way.PLAIN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditFacts(RunFacts):
    """audit.json.

    Attributes:
      schema_version: of audit.json.
      grid_size: how many settings calibration chose from.
      model: the model.
      warnings: about the images.
      blind_auc: of a classifier that never saw the model; None if there was none.
      caption_auc: of one that saw neither model nor pictures, but the captions that the model was asked with.
    """

    schema_version: int = SCHEMA_VERSION
    grid_size: int
    model: ModelFacts
    warnings: tuple[str, ...]
    blind_auc: Absent[Estimate] = None
    caption_auc: Absent[Estimate] = None

    @property
    def tables(self) -> tuple[str, ...]:
        """Where the score tables of candidates are, one for each model."""
        return (f"candidates/{self.decided_by}",)


@dataclasses.dataclass(frozen=True)
class BeforeAfter(Generic[T]):
    """The same thing for the model before a deletion, and for the one after."""

    before: T
    after: T

    def pair(self) -> tuple[T, T]:
        """Return what is known of the two, in this order."""
        return self.before, self.after


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareFacts(RunFacts):
    """The facts of compare.json.

    Attributes:
      models: both models.
      image_warnings: about the images.
    """

    models: BeforeAfter[ModelFacts]
    image_warnings: tuple[str, ...]

    @property
    def tables(self) -> tuple[str, ...]:
        """Where the score tables of candidates are, one for each model."""
        return ("before", "after")
