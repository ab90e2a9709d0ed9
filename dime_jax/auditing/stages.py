"""The audit, stage after stage: open, check, score, calibrate, score, find, report.

Every stage that makes queries continues where it was interrupted; the others take seconds and are repeated.
"""

import pathlib
import platform
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image

from dime_jax import data, evidence, model_check, pipeline, scoring
from dime_jax.auditing import cost, findings
from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.images import AuditImages, open_images
from dime_jax.auditing.record import Choice, Record, choose_decider, label, read_record, theory_weights, write_record
from dime_jax.checkpoints import OpenedModel, open_model
from dime_jax.data import Split
from dime_jax.denoiser import Denoiser
from dime_jax.report import html

THUMBNAIL_SIDE = 96
SHOWN = 8  # images in each row of examples
_MOST_CANDIDATE_THUMBNAILS = 200
# The blind baseline holds its images in memory: at most so many of a side, and so many values.
_BLIND_IMAGES, _BLIND_VALUES = 1500, 2**26
_STATISTICS_BATCH = 64


class AuditResult(NamedTuple):
    """What an audit leaves: results.json as a dictionary, its directory, and the page to read."""

    results: dict[str, Any]
    directory: pathlib.Path
    report: pathlib.Path


def audit(config: AuditConfig) -> AuditResult:
    """Audit a model, or finish an audit that was interrupted.

    Raises:
      ValueError: in one line, for anything in the settings, model or images that makes the audit impossible or its
        result meaningless.
    """
    model = open_model(config.model, config.directory, config.conversion)
    images = open_images(config, model.denoiser)
    say(config, _introduction(model, images))
    for warning in images.warnings:
        say(config, f"warning: {warning}")
    config.directory.mkdir(parents=True, exist_ok=True)
    config = cost.announced(config, images, model.denoiser.schedule, say)
    check_model(config, model.denoiser, images)
    prepare = _with_members if len(images.split.member) else _without_members
    (decider, why), heldout, facts = prepare(config, model.denoiser, images)
    if len(images.candidates):
        scoring.score(
            model.denoiser,
            images.source,
            [pipeline.frozen_job(decider)],
            config.directory / "candidates" / label(decider),
            indices=pipeline.shuffled(np.concatenate([heldout, images.candidates]), config.seed),
            tolerated=images.candidates,
            seed=config.seed,
            options=config.options,
        )
    facts["images"] |= images.counts()
    facts |= {
        "unusable_candidates": images.unusable_candidates(),
        "settings": config.to_json(),
        "model": describe_model(model),
        "duplicates": images.duplicates,
        "warnings": images.warnings,
        "decided_by": label(decider),
        "chosen": why,
        "environment": environment(),
    }
    arrays = {
        "heldout": heldout,
        "candidates": images.candidates,
        "truth": np.zeros(0, bool) if images.truth is None else images.truth,
        "groups": images.groups,
    }
    record = Record(config.directory, facts, arrays)
    arrays |= _thumbnails(record, images, model.denoiser)
    if len(images.candidates):
        arrays |= picture_statistics(images, model.denoiser, heldout, config.seed)
    if record.members_known:
        try:
            blind, scores = _blind_baseline(config, record.split, images, model.denoiser)
            facts, arrays = facts | {"blind_auc": findings.plain(blind.auc)}, arrays | scores
        except evidence.GroupsTooLarge as error:
            unknown = f"whether members and held-out images differ without the model could not be checked: {error}"
            facts |= {"warnings": [*images.warnings, unknown]}
    return _report(write_record(config.directory, facts, arrays))


def check_model(config: AuditConfig, denoiser: Denoiser, images: AuditImages) -> None:
    """Check that the model is a denoiser, before thousands of queries; say so at once if it is none."""
    found = model_check.check_once(
        config.directory, denoiser, images.source, images.split.heldout, seed=config.seed, options=config.options
    )
    if not found.passed:
        say(config, f"warning: {found.summary}")


