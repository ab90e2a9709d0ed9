"""The deletion check: the same candidates against a model before and after, with everything frozen on the one before.

COMPARE/compare.json, compare.npz    what was compared, and what came out
COMPARE/run.json ... calibration/    with known members: how the attack was calibrated, on the model before
COMPARE/before/, COMPARE/after/      score tables of held-out images and candidates under each model
COMPARE/candidates.csv, report.html, figures/

compare.json holds the digests of the others, those of score tables by their manifests (see `digests`).
"""

import io
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dime_jax import digests, evidence, model_check, pipeline, score_table, scoring
from dime_jax._csv import write_csv
from dime_jax.attacks import Setting
from dime_jax.auditing import findings
from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.images import AuditImages, open_images
from dime_jax.auditing.record import SCHEMA_VERSION, Choice, by_label, frozen_attacks, label, theory_weights
from dime_jax.auditing.stages import (
    AuditResult,
    calibrate,
    check_model,
    describe_model,
    environment,
    picture_statistics,
    say,
)
from dime_jax.checkpoints import open_model
from dime_jax.denoiser import Denoiser
from dime_jax.denoiser_check import DenoiserCheck
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
    for model in models:
        check_model(config, model.denoiser, images)
    (decider, why), heldout, setting = _choose(config, models[0].denoiser, images)
    indices = np.concatenate([heldout, images.candidates])
    for name, model in zip(MODELS, models):
        say(config, f"{name}: {model.describe()}")
        scoring.score(
            model.denoiser,
            images.source,
            [pipeline.frozen_job(decider)],
            config.directory / name,
            indices=pipeline.shuffled(indices, config.seed),
            tolerated=images.candidates,
            seed=config.seed,
            options=config.options,
        )
    facts = {
        "settings": {**config.to_json(), "after": _name(after)},
        "models": {name: describe_model(model) for name, model in zip(MODELS, models)},
        "images": {
            "members": len(images.split.member),
            "heldout": len(heldout),
            **images.counts(),
        },
        "unusable_candidates": images.unusable_candidates(),
        "decided_by": label(decider),
        "chosen": why,
        "theory_setting": setting,
        "duplicates": images.duplicates,
        "image_warnings": images.warnings,
        "environment": environment(),
    }
    (config.directory / "compare.json").unlink(missing_ok=True)  # a kill must not leave the old one with new arrays
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        allow_pickle=False,
        heldout=heldout,
        candidates=images.candidates,
        groups=images.groups[indices],
        **picture_statistics(images, models[0].denoiser, heldout, config.seed),
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


def _choose(config: AuditConfig, before: Denoiser, images: AuditImages) -> tuple[Choice, np.ndarray, Setting | None]:
    """The attack that decides, held-out images that had no part in that choice, and the setting if it was stated."""
    if not len(images.split.member):
        setting = config.theory_setting()
        return Choice(theory_weights(before.schedule, setting), "theory weights"), images.split.heldout, setting
    choice, halves = calibrate(config, before, images)
    return choice, images.reference(halves.calibration), None


