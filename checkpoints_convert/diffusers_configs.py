"""The configs of a diffusers pipeline's parts, as specs.

Every key of a config is honoured, known to change nothing that an attack asks for, or refused by name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from dime_jax._util.typing import JsonObject
from dime_jax.models import AutoencoderSpec, ClipTextSpec, ConditionalUnetSpec, DdpmUnetSpec, DitSpec, ScheduleSpec
from dime_jax.models.checks import MAX_CHANNELS, check_integer
from dime_jax.models.spec import PREDICTIONS

_BOOKKEEPING = ("_class_name", "_diffusers_version", "_name_or_path", "sample_size")
_EMA = ("decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power")


class Keys(NamedTuple):
    """What is known about the keys of one class's config.

    Attributes:
      class_names: of the class.
      fixed: keys with the only values that our network has; the first is the default.
      honoured: keys that our network has, with their defaults.
      ignored: keys that change nothing here; if there are none, all others.
      reasons: what a key's other values would mean, for the error.
    """

    class_names: tuple[str, ...]
    fixed: Mapping[str, tuple[object, ...]]
    honoured: Mapping[str, object]
    ignored: tuple[str, ...]
    reasons: Mapping[str, str] = {}


UNET = Keys(
    class_names=("UNet2DModel",),
    fixed={
        "center_input_sample": (False,),
        "time_embedding_type": ("positional",),
        "mid_block_type": ("UNetMidBlock2D",),
        "mid_block_scale_factor": (1,),
        "downsample_type": ("conv",),
        "upsample_type": ("conv",),
        "act_fn": ("silu", "swish"),
        "resnet_time_scale_shift": ("default",),
        "class_embed_type": (None,),
        "downsample_padding": (1, 0),
    },
    honoured={
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
    },
    ignored=(*_BOOKKEEPING, *_EMA, "num_train_timesteps"),  # the last is for time embeddings of other types
)

CONDITIONAL_UNET = Keys(
    class_names=("UNet2DConditionModel",),
    fixed={
        "center_input_sample": (False,),
        "mid_block_type": ("UNetMidBlock2DCrossAttn",),
        "only_cross_attention": (False,),
        "mid_block_scale_factor": (1,),
        "act_fn": ("silu", "swish"),
        "reverse_transformer_layers_per_block": (None,),
        "encoder_hid_dim": (None,),
        "encoder_hid_dim_type": (None,),
        "num_attention_heads": (None,),
        "dual_cross_attention": (False,),
        "class_embed_type": (None,),
        "addition_embed_type": (None,),
        "num_class_embeds": (None,),
        "resnet_time_scale_shift": ("default",),
        "resnet_skip_time_act": (False,),
        "resnet_out_scale_factor": (1,),
        "time_embedding_type": ("positional",),
        "time_embedding_act_fn": (None,),
        "timestep_post_act": (None,),
        "time_cond_proj_dim": (None,),
        "conv_in_kernel": (3,),
        "conv_out_kernel": (3,),
        "projection_class_embeddings_input_dim": (None,),
        "attention_type": ("default",),
        "class_embeddings_concat": (False,),
        "mid_block_only_cross_attention": (None, False),
        "cross_attention_norm": (None,),
        "downsample_padding": (1, 0),
    },
    honoured={
        "in_channels": 4,
        "out_channels": 4,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
        "block_out_channels": (320, 640, 1280, 1280),
        "layers_per_block": 2,
        "downsample_padding": 1,
        "dropout": 0.0,
        "norm_num_groups": 32,
        "norm_eps": 1e-5,
        "cross_attention_dim": 1280,
        "transformer_layers_per_block": 1,
        "attention_head_dim": 8,
        "use_linear_projection": False,
        "time_embedding_dim": None,
    },
    ignored=(*_BOOKKEEPING, *_EMA, "upcast_attention", "addition_time_embed_dim", "addition_embed_type_num_heads"),
    reasons={
        "addition_embed_type": "the network takes more than a caption, as SDXL's does",
        "class_embed_type": "the network takes a class beside the caption",
        "num_class_embeds": "the network takes a class beside the caption",
        "encoder_hid_dim_type": "the network takes image embeddings, as an IP-adapter's does",
        "encoder_hid_dim": "the network takes image embeddings, as an IP-adapter's does",
        "time_cond_proj_dim": "the network takes the guidance scale, as a consistency model's does",
        "attention_type": "the network takes boxes, as GLIGEN's does",
    },
)
_OTHER_CHANNELS = {
    9: "it is an inpainting network: mask and masked image come as further channels",
    8: "it is an editing network: the image to edit comes as further channels",
    7: "it is an upscaling network: the small image comes as further channels",
    5: "it is a depth-to-image network: the depth comes as a further channel",
}

AUTOENCODER = Keys(
    class_names=("AutoencoderKL",),
    fixed={"act_fn": ("silu", "swish"), "latents_mean": (None,), "latents_std": (None,)},
    honoured={
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",),
        "up_block_types": ("UpDecoderBlock2D",),
        "block_out_channels": (64,),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 32,
        "scaling_factor": 0.18215,
        "shift_factor": None,
        "use_quant_conv": True,
        "use_post_quant_conv": True,
        "mid_block_add_attention": True,
    },
    ignored=(*_BOOKKEEPING, *_EMA, "force_upcast"),
)

DIT = Keys(
    class_names=("DiTTransformer2DModel", "Transformer2DModel"),
    fixed={
        "norm_type": ("ada_norm_zero",),
        "activation_fn": ("gelu-approximate",),
        "attention_bias": (True,),
        "norm_elementwise_affine": (False,),
        "only_cross_attention": (False,),
        "double_self_attention": (False,),
        "use_linear_projection": (False,),
        "cross_attention_dim": (None,),
        "num_vector_embeds": (None,),
        "attention_type": ("default",),
        "caption_channels": (None,),
        "interpolation_scale": (None,),
        "use_additional_conditions": (None, False),
    },
    honoured={
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": None,
        "num_layers": 28,
        "sample_size": 32,
        "patch_size": 2,
        "num_embeds_ada_norm": 1000,
        "norm_eps": 1e-5,
    },
    ignored=(*_BOOKKEEPING, *_EMA, "dropout", "norm_num_groups", "upcast_attention"),
)

CLIP = Keys(
    class_names=("CLIPTextModel",),
    fixed={"model_type": ("clip_text_model",), "use_attention_mask": (False,), "quantization_config": (None,)},
    honoured={
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    ignored=(),
)


def check_class(name: object, expected: tuple[str, ...]) -> None:
    """Require the class that a config is for to be among those expected."""
    if name not in expected:
        raise ValueError(f"cannot honour _class_name={repr(name)[:60]}: expected {' or '.join(expected)}")


def refuse_code(config: JsonObject) -> None:
    """Refuse a config that names Python code."""
    if "auto_map" in config:
        raise ValueError("cannot honour auto_map: it names code to run")


def _refuse_unknown(config: JsonObject, known: set[str]) -> None:
    unknown = sorted(set(config) - known)
    if unknown:
        shown = ", ".join(f"{key}={str(config[key])[:40]!r}" for key in unknown[:5])
        raise ValueError(f"cannot honour unknown keys: {shown}")


def _given(config: JsonObject, keys: Keys) -> JsonObject:
    """The keys that are honoured, with defaults, once the others are known to change nothing."""
    classes = config.get("architectures")  # as transformers has it
    check_class(classes[0] if isinstance(classes, list) and classes else config.get("_class_name"), keys.class_names)
    refuse_code(config)
    for key, values in keys.fixed.items():
        if config.get(key, values[0]) not in values:
            if key in keys.reasons:
                raise ValueError(f"not supported, because {keys.reasons[key]} ({key}={str(config[key])[:60]})")
            expected = " or ".join(map(repr, values))
            raise ValueError(f"cannot honour {key}={str(config[key])[:60]!r}: expected {expected}")
    if keys.ignored:
        _refuse_unknown(config, {*keys.fixed, *keys.honoured, *keys.ignored})
    return {key: config.get(key, default) for key, default in keys.honoured.items()}


def describe_defaults(config: JsonObject, keys: Keys) -> list[str]:
    """A line on what a config leaves to the code that reads it, in a list; none if it leaves nothing."""
    values = [f"{key}={value!r}" for key, value in keys.honoured.items() if key not in config and key != "sample_size"]
    return [f"architecture: diffusers' defaults, where config.json does not say: {', '.join(values)}"] if values else []


def _list(given: JsonObject, key: str, length: int | None = None) -> tuple[Any, ...]:
    value = given[key]
    if not isinstance(value, (list, tuple)) or not value or (length is not None and len(value) != length):
        expected = "a list" if length is None else f"a list of {length}, one for each level"
        raise ValueError(f"expected {key} to be {expected}, got {str(value)[:60]}")
    return tuple(value)


def parse_unet(config: JsonObject, learned_sigma: bool | None = None) -> DdpmUnetSpec:
    """Return the spec of a UNet2DModel's config.

    Args:
      config: what it is.
      learned_sigma: whether the scheduler expects a variance from the network; None: as many channels as it has.
    """
    given = _given(config, UNET)
    channels = _channels(given)
    if given["attn_norm_num_groups"] not in (None, given["norm_num_groups"]):
        raise ValueError(f"cannot honour attn_norm_num_groups={given['attn_norm_num_groups']!r}: expected null")
    return DdpmUnetSpec(
        image_channels=given["in_channels"],
        learned_sigma=_has_learned_sigma(given, learned_sigma),
        stem_channels=channels[0],
        time_features=channels[0],
        time_channels=given["time_embedding_dim"] or 4 * channels[0],
        level_channels=channels,
        num_res_blocks=given["layers_per_block"],
        attention_levels=_attention_levels(given, "down_block_types", "Attn"),
        up_attention_levels=_attention_levels(given, "up_block_types", "Attn"),
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


def _channels(given: JsonObject) -> tuple[int, ...]:
    channels = _list(given, "block_out_channels")
    for one in channels:
        check_integer(one, 1, MAX_CHANNELS, "block_out_channels")
    return channels


def _has_learned_sigma(given: JsonObject, learned: bool | None) -> bool:
    inputs, outputs = given["in_channels"], given["out_channels"]
    check_integer(inputs, 1, MAX_CHANNELS, "in_channels")
    check_integer(outputs, 1, 2 * MAX_CHANNELS, "out_channels")
    if learned is None:
        learned = outputs == 2 * inputs
    if outputs != inputs * (2 if learned else 1):
        expected = f"2 * in_channels = {2 * inputs}" if learned else f"in_channels = {inputs}"
        raise ValueError(
            f"cannot honour out_channels={outputs}: expected {expected}, as its variance is "
            f"{'learned' if learned else 'not learned'}"
        )
    return learned


def parse_conditional_unet(config: JsonObject) -> ConditionalUnetSpec:
    """Return the spec of a UNet2DConditionModel's config."""
    given = _given(config, CONDITIONAL_UNET)
    _check_channels(given)
    channels = _channels(given)
    heads = given["attention_head_dim"]  # which is what diffusers calls the number of heads here
    return ConditionalUnetSpec(
        channels=given["in_channels"],
        level_channels=channels,
        num_res_blocks=given["layers_per_block"],
        attention_levels=_attention_levels(given, "down_block_types", "CrossAttn"),
        up_attention_levels=_attention_levels(given, "up_block_types", "CrossAttn"),
        level_heads=tuple(heads) if isinstance(heads, (list, tuple)) else (heads,) * len(channels),
        context_channels=given["cross_attention_dim"],
        transformer_layers=given["transformer_layers_per_block"],
        linear_projection=given["use_linear_projection"],
        time_channels=4 * channels[0] if given["time_embedding_dim"] is None else given["time_embedding_dim"],
        time_cos_first=given["flip_sin_to_cos"],
        time_frequency_shift=given["freq_shift"],
        symmetric_downsample=given["downsample_padding"] == 1,
        norm_groups=given["norm_num_groups"],
        norm_eps=given["norm_eps"],
        dropout=given["dropout"],
    )


