"""diffusers folders: a UNet2DModel (config.json + weights), alone or in a pipeline with unet/ and scheduler/.

Every key of a config is honoured, known to change nothing that an attack asks for, or refused by name.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from checkpoints_convert import weights_file
from checkpoints_convert.checkpoint import Checkpoint, Known, Size, make_spec
from checkpoints_convert.json_file import read_json
from checkpoints_convert.mapping import Dialect, block_names
from checkpoints_convert.options import ConversionOptions
from checkpoints_convert.weights_file import ChosenWeights, about
from dime_jax._util.typing import JsonObject
from dime_jax.models import ConditionalUnetSpec, DdpmUnetSpec, ScheduleSpec
from dime_jax.models.checks import MAX_CHANNELS, check_integer
from dime_jax.models.spec import PREDICTIONS

_PIPELINES = ("DDPMPipeline", "DDIMPipeline", "PNDMPipeline")
_SCHEDULERS = ("DDPMScheduler", "DDIMScheduler", "PNDMScheduler")
_WEIGHT_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")


def module_names(spec: DdpmUnetSpec | ConditionalUnetSpec) -> dict[str, str]:
    """Their name for each top-level module of a U-Net."""
    names = {
        "time_dense_0": "time_embedding.linear_1",
        "time_dense_1": "time_embedding.linear_2",
        "label_embedding": "class_embedding",
        "conv_in": "conv_in",
        "middle_block_0": "mid_block.resnets.0",
        "middle_attention": "mid_block.attentions.0",
        "middle_block_1": "mid_block.resnets.1",
        "norm_out": "conv_norm_out",
        "conv_out": "conv_out",
    }
    levels = len(spec.level_channels)
    for level in range(levels):
        down, up = f"down_blocks.{level}", f"up_blocks.{levels - 1 - level}"
        names[f"down_{level}_downsample"] = f"{down}.downsamplers.0.conv"
        names[f"up_{level}_upsample"] = f"{up}.upsamplers.0.conv"
        for way, prefix in (("down", down), ("up", up)):
            blocks = range(spec.num_res_blocks + 1)
            residual = [f"{prefix}.resnets.{block}" for block in blocks]
            names |= block_names(way, level, residual, [f"{prefix}.attentions.{block}" for block in blocks])
    return names


DIALECT = Dialect(
    name="diffusers",
    prefixes=(
        "time_embedding.linear_",
        "conv_in.",
        "down_blocks.",
        "mid_block.",
        "up_blocks.",
        "conv_norm_out.",
        "conv_out.",
    ),
    module_names=module_names,
    part_names={
        "norm_1": "norm1",
        "conv_1": "conv1",
        "time_dense": "time_emb_proj",
        "norm_2": "norm2",
        "conv_2": "conv2",
        "shortcut": "conv_shortcut",
        "norm": "group_norm",
        "query": "to_q",
        "key": "to_k",
        "value": "to_v",
        "out": "to_out.0",
    },
    attention_layout="linear",
)

# Before diffusers 0.14 the attention's projections had other names.
_OLD_PARTS = {"query": "query", "key": "key", "value": "value", "out": "proj_attn"}
OLD_DIALECT = DIALECT._replace(name="diffusers (old names)", part_names={**DIALECT.part_names, **_OLD_PARTS})

# Keys of UNet2DModel's config with the only values that our network has; the first is diffusers' default.
_FIXED = {
    "center_input_sample": (False,),
    "time_embedding_type": ("positional",),
    "mid_block_type": ("UNetMidBlock2D",),
    "mid_block_scale_factor": (1,),
    "downsample_type": ("conv",),
    "upsample_type": ("conv",),
    "act_fn": ("silu", "swish"),
    "resnet_time_scale_shift": ("default",),
    "class_embed_type": (None,),
}
# Keys that our network has, with diffusers' defaults.
_HONOURED = {
    "sample_size": None,
    "in_channels": 3,
    "out_channels": 3,
    "time_embedding_dim": None,
    "freq_shift": 0,
    "flip_sin_to_cos": True,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (224, 448, 672, 896),
    "layers_per_block": 2,
    "downsample_padding": 1,
    "dropout": 0.0,
    "attention_head_dim": 8,
    "norm_num_groups": 32,
    "attn_norm_num_groups": None,
    "norm_eps": 1e-5,
    "add_attention": True,
    "num_class_embeds": None,
}
_BOOKKEEPING = {"_class_name", "_diffusers_version", "_name_or_path"}
_EMA_KEYS = {"decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power"}
_IGNORED = _BOOKKEEPING | _EMA_KEYS | {"num_train_timesteps"}  # the last is for time embeddings of other types

_SCHEDULER_HONOURED = {
    "num_train_timesteps": 1000,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "rescale_betas_zero_snr": False,
    "prediction_type": "epsilon",
    "variance_type": "fixed_small",
}
# These change how samples are drawn, not what the network was trained to predict.
_CLIPPING = {"clip_sample", "clip_sample_range", "thresholding", "dynamic_thresholding_ratio", "sample_max_value"}
_STEPPING = {"steps_offset", "timestep_spacing", "timestep_values", "set_alpha_to_one", "skip_prk_steps"}
_SCHEDULER_IGNORED = _BOOKKEEPING | _CLIPPING | _STEPPING | {"tensor_format"}
_BETA_SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "squaredcos_cap_v2": "cosine"}


class _Scheduler(NamedTuple):
    """What a scheduler's config says; `learned_sigma` is None if there is no scheduler."""

    schedule: Known[ScheduleSpec] | None
    prediction: Known[str] | None
    learned_sigma: bool | None


