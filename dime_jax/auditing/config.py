"""What to audit, and how: the settings of `audit`."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any

from dime_jax import scoring
from dime_jax._util import validate
from dime_jax._util.flags import check_choices, documented
from dime_jax.attacks import Setting, get_attack, load_attack_module
from dime_jax.attacks.loss_level import BESIDE_NAME, NAME, on_schedule
from dime_jax.core.denoiser import BESIDE, OWN, TEXT_CONDITIONS, Denoiser
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.data import Source
from dime_jax.loading.conversion import NO_OPTIONS, NO_USE_OPTIONS, ConversionOptions, UseOptions
from dime_jax.protocol.facts import Settings
from dime_jax.protocol.options import NO_REFERENCE, PROFILES, SMALL, TRAIN, AuditOptions, OutputOption, Profile
from dime_jax.remote.options import NO_REMOTE_OPTIONS, RemoteOptions
from dime_jax.scoring import planning

DEFAULT_OPTIONS = scoring.ScoringOptions()


@documented
@dataclasses.dataclass(frozen=True)
class AuditConfig(AuditOptions, OutputOption):
    """The settings of an audit; those of `dime-jax audit`. Images are source URIs (see `data.open_source`) or Sources.

    Known members and held-out images are named by `members` and `heldout`, or by `images` and a `split` file. Without
    known members the audit cannot calibrate: a fixed rule of three queries decides (`loss_level`). With neither, the
    images are those of the shipped example, for models of its image shape, or of the shipped LoRA, whose members are
    candidates then. The model may be a Denoiser.

    How queries are run is said by `options`, what a checkpoint or a hosted model does not say itself by `conversion`,
    how a latent model is used by `use`, and how a hosted model is asked by `remote`.
    """

    options: scoring.ScoringOptions = DEFAULT_OPTIONS
    conversion: ConversionOptions = NO_OPTIONS
    use: UseOptions = NO_USE_OPTIONS
    remote: RemoteOptions = NO_REMOTE_OPTIONS

    def __post_init__(self) -> None:
        if self.attack_module is not None:
            load_attack_module(self.attack_module)
        check_choices(self)
        if not 0 < self.level < 1:
            raise ValueError(f"level must be > 0 and < 1, got {self.level}")
        if not 0 <= self.delta < 1:
            raise ValueError(f"delta must be >= 0 and < 1, got {self.delta}")
        for name in ("calibration_size", "test_size"):
            if getattr(self, name) is not None:
                validate.check_at_least(getattr(self, name), 10, name)
        if (self.images is None) != (self.split is None):
            raise ValueError("images and split must be given together")
        if self.images is not None and (self.members is not None or self.heldout is not None):
            raise ValueError("name the images by members and heldout, or by images and split")
        if self.trains_reference and not re.fullmatch(rf"{TRAIN}[1-9]\d{{0,8}}(:{SMALL})?", str(self.reference)):
            raise ValueError(f"reference must be {TRAIN}N or {TRAIN}N:{SMALL} to train one, got {self.reference!r}")
        if self.reference_lora and (self.trains_reference or not self.has_reference):
            raise ValueError("reference_lora needs a reference to merge it into")
        if self.variations and self.options.budget.per_image is not None:
            raise ValueError("variations cannot be combined with a limit on queries per image: they are further images")
        validate.check_at_least(self.queries or 1, 1, "queries")
        self.check_decider(self.row_labels())

    def check_decider(self, labels: Sequence[str]) -> None:
        """Require what is to decide to be among these rows."""
        if self.decide_with is not None and self.decide_with not in labels:
            raise ValueError(f"decide_with must be one of {', '.join(labels)}, got {self.decide_with!r}")

    def sizes(self) -> Profile:
        """Sizes and tiers: what was asked for, or the profile's."""
        calibration_size, test_size, queries, every_heldout = PROFILES[self.profile]
        return Profile(
            self.calibration_size or calibration_size,
            self.test_size or test_size,
            tuple(self.queries or ()) or queries,
            every_heldout,
        )

    @property
    def members_known(self) -> bool:
        """Whether there are members to calibrate with: named, or those of the shipped model."""
        example = self.heldout is None and not self.use.lora  # the shipped LoRA's are candidates
        return self.members is not None or self.images is not None or example

    def jobs(
        self, conditions: Collection[str] = TEXT_CONDITIONS, schedule: NoiseSchedule | None = None
    ) -> list[planning.Job]:
        """Every attack and setting to choose from, for a model that offers these conditions; without members, one.

        The timesteps of the fixed rule are those of the model's schedule, or of the usual one until that is known.
        """
        for name in self.attacks or ():
            get_attack(name)
        if self.has_reference:
            conditions = (*conditions, BESIDE)
        if self.members_known:
            jobs = planning.grid_jobs(*self._grid, conditions)
        else:
            rule = BESIDE_NAME if self.has_reference else NAME
            most = max(self.queries) if self.queries else None
            jobs = planning.grid_jobs([rule], self.profile, most=most, conditions=conditions)
        if schedule is None:
            return jobs
        fixed = (NAME, BESIDE_NAME)
        return [
            job._replace(setting=on_schedule(job.setting, schedule)) if job.attack.name in fixed else job
            for job in jobs
        ]

    @property
    def has_reference(self) -> bool:
        """Whether a second model is asked: a named one, or the base of a LoRA."""
        return self.reference != NO_REFERENCE and (self.reference is not None or bool(self.use.lora))

    @property
    def trains_reference(self) -> bool:
        """Whether the reference is trained first, on some of the held-out images."""
        return isinstance(self.reference, str) and self.reference.startswith(TRAIN)

    @property
    def reference_images(self) -> int:
        """How many held-out images a reference is trained on first."""
        return int(str(self.reference).split(":")[1]) if self.trains_reference else 0

    @property
    def reference_size(self) -> str:
        """The size of the network that is trained on them."""
        return SMALL if str(self.reference).endswith(f":{SMALL}") else "same"

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

    def settings(self, after: str | os.PathLike[str] | Denoiser | None = None) -> Settings:
        """The settings that someone needs to repeat the audit, or a comparison with the model `after`."""
        asked = {name: _named(getattr(self, name)) for name in AuditOptions.__dataclass_fields__}
        if self.attack_module is not None:
            asked["attack_module"] = str(pathlib.Path(self.attack_module).resolve())
        return Settings(
            **asked,
            conversion={**self.conversion.given(), **self.use.given()} or None,
            remote=self.remote.given() or None,
            after=_named(after),
        )


def _named(value: Any) -> Any:
    """A setting as the record has it: models, sources and files by their names."""
    if isinstance(value, Source | Denoiser):
        return value.name
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return tuple(value) if isinstance(value, list | tuple) else value
