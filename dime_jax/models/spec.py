"""What a model directory says about its networks: frozen, validated, and the same after a round trip through JSON."""

import dataclasses
import math
from typing import Annotated

import numpy as np

from dime_jax._util import validate
from dime_jax._util.records import Json, Tagged, parse, plain_object
from dime_jax.core.schedule import NoiseSchedule, cosine_betas, schedule_from_betas
from dime_jax.models.architectures import NETWORKS
from dime_jax.models.autoencoder import AutoencoderSpec
from dime_jax.models.checks import MAX_IMAGE_SIZE, MAX_STEPS, Range, check_fields, check_integer, check_number, short
from dime_jax.models.clip_text import ClipTextSpec
from dime_jax.models.network_spec import DenoiserSpec, NetworkSpec

PREDICTIONS = ("epsilon", "sample", "v_prediction")

_LATENT = "latent"
_PARTS = ("denoiser", "autoencoder", "text_encoder")
_COMMON = ("image_shape", "schedule", "prediction")


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
    num_steps: Annotated[int, Range(1, MAX_STEPS)] = 1000
    beta_start: Annotated[float, Range(0, 1)] = 1e-4
    beta_end: Annotated[float, Range(0, 1)] = 0.02
    betas: tuple[float, ...] | None = None
    zero_terminal_snr: bool = False

    def __post_init__(self) -> None:
        validate.check_choice(self.kind, ("linear", "scaled_linear", "cosine", "betas"), "schedule")
        check_fields(self)
        if (self.kind == "betas") != (self.betas is not None):
            raise ValueError(f"betas must be given with the schedule 'betas' and only then, got schedule {self.kind!r}")
        if self.betas is not None:
            if not isinstance(self.betas, (tuple, list)) or len(self.betas) != self.num_steps:
                raise ValueError(f"betas must be a list of num_steps={self.num_steps} numbers")
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
    """Everything but the weights of a model: a network that predicts noise, and what else it needs.

    Attributes:
      denoiser: the network that predicts noise, on images, or on latents if there is an autoencoder.
      image_shape: (H, W, C) of an image.
      schedule: of the noise.
      prediction: what the network predicts, in the words of diffusers.
      autoencoder: makes latents of images; None if the network takes images.
      text_encoder: embeds captions, for a network that takes them.
    """

    denoiser: Annotated[DenoiserSpec, Tagged(NETWORKS)]
    image_shape: tuple[int, int, int]
    schedule: ScheduleSpec = dataclasses.field(default_factory=ScheduleSpec)
    prediction: str = "epsilon"
    autoencoder: AutoencoderSpec | None = None
    text_encoder: ClipTextSpec | None = None

    def __post_init__(self) -> None:
        validate.check_choice(self.prediction, PREDICTIONS, "prediction")
        if not isinstance(self.image_shape, (tuple, list)) or len(self.image_shape) != 3:
            raise ValueError(f"image_shape must be [height, width, channels], got {short(self.image_shape)}")
        object.__setattr__(self, "image_shape", tuple(self.image_shape))
        self._check_channels()
        self._check_sizes()
        self._check_text()
        steps = self.denoiser.time_table_steps
        if steps is not None and steps < self.schedule.num_steps:
            raise ValueError(f"time_table_steps must be >= {self.schedule.num_steps}, the schedule's, got {steps}")

    def _check_channels(self) -> None:
        channels = self.denoiser.x_shape[2]
        if self.autoencoder is not None:
            latent = self.autoencoder.latent_channels
            if channels != latent:
                raise ValueError(f"the network must take the autoencoder's {latent} channels, got {channels}")
            channels = self.autoencoder.image_channels
        if self.image_shape[2] != channels:
            raise ValueError(f"images must have image_channels={channels}, got {self.image_shape[2]}")

    def _check_sizes(self) -> None:
        for size, smallest in zip(self.image_shape[:2], self.denoiser.x_shape):
            smallest *= self._reduction
            check_integer(size, 1, MAX_IMAGE_SIZE, "image size")
            if self.denoiser.resizable and size % smallest:
                raise ValueError(f"the image size must be divisible by {smallest}, got {size}")
            if not self.denoiser.resizable and size != smallest:
                raise ValueError(f"the image size must be {smallest}, got {size}")

    def _check_text(self) -> None:
        width, encoder = self.denoiser.context_channels, self.text_encoder
        if width is None and encoder is not None:
            raise ValueError("text_encoder must be None: the network takes no captions")
        if width is not None and encoder is None:
            raise ValueError("text_encoder must be given: the network takes captions")
        if encoder is not None and encoder.width != width:
            raise ValueError(f"text_encoder must have width {width}, as the network's context, got {encoder.width}")

    @property
    def _reduction(self) -> int:
        return 1 if self.autoencoder is None else self.autoencoder.reduction

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of x: a latent, or an image if there is no autoencoder."""
        height, width, _ = self.image_shape
        return height // self._reduction, width // self._reduction, self.denoiser.x_shape[2]

    @property
    def num_classes(self) -> int | None:
        """How many classes condition it; None if none do."""
        return self.denoiser.num_classes

    @property
    def parts(self) -> dict[str, NetworkSpec]:
        """The networks that there are, by name: "denoiser", "autoencoder", "text_encoder"."""
        parts = {name: getattr(self, name) for name in _PARTS}
        return {name: part for name, part in parts.items() if part is not None}

    def to_json(self) -> dict[str, Json]:
        """Return what `from_json` reads. A model of one network has it under "architecture", and no kind."""
        common = {name: getattr(self, name) for name in _COMMON}
        if list(self.parts) == ["denoiser"]:
            return plain_object({"architecture": self.denoiser, **common})
        return plain_object({"kind": _LATENT, **dict.fromkeys(_PARTS), **self.parts, **common})

    @classmethod
    def from_json(cls, contents: object) -> "ModelSpec":
        """Return the spec that `to_json` wrote; unknown and missing fields are refused."""
        if isinstance(contents, dict):
            if contents.get("kind") == _LATENT:
                contents = {name: value for name, value in contents.items() if name != "kind"}
            elif "architecture" in contents and not contents.keys() & set(_PARTS):
                contents = {**dict.fromkeys(_PARTS), "denoiser": contents["architecture"], **contents}
                del contents["architecture"]
        return parse(cls, contents, "spec", strict=True)