def _check_channels(given: JsonObject) -> None:
    inputs, outputs = given["in_channels"], given["out_channels"]
    if inputs != outputs:
        reason = _OTHER_CHANNELS.get(inputs) if isinstance(inputs, int) else None
        if reason:
            raise ValueError(f"not supported, because {reason} (in_channels={inputs})")
        raise ValueError(f"cannot honour out_channels={str(outputs)[:20]}: expected in_channels={str(inputs)[:20]}")


def _attention_levels(given: JsonObject, key: str, attention: str) -> tuple[int, ...]:
    """The levels, from the full resolution down, whose blocks have attention; `attention` is what these are called."""
    plain = {"down_block_types": "DownBlock2D", "up_block_types": "UpBlock2D"}[key]
    block_types = _list(given, key, len(given["block_out_channels"]))
    for block_type in block_types:
        if block_type not in (plain, f"{attention}{plain}"):
            raise ValueError(
                f"cannot honour the block type {str(block_type)[:60]!r}: expected {plain} or {attention}{plain}"
            )
    levels = block_types if key == "down_block_types" else block_types[::-1]
    return tuple(level for level, block_type in enumerate(levels) if block_type != plain)


def parse_autoencoder(config: JsonObject) -> AutoencoderSpec:
    """The spec of an AutoencoderKL's config."""
    given = _given(config, AUTOENCODER)
    channels = _list(given, "block_out_channels")
    for key, block in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        other = set(map(str, _list(given, key, len(channels)))) - {block}
        if other:
            raise ValueError(f"cannot honour the block type {min(other)[:60]!r}: expected {block}")
    if given["in_channels"] != given["out_channels"]:
        raise ValueError(f"cannot honour out_channels={given['out_channels']!r}: expected in_channels")
    return AutoencoderSpec(
        image_channels=given["in_channels"],
        latent_channels=given["latent_channels"],
        level_channels=channels,
        num_res_blocks=given["layers_per_block"],
        middle_attention=given["mid_block_add_attention"],
        quant_conv=given["use_quant_conv"],
        post_quant_conv=given["use_post_quant_conv"],
        norm_groups=given["norm_num_groups"],
        scaling_factor=given["scaling_factor"],
        shift_factor=0.0 if given["shift_factor"] is None else given["shift_factor"],
    )


