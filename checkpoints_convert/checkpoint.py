"""An opened checkpoint: its networks, and what has to be known besides their weights.

Image size, schedule and prediction are each given by the user, held by the file, or inferred from the code base that
the file comes from. A line about each says which, for people and for the model directory. For what
nobody knows, the user is asked.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track

from checkpoints_convert import mapping
from checkpoints_convert.mapping import Entry, Naming, StateDict
from checkpoints_convert.options import ConversionOptions
from checkpoints_convert.weights_file import ChosenWeights, about
from dime_jax import models
from dime_jax._util import validate
from dime_jax._util.typing import JsonObject, PyTree
from dime_jax.models import AutoencoderSpec, ClipTextSpec, DenoiserSpec, ModelSpec, NetworkSpec, ScheduleSpec
from dime_jax.models.checks import MAX_IMAGE_SIZE, check_integer
from dime_jax.models.schedule_spec import describe_schedule, parse_schedule
from dime_jax.models.spec import PREDICTIONS

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
SpecT = TypeVar("SpecT", bound=NetworkSpec, covariant=True)

Size = tuple[int, int]

_WORDS = {"image_size": "image size", "schedule": "noise schedule", "prediction": "prediction"}
_EXAMPLES = {
    "image_size": "the height and width",
    "schedule": "such as linear:1000:0.0001:0.02",
    "prediction": " or ".join(PREDICTIONS),
}
_PROGRESS_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class Part(Generic[SpecT]):
    """One network of a checkpoint. Its tensors are read when they are asked for.

    Attributes:
      name: for people: "unet", "transformer", "vae" or "text_encoder".
      spec: the network.
      file: its weights file, or the index of its shards.
      read: returns its tensors by name, as views on the file.
      naming: what tensors of these names call its modules.
    """

    name: str
    spec: SpecT
    file: Path
    read: Callable[[], StateDict]
    naming: Callable[[StateDict], Naming]

    def name_table(self, state: StateDict) -> list[Entry]:
        """Return the variable that each tensor of the state becomes."""
        return mapping.name_table(self.spec, self.naming(state))

    def variables(self) -> PyTree:
        """Return the network's variables in float32, as a nested dict of NumPy arrays.

        A network far larger than what the file holds is refused before memory is allocated for it.
        """
        state = self.read()
        with about(self.file):
            needed = models.count_values(models.param_shapes(self.spec))
            held = sum(tensor.size for tensor in state.values())
            if needed > 2 * held:
                raise ValueError(f"must hold the {needed:,} values of the network that it describes, got {held:,}")
            return mapping.to_variables(state, self.name_table(state), _progress(self.file.stat().st_size))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: everything about a model but how it is stored.

    Attributes:
      source: the file or folder.
      spec: everything but the weights.
      parts: the networks, by their names in `spec.parts`.
      facts: one line on each thing that is not in every checkpoint, with how it is known.
      weights: "ema", "raw" or "only" (the file has no others).
      setting: the name of a published network, where it is one.
      tokenizer_files: of the tokenizer, if captions condition the model.
      dialect: whose names its tensors have.
    """

    source: Path
    spec: ModelSpec
    parts: Mapping[str, Part[NetworkSpec]]
    facts: tuple[str, ...]
    weights: str = "only"
    setting: str | None = None
    tokenizer_files: tuple[Path, ...] = ()
    dialect: str = "diffusers"

    @property
    def denoiser(self) -> Part[NetworkSpec]:
        """The network that predicts noise."""
        return self.parts["denoiser"]

    @property
    def file(self) -> Path:
        """What to name as the model's origin: the weights file of a single network, else the source."""
        return self.denoiser.file if len(self.parts) == 1 else self.source

    def variables(self) -> PyTree:
        """Return the variables of the one network, or of each under its name."""
        variables = {name: part.variables() for name, part in self.parts.items()}
        return variables if len(variables) > 1 else variables["denoiser"]

    def provenance(self) -> JsonObject:
        """Return where the model comes from, as a model directory records it."""
        return {
            "source": self.file.name,
            "dialect": self.dialect,
            "setting": self.setting,
            "weights": self.weights,
            "facts": list(self.facts),
        }


class Dialect(NamedTuple):
    """One family of checkpoint files.

    Attributes:
      name: for people, and for `--dialect`.
      prefixes: what the names of its tensors begin with, to recognise it by.
      open_weights: makes a checkpoint of the weights that were chosen from a file.
      takes_model_flags: whether `--model_flags` is for it.
    """

    name: str
    prefixes: tuple[str, ...]
    open_weights: Callable[[ChosenWeights, ConversionOptions], Checkpoint]
    takes_model_flags: bool = False


class Known(NamedTuple, Generic[T_co]):
    """A fact about a model, and how it is known."""

    value: T_co
    how: str


def by_convention(value: T, code: str) -> Known[T]:
    """Return a fact that all models of one code base share, unless someone changed it."""
    return Known(value, f"by convention of {code}; the file does not say")


class Facts(NamedTuple):
    """What has to be known besides the weights, as the checkpoint has it; None where it does not say."""

    image_size: Known[Size] | None
    schedule: Known[ScheduleSpec] | None
    prediction: Known[str] | None


