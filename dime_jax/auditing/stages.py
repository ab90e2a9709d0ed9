"""The audit, stage after stage: open, check, score, calibrate, score, find, report.

Every stage that makes queries continues where it was interrupted; the others take seconds and are repeated.
"""

import dataclasses
import os
import pathlib
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dime_jax import scoring
from dime_jax._util.records import Json, plain_object
from dime_jax.attacks.modules import describe_module, load_again
from dime_jax.auditing import cost, pictures
from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.deciding import Decision, decide
from dime_jax.auditing.images import AuditImages, open_images
from dime_jax.auditing.pictures import Blind
from dime_jax.core.denoiser import Denoiser
from dime_jax.data import Split
from dime_jax.data.variations import VARIATIONS, varied
from dime_jax.findings import finding, json_files
from dime_jax.findings.results import AuditFindings, DeletionFindings
from dime_jax.guards import identity, model_check
from dime_jax.loading.opening import OpenedModel, open_model
from dime_jax.protocol import pipeline
from dime_jax.protocol.arrays import AuditArrays
from dime_jax.protocol.facts import AuditFacts, Environment, HalfCounts, ImageCounts, ModelFacts
from dime_jax.protocol.record import Record, candidates_directory, read_reference, variations_directory
from dime_jax.report import html


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
    model = open_model(config.model, config.directory, config.conversion, lambda text: say(config, text), config.remote)
    images = open_images(config, model.denoiser)
    say(config, _introduction(model, images))
    for warning in [*config.left_out(config.offered(model.denoiser)), *images.warnings]:
        say(config, f"warning: {warning}")
    config.directory.mkdir(parents=True, exist_ok=True)
    config = cost.announced(config, images, model.denoiser, say)
    config = check_model(config, model.denoiser, images)
    decision = decide(config, model.denoiser, images)
    if decision.halves is not None:
        pipeline.score_half(config.directory, "test", model.denoiser, images.source, options=config.options)
    if len(images.candidates):
        score_candidates(
            config, model.denoiser, images, decision, candidates_directory(config.directory, decision.label)
        )
    if len(images.candidates) and config.variations:
        _score_variations(config, model.denoiser, images, decision)
    return _report(_write_record(config, model, images, decision))


def _write_record(config: AuditConfig, model: OpenedModel, images: AuditImages, decision: Decision) -> Record:
    """Write down all that the report is made from, once all queries are made."""
    shape, halves = model.denoiser.image_shape, decision.halves
    reference = read_reference(config.directory, decision.label, decision.heldout, halves is not None)
    thumbnails = pictures.make_thumbnails(images, shape, reference.split, reference.scores(decision.decider))
    statistics = known_statistics = None
    if len(images.candidates):
        statistics = pictures.picture_statistics(images, shape, decision.heldout, config.seed)
    if len(images.candidates) and halves is not None:
        known_statistics = pictures.known_statistics(images, shape, decision.heldout, halves)
    blind = captions = Blind(None, None)
    if halves is not None:
        blind = pictures.fit_blind_baseline(images, shape, reference.split, config.seed)
    if halves is not None and asked_captions(config, model.denoiser) == "own":
        captions = pictures.fit_caption_baseline(images, reference.split, config.seed)
    unusable = images.count_unusable()
    facts = AuditFacts(
        settings=config.settings(),
        images=ImageCounts(
            members=len(images.split.member),
            heldout=len(images.split.heldout),
            calibration=None if halves is None else _sizes(halves.calibration),
            test=None if halves is None else _sizes(halves.test),
            candidates=len(images.candidates) + unusable.candidates,
            unusable=unusable,
        ),
        unusable_candidates=images.unusable_candidates(),
        attack_module=describe_module(config.attack_module),
        decided_by=decision.label,
        chosen=decision.why,
        theory_setting=decision.theory_setting,
        duplicates=images.duplicates,
        environment=environment(),
        captions=asked_captions(config, model.denoiser),
        grid_size=1 if halves is None else len(pipeline.read_jobs(config.directory)),
        model=describe_model(model),
        warnings=(
            *images.warnings,
            *blind.warnings,
            *captions.warnings,
            *identity.noise_warnings(config.directory, model.denoiser.fingerprint),
        ),
        blind_auc=blind.auc,
        caption_auc=captions.auc,
    )
    truth = np.zeros(0, bool) if images.truth is None else images.truth
    arrays = AuditArrays(
        decision.heldout,
        images.candidates,
        truth,
        images.groups,
        thumbnails,
        statistics,
        blind.scores,
        captions.scores,
        known_statistics,
    )
    return json_files.write_record(config.directory, facts, arrays)


