"""What a model directory says about a latent model: frozen, validated, and the same after a trip through JSON.

`LatentModelSpec` = the network that predicts noise on latents (`ConditionalUnetSpec` or `DitSpec`) + the autoencoder
(`AutoencoderSpec`) + the text encoder if captions condition it (`ClipTextSpec`) + noise schedule, prediction and the
shape of an image. Bad values are refused with one line, before anything is allocated.
"""

import dataclasses
from typing import ClassVar

from dime_jax._util import validate
from dime_jax._util.typing import JsonObject
from dime_jax.models.spec import (
    MAX_CHANNELS,
    MAX_CLASSES,
    MAX_IMAGE_SIZE,
    MAX_LEVELS,
    MAX_RES_BLOCKS,
    PREDICTIONS,
    ScheduleSpec,
    check_flag,
    check_integer,
    check_number,
    freeze_image_shape,
    from_fields,
    from_tagged,
    to_fields,
)

MAX_LAYERS = 128
MAX_TRANSFORMER_LAYERS = 512  # in a U-Net; each takes a while to trace
MAX_VOCABULARY = 2**20
MAX_TOKENS = 2**16
MAX_POSITION_VALUES = 2**26  # of a table of positions

ACTIVATIONS = ("quick_gelu", "gelu")
DIT_LAYOUTS = ("original", "diffusers")


def _check_integers(spec: object, low: int, high: int, *names: str) -> None:
    for name in names:
        check_integer(getattr(spec, name), low, high, name)


def _check_tuple(spec: object, name: str, low: int, high: int) -> None:
    """Require a list of at most MAX_LEVELS integers in [low, high]; it becomes a tuple."""
    value = getattr(spec, name)
    if not isinstance(value, (tuple, list)) or len(value) > MAX_LEVELS:
        raise ValueError(f"expected {name} to be a list of at most {MAX_LEVELS} integers, got {name}={str(value)[:60]}")
    for item in value:
        check_integer(item, low, high, name)
    object.__setattr__(spec, name, tuple(value))


