"""Is it still the same model? Its answer to one fixed question is stored, and asked for again whenever a run resumes.

All that is known of a plain function is its name, and of a hosted model what its server claims. Another model under the
same name would be credited with the answers of the first. So one query is spent on a fixed input, at the beginning and
at every resume, and the answers must agree to 1e-4 of their size: accelerators round. At the beginning it is asked
twice: a model whose answers are noisy cannot be asked for differences between two of them.

RUN/model_answer.json       {fingerprint: {queries, answer, noise}}
RUN/queries-answer.bin      their ledger; they are about no image of the run
"""

import contextlib
import functools
import os
import pathlib
import weakref
from typing import NamedTuple

import jax
import numpy as np
import scipy.special

from dime_jax import scoring
from dime_jax._util.distributed import on_first_process, together
from dime_jax._util.typing import PyTree
from dime_jax.attacks import attack_names
from dime_jax.core.denoiser import OWN, Denoiser
from dime_jax.guards import memory
from dime_jax.scoring import planning, query_ledger
from dime_jax.scoring.query_ledger import NO_IMAGE, BudgetExceeded, Ledger

FILE = "model_answer.json"
TOLERANCE = 1e-4  # of the largest number in the answer
_NOISE_FACTOR = 5.0  # a noisy model's answers may differ by this many times what they differed by at first
_KEPT = 4096  # numbers of an answer that are stored
TRACE = "trace"  # the name of DIME's crowding among the readings
_GOLDEN = (5**0.5 - 1) / 2
# The functions that were recognised in this process, and in which runs: nobody can have swapped them since.
_recognised: "weakref.WeakKeyDictionary[Denoiser, set[pathlib.Path]]" = weakref.WeakKeyDictionary()


class _Entry(NamedTuple):
    """What is known of one model.

    Attributes:
      queries: made so far, over all resumes.
      answer: to the fixed question; None until there is one.
      noise: the largest difference between two answers at the beginning, relative to their size.
    """

    queries: int = 0
    answer: tuple[float, ...] | None = None
    noise: float = 0.0


def guard(
    directory: str | os.PathLike[str],
    denoiser: Denoiser,
    options: scoring.ScoringOptions,
    hooks: scoring.Hooks = scoring.NO_HOOKS,
) -> scoring.Hooks:
    """Return hooks, for all score tables of a run, that recognise a model that is not one of our networks.

    At the beginning of a run it is asked now. When a run resumes, damage is detected first: the model is asked once the
    first table is open. Networks that were opened from files have fingerprints of their weights, and are not asked.

    Raises:
      ValueError: as `recognise`.
    """
    if denoiser.traceable and not denoiser.known_by_name_only:
        return hooks
    directory = pathlib.Path(directory)
    # All processes look before the first one writes, or they would wait for each other at different places.
    known = together(lambda: _recall(directory, denoiser.fingerprint).answer)
    if known is None:
        on_first_process(lambda: recognise(directory, denoiser, options))
        return hooks
    once = functools.cache(lambda: recognise(directory, denoiser, options))
    return hooks._replace(before_asking=once)


def recognise(directory: pathlib.Path, denoiser: Denoiser, options: scoring.ScoringOptions) -> None:
    """Ask a model the fixed question, and compare its answer with the stored one.

    Two queries at the beginning of a run, and one whenever it resumes; none about a function that was recognised in
    this process, and none where the budget is used up, for then nothing else is asked either.

    Args:
      directory: of the run.
      denoiser: the model.
      options: its budget is that of the run; and how to retry.

    Raises:
      ValueError: if the answer differs, is not finite, or is beyond the budget at the beginning.
    """
    known = _recognised.setdefault(denoiser, set())
    if denoiser.requests is None and directory.absolute() in known:
        return
    _recognise(directory, denoiser, options)
    known.add(directory.absolute())


def queries(directory: pathlib.Path, fingerprint: str) -> int:
    """Return how many queries this took so far."""
    return _recall(directory, fingerprint).queries