def open_folder(folder: Path, options: ConversionOptions) -> Checkpoint:
    """The checkpoint of a folder."""
    if options.dialect not in ("auto", DIALECT.name):
        raise ValueError(f"{folder} is a folder: expected the dialect diffusers, got {options.dialect}")
    if options.model_flags is not None:
        raise ValueError(f"{folder} has its own config: expected no --model_flags")
    index = folder / "model_index.json"
    if index.is_file():
        with about(index):
            _check_pipeline(read_json(index))
    unet, which = _choose_unet(folder, options.weights)
    scheduler = _read_scheduler(folder)
    with about(unet / "config.json"):
        config = read_json(unet / "config.json")
        architecture, image_size = parse_unet(config, scheduler.learned_sigma)
    with about(folder):
        spec, facts = make_spec(options, architecture, image_size, scheduler.schedule, scheduler.prediction)
    file = _weights_file(unet)
    with about(file):
        weights = weights_file.choose(file, weights_file.read(file), None)
    is_old = any(name.endswith(".proj_attn.weight") for name in weights.state)
    dialect = OLD_DIALECT if is_old else DIALECT
    lines = [*weights.facts, *facts]
    if architecture.learned_sigma and scheduler.learned_sigma is None:
        lines.append("variance: learned (out_channels is twice in_channels; there is no scheduler to say)")
    lines += _defaults("config.json", config, _HONOURED, but=("sample_size",))
    return Checkpoint(file, weights.state, dialect, which, spec, tuple(lines))


def open_weights(weights: ChosenWeights, options: ConversionOptions) -> NoReturn:
    """Refuse a weights file by itself, which does not say enough."""
    del weights, options
    raise ValueError("diffusers weights without their config: expected the folder that holds config.json")


def _read_scheduler(folder: Path) -> _Scheduler:
    files = [folder / "scheduler" / "scheduler_config.json", folder / "scheduler_config.json"]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return _Scheduler(None, None, None)
    config = read_json(file)
    with about(file):
        schedule, prediction = parse_scheduler(config)
    defaults = ", ".join(_missing(config, _SCHEDULER_HONOURED, but=("prediction_type", "variance_type")))
    how = f"{file.name}, with diffusers' defaults for {defaults}" if defaults else file.name
    says = "prediction_type" in config
    return _Scheduler(
        Known(schedule, how),
        Known(prediction, file.name if says else f"diffusers' default; {file.name} does not say"),
        config.get("variance_type") in ("learned", "learned_range"),
    )


