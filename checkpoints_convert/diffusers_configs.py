"""The configs of a diffusers pipeline's parts, as specs."""

from typing import Any

from checkpoints_convert.config_keys import ConfigKeys, check_class, read_keys, refuse_code, refuse_unknown
from dime_jax._util.typing import JsonObject
from dime_jax.models import AutoencoderSpec, ClipTextSpec, ConditionalUnetSpec, DdpmUnetSpec, DitSpec, ScheduleSpec
from dime_jax.models.checks import MAX_CHANNELS, check_integer
from dime_jax.models.spec import PREDICTIONS

_BOOKKEEPING = ("_class_name", "_diffusers_version", "_name_or_path", "sample_size")
_EMA = ("decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power")


_UNET_FIXED = {
    "center_input_sample": (False,),
    "time_embedding_type": ("positional",),
    "mid_block_scale_factor": (1,),
    "act_fn": ("silu", "swish"),
    "resnet_time_scale_shift": ("default",),
    "class_embed_type": (None,),
    "downsample_padding": (1, 0),
}
_UNET_FIELDS = {
    "layers_per_block": ("num_res_blocks", 2),
    "flip_sin_to_cos": ("time_cos_first", True),
    "freq_shift": ("time_frequency_shift", 0),
    "norm_num_groups": ("norm_groups", 32),
    "norm_eps": ("norm_eps", 1e-5),
    "dropout": ("dropout", 0.0),
}

UNET = ConfigKeys(
    class_names=("UNet2DModel",),
    fixed={
        **_UNET_FIXED,
        "mid_block_type": ("UNetMidBlock2D",),
        "downsample_type": ("conv",),
        "upsample_type": ("conv",),
    },
    fields={
        **_UNET_FIELDS,
        "in_channels": ("image_channels", 3),
        "attention_head_dim": ("head_channels", 8),
        "add_attention": ("middle_attention", True),
        "num_class_embeds": ("num_classes", None),
    },
    honoured={
        "out_channels": 3,
        "time_embedding_dim": None,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (224, 448, 672, 896),
        "downsample_padding": 1,
        "attn_norm_num_groups": None,
    },
    ignored=(*_BOOKKEEPING, *_EMA, "num_train_timesteps"),  # the last is for time embeddings of other types
)