def noise_warnings(directory: pathlib.Path, fingerprint: str) -> list[str]:
    """Return a line on what a model whose answers are noisy cannot tell; none for other models."""
    noise = _recall(directory, fingerprint).noise
    if noise <= TOLERANCE:
        return []
    names = attack_names([OWN])
    readings = {name: planning.grid_jobs([name], "quick")[0].recipe.readings for name in names}
    divided = [name for name in names if any(reading.name == TRACE for reading in readings[name])]
    remain = [name for name in names if name not in divided]
    return [
        f"the model's answers are noisy: two answers to the same question differ by {noise:.1g} of their size. "
        f"{', '.join(divided)} divide a difference of two answers, forward or central, by a small step: what they "
        f"measure is then mostly noise. The attacks that remain: {', '.join(remain)}"
    ]


def _recognise(directory: pathlib.Path, denoiser: Denoiser, options: scoring.ScoringOptions) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    made, entry = query_ledger.queries_made(directory), _recall(directory, denoiser.fingerprint)
    total, needed = options.budget.total, 2 if entry.answer is None else 1
    if total is not None and total - made < needed:
        if made == 0:
            raise BudgetExceeded(f"the budget must be >= {needed} queries, to detect a changed model, got {total}")
        options.say("warning: the budget is used up, so nothing checks that this is still the same model")
        return
    allowance = None if total is None else total - made
    with contextlib.closing(Ledger(directory, "answer", 0, allowance, query_ledger.Budget(total))) as ledger:
        answers = [_ask(directory, denoiser, options, ledger) for _ in range(needed)]
    if entry.answer is None:
        asked, answer = queries(directory, denoiser.fingerprint), tuple(answers[0].tolist())
        found = _Entry(asked, answer, _difference(answers[0], answers[1]))
        memory.remember(directory / FILE, denoiser.fingerprint, found)
    else:
        _check_same(denoiser, np.asarray(entry.answer), answers[0], entry.noise)
    for line in noise_warnings(directory, denoiser.fingerprint) if entry.answer is None else ():
        options.say(f"warning: {line}")


def _check_same(denoiser: Denoiser, kept: np.ndarray, answer: np.ndarray, noise: float) -> None:
    difference, most = _difference(kept, answer), max(TOLERANCE, _NOISE_FACTOR * noise)
    if not difference <= most:
        raise ValueError(
            f"{denoiser.name} is not the model that this run was started with: its answer to the same question differs "
            f"by {difference:.2g} of its size (at most {most:.2g} is allowed); choose another name or output directory"
        )


def _difference(one: np.ndarray, two: np.ndarray) -> float:
    """Return the largest difference, relative to the largest number of the first; infinite for different shapes."""
    if one.shape != two.shape:
        return float("inf")
    return float(np.max(np.abs(one - two)) / max(np.max(np.abs(one)), 1e-30))


def _ask(directory: pathlib.Path, denoiser: Denoiser, options: scoring.ScoringOptions, ledger: Ledger) -> np.ndarray:
    """Ask the question once, and return the numbers to store."""
    x, t, condition = _question(denoiser)

    def debit(part: slice) -> None:
        ledger.debit(np.array([NO_IMAGE]))
        entry = _recall(directory, denoiser.fingerprint)
        memory.remember(directory / FILE, denoiser.fingerprint, entry._replace(queries=entry.queries + 1))

    answer = scoring.ask_in_requests(denoiser, x, t, condition, debit=debit, retry=options.retry, say=options.say)
    flat = np.asarray(answer, np.float64).ravel()
    if not np.all(np.isfinite(flat)):
        raise ValueError(f"{denoiser.name} must give a finite answer to an image of noise, got NaN or infinity")
    return flat[:: -(-flat.size // _KEPT)]


def _question(denoiser: Denoiser) -> tuple[np.ndarray, int, PyTree]:
    """Make an image of what looks like noise, the same on every machine, at the middle timestep, in the first class."""
    size = int(np.prod(denoiser.shape))
    uniform = (np.arange(1, size + 1) * _GOLDEN) % 1.0
    x = scipy.special.ndtri(np.clip(uniform, 1e-6, 1 - 1e-6)).astype(np.float32).reshape(1, *denoiser.shape)
    condition = jax.tree.map(lambda one: np.zeros((1, *one.shape), one.dtype), denoiser.condition_shape)
    return x, denoiser.schedule.num_steps // 2, condition


def _recall(directory: pathlib.Path, fingerprint: str) -> _Entry:
    return memory.recall(directory / FILE, fingerprint, _Entry)