def _report(directory: pathlib.Path, facts: dict[str, Any]) -> AuditResult:
    tables = {name: score_table.read_table(directory / name) for name in MODELS}
    manifests = [f"{name}/manifest.json" for name in MODELS]
    files, unsealed = ["compare.npz", *manifests], digests.warn_of_unsealed(directory, manifests)
    if (directory / model_check.FILE).is_file():  # comparisons of older versions have none
        files.append(model_check.FILE)
    if not facts["theory_setting"]:
        files += ["run.json", "halves.npz", "calibration.json", pipeline.MANIFESTS["calibration"]]
    frozen = frozen_attacks(directory, facts["theory_setting"], tables["before"].schedule)
    decider = by_label(frozen, facts["decided_by"])
    arrays = digests.load_arrays(directory / "compare.npz", (directory / "compare.npz").read_bytes())
    heldout, candidates, groups = arrays["heldout"], arrays["candidates"], arrays["groups"]
    direction = evidence.NOT_CHECKED
    if facts["theory_setting"] is None:
        direction = pipeline.read_direction(directory, ["calibration"])
    likeness = _likeness(arrays, len(heldout), facts["settings"]["seed"])
    checks = {
        name: model_check.read_check(directory, table.manifest["identity"]["model"]) for name, table in tables.items()
    }
    scores = {name: pipeline.frozen_scores(table, decider, candidates) for name, table in tables.items()}
    answered = np.all([np.isfinite(side) for side in scores.values()], axis=0)
    like = np.ones(len(candidates), bool) if likeness is None else ~likeness.unlike
    withheld = _withheld(checks.values(), direction) or findings.too_few_answers(answered)
    if likeness is not None and (likeness.set_unlike or np.sum(likeness.unlike) > len(candidates) / 2):
        withheld = withheld or findings.UNLIKE_SET
    if withheld is None:
        scores = {name: np.where(like, values, np.nan) for name, values in scores.items()}
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
    rows = [
        {
            "id": ids[index],
            **{name: None if withheld else getattr(check, name)[row] for name in ("p_before", "p_after")},
            **{name: not withheld and getattr(check, name)[row] for name in ("flagged_before", "flagged_after")},
        }
        for row, index in enumerate(candidates.tolist())
    ]
    reasons = np.select(
        [np.full(len(candidates), withheld is not None), ~answered, ~like],
        [withheld or "", findings.NO_FINITE_ANSWER, findings.UNLIKE],
        "",
    ).tolist()
    rows = findings.explained_rows(rows, reasons, facts, {"flagged_before": False, "flagged_after": False})
    dropped = int(np.sum(~usable))
    left_out = [f"{findings.NO_FINITE_ANSWER} for {dropped} held-out images: they were left out"] if dropped else []
    results = {
        "schema_version": SCHEMA_VERSION,
        "facts": facts,
        "verdict": f"cannot tell: {withheld}" if withheld else check.verdict,
        "withheld": withheld,
        "direction": direction.to_json(),
        "likeness": likeness and {"set_p": likeness.set_p, "set_unlike": likeness.set_unlike},
        **{name: None if withheld else getattr(check, name) for name in ("set_before", "set_after", "change")},
        **{name: getattr(check, name) for name in ("p_cutoff", "rule")},
        "flagged": {name: sum(bool(row[f"flagged_{name}"]) for row in rows) for name in MODELS},
        "decided_by": {
            "attack": decider.attack,
            "queries_per_image": pipeline.frozen_job(decider).queries,
            "setting": decider.setting,
            "chosen": facts.get("chosen", ""),
        },
        "fingerprints": {name: table.manifest["identity"]["model"] for name, table in tables.items()},
        "precision": tables["before"].manifest["identity"]["precision"],
        "seed": settings["seed"],
        "queries_made": sum(table.queries_made for table in tables.values())
        + sum(found.queries for found in checks.values() if found)
        + _calibration_queries(directory, facts),
        "model_check": {name: found and found.to_json() for name, found in checks.items()},
        "warnings": [*facts["image_warnings"], *left_out, *([] if withheld else check.warnings), *unsealed],
    }
    results = findings.plain(results)
    results["headline"] = wording.deletion_headline(results)
    rows = findings.plain(rows)
    write_csv(directory / "candidates.csv", rows)
    pipeline.write_sealed(directory / "compare.json", results, files)
    return AuditResult(results, directory, html.write_comparison(directory, results, rows))


def _likeness(arrays: Mapping[str, np.ndarray], num_heldout: int, seed: int) -> evidence.Likeness | None:
    """The candidates beside the held-out images, as pictures; None for comparisons from before that was looked at."""
    if "candidate_statistics" not in arrays:
        return None
    groups = arrays["groups"]
    of_heldout = dict(zip(arrays["heldout"].tolist(), groups[:num_heldout].tolist()))
    return evidence.likeness(
        arrays["candidate_statistics"],
        arrays["compared_statistics"],
        groups[num_heldout:],
        np.array([of_heldout[index] for index in arrays["compared"].tolist()]),
        seed,
    )


def _withheld(checks: Iterable[DenoiserCheck | None], direction: evidence.Direction) -> str | None:
    """Why there is no verdict on the deletion, if there is none."""
    if any(check is not None and not check.passed for check in checks):
        return "a model does not predict noise the way it was asked to"
    if direction.judgement is evidence.Judgement.BELOW:
        return "members and held-out images look swapped"
    return None


def _calibration_queries(directory: pathlib.Path, facts: dict[str, Any]) -> int:
    return 0 if facts["theory_setting"] else score_table.read_table(directory / "calibration").queries_made


def _name(model: str | os.PathLike[str] | Denoiser) -> str:
    return model.name if isinstance(model, Denoiser) else os.fspath(model)
