"""The deletion check: the same candidates against a model before and after, with everything frozen on the one before.

`findings.deletion` says what is in its directory, and what it shows.
"""

import os
import pathlib
from collections.abc import Iterator, Sequence

from dime_jax._util.distributed import on_first_process
from dime_jax.attacks.modules import load_again
from dime_jax.auditing import pictures
from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.deciding import decide, guard
from dime_jax.auditing.images import open_images
from dime_jax.auditing.models import open_compared
from dime_jax.auditing.run_audit import AuditResult, begin, describe_model, describe_run, score_candidates
from dime_jax.core.denoiser import Denoiser
from dime_jax.findings import json_files
from dime_jax.findings.deletion import find_deletion
from dime_jax.guards import identity
from dime_jax.loading.opening import OpenedModel
from dime_jax.protocol.arrays import AuditArrays
from dime_jax.protocol.facts import BeforeAfter, CompareFacts
from dime_jax.protocol.record import CompareRecord
from dime_jax.report import html

_MODELS = ("before", "after")


def compare(config: AuditConfig, after: str | os.PathLike[str] | Denoiser) -> AuditResult:
    """Check a deletion: do `config.candidates` look like training images of `config.model`, and of `after` no more?

    The attack, its setting and its weights are chosen on the model before (with known members, on a half of them and of
    the held-out images; else the fixed rule of three queries), and then asked of both models about the same held-out
    images and candidates. An interrupted comparison continues.

    Raises:
      ValueError: in one line, as `audit`; and for two models that are the same or take different images.
    """
    if config.candidates is None:
        raise ValueError("candidates must be given: the images whose deletion is to be verified")
    if config.reference is not None or config.reference_lora:
        raise ValueError("a comparison takes no reference: the models before and after are compared with each other")
    if config.use.lora:
        raise ValueError(
            "lora would be merged into both models that are compared: name models that hold theirs already"
        )
    models = open_compared(config, after)
    _check_models(*(model.denoiser for model in models))
    images = open_images(config, models[0].denoiser)
    begin(config, models[0].denoiser, images)
    after_it = guard(config, models[1].denoiser, images)
    decision = decide(config, models[0].denoiser, images, ("calibration", "calibrate"))
    for name, model, guarded in zip(_MODELS, models, (decision.model, after_it)):
        config.options.say(f"{name}: {model.describe()}")
        score_candidates(config, images, decision._replace(model=guarded), name)
    facts = CompareFacts(
        **vars(describe_run(config, models[0].denoiser, images, decision, after)),
        models=BeforeAfter(*(describe_model(model) for model in models)),
        image_warnings=(*images.warnings, *_noise_warnings(config, models)),
    )
    shape, heldout = models[0].denoiser.image_shape, decision.heldout
    statistics = pictures.picture_statistics(images, shape, heldout, config.seed)
    arrays = AuditArrays(heldout, images.candidates, images.groups, statistics=statistics)
    on_first_process(lambda: json_files.write_compare_arrays(config.directory, arrays))
    return _report(CompareRecord(config.directory, facts, arrays))


def _noise_warnings(config: AuditConfig, models: Sequence[OpenedModel]) -> Iterator[str]:
    for name, model in zip(_MODELS, models):
        for line in identity.noise_warnings(config.directory, model.denoiser.fingerprint):
            yield f"{name}: {line}"


def report_comparison(directory: str | os.PathLike[str]) -> AuditResult:
    """Write compare.json, candidates.csv, the figure and report.html of a comparison again, without its models."""
    directory = pathlib.Path(directory)
    record = json_files.read_comparison(directory)
    return _report(record, load_again(record.facts.attack_module, directory))


def _report(record: CompareRecord, warnings: Sequence[str] = ()) -> AuditResult:
    found = find_deletion(record, warnings)

    def write() -> None:
        json_files.write_deletion(record.directory, *found)
        html.write_comparison(record.directory, *found)

    on_first_process(write)
    return AuditResult(found.results, record.directory, record.directory / html.PAGE)


def _check_models(before: Denoiser, after: Denoiser) -> None:
    if before.fingerprint == after.fingerprint:
        raise ValueError(f"the models before and after must differ, got {before.fingerprint[:16]} twice")
    for name in ("image_shape", "num_classes"):
        one, two = getattr(before, name), getattr(after, name)
        if one != two:
            raise ValueError(f"both models must have the same {name}, got {one} before and {two} after")