def check_model(config: AuditConfig, denoiser: Denoiser, images: AuditImages) -> AuditConfig:
    """Check that the model is a denoiser, before thousands of queries; say so at once if it is none.

    Returns:
      The same audit, that notices if the model is another than the one it was begun with.
    """
    found = model_check.check_once(
        config.directory, denoiser, images.source, images.split.heldout, seed=config.seed, options=config.options
    )
    if not found.passed:
        say(config, f"warning: {found.summary}")
    options = identity.guarded(config.directory, denoiser, config.options)
    return dataclasses.replace(config, options=options)


def score_candidates(
    config: AuditConfig, denoiser: Denoiser, images: AuditImages, decision: Decision, directory: pathlib.Path
) -> None:
    """Ask about the candidates, and about the held-out images to compare them with, by the attack that decides."""
    scoring.score(
        denoiser,
        images.source,
        [pipeline.frozen_job(decision.decider)],
        directory,
        indices=pipeline.shuffled(np.concatenate([decision.heldout, images.candidates]), config.seed),
        tolerated=images.candidates,
        seed=config.seed,
        options=config.options.within(config.directory),
    )


def _score_variations(config: AuditConfig, denoiser: Denoiser, images: AuditImages, decision: Decision) -> None:
    """Ask about variations of the held-out images and of the candidates alike."""
    source = varied(images.source, np.concatenate([decision.heldout, images.candidates]))
    places = np.arange(len(source))
    scoring.score(
        denoiser,
        source,
        [pipeline.frozen_job(decision.decider)],
        variations_directory(config.directory, decision.label),
        indices=pipeline.shuffled(places, config.seed),
        tolerated=places[len(decision.heldout) * len(VARIATIONS) :],
        seed=config.seed,
        options=config.options.within(config.directory),
    )


def report(directory: str | os.PathLike[str]) -> AuditResult:
    """Write results.json, candidates.csv, the figures and report.html of an audit again, without its model."""
    record = json_files.read_record(pathlib.Path(directory))
    return _report(record, load_again(record.facts.attack_module, record.directory))


def _report(record: Record, warnings: Sequence[str] = ()) -> AuditResult:
    found = finding.find(record, warnings)
    json_files.write_findings(record.directory, *found)
    return AuditResult(found.results, record.directory, html.write_report(record, found))


def _sizes(split: Split) -> HalfCounts:
    return HalfCounts(len(split.member), len(split.heldout))


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


def asked_captions(config: AuditConfig, denoiser: Denoiser) -> str | None:
    """With which captions the model is asked: "own" or "none"; None if it takes none."""
    return (config.captions or "own") if denoiser.takes_text else None


def environment() -> Environment:
    """Where this runs, for the record."""
    device = jax.devices()[0]
    return Environment(
        devices=f"{jax.device_count()} x {device.device_kind}",
        platform=device.platform,
        python=platform.python_version(),
        jax=jax.__version__,
        numpy=np.__version__,
    )


def _introduction(model: OpenedModel, images: AuditImages) -> str:
    split = images.split
    counts = [(len(split.member), "known members"), (len(split.heldout), "held-out images")]
    counts.append((len(images.candidates), "candidates"))
    return model.describe() + "\n" + ", ".join(f"{n:,} {what}" for n, what in counts if n)


def say(config: AuditConfig, text: str) -> None:
    """One line on standard error, unless the run is silent."""
    if not config.options.silent:
        print(text, file=sys.stderr)
