"""What to audit, and how: the settings of `audit`."""

import dataclasses
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from dime_jax import scoring
from dime_jax._util import validate
from dime_jax.attacks import Setting, get_attack, load_attack_module
from dime_jax.core.denoiser import OWN, TEXT_CONDITIONS, Denoiser
from dime_jax.data import Source
from dime_jax.data.captions import CHOICES
from dime_jax.loading.conversion import NO_OPTIONS, NO_USE_OPTIONS, ConversionOptions, UseOptions
from dime_jax.protocol.facts import Settings
from dime_jax.remote.options import NO_REMOTE_OPTIONS, RemoteOptions
from dime_jax.scoring import planning

EXAMPLE = "digits"
_THEORY_QUERIES = 11  # of DIME without known members, where the profile has no bound
DEFAULT_OPTIONS = scoring.ScoringOptions()


class Profile(NamedTuple):
    """How much work an audit is: images per class in each half, and query budgets; None for all there is."""

    calibration_size: int | None
    test_size: int | None
    queries: tuple[int, ...] | None  # for each, every attack's largest tier that costs at most so many
    every_heldout: bool = True  # whether candidates are compared with all held-out images that did not calibrate

    def replaced(self, calibration_size: int | None, test_size: int | None, queries: Sequence[int] | None) -> "Profile":
        """The same with what is given in place of its own."""
        return Profile(
            self.calibration_size if calibration_size is None else calibration_size,
            self.test_size if test_size is None else test_size,
            tuple(queries) if queries else self.queries,
            self.every_heldout,
        )