def _check_level_channels(spec: "ConditionalUnetSpec | AutoencoderSpec") -> None:
    check_integer(spec.norm_groups, 1, MAX_CHANNELS, "norm_groups")
    _check_tuple(spec, "level_channels", 1, MAX_CHANNELS)
    check_integer(len(spec.level_channels), 1, MAX_LEVELS, "number of level_channels")
    for channels in spec.level_channels:
        if channels % spec.norm_groups:
            raise ValueError(f"expected widths divisible by norm_groups={spec.norm_groups}, got {channels}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionalUnetSpec:
    """The U-Net of Stable Diffusion (diffusers' UNet2DConditionModel); the defaults are those of version 1.

    Level l works at 1/2^l of the latents' resolution. A level has `num_res_blocks` residual blocks on the way down and
    one more on the way up, each followed by a transformer if the level is listed in `attention_levels` (down) or
    `up_attention_levels` (up). The middle always has one.

    Attributes:
      channels: of a latent.
      level_channels: widths; the first is also that of the first convolution and of the embedding of t.
      level_heads: attention heads of each level; the middle has the last level's.
      context_channels: width of the text embedding.
      transformer_layers: in each transformer.
      linear_projection: whether a transformer's input and output maps are stored as matrices (version 2) or as 1×1
        convolutions (version 1), which compute the same.
      time_channels: width of the time MLP.
      time_cos_first: order of the embedding of t: [cos, sin] instead of [sin, cos].
      time_frequency_shift: s in the frequencies 10000^(-i / (half - s)), i = 0 … half - 1.
      symmetric_downsample: padding of the stride-2 convolutions: one on each side, instead of one after the end.
      norm_groups: groups of every GroupNorm.
      norm_eps: added to the variance in residual blocks and the output; transformers have 1e-6.
      dropout: in training; kept for the record.
    """

    kind: ClassVar[str] = "conditional_unet"

    channels: int = 4
    level_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    num_res_blocks: int = 2
    attention_levels: tuple[int, ...] = (0, 1, 2)
    up_attention_levels: tuple[int, ...] = (0, 1, 2)
    level_heads: tuple[int, ...] = (8, 8, 8, 8)
    context_channels: int = 768
    transformer_layers: int = 1
    linear_projection: bool = False
    time_channels: int = 1280
    time_cos_first: bool = True
    time_frequency_shift: float = 0
    symmetric_downsample: bool = True
    norm_groups: int = 32
    norm_eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_level_channels(self)
        levels = len(self.level_channels)
        for name in ("attention_levels", "up_attention_levels"):
            _check_tuple(self, name, 0, levels - 1)
        _check_tuple(self, "level_heads", 1, MAX_CHANNELS)
        if len(self.level_heads) != levels:
            raise ValueError(f"expected one of level_heads for each of {levels} levels, got {len(self.level_heads)}")
        for level in {*self.attention_levels, *self.up_attention_levels, levels - 1}:
            channels, heads = self.level_channels[level], self.level_heads[level]
            if channels % heads:
                raise ValueError(f"expected level_channels divisible by level_heads, got {channels} and {heads}")
        if self.level_channels[0] % 2:
            raise ValueError(f"expected an even first width (that of the time embedding), got {self.level_channels[0]}")
        check_integer(self.channels, 1, 64, "channels")
        _check_integers(self, 1, MAX_RES_BLOCKS, "num_res_blocks", "transformer_layers")
        layers = levels * (2 * self.num_res_blocks + 1) * self.transformer_layers
        check_integer(layers, 1, MAX_TRANSFORMER_LAYERS, "number of transformer layers")
        _check_integers(self, 1, MAX_CHANNELS, "context_channels", "time_channels")
        check_number(self.time_frequency_shift, 0, self.level_channels[0] // 2 - 0.5, "time_frequency_shift")
        check_number(self.norm_eps, 1e-12, 1.0, "norm_eps")
        check_number(self.dropout, 0.0, 0.99, "dropout")
        for name in ("linear_projection", "time_cos_first", "symmetric_downsample"):
            check_flag(getattr(self, name), name)

    @property
    def size_multiple(self) -> int:
        """What the height and width of latents must be a multiple of."""
        return 2 ** (len(self.level_channels) - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DitSpec:
    """The diffusion transformer of Peebles & Xie 2023, class-conditional; the defaults are DiT-XL/2 at 256 × 256.

    Attributes:
      layout: "original" (the authors' files) or "diffusers". They differ in more than names: the original has one
        embedding of t and class for all blocks, frequencies 10000^(-i / 128), one map for q, k, v, and stores the
        table of positions; diffusers has an embedding in each block, 10000^(-i / 127), and computes the positions.
      channels: of a latent.
      learned_sigma: whether the output has as many channels again for the variance (not used by attacks).
      latent_size: height and width of a latent.
      patch_size: height and width of a patch.
      width: of a token.
      num_layers: number of blocks.
      num_heads: attention heads.
      mlp_width: hidden width of a block's MLP.
      num_classes: classes; one more, the last, stands for "no class".
      mlp_norm_eps: added to the variance before a block's MLP; elsewhere it is 1e-6.
    """

    kind: ClassVar[str] = "dit"

    layout: str = "original"
    channels: int = 4
    learned_sigma: bool = True
    latent_size: int = 32
    patch_size: int = 2
    width: int = 1152
    num_layers: int = 28
    num_heads: int = 16
    mlp_width: int = 4608
    num_classes: int = 1000
    mlp_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        validate.check_choice(self.layout, DIT_LAYOUTS, "layout")
        check_integer(self.channels, 1, 64, "channels")
        check_flag(self.learned_sigma, "learned_sigma")
        check_integer(self.latent_size, 1, MAX_IMAGE_SIZE, "latent_size")
        check_integer(self.patch_size, 1, self.latent_size, "patch_size")
        _check_integers(self, 1, MAX_CHANNELS, "width", "num_heads")
        check_integer(self.mlp_width, 1, 8 * MAX_CHANNELS, "mlp_width")
        check_integer(self.num_layers, 1, MAX_LAYERS, "num_layers")
        check_integer(self.num_classes, 1, MAX_CLASSES, "num_classes")
        check_number(self.mlp_norm_eps, 1e-12, 1.0, "mlp_norm_eps")
        if self.latent_size % self.patch_size:
            raise ValueError(f"expected latent_size={self.latent_size} divisible by patch_size={self.patch_size}")
        if self.width % self.num_heads or self.width % 4:
            raise ValueError(f"expected width divisible by 4 and by num_heads={self.num_heads}, got width={self.width}")
        if self.num_tokens * self.width > MAX_POSITION_VALUES:
            raise ValueError(f"expected a smaller table of positions than {self.num_tokens} × width={self.width}")

    @property
    def num_tokens(self) -> int:
        """Patches of a latent."""
        return (self.latent_size // self.patch_size) ** 2

    @property
    def out_channels(self) -> int:
        """Output channels: the prediction, then the learned variance if there is one."""
        return self.channels * (2 if self.learned_sigma else 1)

    @property
    def is_original(self) -> bool:
        """Whether the layout is that of the authors' files."""
        return self.layout == "original"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoencoderSpec:
    """The autoencoder of latent diffusion (diffusers' AutoencoderKL); the defaults are those of Stable Diffusion.

    A latent is (mean of the posterior - shift_factor) * scaling_factor.

    Attributes:
      image_channels: channels of an image.
      latent_channels: channels of a latent.
      level_channels: widths; every level but the last halves the resolution.
      num_res_blocks: in a level of the encoder; the decoder has one more.
      middle_attention: whether the middle has attention.
      quant_conv: whether a 1×1 convolution follows the encoder.
      post_quant_conv: whether one precedes the decoder.
      norm_groups: groups of every GroupNorm; their eps is 1e-6.
      scaling_factor: see above.
      shift_factor: see above.
    """

    kind: ClassVar[str] = "autoencoder"

    image_channels: int = 3
    latent_channels: int = 4
    level_channels: tuple[int, ...] = (128, 256, 512, 512)
    num_res_blocks: int = 2
    middle_attention: bool = True
    quant_conv: bool = True
    post_quant_conv: bool = True
    norm_groups: int = 32
    scaling_factor: float = 0.18215
    shift_factor: float = 0.0

    def __post_init__(self) -> None:
        _check_level_channels(self)
        _check_integers(self, 1, 64, "image_channels", "latent_channels")
        check_integer(self.num_res_blocks, 1, MAX_RES_BLOCKS, "num_res_blocks")
        check_number(self.scaling_factor, 1e-6, 1e6, "scaling_factor")
        check_number(self.shift_factor, -1e6, 1e6, "shift_factor")
        for name in ("middle_attention", "quant_conv", "post_quant_conv"):
            check_flag(getattr(self, name), name)

    @property
    def reduction(self) -> int:
        """How many pixels in a row make one latent."""
        return 2 ** (len(self.level_channels) - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipTextSpec:
    """The text half of CLIP; the defaults are ViT-L/14's, which Stable Diffusion 1 uses.

    Attributes:
      vocabulary: number of tokens there are.
      max_tokens: in a caption.
      width: of a token's embedding.
      mlp_width: hidden width of a layer's MLP.
      num_layers: number of layers.
      num_heads: attention heads.
      activation: "quick_gelu", x * sigmoid(1.702 x), or "gelu", the exact one.
      norm_eps: added to the variance in every layer norm.
    """

    kind: ClassVar[str] = "clip_text"

    vocabulary: int = 49408
    max_tokens: int = 77
    width: int = 768
    mlp_width: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    activation: str = "quick_gelu"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_integer(self.vocabulary, 1, MAX_VOCABULARY, "vocabulary")
        check_integer(self.max_tokens, 1, MAX_TOKENS, "max_tokens")
        _check_integers(self, 1, MAX_CHANNELS, "width", "num_heads")
        check_integer(self.mlp_width, 1, 8 * MAX_CHANNELS, "mlp_width")
        check_integer(self.num_layers, 1, MAX_LAYERS, "num_layers")
        validate.check_choice(self.activation, ACTIVATIONS, "activation")
        check_number(self.norm_eps, 1e-12, 1.0, "norm_eps")
        if self.width % self.num_heads:
            raise ValueError(f"expected width divisible by num_heads={self.num_heads}, got width={self.width}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentModelSpec:
    """Everything but the weights of a latent model.

    Attributes:
      denoiser: the network that predicts noise on latents.
      autoencoder: makes latents of images.
      text_encoder: embeds captions; None for a `DitSpec`, which takes classes.
      image_shape: (H, W, C) of an image.
      schedule: of the noise.
      prediction: what the network predicts, in the words of diffusers.
    """

    kind: ClassVar[str] = "latent"

    denoiser: ConditionalUnetSpec | DitSpec
    autoencoder: AutoencoderSpec
    text_encoder: ClipTextSpec | None
    image_shape: tuple[int, int, int]
    schedule: ScheduleSpec
    prediction: str = "epsilon"

    def __post_init__(self) -> None:
        validate.check_choice(self.prediction, PREDICTIONS, "prediction")
        freeze_image_shape(self)
        self._check_sizes()
        if self.image_shape[2] != self.autoencoder.image_channels:
            raise ValueError(
                f"expected images of image_channels={self.autoencoder.image_channels}, got {self.image_shape[2]}"
            )
        if self.denoiser.channels != self.autoencoder.latent_channels:
            raise ValueError(
                f"expected a network for latents of {self.autoencoder.latent_channels} channels (the autoencoder's), "
                f"got channels={self.denoiser.channels}"
            )
        self._check_text()

    def _check_sizes(self) -> None:
        reduction = self.autoencoder.reduction
        multiple = self.denoiser.size_multiple if isinstance(self.denoiser, ConditionalUnetSpec) else 1
        for size in self.image_shape[:2]:
            check_integer(size, 1, MAX_IMAGE_SIZE, "image size")
            if size % (reduction * multiple):
                raise ValueError(f"expected an image size divisible by {reduction * multiple}, got {size}")
            if isinstance(self.denoiser, DitSpec) and size != reduction * self.denoiser.latent_size:
                raise ValueError(f"expected an image size of {reduction * self.denoiser.latent_size}, got {size}")

    def _check_text(self) -> None:
        if isinstance(self.denoiser, DitSpec):
            if self.text_encoder is not None:
                raise ValueError("expected no text_encoder: the network takes classes, not captions")
        elif self.text_encoder is None:
            raise ValueError("expected a text_encoder: the network takes captions")
        elif self.text_encoder.width != self.denoiser.context_channels:
            raise ValueError(
                f"expected a text_encoder of width {self.denoiser.context_channels} (the network's context_channels), "
                f"got width={self.text_encoder.width}"
            )

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of a latent."""
        height, width, _ = self.image_shape
        reduction = self.autoencoder.reduction
        return height // reduction, width // reduction, self.autoencoder.latent_channels

    @property
    def num_classes(self) -> int | None:
        """How many classes condition it; None if captions do."""
        return self.denoiser.num_classes if isinstance(self.denoiser, DitSpec) else None

    def to_json(self) -> JsonObject:
        """A JSON-able dict, from which `from_json` makes an equal spec."""
        text = None if self.text_encoder is None else to_fields(self.text_encoder)
        parts = {"denoiser": to_fields(self.denoiser), "autoencoder": to_fields(self.autoencoder), "text_encoder": text}
        return {**to_fields(self), **parts, "schedule": to_fields(self.schedule)}

    @classmethod
    def from_json(cls, contents: object) -> "LatentModelSpec":
        """The spec that `to_json` wrote; unknown and missing fields are refused."""
        if not isinstance(contents, dict) or contents.get("kind") != cls.kind:
            raise ValueError(f"expected a spec of kind {cls.kind!r}, got {str(contents)[:60]}")
        fields: JsonObject = dict(contents)
        del fields["kind"]
        given = set(fields) ^ {field.name for field in dataclasses.fields(cls)}
        if given:
            raise ValueError(f"bad fields in spec: unknown or missing {', '.join(sorted(map(str, given))[:5])}")
        text = fields["text_encoder"]
        parts = {
            "denoiser": from_tagged(_DENOISERS, fields["denoiser"], "denoiser"),
            "autoencoder": from_tagged((AutoencoderSpec,), fields["autoencoder"], "autoencoder"),
            "text_encoder": None if text is None else from_tagged((ClipTextSpec,), text, "text_encoder"),
            "schedule": from_fields(ScheduleSpec, fields["schedule"], "schedule"),
        }
        return cls(**{**fields, **parts})


_DENOISERS: tuple[type[ConditionalUnetSpec | DitSpec], ...] = (ConditionalUnetSpec, DitSpec)
NetworkSpec = ConditionalUnetSpec | DitSpec | AutoencoderSpec | ClipTextSpec
