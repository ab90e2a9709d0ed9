"""The check of a run's model: made once, on images that it was not trained on, and kept in the run's directory.

RUN/model_check.json    {fingerprint: {queries, outcome}}; queries are entered before they are asked, so that a killed
                        check is counted as well; outcome is null until the check is done
"""

import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dime_jax import data, digests, scoring
from dime_jax.denoiser import Denoiser
from dime_jax.denoiser_check import IMAGES, DenoiserCheck, check_denoiser
from dime_jax.processes import on_first_process
from dime_jax.query_ledger import Budget, BudgetExceeded, LedgerUnwritable
from dime_jax.score_table import write_atomically

FILE = "model_check.json"


class _Images(NamedTuple):
    x: np.ndarray
    labels: np.ndarray | None
    ids: list[str]


def check_once(
    directory: str | os.PathLike[str],
    denoiser: Denoiser,
    source: data.Source,
    heldout: np.ndarray,
    *,
    transform: data.Transform | None = None,
    seed: int = 0,
    options: scoring.Options | None = None,
) -> DenoiserCheck:
    """Check the model of a run, or read the outcome if that was done before.

    Args:
      directory: of the run.
      denoiser: the model.
      source: the images.
      heldout: positions of images that it was not trained on; 16 of them are taken by the seed.
      transform: preprocessing; the source's own, or `fit`, if None.
      seed: of the choice and of the draws.
      options: its budget is that of the check, which leaves out what would take more; and how to retry.

    Raises:
      ValueError: as `check_denoiser`; and if the budget allows nothing.
    """
    directory, options = pathlib.Path(directory), options or scoring.Options()

    def check() -> None:
        if read_check(directory, denoiser.fingerprint) is None:
            transformed = transform or data.transform_for(source, denoiser.image_shape)
            directory.mkdir(parents=True, exist_ok=True)
            images = _choose(denoiser, source, heldout, transformed, seed)
            _check(directory, denoiser, images, seed, options)

    on_first_process(check)
    found = read_check(directory, denoiser.fingerprint)
    assert found is not None
    return found


def read_check(directory: pathlib.Path, fingerprint: str) -> DenoiserCheck | None:
    """The outcome of a model's check in this directory; None if it was not checked there."""
    outcome = _entries(directory).get(fingerprint, {}).get("outcome")
    return None if outcome is None else DenoiserCheck.from_json(outcome)


def failures(results: Mapping[str, Any]) -> list[str]:
    """What is wrong with the models of results.json or compare.json, a line each; nothing if they passed or were not
    checked."""
    found = results.get("model_check") or {}
    checks = {"The model": found} if "passed" in found else {f"The model {name}": one for name, one in found.items()}
    return [one["summary"].replace("The model", which, 1) for which, one in checks.items() if one and not one["passed"]]


def _entries(directory: pathlib.Path) -> dict[str, dict[str, Any]]:
    path = directory / FILE
    return digests.read(path).contents if path.is_file() else {}


def _enter(directory: pathlib.Path, fingerprint: str, queries: int, outcome: dict[str, Any] | None = None) -> None:
    entries = {**_entries(directory), fingerprint: {"queries": queries, "outcome": outcome}}
    try:
        write_atomically(directory / FILE, digests.seal(entries, {}))
    except OSError as error:  # ours, not the model's, so that it is not tried again
        raise LedgerUnwritable(error.errno, error.strerror, error.filename) from None


def _choose(
    denoiser: Denoiser, source: data.Source, heldout: np.ndarray, transform: data.Transform, seed: int
) -> _Images:
    """The first readable images of a random order."""
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
        raise ValueError("expected held-out images to check the model with, none can be read")
    labels = None if denoiser.num_classes is None or source.labels is None else source.labels[chosen]
    return _Images(np.stack(pixels), labels, [source.ids[index] for index in chosen])


def _check(directory: pathlib.Path, denoiser: Denoiser, images: _Images, seed: int, options: scoring.Options) -> None:
    fingerprint, count = denoiser.fingerprint, len(images.x)
    made = _entries(directory).get(fingerprint, {}).get("queries", 0)
    allowed = _allowed(options.budget, count)
    if allowed < made + count:
        raise BudgetExceeded(
            f"expected a budget of at least {made + count} queries, one about each of {count} images more than were "
            f"made, to check whether the model is a denoiser; got {allowed:.0f}"
        )
    most = None if np.isinf(allowed) else int(allowed - made) // count
    platform = jax.local_devices()[0].platform
    micro_batch = options.micro_batch or scoring.default_micro_batch(denoiser.image_shape, platform)

    def say(text: str) -> None:
        if not options.silent:
            print(text, file=sys.stderr)

    def eps(model: Denoiser, x: Any, t: int, label: Any) -> Any:
        nonlocal made
        if made + len(x) > allowed:
            raise BudgetExceeded(f"expected at most {allowed:.0f} queries for the check of the model, more are needed")
        made += len(x)
        _enter(directory, fingerprint, made)
        return model.eps(x, t, label)

    patient = eps if denoiser.traceable else scoring.patient(eps, options.retry, say)

    def ask(model: Denoiser, x: Any, t: int, label: Any) -> Any:
        # Another object than the run's model is a guess at its layout: if it fails, that is the answer.
        once = patient if model is denoiser else eps
        parts = [slice(start, start + micro_batch) for start in range(0, count, micro_batch)]
        return np.concatenate([once(model, x[part], t, None if label is None else label[part]) for part in parts])

    found = check_denoiser(
        denoiser, images.x, images.labels, ids=images.ids, seed=seed, max_queries_per_image=most, ask=ask
    )
    _enter(directory, fingerprint, made, {**found.to_json(), "queries": made})


def _allowed(budget: Budget, count: int) -> float:
    """The most queries that a check with so many images may make, over all resumes."""
    total = np.inf if budget.total is None else budget.total
    return min(total, np.inf if budget.per_image is None else count * budget.per_image)
