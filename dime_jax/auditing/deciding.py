"""Which attack decides about the candidates: calibrated and chosen on one half, or stated where nobody is known."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import data
from dime_jax.attacks import Setting
from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.images import AuditImages
from dime_jax.core.denoiser import Denoiser
from dime_jax.evidence import Direction
from dime_jax.protocol import pipeline
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.frozen import best_calibrated, by_label
from dime_jax.scoring import planning


class Choice(NamedTuple):
    """The attack that decides about candidates, and why this one, in words."""

    decider: Calibration
    why: str


class Decision(NamedTuple):
    """How candidates will be judged.

    Attributes:
      decider: the attack that decides.
      why: this one, in words.
      heldout: held-out images that had no part in that choice, to compare candidates with.
      halves: with known members: which images chose, and which are tested.
      theory_setting: without: the setting that was stated.
    """

    decider: Calibration
    why: str
    heldout: np.ndarray
    halves: data.Halves | None
    theory_setting: Setting | None

    @property
    def label(self) -> str:
        """The decider's."""
        return self.decider.label


def decide(config: AuditConfig, denoiser: Denoiser, images: AuditImages) -> Decision:
    """With known members, calibrate on one half of them and of the held-out images; else DIME with theory weights."""
    if not len(images.split.member):
        setting = config.theory_setting()
        why = "theory weights at a stated setting: without known members nothing can be calibrated"
        decider = pipeline.theory_weights(denoiser.schedule, setting)
        return Decision(decider, why, images.split.heldout, None, setting)
    choice, halves = _calibrate(config, denoiser, images)
    return Decision(*choice, images.reference(halves.calibration), halves, None)


def _calibrate(config: AuditConfig, denoiser: Denoiser, images: AuditImages) -> tuple[Choice, data.Halves]:
    """Score one half with the grid, freeze every attack, and choose the one that decides."""
    sizes = config.sizes()
    halves = data.halves(
        images.split,
        images.source.ids,
        seed=config.seed,
        groups=images.groups,
        calibration_size=sizes.calibration_size,
        test_size=sizes.test_size,
    )
    jobs = config.jobs(config.offered(denoiser))
    config.check_decider(planning.row_labels(jobs))
    pipeline.begin(config.directory, jobs, halves, config.seed)
    pipeline.score_half(config.directory, "calibration", denoiser, images.source, options=config.options)
    frozen = pipeline.calibrate_run(config.directory)
    direction = pipeline.read_direction(config.directory, ["calibration"], images.groups)
    return choose_decider(frozen, pipeline.asked_labels(config.directory), config.decide_with, direction), halves


def choose_decider(
    frozen: Sequence[Calibration], asked: Collection[str], wanted: str | None, direction: Direction
) -> Choice:
    """The wanted attack, or of those asked for the best on the calibration half, as far as the labels may be trusted.

    To fit weights to the labels and to pick the attack that agrees with them best both follow the labels, right or
    wrong, so either takes a witness that confirms them. Otherwise the only attack of fixed direction that was named
    decides, or else the witness itself.

    Args:
      frozen: every calibrated attack, the witness among them.
      asked: labels of the attacks that were asked for.
      wanted: label of the attack that is to decide, if the user named one.
      direction: what the witness says on the calibration half.
    """
    attacks = [one for one in frozen if one.label in asked]
    first = best_calibrated(attacks) if wanted is None else by_label(attacks, wanted)
    why = "highest AUC on the calibration half" if wanted is None else "asked for"
    fixed = [one for one in attacks if not one.learned_direction and wanted in (None, one.label)]
    witness = by_label(frozen, planning.WITNESS_LABEL)
    if direction.may_learn or first == witness or [first] == fixed:
        return Choice(first, why)
    if len(fixed) == 1:
        instead, decider = "the only attack of fixed direction", fixed[0]
    else:
        instead, decider = "the witness of direction", witness
    return Choice(decider, f"{instead}; {first.label} ({why}) follows the labels, which the witness does not confirm")
