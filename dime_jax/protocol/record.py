"""The record of an audit: what is on disk once all queries are made, and all that the report is made from.

AUDIT/audit.json            `AuditFacts`: settings, model, images, duplicates, warnings, environment
AUDIT/audit.npz             `AuditArrays`: candidates, their truth where known, groups; blind baseline; thumbnails
AUDIT/run.json ... test/    the run of `stages`, with known members
AUDIT/candidates/ATTACK/    score table of the candidates and of held-out images, by the attack that decides
AUDIT/variations/ATTACK/    the same of their variations, where those were asked for

audit.json holds the digests of all of these, those of score tables by their manifests (see `digests`).
"""

import dataclasses
import functools
import pathlib
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from dime_jax import evidence
from dime_jax.data import Pair, Split
from dime_jax.data.groups import groups_of
from dime_jax.data.variations import VARIATIONS
from dime_jax.guards import model_check
from dime_jax.guards.wiring import DenoiserCheck
from dime_jax.protocol import stages
from dime_jax.protocol.arrays import AuditArrays
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.facts import AuditFacts, CompareFacts
from dime_jax.protocol.frozen import by_label, frozen_attacks
from dime_jax.scoring import score_table
from dime_jax.scoring.score_table import ScoreTable

Facts = TypeVar("Facts", AuditFacts, CompareFacts)


def finite(scores: np.ndarray) -> np.ndarray:
    """Scores without those of images that have no finite answer."""
    return scores[np.isfinite(scores)]


def best_of(scores: np.ndarray, others: np.ndarray) -> "Varied":
    """The lowest score of each image [n] and its variations [n, k]; NaN, from whichever, is not low.

    An image without a score of its own has none. The rule is the same for every image, so images that were exchangeable
    still are: the rank of one among the others remains a p-value.
    """
    filled = np.where(np.isnan(others), np.inf, others)
    columns = np.concatenate([scores[:, None], filled], axis=1)
    which = np.where(np.isnan(scores), 0, np.argmin(np.where(np.isnan(columns), np.inf, columns), axis=1))
    return Varied(columns[np.arange(len(scores)), which], which)


class KnownImages(NamedTuple):
    """The known images that were not used to choose any setting, and their score table."""

    table: ScoreTable
    split: Split

    def scores(self, frozen: Calibration) -> Pair[np.ndarray]:
        """Their scores by a frozen attack, lower for members; NaN without a finite answer."""
        return self.split.sides.map(lambda side: stages.frozen_scores(self.table, frozen, side))


def read_known(directory: pathlib.Path, decided_by: str, heldout: np.ndarray, members_known: bool) -> KnownImages:
    """The test half; without known members the held-out images that candidates are compared with."""
    if members_known:
        return KnownImages(score_table.read_table(directory / "test"), stages.read_halves(directory).test)
    table = score_table.read_table(candidates_directory(directory, decided_by))
    return KnownImages(table, Split(np.zeros(0, np.int64), heldout))


def candidates_directory(directory: pathlib.Path, decided_by: str) -> pathlib.Path:
    """Where the score table of candidates is, by the label of the attack that decides."""
    return directory / "candidates" / decided_by


def variations_directory(directory: pathlib.Path, decided_by: str) -> pathlib.Path:
    """Where the score table of variations is."""
    return directory / "variations" / decided_by


