"""The record of an audit: what is on disk once all queries are made, and all that the report is made from.

AUDIT/audit.json            settings, model, images, duplicates, warnings, environment
AUDIT/audit.npz             candidates, their truth where known, groups; the blind baseline's scores; thumbnails
AUDIT/run.json ... test/    the run of `pipeline`, with known members
AUDIT/candidates/ATTACK/    score table of the candidates and of held-out images, by the attack that decides

audit.json holds the digests of all of these, those of score tables by their manifests (see `digests`).
"""

import dataclasses
import functools
import io
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dime_jax import _validate, digests, model_check, pipeline, score_table
from dime_jax.attacks import Setting, theory_phi
from dime_jax.calibration import Calibration
from dime_jax.data import Split
from dime_jax.evidence import Direction
from dime_jax.schedule import NoiseSchedule
from dime_jax.score_table import ScoreTable

SCHEMA_VERSION = 1


class Sides(NamedTuple):
    """Scores of an attack, lower for members; NaN without a finite answer."""

    member: np.ndarray
    heldout: np.ndarray

    def finite(self) -> "Sides":
        """Without NaN."""
        return Sides(*(side[np.isfinite(side)] for side in self))


class Choice(NamedTuple):
    """The attack that decides about candidates, and why this one, in words."""

    decider: Calibration
    why: str


def label(frozen: Calibration) -> str:
    """ "attack@queries": how one row of the results is called."""
    return pipeline.frozen_job(frozen).label


def best_calibrated(frozen: Sequence[Calibration]) -> Calibration:
    """The attack of highest AUC on the calibration half; of equals the one of fewest queries."""
    return max(frozen, key=lambda one: (one.auc, -pipeline.frozen_job(one).queries))


def by_label(frozen: Sequence[Calibration], wanted: str) -> Calibration:
    """The frozen attack of that label."""
    labels = {label(one): one for one in frozen}
    if wanted not in labels:
        raise ValueError(f"unknown attack {wanted!r} to decide with; expected one of {', '.join(labels)}")
    return labels[wanted]


def choose_decider(
    frozen: Sequence[Calibration], asked: Collection[str], wanted: str | None, direction: Direction
) -> Choice:
    """The wanted attack, or of those asked for the best on the calibration half; but see who may decide.

    An attack that learned its direction from the labels decides only if the witness confirms that direction.
    Otherwise the best attack of fixed direction takes its place: of those asked for, or else the witness itself.

    Args:
      frozen: every calibrated attack, the witness among them.
      asked: labels of the attacks that were asked for.
      wanted: label of the attack that is to decide, if the user named one.
      direction: what the witness says on the calibration half.
    """
    attacks = [one for one in frozen if label(one) in asked]
    first = best_calibrated(attacks) if wanted is None else by_label(attacks, wanted)
    why = "highest AUC on the calibration half" if wanted is None else "asked for"
    if not first.learned_direction or direction.may_learn:
        return Choice(first, why)
    fixed = [one for one in attacks if not one.learned_direction] or [
        one for one in frozen if not one.learned_direction
    ]
    return Choice(
        best_calibrated(fixed),
        f"the best attack of fixed direction; {label(first)} ({why}) learned its direction from the labels, and the "
        "witness does not confirm it",
    )


def theory_weights(schedule: NoiseSchedule, setting: Setting) -> Calibration:
    """DIME with the population-exact angle, for audits without known members: nothing is calibrated, no threshold."""
    _validate.check_timestep(setting["t"], schedule.num_steps, "timestep")
    phi = theory_phi(schedule.sigma(setting["t"])).item()
    return Calibration("dime_theory", dict(setting), phi, None, -np.inf, np.nan)


