"""A noise schedule as users name it (`--schedule`), and as reports describe it."""

import json
from pathlib import Path

from dime_jax._util import validate
from dime_jax.models.spec import ScheduleSpec


def describe_schedule(schedule: ScheduleSpec) -> str:
    """Describe a schedule in words: kind, betas and number of steps."""
    ends = f" from {schedule.beta_start:g} to {schedule.beta_end:g}" if "linear" in schedule.kind else ""
    zero = ", zero terminal SNR" if schedule.zero_terminal_snr else ""
    return f"{schedule.kind}{ends}, {schedule.num_steps} steps{zero}"


def parse_schedule(text: str | None) -> ScheduleSpec | None:
    """Return the schedule that `--schedule` names, as `ConversionOptions` describes it; None for None."""
    if text is None:
        return None
    if text.endswith(".json"):
        return _schedule_file(Path(text))
    kind, *values = text.split(":")
    validate.check_choice(kind, ["linear", "scaled_linear", "cosine"], "schedule")
    try:
        match values:
            case []:
                return ScheduleSpec(kind=kind)
            case [steps] if kind == "cosine":
                return ScheduleSpec(kind=kind, num_steps=int(steps))
            case [steps, start, end] if kind != "cosine":
                return ScheduleSpec(kind=kind, num_steps=int(steps), beta_start=float(start), beta_end=float(end))
    except ValueError as error:
        raise ValueError(f"--schedule={text}: {error}") from None
    form = "cosine:STEPS" if kind == "cosine" else f"{kind}:STEPS:BETA_START:BETA_END"
    raise ValueError(f"--schedule must be {kind} or {form}, got {text}")


def _schedule_file(file: Path) -> ScheduleSpec:
    if not file.is_file():
        raise ValueError(f"there is no file {file}, which --schedule names")
    try:
        betas = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        betas = None
    if not isinstance(betas, list):
        raise ValueError(f"{file} must hold a JSON list of betas")
    try:
        return ScheduleSpec(kind="betas", num_steps=len(betas), betas=tuple(betas))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
