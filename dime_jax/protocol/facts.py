"""What was audited, and how, written down once all queries are made: audit.json, and the facts of compare.json."""

import dataclasses
from collections.abc import Mapping
from typing import Generic, TypeVar

from dime_jax._util.records import Absent
from dime_jax.attacks import Setting
from dime_jax.attacks.modules import ModuleFacts
from dime_jax.data.role_checks import DuplicateFacts, RoleCounts, UnusableCandidate
from dime_jax.evidence.metrics import Estimate
from dime_jax.protocol.evaluation import SCHEMA_VERSION

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for, as `AuditConfig` explains it; what was left open is None, and absent in JSON.

    Attributes:
      after: of a comparison: the model after the deletion.
    """

    model: str
    members: Absent[str] = None
    heldout: Absent[str] = None
    candidates: Absent[str] = None
    images: Absent[str] = None
    split: Absent[str] = None
    labels: Absent[str] = None
    groups: Absent[str] = None
    captions: Absent[str] = None
    attacks: Absent[tuple[str, ...]] = None
    attack_module: Absent[str] = None
    queries: Absent[tuple[int, ...]] = None
    profile: str
    grid: Absent[tuple[Setting, ...]] = None
    calibration_size: Absent[int] = None
    test_size: Absent[int] = None
    variations: Absent[bool] = None
    decide_with: Absent[str] = None
    level: float
    timestep: int
    gamma: float
    delta: float
    randomised: bool
    seed: int
    conversion: Absent[Mapping[str, str | int]] = None
    remote: Absent[Mapping[str, str | int | float]] = None
    after: Absent[str] = None


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
    """What audits and comparisons both write down.

    Attributes:
      settings: what was asked for.
      images: how many there were.
      unusable_candidates: candidates that could not be used.
      attack_module: the file that a user's own attacks come from.
      decided_by: label of the attack that decides.
      chosen: why that one, in words.
      theory_setting: the setting that was stated, without known members; None if it was calibrated.
      duplicates: copies that were found.
      environment: where it ran.
      captions: with which captions a text-conditioned model was asked: "own" or "none"; None for other models.
    """

    settings: Settings
    images: ImageCounts
    unusable_candidates: tuple[UnusableCandidate, ...]
    attack_module: Absent[ModuleFacts] = None
    decided_by: str
    chosen: str
    theory_setting: Setting | None
    duplicates: DuplicateFacts
    environment: Environment
    captions: Absent[str] = None


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


@dataclasses.dataclass(frozen=True)
class BeforeAfter(Generic[T]):
    """The same of the model before a deletion, and of the one after."""

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
