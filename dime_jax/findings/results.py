"""What an audit or a deletion check found, as results.json and compare.json have it (`schema_version` 1).

Numbers that are not finite are null in JSON. The same record gives the same files.
"""

import dataclasses
from collections.abc import Mapping

from dime_jax._util.records import Absent, field_names
from dime_jax.attacks import Setting
from dime_jax.data import DuplicateReport
from dime_jax.data.role_checks import DuplicateFacts
from dime_jax.evidence import Change, DeletionVerdict, Direction, EpsilonBound, FractionUsed, SetTest, Verdict, Way
from dime_jax.evidence.metrics import Estimate
from dime_jax.guards.wiring import DenoiserCheck
from dime_jax.protocol.evaluation import SCHEMA_VERSION, AdjustedRow, Evaluation, ResultRow
from dime_jax.protocol.facts import BeforeAfter, CompareFacts, Environment, ImageCounts, ModelFacts, Settings


@dataclasses.dataclass(frozen=True)
class Headline:
    """The first screen in words: one sentence, its uncertainty, what it means for the candidates, and doubts."""

    answer: str
    detail: str
    candidates: str
    alarms: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecidedBy:
    """The attack behind a verdict, and why this one, in words."""

    attack: str
    queries_per_image: int
    setting: Setting
    chosen: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditDecidedBy(DecidedBy):
    """The same of an audit, with its AUC on the calibration half; NaN if nothing was calibrated.

    Its scores are plain, or `adjusted`: what the picture explains is taken out, or what `way` says.
    """

    label: str
    calibration_auc: float
    adjusted: bool
    way: Absent[Way] = None

    @property
    def taken_out(self) -> Way:
        """What is taken out of its scores."""
        return self.way or (Way.ADJUSTED if self.adjusted else Way.PLAIN)


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """DIME minus the best baseline at no more queries, paired on the test half; both are "attack@queries"."""

    budget: int
    dime: str
    baseline: str
    auc_difference: Estimate
    p_value: float
    tpr_difference_at_1pct_fpr: Estimate


@dataclasses.dataclass(frozen=True)
class CrowdingEffect:
    """What the crowding term adds to the level: DIME's AUC minus level-only's, paired on the test half.

    Attributes:
      dime: "attack@queries".
      weight: of crowding in DIME's score, sin φ; 0 where calibration gave it none.
      same_setting: against the level alone from the same answers, at the setting that was chosen for DIME.
      same_setting_p: for no difference.
      level: level-only at no more queries, as "attack@queries"; None if it was not asked for.
      own_setting: against that, each at the setting that was chosen for it.
      own_setting_p: for no difference.
    """

    dime: str
    weight: float
    same_setting: Estimate
    same_setting_p: float
    level: str | None = None
    own_setting: Estimate | None = None
    own_setting_p: float | None = None


@dataclasses.dataclass(frozen=True)
class BlindFinding:
    """A classifier that never saw the model, and what the attack has over it.

    Attributes:
      auc: of the classifier.
      gap: the attack's AUC minus the classifier's, on the same images.
      p_value: for no gap.
      fires: whether the classifier surely tells the sets apart.
      explained: whether it does, and may do so as well as the attack.
      images: how many members and held-out images were compared.
    """

    auc: Estimate
    gap: Estimate
    p_value: float
    fires: bool
    explained: bool
    images: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyFindings(Evaluation):
    """results.json of an experiment: the evaluation of the test half, and what the images show without the model.

    Attributes:
      blind_baseline: beside the attack that is best on the calibration half; None where none could be fitted.
      duplicates: among the images of both halves.
    """

    blind_baseline: BlindFinding | None
    duplicates: DuplicateReport


@dataclasses.dataclass(frozen=True)
class LikenessFound:
    """Whether the candidates are the same kind of picture as the held-out images.

    Attributes:
      set_p: p-value of the set being as far from the held-out images, by statistics of the pictures.
      set_unlike: whether it is too far.
      unlike: how many of them are, one by one.
      reference_p: p-value of a reference, which never saw the model, telling the two sets apart by its own answers;
        absent if none is taken out of the scores.
    """

    set_p: float
    set_unlike: bool
    unlike: Absent[int] = None
    reference_p: Absent[float] = None


@dataclasses.dataclass(frozen=True)
class Truth:
    """How many members and others there are among the candidates, and how many of each show evidence."""

    members: int
    members_found: int
    others: int
    false_alarms: int


