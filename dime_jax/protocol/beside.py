"""A reference: a second model, not trained on the images in question, that is asked what the model is asked.

    RUN/reference/    a run of the same layout, with checks and ledgers of its own: a score table beside each of the
                      model's, of the same images in the same order, with the same noise

What is left of the model's scores, once the reference's are taken out, is what the one has learned and the other has
not. The two take turns: each table is finished with the model before the reference is asked, and only one of them needs
its weights in memory. Budgets bind what the model is asked; the reference has the same bounds for itself.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import data, scoring
from dime_jax.core.denoiser import Denoiser
from dime_jax.guards import model_check
from dime_jax.guards.wiring import DenoiserCheck
from dime_jax.scoring import score_table
from dime_jax.scoring.planning import Job, at_same_noise, far_apart, make_plan
from dime_jax.scoring.query_ledger import REFERENCE
from dime_jax.scoring.score_table import ScoreTable

# What both tables must have in common, of the facts in their manifests.
_SHARED = ("data", "images", "transform", "seed", "precision")
_ENCODED, _SAME_LATENTS = 16, 0.01  # images whose latents are compared, and how far these may be apart
# Errors of a check that are as near, where 1 is that of predicting zero, come from one model, whoever hosts it: they
# are means over images, pixels and draws, and rounding changes their seventh digit.
_SAME_ERRORS = 1e-6


class Guarded(NamedTuple):
    """A model that passed the guards, and the reference beside it, if there is one.

    Attributes:
      denoiser: the model.
      hooks: with which everything is asked of it: a model that was exchanged is noticed.
      reference: the same of the reference.
    """

    denoiser: Denoiser
    hooks: scoring.Hooks = scoring.NO_HOOKS
    reference: "Guarded | None" = None


def check(
    denoiser: Denoiser,
    reference: Denoiser,
    source: data.Source,
    heldout: np.ndarray,
    transform: data.Transform | None = None,
    seed: int = 0,
) -> None:
    """Require a reference to be another model that takes the same images; no query.

    Args:
      denoiser: the model.
      reference: the other one.
      source: the images.
      heldout: of which a few are encoded, if the models have encoders.
      transform: preprocessing; the source's own, or `fit`, if None.
      seed: of the choice, and of encoders that sample.

    Raises:
      ValueError: in one line, if it is the model itself, takes other images or labels, or encodes images otherwise.
    """
    if reference.fingerprint == denoiser.fingerprint:
        raise ValueError(f"the reference must be another model, got {denoiser.name} itself")
    for name in ("image_shape", "shape", "num_classes", "takes_text", "conditions"):
        one, two = getattr(denoiser, name), getattr(reference, name)
        if one != two:
            raise ValueError(f"the reference must have the {name} of the model, {one}, got {two}")
    if denoiser.encode_fn is None and reference.encode_fn is None:
        return
    transform = transform or data.transform_for(source, denoiser.image_shape)
    few = np.sort(np.random.default_rng(seed).permutation(heldout)[:_ENCODED])
    ours, theirs = (_latents(model, source, few, transform, seed) for model in (denoiser, reference))
    difference = float(np.linalg.norm(ours - theirs)) / max(float(np.linalg.norm(ours)), 1e-30)
    if difference > _SAME_LATENTS:
        raise ValueError(
            f"the reference must encode images as the model does, to {_SAME_LATENTS:.0%}; its latents differ by "
            f"{difference:.1%}"
        )


def check_answers(denoiser: DenoiserCheck, reference: DenoiserCheck, name: str) -> None:
    """Require of what was found about both that the reference is a denoiser, and answers otherwise than the model.

    Args:
      denoiser: the check of the model.
      reference: that of the other one.
      name: of the other one.
    """
    if not reference.passed:
        raise ValueError(f"the reference {name} cannot be used: {reference.summary}")
    ours, theirs = (np.array(one.errors, np.float64) for one in (denoiser, reference))
    if denoiser.timesteps == reference.timesteps and np.allclose(ours, theirs, 0, _SAME_ERRORS, equal_nan=True):
        raise ValueError(f"the reference {name} answers exactly as the model does: there is nothing to find")


def _latents(
    model: Denoiser, source: data.Source, indices: np.ndarray, transform: data.Transform, seed: int
) -> np.ndarray:
    """The latents of the readable images among these, one after the other; frees the weights."""
    batches = data.batches(source, 1, transform, indices=indices)
    found = [model.encode(batch.images, ids=batch.ids, seed=seed) for batch in batches if batch.mask.all()]
    model.release()
    return np.concatenate([np.zeros((0, *model.shape)), *map(np.asarray, found)])


def score(
    model: Guarded,
    run: pathlib.Path,
    place: str,
    source: data.Source,
    jobs: Sequence[Job],
    *,
    indices: np.ndarray,
    seed: int,
    options: scoring.ScoringOptions,
    tolerated: np.ndarray | None = None,
    transform: data.Transform | None = None,
) -> ScoreTable:
    """Score some images by a model and by its reference, or finish that.

    Args:
      model: what to ask.
      run: the directory of the run, whose budget it is.
      place: of the score table in it, and of the reference's in RUN/reference.
      source: the images.
      jobs: attacks and settings; the reference is asked at the same noise levels.
      indices, seed, tolerated, transform: see `scoring.score`.
      options: how to run.
    """

    def ask(one: Guarded, jobs: Sequence[Job], within: pathlib.Path, options: scoring.ScoringOptions) -> ScoreTable:
        return scoring.score(
            one.denoiser,
            source,
            jobs,
            within / place,
            indices=indices,
            tolerated=tolerated,
            transform=transform,
            seed=seed,
            options=options.within(within),
            hooks=one.hooks,
        )

    reference = model.reference
    if reference is None:
        return ask(model, jobs, run, options)
    schedule, other = model.denoiser.schedule, reference.denoiser.schedule
    theirs = [at_same_noise(job, schedule, other) for job in jobs]
    try:
        make_plan(theirs, other)  # before anything is asked of the model
    except ValueError as error:
        raise ValueError(f"the reference {reference.denoiser.name} cannot be asked the same: {error}") from None
    micro_batch = ask(model, jobs, run, options).manifest["micro_batch"]
    model.denoiser.release()
    begun = run / REFERENCE / place
    if (begun / "manifest.json").exists():  # in smaller batches, if its memory ended
        micro_batch = min(micro_batch, score_table.read_manifest(begun)["micro_batch"])
    ask(reference, theirs, run / REFERENCE, dataclasses.replace(options, micro_batch=micro_batch))
    reference.denoiser.release()
    return read(run, place)


def read(run: pathlib.Path, place: str) -> ScoreTable:
    """Open a complete score table of a run, with the reference's beside it if there is one.

    Raises:
      ValueError: as `score_table.read_table`; and if the two tables are not of the same.
    """
    table, beside = score_table.read_table(run / place), run / REFERENCE / place
    if not beside.exists():
        return table
    reference = score_table.read_table(beside)
    ours, theirs = table.manifest["identity"], reference.manifest["identity"]
    different = [name for name in _SHARED if ours[name] != theirs[name]]
    if different or not np.array_equal(table.index, reference.index):
        raise ValueError(f"{beside} must be of the same {(different or ['images'])[0]} as {run / place}")
    return dataclasses.replace(table, reference=reference)


def queries_made(run: pathlib.Path, tables: Sequence[ScoreTable]) -> int | None:
    """What was asked of the reference, for these tables of a run and for its check; None if there is none."""
    asked = [table.reference for table in tables if table.reference is not None]
    if not asked:
        return None
    found = model_check.read_check(run / REFERENCE, asked[0].manifest["identity"]["model"])
    return sum(table.queries_made for table in asked) + (found.queries if found else 0)


def noise_warnings(table: ScoreTable, jobs: Sequence[Job]) -> list[str]:
    """A line on what was asked of the reference at another noise level than of the model, for want of a nearer one."""
    if table.reference is None:
        return []
    schedules = table.schedule, table.reference.schedule
    pairs = [pair for job in jobs for pair in far_apart(job, *schedules)]
    if not pairs:
        return []
    ours, theirs = max(pairs, key=lambda pair: abs(np.log(pair[1] / pair[0])))
    return [
        f"the reference has other noise levels: what was asked of the model at {ours:.2g} was asked of it at "
        f"{theirs:.2g}, so that it explains less"
    ]


def terms(table: ScoreTable, job: Job, reference: bool) -> np.ndarray:
    """An attack's terms [columns, n]; with `reference` followed by the reference's, [2 columns, n]."""
    own = table.terms(job)
    if not reference:
        return own
    other, theirs = of_reference(table, job)
    return np.concatenate([own, other.terms(theirs)])


def of_reference(table: ScoreTable, job: Job) -> tuple[ScoreTable, Job]:
    """Return the reference's table beside one of the model, and what it was asked where the model was asked a job."""
    if table.reference is None:
        raise ValueError(f"{table.directory} has no reference beside it")
    return table.reference, at_same_noise(job, table.schedule, table.reference.schedule)