def _missing(config: JsonObject, honoured: Mapping[str, object], but: tuple[str, ...]) -> list[str]:
    return [key for key in honoured if key not in config and key not in but]


def _defaults(name: str, config: JsonObject, honoured: Mapping[str, object], but: tuple[str, ...]) -> list[str]:
    """A line on what a config leaves to the code that reads it."""
    values = [f"{key}={honoured[key]!r}" for key in _missing(config, honoured, but)]
    return [f"architecture: diffusers' defaults, where {name} does not say: {', '.join(values)}"] if values else []


def _check_pipeline(index: JsonObject) -> None:
    _check_class(index, _PIPELINES)
    for part in ("unet", "scheduler"):
        match index.get(part):
            case ["diffusers", *_]:
                pass
            case other:
                raise ValueError(f"expected {part} from the library 'diffusers', got {str(other)[:60]}")


def _choose_unet(folder: Path, weights: str | None) -> tuple[Path, str]:
    """The folder of the network, and which weights it holds."""
    ema, raw = folder / "unet_ema", folder / "unet"
    if ema.is_dir() and weights in (None, "ema"):
        return ema, "ema"
    if ema.is_dir() and raw.is_dir() and weights == "raw":
        return raw, "raw"
    if weights is not None and ema.is_dir():
        raise ValueError(f"{folder} has no {weights} weights: expected --weights to be ema or raw")
    if weights is not None:
        raise ValueError(
            f"{folder} holds one set of weights, not marked as EMA or raw: expected no --weights={weights}"
        )
    unet = raw if raw.is_dir() else folder
    if not (unet / "config.json").is_file():
        raise ValueError(f"{folder} is not a diffusers folder: no config.json, and no unet/ in it")
    return unet, "only"


def _weights_file(unet: Path) -> Path:
    for name in _WEIGHT_FILES:
        if (unet / name).is_file():
            return unet / name
    others = sorted(file.name for file in unet.glob("diffusion_pytorch_model*"))
    raise ValueError(f"{unet}: expected {' or '.join(_WEIGHT_FILES)}, found {', '.join(others) or 'no weights'}")


def parse_unet(config: JsonObject, learned_sigma: bool | None) -> tuple[DdpmUnetSpec, Known[Size] | None]:
    """The architecture and the image size (None if the config has none) of a UNet2DModel's config.

    `learned_sigma` is whether the scheduler expects a variance from the network; None: as many channels as it has.
    """
    _check_class(config, ("UNet2DModel",))
    _check_keys(config, _FIXED.keys() | _HONOURED.keys() | _IGNORED)
    for key, values in _FIXED.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(f"cannot honour {key}={config[key]!r}: expected {' or '.join(map(repr, values))}")
    given: JsonObject = {key: config.get(key, default) for key, default in _HONOURED.items()}
    for key in ("block_out_channels", "down_block_types", "up_block_types"):
        if not isinstance(given[key], (list, tuple)) or not given[key]:
            raise ValueError(f"expected {key} to be a list, got {given[key]!r}")
        if len(given[key]) != len(given["block_out_channels"]):
            raise ValueError(f"expected as many {key} as block_out_channels, got {len(given[key])}")
    for channels in given["block_out_channels"]:
        check_integer(channels, 1, MAX_CHANNELS, "block_out_channels")
    stem = given["block_out_channels"][0]
    if given["downsample_padding"] not in (0, 1):
        raise ValueError(f"cannot honour downsample_padding={given['downsample_padding']!r}: expected 0 or 1")
    if given["attn_norm_num_groups"] not in (None, given["norm_num_groups"]):
        raise ValueError(f"cannot honour attn_norm_num_groups={given['attn_norm_num_groups']!r}: expected null")
    channels = given["in_channels"]
    check_integer(channels, 1, MAX_CHANNELS, "in_channels")
    check_integer(given["out_channels"], 1, 2 * MAX_CHANNELS, "out_channels")
    if learned_sigma is None:
        learned_sigma = given["out_channels"] == 2 * channels
    if given["out_channels"] != channels * (2 if learned_sigma else 1):
        expected = f"2 * in_channels = {2 * channels}, as its" if learned_sigma else f"in_channels = {channels}, as its"
        raise ValueError(
            f"cannot honour out_channels={given['out_channels']}: expected {expected} variance is "
            f"{'learned' if learned_sigma else 'not learned'}"
        )
    spec = DdpmUnetSpec(
        image_channels=channels,
        learned_sigma=learned_sigma,
        stem_channels=stem,
        time_features=stem,
        time_channels=given["time_embedding_dim"] or 4 * stem,
        level_channels=tuple(given["block_out_channels"]),
        num_res_blocks=given["layers_per_block"],
        attention_levels=_attention_levels(given["down_block_types"], "DownBlock2D"),
        up_attention_levels=_attention_levels(given["up_block_types"][::-1], "UpBlock2D"),
        head_channels=given["attention_head_dim"],
        norm_groups=given["norm_num_groups"],
        norm_eps=given["norm_eps"],
        num_classes=given["num_class_embeds"],
        dropout=given["dropout"],
        time_cos_first=given["flip_sin_to_cos"],
        time_frequency_shift=given["freq_shift"],
        symmetric_downsample=given["downsample_padding"] == 1,
        middle_attention=given["add_attention"],
    )
    return spec, _image_size(given)


