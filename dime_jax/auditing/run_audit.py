"""The audit, from one stage to the next: open, check, score, calibrate, score, find, report.

Every stage that makes queries continues where it was interrupted; the others take seconds and are repeated.
"""

import dataclasses
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dime_jax import data, scoring
from dime_jax._util.distributed import on_first_process
from dime_jax._util.records import Json, plain_object
from dime_jax.attacks.modules import describe_module, load_again
from dime_jax.auditing import cost, pictures
from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.deciding import Decision, decide
from dime_jax.auditing.images import open_images
from dime_jax.auditing.models import open_models
from dime_jax.auditing.reference import train_beside
from dime_jax.core.denoiser import Denoiser
from dime_jax.data.role_checks import CheckedImages
from dime_jax.data.variations import VARIATIONS, varied
from dime_jax.evidence import Way
from dime_jax.findings import finding, json_files
from dime_jax.findings.results import AuditFindings, DeletionFindings
from dime_jax.guards import identity
from dime_jax.loading.opening import OpenedModel
from dime_jax.protocol import beside, stages, statistics
from dime_jax.protocol.arrays import AuditArrays
from dime_jax.protocol.blind import Blind, fit_blind, fit_caption_baseline
from dime_jax.protocol.facts import AuditFacts, Environment, HalfCounts, ImageCounts, ModelFacts, RunFacts
from dime_jax.protocol.record import Record, candidates_place, read_known, variations_place
from dime_jax.report import html
from dime_jax.scoring.query_ledger import REFERENCE


class AuditResult(NamedTuple):
    """What an audit or a comparison leaves: what was found, its directory, and the page to read."""

    findings: AuditFindings | DeletionFindings
    directory: pathlib.Path
    report: pathlib.Path

    @property
    def results(self) -> Mapping[str, Json]:
        """results.json or compare.json, as a dictionary."""
        return plain_object(self.findings)


def audit(config: AuditConfig) -> AuditResult:
    """Audit a model, or finish an audit that was interrupted.

    Raises:
      ValueError: in one line, for anything in the settings, model or images that makes the audit impossible or its
        result meaningless.
    """
    model, reference = open_models(config)
    images = open_images(config, model.denoiser)
    if config.trains_reference:
        images, reference = train_beside(config, model, images)
    opened = model, reference
    config.options.say(_introduction(opened, images))
    begin(config, model.denoiser, images)
    hooks = scoring.Hooks(on_rate=cost.eta_hook(config, images, model.denoiser))
    take = ("calibration", "calibrate", "test")
    decision = decide(config, model.denoiser, images, take, hooks, reference and reference.denoiser)
    if len(images.candidates):
        score_candidates(config, images, decision, candidates_place(decision.label))
    if len(images.candidates) and config.variations:
        _score_variations(config, images, decision)
    on_first_process(lambda: _write_record(config, opened, images, decision))
    return _report(json_files.read_record(config.directory))


def _write_record(
    config: AuditConfig,
    opened: tuple[OpenedModel, OpenedModel | None],
    images: CheckedImages,
    decision: Decision,
) -> None:
    """Write down all that the report is made from, once all queries are made."""
    model, reference = opened
    shape, halves = model.denoiser.image_shape, decision.halves
    known = read_known(config.directory, decision.label, decision.heldout, halves is not None)
    thumbnails = pictures.make_thumbnails(images, shape, known.split, known.scores(decision.decider))
    likeness = None
    if len(images.candidates):
        likeness = pictures.picture_statistics(images, shape, decision.heldout, config.seed)
    blind = captions = Blind(None, None)
    if halves is not None:
        blind = fit_blind(
            images.source, images.groups, data.transform_for(images.source, shape), known.split, config.seed
        )
    if halves is not None and model.denoiser.takes_text and config.captions != "none":
        captions = fit_caption_baseline(images.source, images.groups, known.split, config.seed)
    shared = describe_run(config, model.denoiser, images, decision)
    counts = dataclasses.replace(
        shared.images,
        heldout=len(images.split.heldout),
        calibration=None if halves is None else HalfCounts(*halves.calibration.sides.map(len)),
        test=None if halves is None else HalfCounts(*halves.test.sides.map(len)),
    )
    noisy, beside_it = identity.noise_warnings(config.directory, model.denoiser.fingerprint), None
    if reference is not None:
        beside_it = describe_model(reference)
        theirs = identity.noise_warnings(config.directory / REFERENCE, reference.denoiser.fingerprint)
        noisy += [f"reference: {line}" for line in theirs]
    facts = AuditFacts(
        **vars(dataclasses.replace(shared, images=counts, reference=beside_it)),
        grid_size=1 if halves is None else len(stages.read_jobs(config.directory)),
        model=describe_model(model),
        warnings=(*images.warnings, *blind.warnings, *captions.warnings, *noisy),
        blind_auc=blind.auc,
        caption_auc=captions.auc,
    )
    arrays = AuditArrays(
        decision.heldout,
        images.candidates,
        images.groups,
        thumbnails=thumbnails,
        statistics=likeness,
        blind=blind.scores,
        caption_blind=captions.scores,
    )
    if images.truth is not None:
        arrays = dataclasses.replace(arrays, truth=images.truth)
    json_files.write_record(config.directory, facts, arrays)


