"""What the images show without the model, beside the attacks of a run: a blind baseline, and duplicates.

    RUN/images_alone.json    `ImagesAlone`, written by `experiments.attack`; results.json repeats what it says

If pictures alone tell members from held-out images, or the same picture is on both sides, an attack's success may
mean no more than that.
"""

import json
import pathlib
from typing import NamedTuple

import numpy as np

from dime_jax import data
from dime_jax._util import files, records
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings import json_files, wording
from dime_jax.findings.known_images import beside
from dime_jax.findings.results import StudyFindings
from dime_jax.protocol import stages
from dime_jax.protocol.arrays import BlindScores
from dime_jax.protocol.blind import fit_blind
from dime_jax.protocol.frozen import best_calibrated
from dime_jax.protocol.record import KnownImages
from dime_jax.scoring import score_table

FILE = "images_alone.json"


class ImagesAlone(NamedTuple):
    """What was found before any model was asked.

    Attributes:
      duplicates: among the images of both halves; none are taken out, as in the paper's protocol.
      blind_auc: of a classifier of test images that never saw the model; None where none could be fitted.
      member: positions of the members that it scored.
      heldout: of the held-out images.
      member_scores: lower for members.
      heldout_scores: the same.
      warnings: for the reader.
    """

    duplicates: data.DuplicateReport
    blind_auc: Estimate | None
    member: list[int]
    heldout: list[int]
    member_scores: list[float]
    heldout_scores: list[float]
    warnings: tuple[str, ...]


Looked = tuple[ImagesAlone, np.ndarray]


def look(source: data.Source, halves: data.Halves, transform: data.Transform, seed: int) -> Looked:
    """Compare all images of the halves with each other, and fit the blind baseline on the test half.

    Args:
      source: the images.
      halves: which of them are used.
      transform: how the model sees them.
      seed: of folds, and of the part that is looked at where there are very many.

    Returns:
      What was found, and the groups of all images of the source: copies of one picture, photos of one person.
    """
    everyone = halves.together()
    sides = [side for half in halves for side in (half.member, half.heldout)]
    duplicates = data.find_duplicates(source, np.concatenate(sides))
    groups = data.merge_groups(duplicates.groups, source.identities)
    assert groups is not None
    blind = fit_blind(source, groups, transform, halves.test, seed)
    scores = blind.scores or BlindScores(*(np.zeros(0, kind) for kind in (int, int, float, float)))
    found = data.report_duplicates(duplicates, everyone, halves)
    across = (
        f"{found.across_member_heldout} clusters of copies lie across members and held-out images, and were left in"
    )
    warnings = (*blind.warnings, *([across] if found.across_member_heldout else []))
    columns = (scores.member, scores.heldout, scores.member_scores, scores.heldout_scores)
    member, heldout, member_scores, heldout_scores = (column.tolist() for column in columns)
    alone = ImagesAlone(found, blind.auc, member, heldout, member_scores, heldout_scores, warnings)
    return alone, groups


def write(directory: pathlib.Path, found: ImagesAlone) -> None:
    """Write the file."""
    files.write_json(directory / FILE, records.plain(found))


def look_once(directory: pathlib.Path, source: data.Source, transform: data.Transform, seed: int) -> None:
    """Write the file of a run that has none.

    Args:
      directory: of the run.
      source: the images.
      transform: how the model sees them.
      seed: as in `look`.
    """
    if not (directory / FILE).exists():
        write(directory, look(source, stages.read_halves(directory), transform, seed)[0])


def results(directory: pathlib.Path) -> StudyFindings:
    """Return what a run's score tables and its images show."""
    found = stages.evaluation(directory)
    fields = {name: getattr(found, name) for name in records.field_names(found)}
    path = directory / FILE
    if not path.exists():
        raise ValueError(f"{directory} is not a finished run of experiments.attack: it has no {FILE}")
    alone = records.parse(ImagesAlone, json.loads(path.read_bytes()), str(path))
    blind = None
    if alone.blind_auc is not None:
        arrays = (alone.member, alone.heldout, alone.member_scores, alone.heldout_scores)
        asked = stages.asked_labels(directory)
        best = best_calibrated([one for one in stages.read_calibrations(directory) if one.label in asked])
        table = score_table.read_table(directory / "test")
        known = KnownImages(table, stages.read_halves(directory).test)
        blind = beside(known, best, BlindScores(*map(np.array, arrays)), alone.blind_auc, stages.read_groups(directory))
    fields["warnings"] = (*found.warnings, *alone.warnings)
    return StudyFindings(**fields, blind_baseline=blind, duplicates=alone.duplicates)


def write_results(directory: pathlib.Path) -> None:
    """Write results.json."""
    files.write_json(directory / json_files.RESULTS, records.plain(results(directory)))


def describe(found: StudyFindings) -> str:
    """Return one line for tables and for the terminal."""
    blind, copies = found.blind_baseline, found.duplicates
    words = "no classifier of the pictures could be fitted"
    if blind is not None:
        words = (
            f"a classifier that never saw the model has AUC {wording.interval(blind.auc)}, and the best attack is "
            f"ahead of it by {wording.points(blind.gap)}"
        )
        words += ": the pictures alone may explain what it found" if blind.explained else ""
    return (
        f"{words}; {copies.exact_pairs} exact and {copies.near_pairs} near-duplicate pairs, "
        f"{copies.across_member_heldout} clusters of them across members and held-out images"
    )
