"""How long an audit will take, said as soon as it is known how long a query takes; for slow models, what is quicker."""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from dime_jax._util.progress import duration
from dime_jax.auditing.config import AuditConfig
from dime_jax.core.denoiser import OWN, Denoiser
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.data.role_checks import CheckedImages
from dime_jax.data.variations import VARIATIONS
from dime_jax.scoring import planning, query_ledger

LONG_SECONDS = 600.0
LIGHT = "light"


class Cost(NamedTuple):
    """What an audit takes.

    Attributes:
      calibration: queries of the whole grid on one half.
      test: queries of the frozen settings on the other half, at most.
      candidates: queries of the attack that decides, at most.
      settings: how many calibration chooses from.
      heldout: images that p-values are ranks among.
      deciding: queries about one candidate, at most.
    """

    calibration: int
    test: int
    candidates: int
    settings: int
    heldout: int
    deciding: int

    @property
    def queries(self) -> int:
        """All queries, at most."""
        return self.calibration + self.test + self.candidates


def expected(
    config: AuditConfig, images: CheckedImages, schedule: NoiseSchedule, conditions: Collection[str] = (OWN,)
) -> Cost:
    """What an audit of these images will take."""
    jobs, candidates = config.jobs(conditions, schedule), len(images.candidates)
    each = 1 + len(VARIATIONS) if config.variations else 1  # pictures for each candidate
    deciding = [job.queries for job in jobs if config.decide_with in (None, *planning.row_labels([job]))]
    if not config.members_known:
        heldout = len(images.split.heldout)
        return Cost(0, 0, deciding[0] * each * (heldout + candidates) if candidates else 0, 1, heldout, deciding[0])
    sizes, witness = config.sizes(), planning.witness_jobs(jobs)
    halves = [len(side) // 2 for side in (images.split.member, images.split.heldout)]
    calibrated = [_at_most(half, sizes.calibration_size) for half in halves]
    tested = [_at_most(half, sizes.test_size) for half in halves]
    heldout = len(images.split.heldout) if sizes.every_heldout else 2 * max(tested[1], calibrated[1])
    compared = _at_most(heldout, len(images.split.heldout)) - calibrated[1]
    dearest: dict[tuple[str, float | None], int] = {}
    for job in jobs:
        row = job.attack.name, job.setting.get("q")
        dearest[row] = max(dearest.get(row, 0), job.queries)
    return Cost(
        sum(calibrated) * planning.make_plan([*jobs, *witness], schedule).queries_per_image,
        sum(tested) * (sum(dearest.values()) + sum(job.queries for job in witness)),
        max(deciding) * each * (compared + candidates) if candidates else 0,
        len(jobs),
        compared,
        max(deciding),
    )


def _at_most(count: int, most: int | None) -> int:
    return count if most is None else min(count, most)


def eta_hook(config: AuditConfig, images: CheckedImages, denoiser: Denoiser) -> Callable[[float], None]:
    """Return a hook that prints once, given the measured seconds per query, how long the whole audit will take.

    Above ten minutes it also says what the light profile would take, and what that loses. Nothing is asked to find out.
    """
    said = False

    def on_rate(seconds: float) -> None:
        nonlocal said
        if not said:
            said = True
            for line in eta_lines(config, images, denoiser.schedule, seconds, config.offered(denoiser)):
                config.options.say(line)

    return on_rate


def eta_lines(
    config: AuditConfig,
    images: CheckedImages,
    schedule: NoiseSchedule,
    seconds: float,
    conditions: Collection[str] = (OWN,),
) -> Iterator[str]:
    """Return the lines that `eta_hook` prints, at so many seconds per query."""
    cost = expected(config, images, schedule, conditions)
    left = max(0, cost.queries - query_ledger.queries_made(config.directory))
    if config.has_reference:  # which is asked the same, if it is as quick
        seconds *= 2
    queries = f"{left:,} more queries{', and as many to the reference' if config.has_reference else ''}"
    yield f"all stages of the audit need at most {queries}: about {duration(left * seconds)}"
    light = lighter(config) if left * seconds > LONG_SECONDS else None
    less = None if light is None else expected(light, images, schedule, conditions)
    if light is not None and less is not None and less.queries < left:
        names = ("queries", "calibration_size", "test_size", "decide_with")
        dropped = [f"--{name}" for name in names if getattr(config, name) is not None]
        how = " and without ".join([f"try --profile {LIGHT} with another --output", *dropped])
        yield f"a lighter audit takes about {duration(less.queries * seconds)}: {how}"
        yield f"it is less sensitive: {'; '.join(_losses(cost, less))}"


def _losses(cost: Cost, less: Cost) -> Iterator[str]:
    """What a lighter audit gives up."""
    if less.settings < cost.settings:
        yield f"it chooses from {less.settings} attack settings instead of {cost.settings}"
    if less.deciding < cost.deciding:
        yield f"it asks at most {less.deciding} queries about a candidate instead of {cost.deciding}"
    if less.heldout < cost.heldout:
        yield (
            f"it ranks candidates among {less.heldout:,} held-out images instead of {cost.heldout:,}, so that no "
            f"p-value is below {1 / (1 + less.heldout):.2g} instead of {1 / (1 + cost.heldout):.2g}"
        )


def lighter(config: AuditConfig) -> AuditConfig | None:
    """Return the same audit with all that the light profile says; None if it has that, or no tier of its attacks."""
    if config.profile == LIGHT:
        return None
    try:
        return dataclasses.replace(
            config, profile=LIGHT, queries=None, calibration_size=None, test_size=None, decide_with=None
        )
    except ValueError:
        return None
