"""The record of an audit: what is on disk once all queries are made, and all that the report is made from.

AUDIT/audit.json            `AuditFacts`: settings, model, images, duplicates, warnings, environment
AUDIT/audit.npz             `AuditArrays`: candidates, their truth where known, groups; blind baseline; thumbnails
AUDIT/statistics.npz        what the pictures say about their difficulty (`statistics`)
AUDIT/run.json ... test/    the run of `stages`, with known members
AUDIT/candidates/ATTACK/    score table of the candidates and of held-out images, by the attack that decides
AUDIT/variations/ATTACK/    the same of their variations, where those were asked for, with statistics of their own

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
from dime_jax.evidence import Pile, Way
from dime_jax.guards import model_check
from dime_jax.guards.wiring import DenoiserCheck
from dime_jax.protocol import beside, calibration, stages, statistics
from dime_jax.protocol.arrays import AuditArrays
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.facts import AuditFacts, CompareFacts
from dime_jax.protocol.frozen import by_label
from dime_jax.protocol.statistics import Statistics
from dime_jax.scoring.score_table import ScoreTable

Facts = TypeVar("Facts", AuditFacts, CompareFacts)


def finite(scores: np.ndarray) -> np.ndarray:
    """Drop the scores of images that have no finite answer."""
    return scores[np.isfinite(scores)]


def best_of(scores: np.ndarray, others: np.ndarray) -> "Varied":
    """Return the lowest score of each image [n] and its variations [n, k]; NaN is ignored.

    An image without a score of its own has none. The rule is the same for every image, so images that were exchangeable
    still are: the rank of one among the others remains a p-value.
    """
    filled = np.where(np.isnan(others), np.inf, others)
    columns = np.concatenate([scores[:, None], filled], axis=1)
    which = np.where(np.isnan(scores), 0, np.argmin(np.where(np.isnan(columns), np.inf, columns), axis=1))
    return Varied(columns[np.arange(len(scores)), which], which)


class KnownImages(NamedTuple):
    """Known images, such as those that were not used to choose any setting, their score table and statistics."""

    table: ScoreTable
    split: Split
    pictures: Statistics | None = None

    def scores(self, frozen: Calibration) -> Pair[np.ndarray]:
        """Return their scores by a frozen attack, lower for members; NaN without a finite answer."""
        return self.split.sides.map(lambda side: stages.frozen_scores(self.table, frozen, side, self.pictures))


def read_known(directory: pathlib.Path, decided_by: str, heldout: np.ndarray, members_known: bool) -> KnownImages:
    """Read the test half; without known members, the held-out images that candidates are compared with."""
    pictures = statistics.read(directory) if statistics.exist(directory) else None
    if members_known:
        return KnownImages(beside.read(directory, "test"), stages.read_halves(directory).test, pictures)
    table = beside.read(directory, candidates_place(decided_by))
    return KnownImages(table, Split(np.zeros(0, np.int64), heldout), pictures)


def candidates_place(decided_by: str) -> str:
    """Return where in a run the score table of candidates is, by the label of the attack that decides."""
    return f"candidates/{decided_by}"


def variations_place(decided_by: str) -> str:
    """Return where the score table of variations is."""
    return f"variations/{decided_by}"


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
        return [beside.read(self.directory, place) for place in places]

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
        """Every frozen attack with its plain score; none without known members."""
        return stages.read_calibrations(self.directory) if self.members_known else []

    @functools.cached_property
    def pictures(self) -> Statistics | None:
        """What the pictures say about their difficulty; None if that was not computed."""
        return statistics.read(self.directory) if statistics.exist(self.directory) else None

    @functools.cached_property
    def decider(self) -> Calibration:
        """The attack that decides; its scores, without known members, are fitted to the held-out images."""
        facts = self.facts
        if facts.fixed_setting is not None:
            table = self.candidates or self.known.table
            way = facts.taken_out
            frozen = stages.fixed_rule(table.schedule, facts.fixed_setting, reference=way.reference)
            return frozen if way is Way.PLAIN else self.refit(frozen, table, self.arrays.heldout, way)
        return by_label(stages.read_calibrations(self.directory, facts.taken_out), facts.decided_by)

    def refit(self, frozen: Calibration, table: ScoreTable, images: np.ndarray, way: Way) -> Calibration:
        """Return a frozen attack with something taken out of its score, fitted to some images of a table alone.

        Args:
          frozen: the attack.
          table: with its terms.
          images: of the fit.
          way: what is taken out.
        """
        empty = calibration.to_adjust(frozen, way)
        known = statistics.of_images(self.pictures, images)
        return calibration.adjust(frozen, stages.terms_of(table, empty, images), known, way)

    def scores(self, frozen: Calibration) -> Pair[np.ndarray]:
        """Return the scores of these known images."""
        return self.known.scores(frozen)

    @functools.cached_property
    def calibration_images(self) -> KnownImages:
        """The known images that chose the settings."""
        table = beside.read(self.directory, "calibration")
        return KnownImages(table, stages.read_halves(self.directory).calibration, self.pictures)

    @functools.cached_property
    def variations(self) -> ScoreTable | None:
        """The score table of variations of held-out images and candidates, in this order; None if there are none."""
        if self.candidates is None or not self.facts.settings.variations:
            return None
        return beside.read(self.directory, variations_place(self.facts.decided_by))

    def varied(self, frozen: Calibration | None = None, table: ScoreTable | None = None) -> tuple[Varied, Varied]:
        """Return the best scores of the candidates, and of the held-out images that they are compared with.

        Args:
          frozen: an attack; the one that decides if None.
          table: of candidates and held-out images under one of the models; the first if None.
        """
        frozen, table = frozen or self.decider, table or self.candidates
        heldout, images = self.arrays.heldout, np.concatenate([self.arrays.heldout, self.arrays.candidates])
        both = np.zeros(0) if table is None else stages.frozen_scores(table, frozen, images, self.pictures)
        found = Varied(both, np.zeros(len(both), np.int64))
        if self.variations is not None:
            places = np.arange(len(both) * len(VARIATIONS))
            others = stages.frozen_scores(self.variations, frozen, places, self.varied_pictures)
            found = best_of(both, others.reshape(len(both), -1))
        cut = len(heldout)
        return Varied(found.best[cut:], found.which[cut:]), Varied(found.best[:cut], found.which[:cut])

    def own_scores(self, indices: np.ndarray) -> np.ndarray:
        """Return the scores of candidates, or of the held-out images that they are compared with, as they are."""
        if self.candidates is None:
            return np.zeros(0)
        return stages.frozen_scores(self.candidates, self.decider, indices, self.pictures)

    @functools.cached_property
    def varied_pictures(self) -> Statistics | None:
        """The statistics of the variations."""
        place = self.directory / "variations"
        return statistics.read(place) if statistics.exist(place) else None

    def piles(self, frozen: Calibration, table: ScoreTable) -> tuple[Pile, Pile]:
        """Return what p-values are fitted to: every version of the candidates, and of held-out images to compare with.

        Args:
          frozen: an attack whose score is adjusted.
          table: of candidates and held-out images, under one of the models.
        """
        images = np.concatenate([self.arrays.heldout, self.arrays.candidates])
        both = frozen.pile(stages.terms_of(table, frozen, images), statistics.of_images(self.pictures, images))
        if self.variations is not None:
            places = np.arange(len(images) * len(VARIATIONS))
            terms = stages.terms_of(self.variations, frozen, places)
            others = frozen.pile(terms, statistics.of_images(self.varied_pictures, places))
            shape = (len(both.scores), len(images), len(VARIATIONS))
            both = both._replace(
                scores=np.concatenate([both.scores, others.scores.reshape(shape)], axis=2),
                statistics=np.concatenate([both.statistics, others.statistics.reshape(*shape, -1)], axis=2),
            )
        cut = len(self.arrays.heldout)
        return both.take(slice(cut, None)), both.take(slice(cut))

    def groups(self, indices: np.ndarray) -> np.ndarray | None:
        """Return the groups of some images; None if none of them is in a group."""
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
