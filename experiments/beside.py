"""What attacks achieve alone and beside a second model: the part that `reference` and `finetune` share.

Every attack has one setting that was fixed beforehand, so no label is used. What is taken out of its score is fitted to
some of the held-out images, without labels and without any member, and then frozen; all members and the other held-out
images are counted.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from dime_jax import data, scoring
from dime_jax.attacks import get_attack
from dime_jax.attacks.loss_level import BESIDE_NAME, NAME, setting_for
from dime_jax.core.denoiser import Denoiser
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.data import Pair, Split
from dime_jax.evidence import Way, metrics
from dime_jax.evidence.metrics import Estimate
from dime_jax.protocol import calibration, stages
from dime_jax.protocol.record import KnownImages
from dime_jax.protocol.statistics import Statistics
from dime_jax.scoring.planning import Job
from dime_jax.scoring.score_table import ScoreTable
from experiments.fresh_models import every_heldout

CROWDING_SIGMA, CROWDING_GAMMA = 0.324, 0.4  # t = 100 of DDPM's schedule, where theory's weights were tried


class Counted(NamedTuple):
    """One attack, with something taken out of its score or not: what it achieves, and its lead over its plain score."""

    auc: Estimate
    tpr_at_1pct_fpr: Estimate
    lead: Estimate


Found = dict[str, dict[str, Counted]]  # attacks by name, each by what is taken out of its score


def study_name(file: str) -> str:
    """Config and variant in short: "cifar10:overnight"."""
    name, _, variant = file.partition(":")
    return ":".join(filter(None, (pathlib.Path(name).stem, variant)))


class Cut(NamedTuple):
    """Held-out images: those of the fits, those that are counted, and those that were set aside."""

    fitted: np.ndarray
    counted: np.ndarray
    apart: np.ndarray


class ImageRoles(NamedTuple):
    """Who is who.

    Attributes:
      member: what the model was trained on; all are counted.
      counted: held-out images that are counted.
      fitted: held-out images that what is taken out is fitted to.
    """

    member: np.ndarray
    counted: np.ndarray
    fitted: np.ndarray

    @property
    def all(self) -> np.ndarray:
        """All of them."""
        return np.concatenate(self)


def cut(config: ConfigDict, workdir: str | pathlib.Path, apart: int, fitted: int, counted: int = 1000) -> Cut:
    """Cut the held-out images of a study, all that its split has and not only those of its own attack.

    Args:
      config: of the study.
      workdir: of the study.
      apart: how many are set aside, for a second model to be trained on.
      fitted: how many the fits get.
      counted: how many are counted at most.
    """
    heldout = np.random.default_rng(config.seed).permutation(every_heldout(config, workdir))
    rest = len(heldout) - apart
    if rest < 2 * fitted:
        raise ValueError(
            f"{fitted} images for fits and {apart} set aside must leave {fitted}, of {len(heldout)} held out"
        )
    return Cut(heldout[:fitted], heldout[fitted:rest][:counted], np.sort(heldout[rest:]))


def fixed_jobs(schedule: NoiseSchedule) -> list[Job]:
    """Every attack whose direction is known, at noise levels that were fixed beforehand."""
    rule = setting_for(schedule)
    high, low = {"t": rule["t_loss"]}, {"t": rule["t_level"]}
    crowding = {"t": schedule.timestep_at(CROWDING_SIGMA), "gamma": CROWDING_GAMMA, "q": 1}
    settings = {
        NAME: rule,
        BESIDE_NAME: rule,
        "loss": high,
        "level_only": {**low, "gamma": rule["gamma_level"], "q": 1},
        "crowding_only": crowding,
        "dime_theory": crowding,
        "sima_l4": low,
        "pia_l2": high,
        "pia_l4": high,
    }
    return [Job(get_attack(name), setting) for name, setting in settings.items()]


def ask(
    denoiser: Denoiser, source: data.Source, images: ImageRoles, jobs: Sequence[Job], directory: pathlib.Path, seed: int
) -> ScoreTable:
    """Ask a model about the images, or finish that."""
    indices, options = stages.shuffled(images.all, seed), scoring.ScoringOptions(micro_batch=50)
    return scoring.score(denoiser, source, jobs, directory, indices=indices, seed=seed, options=options)


def count(
    table: ScoreTable, reference: ScoreTable | None, images: ImageRoles, pictures: Statistics, seed: int
) -> Found:
    """What each attack achieves.

    Args:
      table: of the model.
      reference: of the second one; None if it is asked alone.
      images: who is who.
      pictures: their statistics.
      seed: of intervals.
    """
    table = dataclasses.replace(table, reference=reference)
    known = KnownImages(table, Split(images.member, images.counted), pictures)
    found = {}
    for job in fixed_jobs(table.schedule):
        plain = calibration.fixed_rule(job.attack, table.schedule, job.setting)
        scores: dict[Way, Pair[np.ndarray]] = {}
        for way in stages.ways(pictures=True, reference=reference is not None):
            frozen = plain
            if way is not Way.PLAIN:
                terms = stages.terms_of(table, calibration.to_adjust(plain, way), images.fitted)
                frozen = calibration.adjust(plain, terms, pictures.of(images.fitted), way)
            scores[way] = known.scores(frozen)
        found[job.attack.name] = {way.value: _counted(of, scores[Way.PLAIN], seed) for way, of in scores.items()}
    return found


def _counted(scores: Pair[np.ndarray], plain: Pair[np.ndarray], seed: int) -> Counted:
    rates, lead = metrics.evaluate(*scores, seed=seed), metrics.compare(scores, plain, seed=seed)
    return Counted(rates.auc, rates.tpr_at_fpr[0.01], lead.auc_difference)