# DIME's tiers of 1 and 10 probes cost 2 and 11 queries.
PROFILES = {
    "light": Profile(60, 100, (2,), every_heldout=False),
    "quick": Profile(150, 300, (2, 11)),
    "paper": Profile(500, None, None),
}


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """The settings of an audit. Images are source URIs (see `data.open_source`) or Sources.

    Known members and held-out images are named by `members` and `heldout`, or by `images` and a `split` file. Without
    known members the audit cannot calibrate: it runs DIME with theory weights at `timestep` and `gamma`. With neither,
    the images are those of the shipped example, for models of its image shape.

    Attributes:
      output: directory of the audit; one that was interrupted is continued.
      model: a shipped model's name, a model directory, a checkpoint to convert, or a Denoiser.
      members: images that the model was trained on.
      heldout: images that it was not trained on, otherwise like the members.
      candidates: images to decide about.
      images: with `split`: the source that the split's indices are about.
      split: split file of SecMI or dime-mia.
      labels: CSV file of lines "id,label", for class-conditional models whose images carry no labels.
      captions: of text-conditioned models: "own" asks about each image with its own caption, as None does, "none" with
        the empty one.
      groups: CSV file of lines "id,group": images of one owner, shoot or cluster, which are no independent evidence.
        Candidates go by their ids, others by "members/ID" and "heldout/ID".
      attacks: names in the registry; all if None.
      attack_module: a Python file that registers attacks of your own, see `dime_jax.register_attack`.
      queries: at most so many queries per image: every attack at its largest tier that costs no more, and nothing that
        costs more. Of several numbers, the tier for each. As the profile says if None.
      profile: "quick", "paper", or "light" for slow models: grid, sizes and query budgets.
      grid: parameters that replace the grid's, such as [{"t": 70}].
      calibration_size: at most so many images per class choose the settings; as the profile says if None.
      test_size: at most so many images per class are tested.
      variations: ask about each candidate also mirrored, cropped and encoded again, and judge the best score of them.
      decide_with: "attack@queries" that decides about candidates; the best on the calibration half if None.
      level: the false discovery rate of the verdicts, and the level of the test on the whole set.
      timestep: of DIME, without known members.
      gamma: of DIME, without known members.
      delta: of the bound on differential privacy.
      randomised: whether a coin decided for every image, before training, if it became a member: only then is the
        bound on ε an audit of differential privacy.
      seed: of halves, draws and resampling.
      options: how to run the queries.
      conversion: what a checkpoint to convert, or a hosted model, does not say itself.
      use: how a latent model is used.
      remote: how a hosted model is asked.
    """

    output: str | os.PathLike[str]
    model: str | os.PathLike[str] | Denoiser = EXAMPLE
    members: str | Source | None = None
    heldout: str | Source | None = None
    candidates: str | Source | None = None
    images: str | Source | None = None
    split: str | os.PathLike[str] | None = None
    labels: str | os.PathLike[str] | None = None
    groups: str | os.PathLike[str] | None = None
    captions: str | None = None
    attacks: Sequence[str] | None = None
    attack_module: str | os.PathLike[str] | None = None
    queries: Sequence[int] | None = None
    profile: str = "quick"
    grid: Sequence[Setting] | None = None
    calibration_size: int | None = None
    test_size: int | None = None
    variations: bool = False
    decide_with: str | None = None
    level: float = 0.05
    timestep: int = 70
    gamma: float = 0.1
    delta: float = 0.0
    randomised: bool = False
    seed: int = 0
    options: scoring.ScoringOptions = DEFAULT_OPTIONS
    conversion: ConversionOptions = NO_OPTIONS
    use: UseOptions = NO_USE_OPTIONS
    remote: RemoteOptions = NO_REMOTE_OPTIONS

    def __post_init__(self) -> None:
        if self.attack_module is not None:
            load_attack_module(self.attack_module)
        validate.check_choice(self.profile, tuple(PROFILES), "profile")
        if not 0 < self.level < 1:
            raise ValueError(f"expected 0 < level < 1, got level={self.level}")
        if not 0 <= self.delta < 1:
            raise ValueError(f"expected 0 <= delta < 1, got delta={self.delta}")
        for name in ("calibration_size", "test_size"):
            if getattr(self, name) is not None:
                validate.check_at_least(getattr(self, name), 10, name)
        if self.captions is not None:
            validate.check_choice(self.captions, CHOICES, "captions")
        if (self.images is None) != (self.split is None):
            raise ValueError("expected images and split together")
        if self.images is not None and (self.members is not None or self.heldout is not None):
            raise ValueError("expected either members and heldout, or images and split")
        if self.variations and self.options.budget.per_image is not None:
            raise ValueError("expected no bound on queries per image with variations, which are further images")
        validate.check_at_least(self.timestep, 0, "timestep")
        validate.check_positive(self.gamma, "gamma")
        validate.check_at_least(self.queries or 1, 1, "queries")
        self.check_decider(self.row_labels())

    def check_decider(self, labels: Sequence[str]) -> None:
        """Require what is to decide to be among these rows."""
        if self.decide_with is not None and self.decide_with not in labels:
            raise ValueError(f"unknown attack {self.decide_with!r} to decide with; expected one of {', '.join(labels)}")

    @property
    def model_options(self) -> dict[str, Any]:
        """The options of `open_model`."""
        return vars(self.conversion) | vars(self.use)

    @property
    def directory(self) -> pathlib.Path:
        """The output directory."""
        return pathlib.Path(self.output)

    def sizes(self) -> Profile:
        """Sizes and tiers: what was asked for, or the profile's."""
        return PROFILES[self.profile].replaced(self.calibration_size, self.test_size, self.queries)

    @property
    def members_known(self) -> bool:
        """Whether there are members to calibrate with: named, or those of the shipped example."""
        return self.members is not None or self.images is not None or self.heldout is None

    def jobs(self, conditions: Collection[str] = TEXT_CONDITIONS) -> list[planning.Job]:
        """Every attack and setting to choose from, for a model that offers these conditions; without members, one."""
        if self.members_known:
            return planning.grid_jobs(*self._grid, conditions)
        for name in self.attacks or ():
            get_attack(name)
        return [planning.Job(get_attack("dime_theory"), self.theory_setting())]

    def left_out(self, conditions: Collection[str] = (OWN,)) -> list[str]:
        """What is not asked because it costs too many queries, in one line for each attack."""
        return planning.left_out(*self._grid, conditions) if self.members_known else []

    @property
    def _grid(self) -> tuple[Sequence[str] | None, str, Sequence[int] | None, Sequence[Setting] | None, int | None]:
        """The arguments of `planning.grid_jobs`. What a user names bounds all attacks, a profile only chooses tiers."""
        most = max(self.queries) if self.queries else None
        return self.attacks, self.profile, self.sizes().queries, self.grid, most

    def offered(self, denoiser: Denoiser) -> tuple[str, ...]:
        """The conditions under which a model can be asked; without captions there are no parts of them either."""
        return (OWN,) if self.captions == "none" else denoiser.conditions

    def row_labels(self) -> list[str]:
        """The names "attack@queries" of what may decide about candidates."""
        return planning.row_labels(self.jobs())

    def result_labels(self) -> list[str]:
        """The names of the rows that results.json will have: the witness of direction is one."""
        jobs = self.jobs()
        return planning.row_labels([*jobs, *planning.witness_jobs(jobs)]) if self.members_known else []

    def theory_setting(self) -> Setting:
        """DIME's setting without known members."""
        setting, budget = {"t": self.timestep, "gamma": self.gamma}, max(self.sizes().queries or (_THEORY_QUERIES,))
        jobs = planning.grid_jobs(["dime_theory"], self.profile, [budget], [setting])
        return max(jobs, key=lambda job: job.queries).setting

    def settings(self, after: str | os.PathLike[str] | Denoiser | None = None) -> Settings:
        """The settings that someone needs to repeat the audit, or a comparison with the model `after`."""
        return Settings(
            model=_name(self.model) or "",
            members=_name(self.members),
            heldout=_name(self.heldout),
            candidates=_name(self.candidates),
            images=_name(self.images),
            split=_name(self.split),
            labels=_name(self.labels),
            groups=_name(self.groups),
            captions=self.captions,
            attacks=None if self.attacks is None else tuple(self.attacks),
            attack_module=None if self.attack_module is None else str(pathlib.Path(self.attack_module).resolve()),
            queries=None if self.queries is None else tuple(self.queries),
            profile=self.profile,
            grid=None if self.grid is None else tuple(self.grid),
            calibration_size=self.calibration_size,
            test_size=self.test_size,
            variations=self.variations or None,
            decide_with=self.decide_with,
            level=self.level,
            timestep=self.timestep,
            gamma=self.gamma,
            delta=self.delta,
            randomised=self.randomised,
            seed=self.seed,
            conversion={**self.conversion.given(), **self.use.given()} or None,
            remote=self.remote.given() or None,
            after=_name(after),
        )


def _name(place: str | os.PathLike[str] | Source | Denoiser | None) -> str | None:
    if isinstance(place, Source | Denoiser):
        return place.name
    return None if place is None else os.fspath(place)