_NONE = (
    *("reverse_transformer_layers_per_block", "encoder_hid_dim", "encoder_hid_dim_type", "num_attention_heads"),
    *("addition_embed_type", "num_class_embeds", "time_embedding_act_fn", "timestep_post_act", "time_cond_proj_dim"),
    *("projection_class_embeddings_input_dim", "cross_attention_norm"),
)
_FALSE = ("only_cross_attention", "dual_cross_attention", "resnet_skip_time_act", "class_embeddings_concat")
CONDITIONAL_UNET = ConfigKeys(
    class_names=("UNet2DConditionModel",),
    fixed={
        **_UNET_FIXED,
        **dict.fromkeys(_NONE, (None,)),
        **dict.fromkeys(_FALSE, (False,)),
        "mid_block_type": ("UNetMidBlock2DCrossAttn",),
        "resnet_out_scale_factor": (1,),
        "conv_in_kernel": (3,),
        "conv_out_kernel": (3,),
        "attention_type": ("default",),
        "mid_block_only_cross_attention": (None, False),
    },
    fields={
        **_UNET_FIELDS,
        "in_channels": ("channels", 4),
        "cross_attention_dim": ("context_channels", 1280),
        "transformer_layers_per_block": ("transformer_layers", 1),
        "use_linear_projection": ("linear_projection", False),
    },
    honoured={
        "out_channels": 4,
        "time_embedding_dim": None,
        "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
        "block_out_channels": (320, 640, 1280, 1280),
        "downsample_padding": 1,
        "attention_head_dim": 8,
    },
    ignored=(*_BOOKKEEPING, *_EMA, "upcast_attention", "addition_time_embed_dim", "addition_embed_type_num_heads"),
    reasons={
        "addition_embed_type": "the network takes more than a caption, as SDXL's does",
        **dict.fromkeys(("class_embed_type", "num_class_embeds"), "the network takes a class beside the caption"),
        **dict.fromkeys(
            ("encoder_hid_dim", "encoder_hid_dim_type"), "the network takes image embeddings, as an IP-adapter's does"
        ),
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

AUTOENCODER = ConfigKeys(
    class_names=("AutoencoderKL",),
    fixed={"act_fn": ("silu", "swish"), "latents_mean": (None,), "latents_std": (None,)},
    fields={
        "in_channels": ("image_channels", 3),
        "latent_channels": ("latent_channels", 4),
        "layers_per_block": ("num_res_blocks", 1),
        "mid_block_add_attention": ("middle_attention", True),
        "use_quant_conv": ("quant_conv", True),
        "use_post_quant_conv": ("post_quant_conv", True),
        "norm_num_groups": ("norm_groups", 32),
        "scaling_factor": ("scaling_factor", 0.18215),
    },
    honoured={
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",),
        "up_block_types": ("UpDecoderBlock2D",),
        "block_out_channels": (64,),
        "shift_factor": None,
    },
    ignored=(*_BOOKKEEPING, *_EMA, "force_upcast"),
)

DIT = ConfigKeys(
    class_names=("DiTTransformer2DModel", "Transformer2DModel"),
    fixed={
        **dict.fromkeys(
            ("cross_attention_dim", "num_vector_embeds", "caption_channels", "interpolation_scale"), (None,)
        ),
        **dict.fromkeys(("norm_elementwise_affine", "only_cross_attention", "double_self_attention"), (False,)),
        "use_linear_projection": (False,),
        "norm_type": ("ada_norm_zero",),
        "activation_fn": ("gelu-approximate",),
        "attention_bias": (True,),
        "attention_type": ("default",),
        "use_additional_conditions": (None, False),
    },
    fields={
        "in_channels": ("channels", 4),
        "sample_size": ("latent_size", 32),
        "patch_size": ("patch_size", 2),
        "num_layers": ("num_layers", 28),
        "num_attention_heads": ("num_heads", 16),
        "num_embeds_ada_norm": ("num_classes", 1000),
        "norm_eps": ("mlp_norm_eps", 1e-5),
    },
    honoured={"attention_head_dim": 72, "out_channels": None},
    ignored=(*_BOOKKEEPING, *_EMA, "dropout", "norm_num_groups", "upcast_attention"),
)

CLIP = ConfigKeys(
    class_names=("CLIPTextModel",),
    fixed={"model_type": ("clip_text_model",), "use_attention_mask": (False,), "quantization_config": (None,)},
    fields={
        "vocab_size": ("vocabulary", 49408),
        "max_position_embeddings": ("max_tokens", 77),
        "hidden_size": ("width", 512),
        "intermediate_size": ("mlp_width", 2048),
        "num_hidden_layers": ("num_layers", 12),
        "num_attention_heads": ("num_heads", 8),
        "hidden_act": ("activation", "quick_gelu"),
        "layer_norm_eps": ("norm_eps", 1e-5),
    },
    honoured={},
    ignored=(),
)


def describe_defaults(config: JsonObject, keys: ConfigKeys) -> list[str]:
    """Return a line on what a config leaves to the code that reads it, in a list; an empty list if nothing."""
    values = [f"{key}={value!r}" for key, value in keys.defaults().items() if key not in config]
    return [f"architecture: diffusers' defaults, where config.json does not say: {', '.join(values)}"] if values else []


def _list(given: JsonObject, key: str, length: int | None = None) -> tuple[Any, ...]:
    value = given[key]
    if not isinstance(value, (list, tuple)) or not value or (length is not None and len(value) != length):
        expected = "a list" if length is None else f"a list of {length}, one for each level"
        raise ValueError(f"{key} must be {expected}, got {str(value)[:60]}")
    return tuple(value)


def parse_unet(config: JsonObject, learned_sigma: bool | None = None) -> DdpmUnetSpec:
    """Return the spec of a UNet2DModel's config.

    Args:
      config: what it is.
      learned_sigma: whether the scheduler expects a variance from the network; None if the channels decide.
    """
    fields, given = read_keys(config, UNET)
    channels = _channels(given)
    if given["attn_norm_num_groups"] not in (None, given["norm_num_groups"]):
        raise ValueError(f"cannot honour attn_norm_num_groups={given['attn_norm_num_groups']!r}: must be null")
    return DdpmUnetSpec(
        **fields,
        **_unet_fields(given, "Attn"),
        learned_sigma=_has_learned_sigma(given, learned_sigma),
        stem_channels=channels[0],
        time_features=channels[0],
    )


def _unet_fields(given: JsonObject, attention: str) -> JsonObject:
    """Return fields of either U-Net that follow from more than one key; `attention` begins the names of its blocks."""
    channels, width = _channels(given), given["time_embedding_dim"]
    return {
        "time_channels": 4 * channels[0] if width is None else width,
        "level_channels": channels,
        "attention_levels": _attention_levels(given, "down_block_types", attention),
        "up_attention_levels": _attention_levels(given, "up_block_types", attention),
        "symmetric_downsample": given["downsample_padding"] == 1,
    }


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
        why = f"as its variance is {'learned' if learned else 'not learned'}"
        raise ValueError(f"cannot honour out_channels={outputs}: must be {expected}, {why}")
    return learned


def parse_conditional_unet(config: JsonObject) -> ConditionalUnetSpec:
    """Return the spec of a UNet2DConditionModel's config."""
    fields, given = read_keys(config, CONDITIONAL_UNET)
    _check_channels(given)
    heads = given["attention_head_dim"]  # which is what diffusers calls the number of heads here
    level_heads = tuple(heads) if isinstance(heads, (list, tuple)) else (heads,) * len(_channels(given))
    return ConditionalUnetSpec(**fields, **_unet_fields(given, "CrossAttn"), level_heads=level_heads)


def _check_channels(given: JsonObject) -> None:
    inputs, outputs = given["in_channels"], given["out_channels"]
    if inputs != outputs:
        reason = _OTHER_CHANNELS.get(inputs) if isinstance(inputs, int) else None
        if reason:
            raise ValueError(f"not supported, because {reason} (in_channels={inputs})")
        raise ValueError(f"cannot honour out_channels={str(outputs)[:20]}: must be in_channels={str(inputs)[:20]}")


def _attention_levels(given: JsonObject, key: str, attention: str) -> tuple[int, ...]:
    """Return the levels, from the full resolution down, whose blocks have attention, whose type is `attention`."""
    plain = {"down_block_types": "DownBlock2D", "up_block_types": "UpBlock2D"}[key]
    block_types = _list(given, key, len(given["block_out_channels"]))
    for one in block_types:
        if one not in (plain, f"{attention}{plain}"):
            raise ValueError(f"cannot honour the block type {str(one)[:60]!r}: must be {plain} or {attention}{plain}")
    levels = block_types if key == "down_block_types" else block_types[::-1]
    return tuple(level for level, block_type in enumerate(levels) if block_type != plain)


def parse_autoencoder(config: JsonObject) -> AutoencoderSpec:
    """Return the spec of an AutoencoderKL's config."""
    fields, given = read_keys(config, AUTOENCODER)
    channels = _list(given, "block_out_channels")
    for key, block in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        other = set(map(str, _list(given, key, len(channels)))) - {block}
        if other:
            raise ValueError(f"cannot honour the block type {min(other)[:60]!r}: must be {block}")
    if given["in_channels"] != given["out_channels"]:
        raise ValueError(f"cannot honour out_channels={given['out_channels']!r}: must be in_channels")
    shift = 0.0 if given["shift_factor"] is None else given["shift_factor"]
    return AutoencoderSpec(**fields, level_channels=channels, shift_factor=shift)


def parse_dit(config: JsonObject) -> DitSpec:
    """Return the spec of a DiTTransformer2DModel's config."""
    fields, given = read_keys(config, DIT)
    for key in ("num_attention_heads", "attention_head_dim", "in_channels"):
        check_integer(given[key], 1, MAX_CHANNELS, key)
    width, inputs = given["num_attention_heads"] * given["attention_head_dim"], given["in_channels"]
    outputs = inputs if given["out_channels"] is None else given["out_channels"]
    if outputs not in (inputs, 2 * inputs):
        raise ValueError(f"cannot honour out_channels={outputs!r}: must be in_channels={inputs}, once or twice")
    learned = outputs == 2 * inputs
    return DitSpec(**fields, layout="diffusers", learned_sigma=learned, width=width, mlp_width=4 * width)


def parse_text_encoder(config: JsonObject) -> ClipTextSpec:
    """Return the spec of a CLIPTextModel's config; its many keys about generating text change nothing."""
    return ClipTextSpec(**read_keys(config, CLIP).fields)


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
        refuse_unknown(config, _PLAIN_KEYS)
    missing = [key for key in _NEEDED_BETAS if key not in config and config.get("trained_betas") is None]
    if missing and name not in _DEFAULT_SAMPLERS:
        raise ValueError(f"the config of the sampler {name[:60]!r} has no {missing[0]}")
    prediction = config.get("prediction_type", "epsilon")
    if prediction not in PREDICTIONS:
        raise ValueError(
            f"cannot honour prediction_type={str(prediction)[:60]!r}: must be one of {', '.join(PREDICTIONS)}"
        )
    return _beta_schedule({**_BETAS, **config}), prediction


def missing_betas(config: JsonObject) -> list[str]:
    """Return the keys of the noise schedule that a sampler's config leaves to the code that reads it."""
    return [key for key in _BETAS if key not in config]


def _beta_schedule(given: JsonObject) -> ScheduleSpec:
    betas, kind, zero_snr = given["trained_betas"], given["beta_schedule"], given["rescale_betas_zero_snr"]
    if betas is not None:
        if not isinstance(betas, list):
            raise ValueError("trained_betas must be a list")
        return ScheduleSpec(kind="betas", num_steps=len(betas), betas=tuple(betas), zero_terminal_snr=zero_snr)
    if kind not in tuple(_BETA_SCHEDULES):
        raise ValueError(f"cannot honour beta_schedule={kind!r}: must be one of {', '.join(_BETA_SCHEDULES)}")
    return ScheduleSpec(
        kind=_BETA_SCHEDULES[kind],
        num_steps=given["num_train_timesteps"],
        beta_start=given["beta_start"],
        beta_end=given["beta_end"],
        zero_terminal_snr=zero_snr,
    )