def parse_dit(config: JsonObject) -> DitSpec:
    """The spec of a DiTTransformer2DModel's config."""
    given = _given(config, DIT)
    for key in ("num_attention_heads", "attention_head_dim", "in_channels"):
        check_integer(given[key], 1, MAX_CHANNELS, key)
    width, inputs = given["num_attention_heads"] * given["attention_head_dim"], given["in_channels"]
    outputs = inputs if given["out_channels"] is None else given["out_channels"]
    if outputs not in (inputs, 2 * inputs):
        raise ValueError(f"cannot honour out_channels={outputs!r}: expected in_channels={inputs}, once or twice")
    return DitSpec(
        layout="diffusers",
        channels=inputs,
        learned_sigma=outputs == 2 * inputs,
        latent_size=given["sample_size"],
        patch_size=given["patch_size"],
        width=width,
        num_layers=given["num_layers"],
        num_heads=given["num_attention_heads"],
        mlp_width=4 * width,
        num_classes=given["num_embeds_ada_norm"],
        mlp_norm_eps=given["norm_eps"],
    )


def parse_text_encoder(config: JsonObject) -> ClipTextSpec:
    """The spec of a CLIPTextModel's config; its many keys about generating text change nothing."""
    given = _given(config, CLIP)
    return ClipTextSpec(
        vocabulary=given["vocab_size"],
        max_tokens=given["max_position_embeddings"],
        width=given["hidden_size"],
        mlp_width=given["intermediate_size"],
        num_layers=given["num_hidden_layers"],
        num_heads=given["num_attention_heads"],
        activation=given["hidden_act"],
        norm_eps=given["layer_norm_eps"],
    )


