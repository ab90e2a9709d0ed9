"""Check a run's model once, on images that it was not trained on, and store the outcome in the run's directory.

RUN/model_check.json    {fingerprint: {queries, outcome}}; outcome is null until the check is done
"""

import contextlib
import dataclasses
import os
import pathlib
import threading
from typing import NamedTuple

import jax
import numpy as np

from dime_jax import data, scoring
from dime_jax._util.distributed import on_first_process
from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import OWN, Denoiser
from dime_jax.guards import identity, memory
from dime_jax.guards.wiring import IMAGES, DenoiserCheck, check_denoiser
from dime_jax.scoring import ScoringOptions
from dime_jax.scoring.query_ledger import Budget, BudgetExceeded, Ledger, queries_made

FILE = "model_check.json"


class _Entry(NamedTuple):
    """What is known of one model: queries made so far, and the outcome once there is one."""

    queries: int = 0
    outcome: DenoiserCheck | None = None


class _Images(NamedTuple):
    index: np.ndarray  # type: ignore[assignment]  # positions in the source
    pixels: np.ndarray
    condition: PyTree
    ids: list[str]


def check_once(
    directory: str | os.PathLike[str],
    denoiser: Denoiser,
    source: data.Source,
    heldout: np.ndarray,
    *,
    transform: data.Transform | None = None,
    seed: int = 0,
    options: ScoringOptions | None = None,
) -> DenoiserCheck:
    """Check the model of a run, or read the outcome if that was done before.

    Args:
      directory: of the run.
      denoiser: the model.
      source: the images.
      heldout: positions of images that it was not trained on; 16 of them are taken by the seed.
      transform: preprocessing; the source's own, or `fit`, if None.
      seed: of the choice and of the draws.
      options: its budget is that of the run, and the check leaves out what would take more; and how to retry.

    Raises:
      ValueError: as `check_denoiser`; and if the budget allows nothing.
    """
    directory, options = pathlib.Path(directory), options or ScoringOptions()

    def check() -> None:
        if read_check(directory, denoiser.fingerprint) is None:
            transformed = transform or data.transform_for(source, denoiser.image_shape)
            directory.mkdir(parents=True, exist_ok=True)
            images = _choose(denoiser, source, heldout, transformed, seed)
            with contextlib.closing(Ledger(directory, "check", len(source), None, options.budget)) as ledger:
                _check(directory, denoiser, images, seed, options, ledger)

    on_first_process(check)
    found = read_check(directory, denoiser.fingerprint)
    assert found is not None
    return found


def read_check(directory: pathlib.Path, fingerprint: str) -> DenoiserCheck | None:
    """Read the outcome of a model's check in this directory; None if it was not checked there.

    Its queries are those of the check, and those that it took to recognise the model (`identity`).
    """
    found = memory.recall(directory / FILE, fingerprint, _Entry).outcome
    recognised = identity.queries(directory, fingerprint)
    return None if found is None else dataclasses.replace(found, queries=found.queries + recognised)


def _choose(
    denoiser: Denoiser, source: data.Source, heldout: np.ndarray, transform: data.Transform, seed: int
) -> _Images:
    """Choose the first readable images in a random order."""
    chosen: list[int] = []
    pixels: list[np.ndarray] = []
    for index in np.random.default_rng(seed).permutation(heldout).tolist():
        if len(chosen) == IMAGES:
            break
        try:
            pixels.append(transform(source[index].image))
        except data.BadImage:
            continue
        chosen.append(index)
    if not chosen:
        raise ValueError("no held-out image can be read, so the model cannot be checked")
    ids, labels = [source.ids[index] for index in chosen], None if source.labels is None else source.labels[chosen]
    captions = None if source.captions is None else [source.captions[index] for index in chosen]
    return _Images(np.array(chosen), np.stack(pixels), denoiser.conditions_for(labels, captions)[OWN], ids)


def _check(
    directory: pathlib.Path, denoiser: Denoiser, images: _Images, seed: int, options: ScoringOptions, ledger: Ledger
) -> None:
    fingerprint, count, path = denoiser.fingerprint, len(images.pixels), directory / FILE
    made = memory.recall(path, fingerprint, _Entry).queries
    elsewhere = queries_made(directory) - made
    allowed = _allowed(options.budget, count, elsewhere)
    if allowed < made + count:
        raise BudgetExceeded(
            f"the budget must be >= {made + count} queries, got {allowed:.0f}: checking whether the model is a "
            f"denoiser takes at least one query about each of {count} images"
        )
    most = None if np.isinf(allowed) else int(allowed - made) // count
    platform = jax.local_devices()[0].platform
    micro_batch = options.micro_batch or scoring.micro_batch_of(denoiser, platform)
    if denoiser.requests is not None:
        micro_batch = min(micro_batch, denoiser.requests.images)

    def eps(model: Denoiser, part: slice, x: jax.Array, t: int, condition: PyTree) -> jax.Array:
        nonlocal made
        model.wait_turn(len(x), threading.Event())
        if made + len(x) > allowed:
            raise BudgetExceeded(f"checking the model takes more than the {allowed:.0f} queries that the budget allows")
        ledger.debit(images.index[part])
        made += len(x)
        memory.remember(path, fingerprint, _Entry(made))
        return model.ask_once(x, t, condition)

    retrying = eps if denoiser.traceable else scoring.with_retries(eps, options.retry, options.say)

    def ask(model: Denoiser, x: jax.Array, t: int, condition: PyTree) -> np.ndarray:
        # Any object but the run's model is a guess at its layout: if it fails, that is the answer.
        once = retrying if model is denoiser else eps
        parts = [slice(start, start + micro_batch) for start in range(0, count, micro_batch)]
        conditions = [jax.tree.map(lambda rows, part=part: rows[part], condition) for part in parts]
        return np.concatenate([once(model, part, x[part], t, told) for part, told in zip(parts, conditions)])

    found = check_denoiser(
        denoiser, images.pixels, images.condition, ids=images.ids, seed=seed, max_queries_per_image=most, ask=ask
    )
    memory.remember(path, fingerprint, _Entry(made, dataclasses.replace(found, queries=made)))


def _allowed(budget: Budget, count: int, elsewhere: int) -> float:
    """Return how many queries a check of `count` images may make over all resumes, besides those made elsewhere."""
    total = np.inf if budget.total is None else max(0, budget.total - elsewhere)
    return min(total, np.inf if budget.per_image is None else count * budget.per_image)