def make_spec(
    options: ConversionOptions,
    facts: Facts,
    denoiser: DenoiserSpec,
    autoencoder: AutoencoderSpec | None = None,
    text_encoder: ClipTextSpec | None = None,
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return the model, from what the options say, or else what the file does; and a line on each fact.

    Args:
      options: the user's.
      facts: the checkpoint's.
      denoiser: the network that predicts noise.
      autoencoder: of a latent model.
      text_encoder: of a model that takes captions.

    Raises:
      ValueError: naming the options for everything that is not known.
    """
    side = options.image_size
    image_size = _prefer(None if side is None else (side, side), facts.image_size)
    schedule = _prefer(parse_schedule(options.schedule), facts.schedule)
    prediction = _prefer(options.prediction, facts.prediction)
    known: dict[str, Known[object] | None] = dict(zip(_WORDS, (image_size, schedule, prediction)))
    if image_size is None or schedule is None or prediction is None:
        missing = [name for name, fact in known.items() if fact is None]
        words = " and ".join(_WORDS[name] for name in missing)
        flags = " and ".join(f"--{name} ({_EXAMPLES[name]})" for name in missing)
        raise ValueError(f"add {flags}: the checkpoint does not hold the {words}")
    spec = ModelSpec(
        denoiser=denoiser,
        image_shape=(*image_size.value, denoiser.x_shape[2] if autoencoder is None else autoencoder.image_channels),
        schedule=schedule.value,
        prediction=prediction.value,
        autoencoder=autoencoder,
        text_encoder=text_encoder,
    )
    return spec, tuple(f"{_WORDS[name]}: {_text(fact.value)} ({fact.how})" for name, fact in known.items() if fact)


def file_checkpoint(
    weights: ChosenWeights,
    options: ConversionOptions,
    denoiser: DenoiserSpec,
    naming: Naming,
    facts: Facts,
    setting: str | None = None,
) -> Checkpoint:
    """Return the checkpoint of the one network whose weights were chosen from a file.

    Args:
      weights: from `weights_file.choose`.
      options, denoiser, facts: as in `make_spec`.
      naming: what the file calls its modules.
      setting: the name of a published network, where it is one.
    """
    spec, lines = make_spec(options, facts, denoiser)
    part = Part("unet", denoiser, weights.file, lambda: weights.state, lambda state: naming)
    return Checkpoint(weights.file, spec, {"denoiser": part}, weights.facts + lines, weights.which, setting)


def ddpm_facts(weights: ChosenWeights, denoiser: models.DdpmUnetSpec, code: str) -> Facts:
    """Return what is known of a DDPM U-Net in a file, by the conventions of the code base that trained it."""
    usual = ScheduleSpec(num_steps=denoiser.time_table_steps or ScheduleSpec.num_steps)
    schedule = stored_schedule(weights) or by_convention(usual, code)
    return Facts(sample_size(weights), schedule, by_convention("epsilon", code))


def _prefer(given: T | None, found: Known[T] | None) -> Known[T] | None:
    """Return what the user gave, else what was found."""
    if given is None:
        return found
    instead = "" if found is None or found.value == given else f", instead of {_text(found.value)}"
    return Known(given, f"as given{instead}")


def _text(value: object) -> str:
    if isinstance(value, ScheduleSpec):
        return describe_schedule(value)
    return f"{value[0]} x {value[1]}" if isinstance(value, tuple) else str(value)


def sample_size(weights: ChosenWeights) -> Known[Size] | None:
    """Return the height and width of x_T, the noise from which pytorch-ddpm draws its sample sheet."""
    x_t = weights.contents.get("x_T") if isinstance(weights.contents, Mapping) else None
    if not isinstance(x_t, np.ndarray) or x_t.ndim != 4:
        return None
    return Known((x_t.shape[2], x_t.shape[3]), "x_T in the file")


def stored_schedule(weights: ChosenWeights) -> Known[ScheduleSpec] | None:
    """Return the schedule of the betas that a training module stores beside its network."""
    betas = weights.buffers.get("betas")
    if betas is None:
        return None
    if betas.ndim != 1 or not np.issubdtype(betas.dtype, np.floating):
        raise ValueError(f"betas must be a list of numbers, got {betas.dtype} of shape {list(betas.shape)}")
    return Known(ScheduleSpec(kind="betas", num_steps=len(betas), betas=tuple(betas.tolist())), "betas in the file")


def check_options(options: ConversionOptions, dialects: Iterable[str]) -> None:
    """Refuse options that no checkpoint could have."""
    validate.check_choice(options.dialect, ["auto", *dialects], "dialect")
    if options.image_size is not None:
        check_integer(options.image_size, 1, MAX_IMAGE_SIZE, "image_size")
    if options.prediction is not None:
        validate.check_choice(options.prediction, PREDICTIONS, "prediction")
    parse_schedule(options.schedule)


def _progress(size: int) -> Callable[[list[Entry]], Iterable[Entry]]:
    """Show a progress bar on stderr for large files, nothing for small ones."""
    console = Console(stderr=True)
    return lambda items: track(items, "Converting", console=console, transient=True, disable=size < _PROGRESS_BYTES)
