"""An opened checkpoint, and what has to be known about it besides its weights: image size, schedule and prediction.

Each of the three is given by the user, held by the file, or inferred from the code base that the file comes from. A
line about each says which, for people and for the model directory. What nobody knows is asked for.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from checkpoints_convert.mapping import Dialect, StateDict
from checkpoints_convert.options import ConversionOptions
from checkpoints_convert.weights_file import ChosenWeights
from dime_jax._util import validate
from dime_jax.models import DdpmUnetSpec, GuidedUnetSpec, ModelSpec, ScheduleSpec
from dime_jax.models.schedule_spec import describe_schedule, parse_schedule
from dime_jax.models.spec import MAX_IMAGE_SIZE, PREDICTIONS, check_integer

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Size = tuple[int, int]

_WORDS = {"image_size": "image size", "schedule": "noise schedule", "prediction": "prediction"}
_EXAMPLES = {
    "image_size": "the height and width",
    "schedule": "such as linear:1000:0.0001:0.02",
    "prediction": " or ".join(PREDICTIONS),
}


class Checkpoint(NamedTuple):
    """A checkpoint, opened: tensors by name, how they are called, and the model they make.

    Attributes:
      file: the weights file.
      state: its tensors by name.
      dialect: whose names these are.
      weights: "ema", "raw" or "only" (the only ones there are).
      spec: the model.
      facts: one line on each fact that is not in every file, with how it is known.
      setting: the name of a published network, where it is one.
    """

    file: Path
    state: StateDict
    dialect: Dialect
    weights: str
    spec: ModelSpec
    facts: tuple[str, ...]
    setting: str | None = None


class Known(NamedTuple, Generic[T_co]):
    """A fact about a model, and how it is known."""

    value: T_co
    how: str


def by_convention(value: T, code: str) -> Known[T]:
    """A fact that all models of one code base share, unless someone changed it."""
    return Known(value, f"by convention of {code}; the file does not say")


def make_spec(
    options: ConversionOptions,
    architecture: DdpmUnetSpec | GuidedUnetSpec,
    image_size: Known[Size] | None,
    schedule: Known[ScheduleSpec] | None,
    prediction: Known[str] | None,
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model, from what the options say, or else what the file does; and a line on each fact.

    Args:
      options: the user's.
      architecture: of the network.
      image_size: height and width as the file has them; None if it does not.
      schedule: likewise.
      prediction: likewise.

    Raises:
      ValueError: naming the options for everything that is not known.
    """
    given_size = None if options.image_size is None else (options.image_size, options.image_size)
    image_size = _prefer(given_size, image_size)
    schedule = _prefer(parse_schedule(options.schedule), schedule)
    prediction = _prefer(options.prediction, prediction)
    if image_size is None or schedule is None or prediction is None:
        known = {"image_size": image_size, "schedule": schedule, "prediction": prediction}
        missing = [name for name, fact in known.items() if fact is None]
        words = " and ".join(_WORDS[name] for name in missing)
        flags = " and ".join(f"--{name} ({_EXAMPLES[name]})" for name in missing)
        raise ValueError(f"expected {flags}: the checkpoint does not hold the {words}")
    spec = ModelSpec(
        architecture=architecture,
        image_shape=(*image_size.value, architecture.image_channels),
        schedule=schedule.value,
        prediction=prediction.value,
    )
    facts: dict[str, Known[object]] = {"image_size": image_size, "schedule": schedule, "prediction": prediction}
    return spec, tuple(f"{_WORDS[name]}: {_text(fact.value)} ({fact.how})" for name, fact in facts.items())


def make_checkpoint(
    weights: ChosenWeights,
    dialect: Dialect,
    options: ConversionOptions,
    architecture: DdpmUnetSpec | GuidedUnetSpec,
    image_size: Known[Size] | None,
    schedule: Known[ScheduleSpec] | None,
    prediction: Known[str] | None,
    setting: str | None = None,
) -> Checkpoint:
    """The checkpoint of the weights chosen from one file.

    Args:
      weights: from `weights_file.choose`.
      dialect: whose names they have.
      options, architecture, image_size, schedule, prediction: as in `make_spec`.
      setting: the name of a published network, where it is one.
    """
    spec, facts = make_spec(options, architecture, image_size, schedule, prediction)
    return Checkpoint(weights.file, weights.state, dialect, weights.which, spec, weights.facts + facts, setting)


def _prefer(given: T | None, found: Known[T] | None) -> Known[T] | None:
    """What the user gave, else what was found."""
    if given is None:
        return found
    contradicts = found is not None and found.value != given
    return Known(given, f"as given, instead of {_text(found.value)}" if found and contradicts else "as given")


def _text(value: object) -> str:
    if isinstance(value, ScheduleSpec):
        return describe_schedule(value)
    return f"{value[0]} x {value[1]}" if isinstance(value, tuple) else str(value)


def sample_size(weights: ChosenWeights) -> Known[Size] | None:
    """Height and width of x_T, the noise from which pytorch-ddpm draws its sample sheet."""
    x_t = weights.contents.get("x_T") if isinstance(weights.contents, Mapping) else None
    if not isinstance(x_t, np.ndarray) or x_t.ndim != 4:
        return None
    return Known((x_t.shape[2], x_t.shape[3]), "x_T in the file")


def stored_schedule(weights: ChosenWeights) -> Known[ScheduleSpec] | None:
    """The schedule of the betas that a training module keeps beside its network."""
    betas = weights.buffers.get("betas")
    if betas is None:
        return None
    if betas.ndim != 1 or not np.issubdtype(betas.dtype, np.floating):
        raise ValueError(f"expected betas to be a list of numbers, got {betas.dtype} of shape {list(betas.shape)}")
    return Known(ScheduleSpec(kind="betas", num_steps=len(betas), betas=tuple(betas.tolist())), "betas in the file")


def check_options(options: ConversionOptions, dialects: Iterable[str]) -> None:
    """Refuse options that no checkpoint could have."""
    validate.check_choice(options.dialect, ["auto", *dialects], "dialect")
    if options.image_size is not None:
        check_integer(options.image_size, 1, MAX_IMAGE_SIZE, "image_size")
    if options.prediction is not None:
        validate.check_choice(options.prediction, PREDICTIONS, "prediction")
    parse_schedule(options.schedule)
