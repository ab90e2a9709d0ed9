"""Which attack decides about the candidates: calibrated and chosen on one half, or stated where nobody is known."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import data, scoring
from dime_jax.attacks import Setting
from dime_jax.attacks.loss_level import BESIDE_LABEL, LEVEL_SIGMA, LOSS_SIGMA, RULE_LABEL
from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.images import cut
from dime_jax.core.denoiser import Denoiser
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.data.role_checks import CheckedImages
from dime_jax.evidence import Direction, Way
from dime_jax.protocol import calibration, stages, statistics
from dime_jax.protocol.beside import Guarded
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
      fixed_setting: without: the setting of the rule that decides then.
      model: for all that is asked further.
      way: what is taken out of its scores.
    """

    decider: Calibration
    why: str
    heldout: np.ndarray
    halves: data.Halves | None
    fixed_setting: Setting | None
    model: Guarded
    way: Way

    @property
    def label(self) -> str:
        """The decider's."""
        return self.decider.label


def decide(
    config: AuditConfig,
    denoiser: Denoiser,
    images: CheckedImages,
    take: Sequence[str],
    hooks: scoring.Hooks = scoring.NO_HOOKS,
    reference: Denoiser | None = None,
) -> Decision:
    """Guard the model; with known members, run the protocol and choose what decides, else take the fixed rule.

    Args:
      config: the settings.
      denoiser: the model.
      images: to ask about.
      take: stages of the protocol, the calibration of attacks among them.
      hooks: what to call meanwhile.
      reference: a second model, that is asked the same.
    """
    directory, heldout = config.directory, images.split.heldout
    if not len(images.split.member):
        decider = stages.fixed_rule(denoiser.schedule, reference=reference is not None)
        rule = "three queries" if reference is None else "two queries to the model and two to the reference"
        why = f"the fixed rule of {rule}: without known members nothing can be calibrated"
        why += _far_levels(denoiser.schedule, decider.setting)
        model = guard(config, denoiser, images, hooks, reference)
        transform = data.transform_for(images.source, denoiser.image_shape)
        statistics.make(directory, images.source, np.concatenate([heldout, images.candidates]), transform)
        way = calibration.way_of_rule(len(heldout), reference is not None)
        return Decision(decider, why, heldout, None, decider.setting, model, way)
    halves = cut(config, images.split, images.source, images.groups)
    model = run_protocol(config, denoiser, images, halves, take, hooks, reference)
    decider, why = choose_decider(
        [frozen for way in Way for frozen in stages.read_calibrations(directory, way)],
        stages.asked_labels(directory),
        config.decide_with,
        stages.read_direction(directory, ["calibration"], images.groups),
    )
    return Decision(decider, why, images.heldout_beside(halves.calibration), halves, None, model, decider.way)


def _far_levels(schedule: NoiseSchedule, setting: Setting) -> str:
    """What to add of a model whose timesteps are far from the noise levels that the fixed rule was made for."""
    meant = np.array([LOSS_SIGMA, LEVEL_SIGMA])
    found = np.array([float(schedule.sigma(int(setting[name]))) for name in ("t_loss", "t_level")])
    if not any(planning.is_far(*pair) for pair in zip(meant, found)):
        return ""
    words = (" and ".join(f"{level:.2g}" for level in levels) for levels in (meant, found))
    return "; it was made for noise levels of {}, the nearest of this model are {}".format(*words)


def run_protocol(
    config: AuditConfig,
    denoiser: Denoiser,
    images: CheckedImages,
    halves: data.Halves,
    take: Sequence[str],
    hooks: scoring.Hooks = scoring.NO_HOOKS,
    reference: Denoiser | None = None,
) -> Guarded:
    """Take stages of the protocol with the attacks and settings of a config; arguments as for `stages.run`."""
    jobs = config.jobs(config.offered(denoiser), denoiser.schedule)
    config.check_decider(planning.row_labels(jobs))
    return stages.run(
        config.directory,
        denoiser,
        images.source,
        halves,
        jobs,
        reference=reference,
        heldout=images.split.heldout,
        candidates=images.candidates,
        groups=images.groups,
        seed=config.seed,
        options=config.options,
        take=take,
        say=config.options.say,
        hooks=hooks,
    )


def guard(
    config: AuditConfig,
    denoiser: Denoiser,
    images: CheckedImages,
    hooks: scoring.Hooks = scoring.NO_HOOKS,
    reference: Denoiser | None = None,
) -> Guarded:
    """Guard a model that is not calibrated; arguments and what is returned as for `stages.guard`."""
    options, heldout = config.options, images.split.heldout
    return stages.guard(
        config.directory,
        denoiser,
        images.source,
        heldout,
        reference=reference,
        seed=config.seed,
        options=options,
        say=options.say,
        hooks=hooks,
    )


def choose_decider(
    frozen: Sequence[Calibration], asked: Collection[str], wanted: str | None, direction: Direction
) -> Choice:
    """The wanted attack, or of those asked for the best on the calibration half, as far as the labels may be trusted.

    To turn a term against theory and to pick the attack that agrees with them best both follow the labels, right or
    wrong, so either takes a witness that confirms them. Otherwise the only attack of fixed direction that was named
    decides, or the fixed rule for audits without known members, or else the witness itself; with as much taken out of
    its score as can be, which needs no labels.

    Args:
      frozen: every calibrated attack in every way, plain first, the witness among them.
      asked: labels of the attacks that were asked for.
      wanted: label of the attack that is to decide, if the user named one.
      direction: what the witness says on the calibration half.
    """
    attacks = [one for one in frozen if one.label in asked]
    first = best_calibrated(attacks) if wanted is None else by_label(attacks, wanted)
    why = "highest AUC on the calibration half" if wanted is None else "asked for"
    if direction.may_learn:
        return Choice(first, why)
    fixed = {one.label: one for one in attacks if not one.learned_direction and wanted in (None, one.label)}
    if len(fixed) == 1:
        instead, decider = "the only attack of fixed direction", *fixed.values()
    elif fixed.keys() & {RULE_LABEL, BESIDE_LABEL}:
        rule = fixed.get(BESIDE_LABEL) or fixed[RULE_LABEL]
        instead, decider = "the fixed rule, which needs no labels", rule
    else:
        witness = {one.label: one for one in frozen}[planning.WITNESS_LABEL]
        instead, decider = "the witness of direction", witness
    if decider.label == first.label:
        return Choice(decider, why)
    return Choice(decider, f"{instead}; {first.label} ({why}) follows the labels, which the witness does not confirm")