def report(directory: str | pathlib.Path) -> AuditResult:
    """Write results.json, candidates.csv, the figures and report.html of an audit again, without its model."""
    return _report(read_record(pathlib.Path(directory)))


def _report(record: Record) -> AuditResult:
    found = findings.find(record)
    findings.write(record, found)
    return AuditResult(found.results, record.directory, html.write_report(record, found))


def calibrate(config: AuditConfig, denoiser: Denoiser, images: AuditImages) -> tuple[Choice, data.Halves]:
    """Score one half with the whole grid, freeze every attack, and choose the one that decides."""
    sizes = config.sizes()
    halves = data.halves(
        images.split,
        images.source.ids,
        seed=config.seed,
        groups=images.groups,
        calibration_size=sizes.calibration_size,
        test_size=sizes.test_size,
    )
    pipeline.begin(config.directory, config.jobs(), halves, config.seed)
    pipeline.score_half(config.directory, "calibration", denoiser, images.source, options=config.options)
    frozen, direction = (
        pipeline.calibrate_run(config.directory),
        pipeline.read_direction(config.directory, ["calibration"]),
    )
    return choose_decider(frozen, pipeline.asked_labels(config.directory), config.decide_with, direction), halves


def _with_members(
    config: AuditConfig, denoiser: Denoiser, images: AuditImages
) -> tuple[Choice, np.ndarray, dict[str, Any]]:
    """Calibrate on one half and score the other, by `pipeline`."""
    choice, halves = calibrate(config, denoiser, images)
    pipeline.score_half(config.directory, "test", denoiser, images.source, options=config.options)
    return (
        choice,
        images.reference(halves.calibration),
        {
            "images": {
                "members": len(images.split.member),
                "heldout": len(images.split.heldout),
                "calibration": _sizes(halves.calibration),
                "test": _sizes(halves.test),
            },
            "grid_size": len(pipeline.read_json(config.directory / "run.json")["jobs"]),
            "theory_setting": None,
        },
    )


def _without_members(
    config: AuditConfig, denoiser: Denoiser, images: AuditImages
) -> tuple[Choice, np.ndarray, dict[str, Any]]:
    """DIME with theory weights: nothing is calibrated, and candidates are compared with all held-out images."""
    setting = config.theory_setting()
    facts = {
        "images": {"members": 0, "heldout": len(images.split.heldout)},
        "grid_size": 1,
        "theory_setting": setting,
    }
    why = "theory weights at a stated setting: without known members nothing can be calibrated"
    return Choice(theory_weights(denoiser.schedule, setting), why), images.split.heldout, facts


def _sizes(split: Split) -> dict[str, int]:
    return {"members": len(split.member), "heldout": len(split.heldout)}


def describe_model(model: OpenedModel) -> dict[str, Any]:
    """A model, for results.json."""
    denoiser = model.denoiser
    return {
        "name": denoiser.name,
        "origin": model.origin,
        "facts": list(model.facts),
        "fingerprint": denoiser.fingerprint,
        "image_shape": list(denoiser.image_shape),
        "num_classes": denoiser.num_classes,
        "num_steps": denoiser.schedule.num_steps,
    }


def environment() -> dict[str, Any]:
    """Where this runs, for results.json."""
    device = jax.devices()[0]
    return {
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "platform": device.platform,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }


def _thumbnails(record: Record, images: AuditImages, denoiser: Denoiser) -> dict[str, np.ndarray]:
    """Small pictures, as the model sees them, of the candidates and of the images with extreme scores."""
    scores, split = record.scores(record.decider), record.split
    rows = {
        "members_found": _extremes(split.member, scores.member),
        "heldout_cleared": _extremes(split.heldout, -scores.heldout),
        "heldout_mistaken": _extremes(split.heldout, scores.heldout),
    }
    indices = np.unique(np.concatenate([*rows.values(), images.candidates[:_MOST_CANDIDATE_THUMBNAILS]]))
    transform = data.transform_for(images.source, denoiser.image_shape)
    pictures = [_thumbnail(images.source, index, transform) for index in indices]
    return rows | {"thumbnail_index": indices, "thumbnails": np.stack(pictures)}