def _attention_levels(block_types: Sequence[object], plain: str) -> tuple[int, ...]:
    for block_type in block_types:
        if block_type not in (plain, f"Attn{plain}"):
            raise ValueError(f"cannot honour the block type {block_type!r}: expected {plain} or Attn{plain}")
    return tuple(level for level, block_type in enumerate(block_types) if block_type != plain)


def _image_size(given: JsonObject) -> Known[Size] | None:
    size = given["sample_size"]
    if size is None:
        return None
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    return Known((height, width), "config.json")


def parse_scheduler(config: JsonObject) -> tuple[ScheduleSpec, str]:
    """The noise schedule and the prediction type of a scheduler's config."""
    _check_class(config, _SCHEDULERS)
    _check_keys(config, _SCHEDULER_HONOURED.keys() | _SCHEDULER_IGNORED)
    given = {key: config.get(key, default) for key, default in _SCHEDULER_HONOURED.items()}
    if given["prediction_type"] not in PREDICTIONS:
        raise ValueError(
            f"cannot honour prediction_type={given['prediction_type']!r}: expected {', '.join(PREDICTIONS)}"
        )
    return beta_schedule(given), given["prediction_type"]


def beta_schedule(given: JsonObject) -> ScheduleSpec:
    """The noise schedule of a scheduler's fields, all of those in `_SCHEDULER_HONOURED`."""
    betas = given["trained_betas"]
    if betas is not None:
        if not isinstance(betas, list):
            raise ValueError("expected trained_betas to be a list")
        return ScheduleSpec(
            kind="betas", num_steps=len(betas), betas=tuple(betas), zero_terminal_snr=given["rescale_betas_zero_snr"]
        )
    if given["beta_schedule"] not in tuple(_BETA_SCHEDULES):
        raise ValueError(
            f"cannot honour beta_schedule={given['beta_schedule']!r}: expected {', '.join(_BETA_SCHEDULES)}"
        )
    return ScheduleSpec(
        kind=_BETA_SCHEDULES[given["beta_schedule"]],
        num_steps=given["num_train_timesteps"],
        beta_start=given["beta_start"],
        beta_end=given["beta_end"],
        zero_terminal_snr=given["rescale_betas_zero_snr"],
    )


def _check_class(config: JsonObject, classes: tuple[str, ...]) -> None:
    if config.get("_class_name") not in classes:
        raise ValueError(f"cannot honour _class_name={config.get('_class_name')!r}: expected {' or '.join(classes)}")
    if "auto_map" in config:
        raise ValueError("cannot honour auto_map: it names code to run")


def _check_keys(config: JsonObject, known: set[str]) -> None:
    unknown = sorted(set(config) - known)
    if unknown:
        raise ValueError(
            f"cannot honour unknown keys: {', '.join(f'{key}={str(config[key])[:40]!r}' for key in unknown)}"
        )