@dataclasses.dataclass(frozen=True)
class Power:
    """The share of known members with p <= level; its interval holds for these held-out images."""

    level: float
    share: Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidatesFound:
    """All candidates together; candidates.csv has a line for each.

    Attributes:
      count: how many, also those that could not be used.
      evidence: show evidence of membership.
      no_evidence: show none.
      cannot_tell: cannot be told.
      level: the false discovery rate.
      heldout: with how many images they were compared, counting a group of them once.
      smallest_p: that so many images can give.
      candidates_needed: to reach it together before any is evidence.
      heldout_needed: for one to be evidence on its own.
      can_decide: whether any outcome could have been evidence.
      withheld: why no verdict is given on any of them; their p-values and the set test are then None.
      set_withheld: why the set is not judged.
      set_test: all of them together.
      less_like_members: p-value of looking *less* like training images than held-out images do, where that is sure.
      likeness: as pictures.
      truth: where that is known.
      warnings: for the reader.
      adjusted: whether something is taken out of the scores behind the p-values.
      power: of these p-values, on known members that were not used to choose any setting; none where it is not known.
    """

    count: int
    evidence: int
    no_evidence: int
    cannot_tell: int
    level: float
    heldout: int
    smallest_p: float
    candidates_needed: int
    heldout_needed: int
    can_decide: bool
    withheld: str | None
    set_withheld: str | None
    set_test: SetTest | None
    less_like_members: float | None
    likeness: LikenessFound
    truth: Truth | None
    warnings: tuple[str, ...]
    adjusted: bool
    power: tuple[Power, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditFindings(Evaluation):
    """results.json of an audit: the evaluation of the test half, and all that follows from it and the candidates.

    Attributes:
      decided_by: the attack behind the verdicts.
      comparisons: DIME against the best baseline, at each of its budgets.
      crowding: what the crowding term adds, at each of DIME's budgets.
      blind_baseline: None without known members, or where none could be fitted.
      captions: with which captions a text-conditioned model was asked: "own" or "none"; None for other models.
      reference: the second model that was asked the same.
      caption_baseline: a classifier that saw the captions alone, where the model was asked with them.
      fraction_used: which fraction of the candidates was used in training; None where that cannot be estimated.
      epsilon_lower_bound: None without known members, or where verdicts are withheld.
      candidates: None if there are none.
      duplicates: copies that were found.
      images: how many there were, and how many of them could not be used.
      grid_size: how many settings calibration chose from.
      model: the model.
      settings: what was asked for.
      environment: where it ran.
      headline: the answer in words.
    """

    decided_by: AuditDecidedBy
    comparisons: tuple[ComparisonRow, ...]
    blind_baseline: BlindFinding | None
    epsilon_lower_bound: EpsilonBound | None
    candidates: CandidatesFound | None
    duplicates: DuplicateFacts
    images: ImageCounts
    grid_size: int
    model: ModelFacts
    settings: Settings
    environment: Environment
    headline: Headline
    captions: Absent[str] = None
    reference: Absent[ModelFacts] = None
    caption_baseline: Absent[BlindFinding] = None
    crowding: tuple[CrowdingEffect, ...]
    fraction_used: Absent[FractionUsed] = None

    @property
    def deciding_row(self) -> ResultRow | AdjustedRow | None:
        """The attack that decides on the test half, in the way that decides; None without known members."""
        row = self.row(self.decided_by.label)
        return None if row is None else row.read(self.decided_by.taken_out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateRow:
    """One line of candidates.csv.

    Attributes:
      id: of the image.
      score: of the attack that decides, lower for members; None without a finite answer.
      p_value: its rank among held-out images, of scores as `AuditDecidedBy` says; None where it got none.
      q_value: the same, adjusted for the number of candidates.
      verdict: what may be said.
      group: of images that belong together, -1 for none; absent if there are no groups.
      variation: of the image, that has this score; absent if only the image itself was asked about.
      member: whether it is one, where that is known.
      reason: why it got no p-value; "" where it got one.
      note: of which other image it is a copy.
      p_not_used: the same attack's p-value that decides nothing: plain if `p_value` is adjusted, adjusted if that is
        plain.
    """

    id: str
    score: float | None = None
    p_value: float | None = None
    q_value: float | None = None
    verdict: Verdict = Verdict.CANNOT_TELL
    group: Absent[int] = None
    variation: Absent[str] = None
    member: Absent[bool] = None
    reason: str
    note: str = ""
    p_not_used: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeletionRow:
    """One line of a comparison's candidates.csv; p-values are None where there are none."""

    id: str
    p_before: float | None = None
    p_after: float | None = None
    flagged_before: bool = False
    flagged_after: bool = False
    reason: str
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeletionFindings:
    """compare.json: the same candidates against a model before and after.

    Attributes:
      schema_version: of compare.json.
      facts: what was compared.
      verdict: None where it is withheld.
      withheld: why there is no verdict; the tests are then None.
      direction: which set is which, on the calibration half.
      likeness: as pictures.
      set_before: all candidates together, under the model before.
      set_after: under the model after.
      change: of one to the other, paired.
      p_cutoff: that flags a candidate.
      rule: that in words.
      flagged: how many candidates.
      decided_by: the attack behind the verdict.
      fingerprints: of both models.
      precision: of matrix products.
      seed: of draws and resampling.
      queries_made: in all.
      model_check: whether each model predicts noise; None where that was not checked.
      warnings: for the reader.
      headline: the answer in words.
    """

    schema_version: int = SCHEMA_VERSION
    facts: CompareFacts
    verdict: DeletionVerdict | None
    withheld: str | None
    direction: Direction
    likeness: LikenessFound
    set_before: SetTest | None
    set_after: SetTest | None
    change: Change | None
    p_cutoff: float
    rule: str
    flagged: BeforeAfter[int]
    decided_by: DecidedBy
    fingerprints: BeforeAfter[str]
    precision: str
    seed: int
    queries_made: int
    model_check: BeforeAfter[DenoiserCheck | None]
    warnings: tuple[str, ...]
    headline: Headline

    @property
    def undecided(self) -> bool:
        """Whether nothing can be told about the deletion."""
        return self.verdict is None or self.verdict.undecided

    @property
    def verdict_in_words(self) -> str:
        """The verdict, or why there is none."""
        return f"cannot tell: {self.withheld}" if self.verdict is None else str(self.verdict)

    def to_json(self) -> Mapping[str, object]:
        """As compare.json has it: `verdict` in words."""
        fields = {name: getattr(self, name) for name in field_names(self)}
        return {**fields, "verdict": self.verdict_in_words}
