"""What a model directory says about its network: frozen, validated, and the same after a round trip through JSON.

`ModelSpec` = a U-Net's architecture (`DdpmUnetSpec` or `GuidedUnetSpec`) + the noise schedule (`ScheduleSpec`) + what
the network predicts + the shape of an image. Bad values are refused with one line, before anything is allocated.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeVar

import numpy as np

from dime_jax._util import records, validate
from dime_jax._util.typing import JsonObject
from dime_jax.core.schedule import NoiseSchedule, cosine_betas, schedule_from_betas

# Far above every published model, far below what would exhaust memory: a typo or a hostile config fails here.
MAX_CHANNELS = 8192
MAX_LEVELS = 10
MAX_RES_BLOCKS = 16
MAX_CLASSES = 100_000
MAX_STEPS = 100_000
MAX_IMAGE_SIZE = 4096

_NUMBERS = (int, float, np.integer, np.floating)
PREDICTIONS = ("epsilon", "sample", "v_prediction")


def check_integer(value: object, low: int, high: int, name: str) -> None:
    """Require an int (not a bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"expected {name} to be an integer in [{low}, {high}], got {name}={_short(value)}")


def check_number(value: object, low: float, high: float, name: str) -> None:
    """Require a finite real number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not low <= value <= high:
        raise ValueError(f"expected {name} to be a number in [{low:g}, {high:g}], got {name}={_short(value)}")


def freeze_image_shape(spec: object) -> None:
    """Require a spec's image_shape to have three entries, [height, width, channels]; it becomes a tuple."""
    shape = getattr(spec, "image_shape", None)
    if not isinstance(shape, (tuple, list)) or len(shape) != 3:
        raise ValueError(f"expected image_shape [height, width, channels], got {_short(shape)}")
    object.__setattr__(spec, "image_shape", tuple(shape))