# What the noise schedule is made from, with the defaults of the samplers below.
_BETAS: JsonObject = {
    "num_train_timesteps": 1000,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "rescale_betas_zero_snr": False,
}
_NEEDED_BETAS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")
_BETA_SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "squaredcos_cap_v2": "cosine"}
_PLAIN_SAMPLERS = ("DDPMScheduler", "DDIMScheduler", "PNDMScheduler")
_DEFAULT_SAMPLERS = (
    *(*_PLAIN_SAMPLERS, "LMSDiscreteScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler"),
    *("DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler"),
    *("UniPCMultistepScheduler", "DEISMultistepScheduler"),
)
# These change how samples are drawn, not what the network was trained to predict.
_CLIPPING = {"clip_sample", "clip_sample_range", "thresholding", "dynamic_thresholding_ratio", "sample_max_value"}
_STEPPING = {"steps_offset", "timestep_spacing", "timestep_values", "set_alpha_to_one", "skip_prk_steps"}
_PLAIN_KEYS = {*_BETAS, "prediction_type", "variance_type", *_BOOKKEEPING, *_CLIPPING, *_STEPPING, "tensor_format"}


def parse_scheduler(config: JsonObject, any_sampler: bool) -> tuple[ScheduleSpec, str]:
    """Return the noise schedule and the prediction of a sampler's config: what the network was trained with.

    Args:
      config: what it is.
      any_sampler: whether all samplers with betas are taken, whatever else they have; else only those of DDPM, DDIM
        and PNDM, whose other keys are known.
    """
    name = str(config.get("_class_name"))
    refuse_code(config)
    if "FlowMatch" in name or config.get("use_flow_sigmas"):
        raise ValueError(f"not supported, because {name[:60]} is for flow matching, which has no noise schedule")
    if not any_sampler:
        check_class(config.get("_class_name"), _PLAIN_SAMPLERS)
        _refuse_unknown(config, _PLAIN_KEYS)
    missing = [key for key in _NEEDED_BETAS if key not in config and config.get("trained_betas") is None]
    if missing and name not in _DEFAULT_SAMPLERS:
        raise ValueError(f"expected {missing[0]} in the config of the sampler {name[:60]!r}")
    prediction = config.get("prediction_type", "epsilon")
    if prediction not in PREDICTIONS:
        raise ValueError(f"cannot honour prediction_type={str(prediction)[:60]!r}: expected {', '.join(PREDICTIONS)}")
    return _beta_schedule({**_BETAS, **config}), prediction


def missing_betas(config: JsonObject) -> list[str]:
    """Return the keys of the noise schedule that a sampler's config leaves to the code that reads it."""
    return [key for key in _BETAS if key not in config]


def _beta_schedule(given: JsonObject) -> ScheduleSpec:
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