def score_candidates(config: AuditConfig, images: CheckedImages, decision: Decision, place: str) -> None:
    """Ask about the candidates, and about the held-out images to compare them with, by the attack that decides."""
    both = np.concatenate([decision.heldout, images.candidates])
    _score(config, images.source, decision, place, both, images.candidates)


def _score_variations(config: AuditConfig, images: CheckedImages, decision: Decision) -> None:
    """Ask about variations of the held-out images and of the candidates alike."""
    source = varied(images.source, np.concatenate([decision.heldout, images.candidates]))
    places, place = np.arange(len(source)), variations_place(decision.label)
    transform = data.transform_for(source, decision.model.denoiser.image_shape)
    statistics.make(config.directory / "variations", source, places, transform)
    of_candidates = places[len(decision.heldout) * len(VARIATIONS) :]
    _score(config, source, decision, place, places, of_candidates)


def _score(
    config: AuditConfig,
    source: data.Source,
    decision: Decision,
    place: str,
    indices: np.ndarray,
    tolerated: np.ndarray,
) -> None:
    """Score some images by the attack that decides; `tolerated` as for `scoring.score`."""
    beside.score(
        decision.model,
        config.directory,
        place,
        source,
        [stages.frozen_job(decision.decider)],
        indices=stages.shuffled(indices, config.seed),
        tolerated=tolerated,
        seed=config.seed,
        options=config.options,
    )


def report(directory: str | os.PathLike[str]) -> AuditResult:
    """Write results.json, candidates.csv, the figures and report.html of an audit again, without its model."""
    record = json_files.read_record(pathlib.Path(directory))
    return _report(record, load_again(record.facts.attack_module, record.directory))


def _report(record: Record, warnings: Sequence[str] = ()) -> AuditResult:
    found = finding.find(record, warnings)

    def write() -> None:
        json_files.write_findings(record.directory, *found)
        html.write_report(record, found)

    on_first_process(write)
    return AuditResult(found.results, record.directory, record.directory / html.PAGE)


def describe_model(model: OpenedModel) -> ModelFacts:
    """A model, for the record."""
    denoiser = model.denoiser
    return ModelFacts(
        name=denoiser.name,
        origin=model.origin,
        facts=tuple(model.facts),
        commit=model.commit,
        fingerprint=denoiser.fingerprint,
        image_shape=tuple(denoiser.image_shape),
        num_classes=denoiser.num_classes,
        num_steps=denoiser.schedule.num_steps,
    )


def begin(config: AuditConfig, denoiser: Denoiser, images: CheckedImages) -> None:
    """Warn of what is left out and of what is wrong with the images, and make the output directory."""
    for warning in [*config.left_out(config.offered(denoiser)), *images.warnings]:
        config.options.say(f"warning: {warning}")
    config.directory.mkdir(parents=True, exist_ok=True)


def describe_run(
    config: AuditConfig,
    denoiser: Denoiser,
    images: CheckedImages,
    decision: Decision,
    after: str | os.PathLike[str] | Denoiser | None = None,
) -> RunFacts:
    """What audits and comparisons (with the model `after`) both write down."""
    unusable = images.count_unusable()
    return RunFacts(
        settings=config.settings(after),
        images=ImageCounts(
            members=len(images.split.member),
            heldout=len(decision.heldout),
            candidates=len(images.candidates) + unusable.candidates,
            unusable=unusable,
        ),
        unusable_candidates=images.unusable_candidates(),
        attack_module=describe_module(config.attack_module),
        decided_by=decision.label,
        chosen=decision.why,
        adjusted=decision.way is not Way.PLAIN,
        way=decision.way if decision.way.reference else None,
        fixed_setting=decision.fixed_setting,
        duplicates=images.duplicates,
        environment=_environment(),
        captions=(config.captions or "own") if denoiser.takes_text else None,
    )


def _environment() -> Environment:
    device = jax.devices()[0]
    return Environment(
        devices=f"{jax.device_count()} x {device.device_kind}",
        platform=device.platform,
        python=platform.python_version(),
        jax=jax.__version__,
        numpy=np.__version__,
    )


def _introduction(opened: tuple[OpenedModel, OpenedModel | None], images: CheckedImages) -> str:
    split, (model, reference) = images.split, opened
    counts = [(len(split.member), "known members"), (len(split.heldout), "held-out images")]
    counts.append((len(images.candidates), "candidates"))
    described = [model.describe(), *([] if reference is None else [f"reference: {reference.describe()}"])]
    return "\n".join([*described, ", ".join(f"{n:,} {what}" for n, what in counts if n)])