def check_flag(value: object, name: str) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be true or false, got {name}={_short(value)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnetSpec:
    """The topology every U-Net here shares; the defaults are the 35.7M-parameter CIFAR-10 network of Ho et al. 2020.

    Level l works at 1/2^l of the resolution; `level_channels` has one entry per level. A level has `num_res_blocks`
    residual blocks on the way down and one more on the way up, each followed by self-attention if the level is listed
    in `attention_levels` (down) or `up_attention_levels` (up; None means the same levels).

    Attributes:
      image_channels: channels of an image.
      learned_sigma: whether the network has as many output channels again for the variance (not used by attacks).
      stem_channels: width after the first convolution.
      time_features: size of the sinusoidal embedding of t.
      time_channels: width of the time MLP.
      head_channels: width of one attention head; None means `num_heads` heads at every width.
      num_heads: number of attention heads where `head_channels` is None.
      norm_groups: groups of every GroupNorm.
      norm_eps: added to every GroupNorm's variance.
      num_classes: size of the label embedding of a class-conditional network, else None.
      dropout: rate before the second convolution of a residual block; applies in training only.
    """

    kind: ClassVar[str]

    image_channels: int = 3
    learned_sigma: bool = False
    stem_channels: int = 128
    time_features: int = 128
    time_channels: int = 512
    level_channels: tuple[int, ...] = (128, 256, 256, 256)
    num_res_blocks: int = 2
    attention_levels: tuple[int, ...] = (1,)
    up_attention_levels: tuple[int, ...] | None = None
    head_channels: int | None = None
    num_heads: int = 1
    norm_groups: int = 32
    norm_eps: float = 1e-6
    num_classes: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("level_channels", "attention_levels", "up_attention_levels"):
            self._check_tuple(name)
        check_integer(len(self.level_channels), 1, MAX_LEVELS, "number of level_channels")
        for name in ("attention_levels", "up_attention_levels"):
            check_integer(len(getattr(self, name) or ()), 0, MAX_LEVELS, f"number of {name}")
        check_integer(self.image_channels, 1, 64, "image_channels")
        check_integer(self.norm_groups, 1, MAX_CHANNELS, "norm_groups")
        for name in ("stem_channels", "time_features", "time_channels"):
            check_integer(getattr(self, name), 1, MAX_CHANNELS, name)
        for channels in self.level_channels:
            check_integer(channels, 1, MAX_CHANNELS, "level_channels")
        for channels in (self.stem_channels, *self.level_channels):
            if channels % self.norm_groups:
                raise ValueError(f"expected widths divisible by norm_groups={self.norm_groups}, got {channels}")
        if self.time_features % 2:
            raise ValueError(f"expected an even number of time_features, got time_features={self.time_features}")
        check_integer(self.num_res_blocks, 1, MAX_RES_BLOCKS, "num_res_blocks")
        levels = len(self.level_channels)
        for level in self.attention_levels + (self.up_attention_levels or ()):
            check_integer(level, 0, levels - 1, "attention level")
        check_integer(self.num_heads, 1, MAX_CHANNELS, "num_heads")
        if self.head_channels is not None:
            check_integer(self.head_channels, 1, MAX_CHANNELS, "head_channels")
        for channels in self._attention_widths():
            self.heads(channels)
        check_number(self.norm_eps, 1e-12, 1.0, "norm_eps")
        check_number(self.dropout, 0.0, 0.99, "dropout")
        check_flag(self.learned_sigma, "learned_sigma")
        if self.num_classes is not None:
            check_integer(self.num_classes, 1, MAX_CLASSES, "num_classes")

    def _check_tuple(self, name: str) -> None:
        value = getattr(self, name)
        if name == "up_attention_levels" and value is None:
            return
        if not isinstance(value, (tuple, list)):
            raise ValueError(f"expected {name} to be a list, got {name}={_short(value)}")
        object.__setattr__(self, name, tuple(value))

    def _attention_widths(self) -> set[int]:
        """Widths at which there is attention."""
        levels = (*self.attention_levels, *self.up_attention, len(self.level_channels) - 1)
        return {self.level_channels[level] for level in levels}

    @property
    def up_attention(self) -> tuple[int, ...]:
        """Levels with attention on the way up."""
        return self.attention_levels if self.up_attention_levels is None else self.up_attention_levels

    @property
    def out_channels(self) -> int:
        """Output channels: the prediction, then the learned variance if there is one."""
        return self.image_channels * (2 if self.learned_sigma else 1)

    def heads(self, channels: int) -> int:
        """Number of attention heads at the given width."""
        size, name = (
            (self.num_heads, "num_heads") if self.head_channels is None else (self.head_channels, "head_channels")
        )
        if channels % size:
            raise ValueError(f"expected attention widths divisible by {name}={size}, got {channels}")
        return size if self.head_channels is None else channels // size


@dataclasses.dataclass(frozen=True, kw_only=True)
class DdpmUnetSpec(UnetSpec):
    """The DDPM U-Net in its three public dialects (pytorch-ddpm/SecMI, ddim/pesser, diffusers' UNet2DModel).

    Attributes:
      time_table_steps: length of the time-embedding table stored with the weights (pytorch-ddpm), or None to compute
        the embedding. The stored table is a constant, not a parameter, and is used as it is in the file.
      time_cos_first: order of the computed embedding: [cos, sin] instead of [sin, cos].
      time_frequency_shift: s in the frequencies 10000^(-i / (half - s)), i = 0 … half - 1.
      symmetric_downsample: padding of the stride-2 convolutions: one on each side, instead of one after the end.
      middle_attention: whether the middle has attention.
    """

    kind: ClassVar[str] = "ddpm_unet"

    time_table_steps: int | None = None
    time_cos_first: bool = False
    time_frequency_shift: float = 1
    symmetric_downsample: bool = False
    middle_attention: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time_table_steps is not None:
            check_integer(self.time_table_steps, 1, MAX_STEPS, "time_table_steps")
        check_number(self.time_frequency_shift, 0, self.time_features // 2 - 0.5, "time_frequency_shift")
        for name in ("time_cos_first", "symmetric_downsample", "middle_attention"):
            check_flag(getattr(self, name), name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuidedUnetSpec(UnetSpec):
    """The U-Net of Dhariwal & Nichol 2021 (openai/guided-diffusion). The time embedding is [cos, sin] with shift 0.

    Attributes:
      resblock_updown: resample inside residual blocks, instead of by a convolution.
      scale_shift_norm: condition by GroupNorm(h) * (1 + scale) + shift, instead of adding to h.
      new_attention_order: the qkv channels are ordered (q|k|v, head, channel), instead of (head, q|k|v, channel).
    """

    kind: ClassVar[str] = "guided_unet"

    norm_eps: float = 1e-5
    resblock_updown: bool = True
    scale_shift_norm: bool = True
    new_attention_order: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("resblock_updown", "scale_shift_norm", "new_attention_order"):
            check_flag(getattr(self, name), name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """How the noise schedule is made.

    Attributes:
      kind: "linear" (β linear in t), "scaled_linear" (√β linear in t), "cosine" (Nichol & Dhariwal 2021) or "betas".
      num_steps: T.
      beta_start: β_0, for the two linear kinds.
      beta_end: β_{T-1}, for the two linear kinds.
      betas: β_0 … β_{T-1}, for "betas".
      zero_terminal_snr: shift and scale √ᾱ so that ᾱ_{T-1} = 0 (Lin et al. 2023, Algorithm 1).
    """

    kind: str = "linear"
    num_steps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02
    betas: tuple[float, ...] | None = None
    zero_terminal_snr: bool = False

    def __post_init__(self) -> None:
        validate.check_choice(self.kind, ("linear", "scaled_linear", "cosine", "betas"), "schedule")
        check_integer(self.num_steps, 1, MAX_STEPS, "num_steps")
        check_number(self.beta_start, 0, 1, "beta_start")
        check_number(self.beta_end, 0, 1, "beta_end")
        check_flag(self.zero_terminal_snr, "zero_terminal_snr")
        if (self.kind == "betas") != (self.betas is not None):
            raise ValueError(f"expected betas with the schedule 'betas' and only then, got schedule {self.kind!r}")
        if self.betas is not None:
            if not isinstance(self.betas, (tuple, list)) or len(self.betas) != self.num_steps:
                raise ValueError(f"expected a list of num_steps={self.num_steps} betas")
            for beta in self.betas:
                check_number(beta, 0, 1, "beta")
            object.__setattr__(self, "betas", tuple(map(float, self.betas)))
        self.build()

    def build(self) -> NoiseSchedule:
        """The schedule's tables."""
        betas = self._betas()
        return schedule_from_betas(_with_zero_terminal_snr(betas) if self.zero_terminal_snr else betas)

    def _betas(self) -> np.ndarray:
        if self.kind == "cosine":
            return cosine_betas(self.num_steps)
        if self.kind == "linear":
            return np.linspace(self.beta_start, self.beta_end, self.num_steps)
        if self.kind == "scaled_linear":
            return np.linspace(math.sqrt(self.beta_start), math.sqrt(self.beta_end), self.num_steps) ** 2
        return np.asarray(self.betas)


def _with_zero_terminal_snr(betas: np.ndarray) -> np.ndarray:
    """√ᾱ shifted to end at 0 and scaled to keep its first value, as βs again."""
    root = np.sqrt(np.cumprod(1 - betas))
    root = (root - root[-1]) * (root[0] / (root[0] - root[-1]))
    abar = root**2
    return 1 - np.concatenate([abar[:1], abar[1:] / abar[:-1]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything but the weights: the U-Net, the schedule, what it predicts ("epsilon", "sample" or "v_prediction",
    in the words of diffusers) and the shape (H, W, C) of an image."""

    architecture: DdpmUnetSpec | GuidedUnetSpec
    image_shape: tuple[int, int, int]
    schedule: ScheduleSpec = dataclasses.field(default_factory=ScheduleSpec)
    prediction: str = "epsilon"

    def __post_init__(self) -> None:
        validate.check_choice(self.prediction, PREDICTIONS, "prediction")
        freeze_image_shape(self)
        multiple = 2 ** (len(self.architecture.level_channels) - 1)
        for size in self.image_shape[:2]:
            check_integer(size, 1, MAX_IMAGE_SIZE, "image size")
            if size % multiple:
                raise ValueError(f"expected an image size divisible by {multiple} (the U-Net's levels), got {size}")
        if self.image_shape[2] != self.architecture.image_channels:
            raise ValueError(
                f"expected images of image_channels={self.architecture.image_channels}, got {self.image_shape[2]}"
            )
        steps = getattr(self.architecture, "time_table_steps", None)
        if steps is not None and steps < self.schedule.num_steps:
            raise ValueError(
                f"expected a time table of at least {self.schedule.num_steps} steps (the schedule's), got {steps}"
            )

    def to_json(self) -> JsonObject:
        """A JSON-able dict, from which `from_json` makes an equal spec."""
        return {**to_fields(self), "architecture": to_fields(self.architecture), "schedule": to_fields(self.schedule)}

    @classmethod
    def from_json(cls, contents: object) -> "ModelSpec":
        """The spec that `to_json` wrote; unknown and missing fields are refused."""
        fields = _fields(contents, cls, "spec")
        return cls(
            architecture=from_tagged(_ARCHITECTURES, fields["architecture"], "architecture"),
            image_shape=fields["image_shape"],
            schedule=from_fields(ScheduleSpec, fields["schedule"], "schedule"),
            prediction=fields["prediction"],
        )


_ARCHITECTURES: tuple[type[DdpmUnetSpec | GuidedUnetSpec], ...] = (DdpmUnetSpec, GuidedUnetSpec)


class _HasKind(Protocol):
    kind: ClassVar[str]


Spec = TypeVar("Spec")
TaggedSpec = TypeVar("TaggedSpec", bound=_HasKind)


def to_fields(spec: object) -> JsonObject:
    """A JSON-able dict of a spec's fields, tuples as lists, with its kind first if its class has one."""
    values = {name: getattr(spec, name) for name in ("kind", *records.field_names(spec)) if hasattr(spec, name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_fields(spec_class: Callable[..., Spec], contents: object, name: str) -> Spec:
    """The spec of one class from a dict of exactly its fields.

    Args:
      spec_class: a dataclass, which checks the values itself.
      contents: as JSON has it.
      name: for the error.
    """
    return spec_class(**_fields(contents, spec_class, name))


def from_tagged(spec_classes: Sequence[type[TaggedSpec]], contents: object, name: str) -> TaggedSpec:
    """The spec that `to_fields` wrote, of whichever of these classes its kind names.

    Args:
      spec_classes: the dataclasses that it may be of.
      contents: as JSON has it.
      name: for the error.
    """
    fields = _mapping(contents, name)
    kind = fields.pop("kind", None)
    validate.check_choice(kind, [spec.kind for spec in spec_classes], f"{name} kind")
    return from_fields(next(spec for spec in spec_classes if spec.kind == kind), fields, name)


def _mapping(value: object, name: str) -> JsonObject:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {name} to be a JSON object, got {_short(value)}")
    return dict(value)


def _fields(value: object, spec_class: object, name: str) -> JsonObject:
    """`value` as keyword arguments of `spec_class`, with exactly its fields."""
    fields, expected = _mapping(value, name), set(records.field_names(spec_class))
    problems = [f"unknown {_short(key)}" for key in sorted(fields.keys() - expected)]
    problems += [f"missing {key!r}" for key in sorted(expected - fields.keys())]
    if problems:
        raise ValueError(f"bad fields in {name}: {', '.join(problems[:5])}")
    return fields


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