def frozen_attacks(
    directory: pathlib.Path, theory_setting: Setting | None, schedule: NoiseSchedule
) -> list[Calibration]:
    """The attacks that calibration froze in a run, or DIME with theory weights if nothing was calibrated."""
    if theory_setting is None:
        return pipeline.read_calibrations(directory)
    return [theory_weights(schedule, theory_setting)]


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """An audit whose queries are made.

    Attributes:
      directory: where it is.
      facts: audit.json.
      arrays: audit.npz.
    """

    directory: pathlib.Path
    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    @property
    def members_known(self) -> bool:
        """Whether there were members to calibrate with."""
        return self.facts["images"]["members"] > 0

    @functools.cached_property
    def candidates(self) -> ScoreTable | None:
        """The score table of candidates and held-out images, if there are candidates."""
        if not len(self.arrays["candidates"]):
            return None
        return score_table.read_table(self.directory / "candidates" / self.facts["decided_by"])

    @functools.cached_property
    def reference(self) -> ScoreTable:
        """The score table of the known images that were not used to choose any setting."""
        table = score_table.read_table(self.directory / "test") if self.members_known else self.candidates
        assert table is not None
        return table

    @functools.cached_property
    def calibrations(self) -> list[Calibration]:
        """Every frozen attack."""
        return frozen_attacks(self.directory, self.facts["theory_setting"], self.reference.schedule)

    @functools.cached_property
    def decider(self) -> Calibration:
        """The attack that decides."""
        return by_label(self.calibrations, self.facts["decided_by"])

    @functools.cached_property
    def split(self) -> Split:
        """Members and held-out images of the reference."""
        if self.members_known:
            return pipeline.read_halves(self.directory).test
        return Split(np.zeros(0, np.int64), self.arrays["heldout"])

    def scores(self, frozen: Calibration) -> Sides:
        """Scores of the reference images."""
        return Sides(
            *(pipeline.frozen_scores(self.reference, frozen, s) for s in (self.split.member, self.split.heldout))
        )

    def candidate_scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores of the candidates, NaN without a finite answer, and the finite ones of held-out images beside them."""
        if self.candidates is None:
            return np.zeros(0), np.zeros(0)
        scores, heldout = (
            pipeline.frozen_scores(self.candidates, self.decider, self.arrays[role])
            for role in ("candidates", "heldout")
        )
        return scores, heldout[np.isfinite(heldout)]

    def groups(self, indices: np.ndarray) -> np.ndarray | None:
        """The groups of some images; None if none of them is in a group."""
        groups = self.arrays["groups"][indices]
        return groups if np.any(groups >= 0) else None


def write_record(directory: pathlib.Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Record:
    """Write audit.json and audit.npz."""
    (directory / "audit.json").unlink(missing_ok=True)  # a kill must not leave the one of before with new arrays
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    score_table.write_atomically(directory / "audit.npz", buffer.getvalue())
    contents = {"schema_version": SCHEMA_VERSION, **facts}
    pipeline.write_sealed(
        directory / "audit.json", contents, ["audit.npz", model_check.FILE, *_evidence(facts, arrays)]
    )
    return read_record(directory)


def read_record(directory: pathlib.Path) -> Record:
    """Open the record of an audit.

    Raises:
      ValueError: if there is none, or a file of it is damaged or missing, naming that.
    """
    if not (directory / "audit.json").is_file():
        raise ValueError(f"{directory} holds no audit: no audit.json in it")
    sealed = digests.read(directory / "audit.json").check()
    facts = sealed.contents
    if facts.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{directory / 'audit.json'}: expected schema_version {SCHEMA_VERSION}")
    return Record(directory, facts, sealed.read_arrays("audit.npz"))


def _evidence(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """The files that an audit rests on: of its run with known members, and of its candidates."""
    run = ["run.json", "halves.npz", "calibration.json", *pipeline.MANIFESTS.values()]
    candidates = [f"candidates/{facts['decided_by']}/manifest.json"]
    return (run if facts["images"]["members"] else []) + (candidates if len(arrays["candidates"]) else [])
