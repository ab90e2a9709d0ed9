"""When nothing may be said: reasons that hold for all candidates, for the set, or for one of them; in words.

Audits and deletion checks share them.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dime_jax import evidence
from dime_jax.data.batches import MAX_UNUSABLE_FRACTION
from dime_jax.evidence import Direction, Judgement, Way
from dime_jax.evidence.likeness import ERROR_RATE
from dime_jax.guards.wiring import DenoiserCheck

NO_FINITE_ANSWER = "the model gave no finite answer"
REFERENCE_SILENT = "the reference gave no finite answer"
SWAPPED = "members and held-out images look swapped"
UNLIKE = "as a picture it is unlike the held-out images"
UNLIKE_SET = "as pictures they are unlike the held-out images"
TOLD_APART = "the reference tells them from the held-out images by itself"
PARTIAL = "the reference knows the held-out images better than the members"


def no_denoiser_or_swapped(checks: Sequence[DenoiserCheck | None], direction: Direction) -> str | None:
    """Why nothing can be said whatever the scores are: a model is no denoiser, or the sets are the wrong way round."""
    if any(check is not None and not check.passed for check in checks):
        return f"{'the' if len(checks) == 1 else 'a'} model does not predict noise the way it was asked to"
    return SWAPPED if direction.judgement is Judgement.BELOW else None


def too_few_answers(answered: np.ndarray, unreadable: int) -> str | None:
    """Why a set of candidates is not judged, if too many of them got no answer: those left may have been chosen.

    Args:
      answered: which of those that could be read have a score.
      unreadable: how many others there are.
    """
    unanswered, count = int(np.sum(~answered)), len(answered) + unreadable
    if unanswered + unreadable <= MAX_UNUSABLE_FRACTION * count:
        return None
    if not unreadable:
        return f"{NO_FINITE_ANSWER} for {unanswered} of {count} candidates"
    also = f", and {NO_FINITE_ANSWER} for {unanswered}" if unanswered else ""
    return f"{unreadable} of {count} candidates could not be used{also}"


def unlike_set(likeness: evidence.Likeness) -> str | None:
    """Why nobody is judged, if the candidates are another kind of picture, as a set or most of them."""
    most = np.sum(likeness.unlike) > len(likeness.unlike) / 2
    return UNLIKE_SET if likeness.set_unlike or most else None


def told_apart(p_value: float | None) -> str | None:
    """Why nobody is judged beside a reference that tells candidates from held-out images, whatever the model says."""
    return TOLD_APART if p_value is not None and p_value <= ERROR_RATE else None


def partial(reference: Direction | None, decides: Way) -> str | None:
    """Why nobody is judged beside a reference that was, as it seems, trained on held-out images."""
    below = reference is not None and reference.judgement is Judgement.BELOW
    return PARTIAL if below and decides.reference else None


def reasons(withheld: str | None, problems: Sequence[str], comparable: np.ndarray) -> list[str]:
    """Why each candidate got no p-value: what holds for all, its own problem, or its being unlike; else ""."""
    return [withheld or own or ("" if fits else UNLIKE) for own, fits in zip(problems, comparable.tolist())]


def number(value: float) -> float | None:
    """Return a score or p-value as candidates.csv has it: None where it is not finite."""
    return float(value) if np.isfinite(value) else None


def failures(checks: Mapping[str, DenoiserCheck | None]) -> list[str]:
    """What is wrong with some models, a line for each that failed its check, by how they are called in it."""
    return [
        check.summary.replace("The model", name, 1)
        for name, check in checks.items()
        if check is not None and not check.passed
    ]