class Varied(NamedTuple):
    """The best score [n] over each image and its variations, and which of them has it: 0 for the image itself."""

    best: np.ndarray
    which: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class RunRecord(Generic[Facts]):
    """An audit whose queries are made, of one model, or of the two that are compared.

    Attributes:
      directory: where it is.
      facts: audit.json, or the facts of compare.json.
      arrays: audit.npz or compare.npz.
    """

    directory: pathlib.Path
    facts: Facts
    arrays: AuditArrays

    @property
    def members_known(self) -> bool:
        """Whether there were members to calibrate with."""
        return self.facts.images.members > 0

    @functools.cached_property
    def tables(self) -> list[ScoreTable]:
        """The score tables of candidates and held-out images, one for each model, if there are candidates."""
        places = self.facts.tables if len(self.arrays.candidates) else ()
        return [score_table.read_table(self.directory / place) for place in places]

    @property
    def candidates(self) -> ScoreTable | None:
        """The first of these tables."""
        return self.tables[0] if self.tables else None

    @functools.cached_property
    def checks(self) -> list[DenoiserCheck | None]:
        """Whether each model predicts noise, by these tables."""
        prints = [table.manifest["identity"]["model"] for table in self.tables]
        return [model_check.read_check(self.directory, fingerprint) for fingerprint in prints]

    @functools.cached_property
    def likeness(self) -> evidence.Likeness:
        """The candidates beside the held-out images, as pictures."""
        statistics = self.arrays.statistics
        assert statistics is not None  # there are candidates
        groups, compared = self.groups(self.arrays.candidates), self.groups(statistics.compared)
        seed = self.facts.settings.seed
        return evidence.likeness(statistics.candidates, statistics.of_compared, groups, compared, seed)

    @functools.cached_property
    def known(self) -> KnownImages:
        """The known images that were not used to choose any setting."""
        return read_known(self.directory, self.facts.decided_by, self.arrays.heldout, self.members_known)

    @property
    def split(self) -> Split:
        """Known members and held-out images that were not used to choose any setting."""
        return self.known.split

    @functools.cached_property
    def calibrations(self) -> list[Calibration]:
        """Every frozen attack."""
        table = self.candidates or self.known.table
        return frozen_attacks(self.directory, self.facts.theory_setting, table.schedule)

    @functools.cached_property
    def decider(self) -> Calibration:
        """The attack that decides."""
        return by_label(self.calibrations, self.facts.decided_by)

    def scores(self, frozen: Calibration) -> Pair[np.ndarray]:
        """Scores of these known images."""
        return self.known.scores(frozen)

    def calibration_scores(self) -> Pair[np.ndarray]:
        """Scores of the known images that chose the settings, by the attack that decides."""
        table = score_table.read_table(self.directory / "calibration")
        return KnownImages(table, stages.read_halves(self.directory).calibration).scores(self.decider)

    @functools.cached_property
    def variations(self) -> ScoreTable | None:
        """The score table of variations of held-out images and candidates, in this order; None if there are none."""
        if self.candidates is None or not self.facts.settings.variations:
            return None
        return score_table.read_table(variations_directory(self.directory, self.facts.decided_by))

    def candidate_scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores of the candidates, NaN without a finite answer, and the finite ones of held-out images beside them.

        Where variations were asked for, the best score of each image and its variations, on both sides alike.
        """
        scores, heldout = self.varied()
        return scores.best, heldout.best[np.isfinite(heldout.best)]

    def varied(self) -> tuple[Varied, Varied]:
        """The best scores of the candidates, and of the held-out images beside them."""
        heldout, candidates = (self.own_scores(side) for side in (self.arrays.heldout, self.arrays.candidates))
        both = np.concatenate([heldout, candidates])
        found = Varied(both, np.zeros(len(both), np.int64))
        if self.variations is not None:
            places = np.arange(len(both) * len(VARIATIONS))
            others = stages.frozen_scores(self.variations, self.decider, places).reshape(len(both), -1)
            found = best_of(both, others)
        cut = len(heldout)
        return Varied(found.best[cut:], found.which[cut:]), Varied(found.best[:cut], found.which[:cut])

    def own_scores(self, indices: np.ndarray) -> np.ndarray:
        """Scores of candidates, or of held-out images beside them, as they are."""
        if self.candidates is None:
            return np.zeros(0)
        return stages.frozen_scores(self.candidates, self.decider, indices)

    def groups(self, indices: np.ndarray) -> np.ndarray | None:
        """The groups of some images; None if none of them is in a group."""
        return groups_of(self.arrays.groups, indices)


class Record(RunRecord[AuditFacts]):
    """The record of an audit."""


class CompareRecord(RunRecord[CompareFacts]):
    """The record of a comparison."""

    @functools.cached_property
    def direction(self) -> evidence.Direction:
        """What the witness says on the calibration half."""
        known = self.members_known
        return stages.read_direction(self.directory, ["calibration"]) if known else evidence.NOT_CHECKED
