"""The deletion check: the same candidates against a model before and after, with everything frozen on the one before.

COMPARE/compare.json, compare.npz    what was compared, and what came out
COMPARE/run.json ... calibration/    with known members: how the attack was calibrated, on the model before
COMPARE/before/, COMPARE/after/      score tables of held-out images and candidates under each model
COMPARE/candidates.csv, report.html, figures/
"""

import io
import os
import pathlib
from typing import Any

import numpy as np

from dime_jax import evidence, pipeline, score_table, scoring
from dime_jax.attacks import Setting
from dime_jax.auditing import findings
from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.images import AuditImages, open_images
from dime_jax.auditing.record import SCHEMA_VERSION, choose_decider, frozen_attacks, label, theory_weights
from dime_jax.auditing.stages import AuditResult, calibrate, describe_model, environment, say
from dime_jax.calibration import Calibration
from dime_jax.checkpoints import open_model
from dime_jax.denoiser import Denoiser
from dime_jax.report import html, wording

MODELS = ("before", "after")


def compare(config: AuditConfig, after: str | os.PathLike[str] | Denoiser) -> AuditResult:
    """Check a deletion: do `config.candidates` look like training images of `config.model`, and of `after` no more?

    The attack, its setting and its weights are chosen on the model before (with known members, on a half of them and of
    the held-out images; else theory weights), and then asked of both models about the same held-out images and
    candidates. An interrupted comparison continues.

    Raises:
      ValueError: in one line, as `audit`; and for two models that are the same or take different images.
    """
    if config.candidates is None:
        raise ValueError("expected candidates: the images whose deletion is to be checked")
    models = [open_model(model, config.directory, config.conversion) for model in (config.model, after)]
    _check_models(*(model.denoiser for model in models))
    images = open_images(config, models[0].denoiser)
    for warning in images.warnings:
        say(config, f"warning: {warning}")
    config.directory.mkdir(parents=True, exist_ok=True)
    decider, heldout, setting = _choose(config, models[0].denoiser, images)
    indices = np.concatenate([heldout, images.candidates])
    for name, model in zip(MODELS, models):
        say(config, f"{name}: {model.describe()}")
        scoring.score(
            model.denoiser,
            images.source,
            [pipeline.frozen_job(decider)],
            config.directory / name,
            indices=pipeline.shuffled(indices, config.seed),
            seed=config.seed,
            options=config.options,
        )
    facts = {
        "settings": {**config.to_json(), "after": _name(after)},
        "models": {name: describe_model(model) for name, model in zip(MODELS, models)},
        "images": {
            "members": len(images.split.member),
            "heldout": len(heldout),
            "candidates": len(images.candidates),
        },
        "decided_by": label(decider),
        "theory_setting": setting,
        "duplicates": images.duplicates,
        "image_warnings": images.warnings,
        "environment": environment(),
    }
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, allow_pickle=False, heldout=heldout, candidates=images.candidates, groups=images.groups[indices]
    )
    score_table.write_atomically(config.directory / "compare.npz", buffer.getvalue())
    return _report(config.directory, facts)


def report_comparison(directory: str | os.PathLike[str]) -> AuditResult:
    """Write compare.json, candidates.csv, the figure and report.html of a comparison again, without its models."""
    directory = pathlib.Path(directory)
    if not (directory / "compare.json").is_file():
        raise ValueError(f"{directory} holds no comparison: no compare.json in it")
    contents = pipeline.read_json(directory / "compare.json")
    if contents.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{directory / 'compare.json'}: expected schema_version {SCHEMA_VERSION}")
    return _report(directory, contents["facts"])


def _check_models(before: Denoiser, after: Denoiser) -> None:
    if before.fingerprint == after.fingerprint:
        raise ValueError(f"expected two different models, got {before.fingerprint[:16]} twice")
    for name in ("image_shape", "num_classes"):
        one, two = getattr(before, name), getattr(after, name)
        if one != two:
            raise ValueError(f"expected both models with one {name}, got {one} before and {two} after")


def _choose(
    config: AuditConfig, before: Denoiser, images: AuditImages
) -> tuple[Calibration, np.ndarray, Setting | None]:
    """The attack that decides, held-out images that chose nothing, and the setting if it was only stated."""
    if not len(images.split.member):
        setting = config.theory_setting()
        return theory_weights(before.schedule, setting), images.split.heldout, setting
    decider, halves = calibrate(config, before, images)
    return decider, halves.test.heldout, None


def _report(directory: pathlib.Path, facts: dict[str, Any]) -> AuditResult:
    tables = {name: score_table.read_table(directory / name) for name in MODELS}
    frozen = frozen_attacks(directory, facts["theory_setting"], tables["before"].schedule)
    decider = choose_decider(frozen, facts["decided_by"])
    with np.load(directory / "compare.npz", allow_pickle=False) as arrays:
        heldout, candidates, groups = arrays["heldout"], arrays["candidates"], arrays["groups"]
    scores = {name: pipeline.frozen_scores(table, decider, candidates) for name, table in tables.items()}
    reference = {name: pipeline.frozen_scores(table, decider, heldout) for name, table in tables.items()}
    usable = np.all([np.isfinite(side) for side in reference.values()], axis=0)
    grouped = groups if np.any(groups >= 0) else None
    settings = facts["settings"]
    check = evidence.deletion_check(
        scores["before"],
        scores["after"],
        reference["before"][usable],
        reference["after"][usable],
        None if grouped is None else grouped[len(heldout) :],
        settings["level"],
        settings["seed"],
        heldout_groups=None if grouped is None else grouped[: len(heldout)][usable],
    )
    ids = dict(zip(tables["before"].index.tolist(), tables["before"].ids))
    columns = ("p_before", "p_after", "flagged_before", "flagged_after")
    rows = [
        {"id": ids[index], **{name: getattr(check, name)[row] for name in columns}}
        for row, index in enumerate(candidates.tolist())
    ]
    results = {
        "schema_version": SCHEMA_VERSION,
        "facts": facts,
        **{name: getattr(check, name) for name in ("verdict", "set_before", "set_after", "change", "p_cutoff", "rule")},
        "flagged": {name: int(np.sum(getattr(check, f"flagged_{name}"))) for name in MODELS},
        "decided_by": {
            "attack": decider.attack,
            "queries_per_image": pipeline.frozen_job(decider).queries,
            "setting": decider.setting,
        },
        "fingerprints": {name: table.manifest["identity"]["model"] for name, table in tables.items()},
        "precision": tables["before"].manifest["identity"]["precision"],
        "seed": settings["seed"],
        "queries_made": sum(table.queries_made for table in tables.values()) + _calibration_queries(directory, facts),
        "warnings": [*facts["image_warnings"], *check.warnings],
    }
    results = findings.plain(results)
    results["headline"] = wording.deletion_headline(results)
    rows = findings.plain(rows)
    findings.write_csv(directory / "candidates.csv", rows)
    pipeline.write_json(directory / "compare.json", results)
    return AuditResult(results, directory, html.write_comparison(directory, results, rows))


def _calibration_queries(directory: pathlib.Path, facts: dict[str, Any]) -> int:
    return 0 if facts["theory_setting"] else score_table.read_table(directory / "calibration").queries_made


def _name(model: str | os.PathLike[str] | Denoiser) -> str:
    return model.name if isinstance(model, Denoiser) else os.fspath(model)