def _extremes(indices: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The images of lowest finite score, lowest first."""
    order = np.argsort(np.where(np.isfinite(scores), scores, np.inf), kind="stable")[:SHOWN]
    return indices[order]


def _thumbnail(source: data.Source, index: int, transform: data.Transform) -> np.ndarray:
    try:
        pixels = transform(source[index].image)
    except data.BadImage:
        pixels = np.zeros(transform.shape, np.float32)
    pixels = np.round((np.clip(pixels, -1, 1) + 1) * 127.5).astype(np.uint8)
    picture = Image.fromarray(pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., 0])
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    return np.asarray(picture.convert("RGB"))


def _blind_baseline(
    config: AuditConfig, split: Split, images: AuditImages, denoiser: Denoiser
) -> tuple[evidence.BlindBaseline, dict[str, np.ndarray]]:
    """The blind baseline on the test half, or a part of it, and its scores for the paired comparison."""
    transform = data.transform_for(images.source, denoiser.image_shape)
    most = max(20, min(_BLIND_IMAGES, _BLIND_VALUES // int(np.prod(denoiser.image_shape))))
    rng = np.random.default_rng(config.seed)
    sides = [np.sort(rng.permutation(side)[:most]) for side in (split.member, split.heldout)]
    (members, readable_members), (heldout, readable_heldout) = (_load(images.source, side, transform) for side in sides)
    sides = [sides[0][readable_members], sides[1][readable_heldout]]
    groups = images.groups[np.concatenate(sides)]
    blind = evidence.blind_baseline(members, heldout, groups=groups if np.any(groups >= 0) else None, seed=config.seed)
    return blind, {
        "blind_member": sides[0],
        "blind_heldout": sides[1],
        "blind_member_scores": blind.scores_member,
        "blind_heldout_scores": blind.scores_heldout,
    }


def picture_statistics(
    images: AuditImages, denoiser: Denoiser, heldout: np.ndarray, seed: int
) -> dict[str, np.ndarray]:
    """Statistics of the candidates' pictures [m, k], NaN where unreadable, and of held-out ones to compare with."""
    transform = data.transform_for(images.source, denoiser.image_shape)
    compared = np.sort(np.random.default_rng(seed).permutation(heldout)[:_BLIND_IMAGES])
    statistics = _statistics(images.source, compared, transform)
    readable = np.all(np.isfinite(statistics), axis=1)
    return {
        "candidate_statistics": _statistics(images.source, images.candidates, transform),
        "compared": compared[readable],
        "compared_statistics": statistics[readable],
    }


def _statistics(source: data.Source, indices: np.ndarray, transform: data.Transform) -> np.ndarray:
    """`evidence.image_statistics` of some images [n, k], batch by batch; NaN where unreadable."""
    rows = []
    for batch in data.batches(source, _STATISTICS_BATCH, transform, indices=indices):
        statistics = evidence.image_statistics(np.where(batch.mask[:, None, None, None], batch.images, 0))
        rows.append(np.where(batch.mask[:, None], statistics, np.nan)[: np.sum(batch.index >= 0)])
    return np.concatenate(rows)


def _load(source: data.Source, indices: np.ndarray, transform: data.Transform) -> tuple[np.ndarray, np.ndarray]:
    """The readable images [n, H, W, C] among some, and which these are."""
    (batch,) = data.batches(source, len(indices), transform, indices=indices)
    return batch.images[batch.mask], batch.mask


def _introduction(model: OpenedModel, images: AuditImages) -> str:
    split = images.split
    counts = [(len(split.member), "known members"), (len(split.heldout), "held-out images")]
    counts.append((len(images.candidates), "candidates"))
    return model.describe() + "\n" + ", ".join(f"{n:,} {what}" for n, what in counts if n)


def say(config: AuditConfig, text: str) -> None:
    """One line on standard error, unless the run is silent."""
    if not config.options.silent:
        print(text, file=sys.stderr)
