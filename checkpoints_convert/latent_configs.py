"""The configs of a latent pipeline's parts, as specs.

Every key of a config is honoured, known to change nothing that an attack asks for, or refused by name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from checkpoints_convert.diffusers import beta_schedule
from dime_jax._util.typing import JsonObject
from dime_jax.models import AutoencoderSpec, ClipTextSpec, ConditionalUnetSpec, DitSpec, ScheduleSpec
from dime_jax.models.checks import MAX_CHANNELS, check_integer
from dime_jax.models.spec import PREDICTIONS

_BOOKKEEPING = ("_class_name", "_diffusers_version", "_name_or_path", "sample_size")
_EMA = ("decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power")


class _Keys(NamedTuple):
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


_UNET = _Keys(
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

_AUTOENCODER = _Keys(
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

_DIT = _Keys(
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

_CLIP = _Keys(
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


def _given(config: JsonObject, keys: _Keys, class_names: list[object]) -> JsonObject:
    """The keys that are honoured, with defaults, once the others are known to change nothing."""
    if not any(name in keys.class_names for name in class_names):
        raise ValueError(f"cannot honour the class {str(class_names)[:60]}: expected {' or '.join(keys.class_names)}")
    if "auto_map" in config:
        raise ValueError("cannot honour auto_map: it names code to run")
    for key, values in keys.fixed.items():
        if config.get(key, values[0]) not in values:
            expected = " or ".join(map(repr, values))
            if key in keys.reasons:
                raise ValueError(f"not supported, because {keys.reasons[key]} ({key}={str(config[key])[:60]})")
            raise ValueError(f"cannot honour {key}={str(config[key])[:60]!r}: expected {expected}")
    unknown = sorted(set(config) - {*keys.fixed, *keys.honoured, *keys.ignored}) if keys.ignored else []
    if unknown:
        raise ValueError(
            f"cannot honour unknown keys: {', '.join(f'{k}={str(config[k])[:40]!r}' for k in unknown[:5])}"
        )
    return {key: config.get(key, default) for key, default in keys.honoured.items()}


def _list(given: JsonObject, key: str, length: int | None = None) -> tuple[Any, ...]:
    value = given[key]
    if not isinstance(value, (list, tuple)) or not value or (length is not None and len(value) != length):
        expected = "a list" if length is None else f"a list of {length}, one for each level"
        raise ValueError(f"expected {key} to be {expected}, got {str(value)[:60]}")
    return tuple(value)


def parse_unet(config: JsonObject) -> ConditionalUnetSpec:
    """The spec of a UNet2DConditionModel's config."""
    given = _given(config, _UNET, [config.get("_class_name")])
    _check_channels(given)
    channels = _list(given, "block_out_channels")
    check_integer(channels[0], 1, MAX_CHANNELS, "block_out_channels")
    if given["downsample_padding"] not in (0, 1):
        raise ValueError(f"cannot honour downsample_padding={given['downsample_padding']!r}: expected 0 or 1")
    heads = given["attention_head_dim"]  # which is what diffusers calls the number of heads here
    return ConditionalUnetSpec(
        channels=given["in_channels"],
        level_channels=channels,
        num_res_blocks=given["layers_per_block"],
        attention_levels=_attention_levels(_list(given, "down_block_types", len(channels)), "DownBlock2D"),
        up_attention_levels=_attention_levels(_list(given, "up_block_types", len(channels))[::-1], "UpBlock2D"),
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


def _attention_levels(block_types: tuple[object, ...], plain: str) -> tuple[int, ...]:
    for block_type in block_types:
        if block_type not in (plain, f"CrossAttn{plain}"):
            raise ValueError(
                f"cannot honour the block type {str(block_type)[:60]!r}: expected {plain} or CrossAttn{plain}"
            )
    return tuple(level for level, block_type in enumerate(block_types) if block_type != plain)


def parse_autoencoder(config: JsonObject) -> AutoencoderSpec:
    """The spec of an AutoencoderKL's config."""
    given = _given(config, _AUTOENCODER, [config.get("_class_name")])
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
    given = _given(config, _DIT, [config.get("_class_name")])
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
    classes = config.get("architectures")
    given = _given(config, _CLIP, classes if isinstance(classes, list) else [classes])
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


# Samplers whose betas are these, where their config does not say.
_DEFAULT_BETAS = {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
_DEFAULT_SAMPLERS = (
    *("DDPMScheduler", "DDIMScheduler", "PNDMScheduler", "LMSDiscreteScheduler", "EulerDiscreteScheduler"),
    *("EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler"),
    *("UniPCMultistepScheduler", "DEISMultistepScheduler"),
)


def parse_scheduler(config: JsonObject) -> tuple[ScheduleSpec, str]:
    """The noise schedule and the prediction of any sampler's config: what the network was trained with."""
    name = str(config.get("_class_name"))
    if "FlowMatch" in name or config.get("use_flow_sigmas"):
        raise ValueError(f"not supported, because {name[:60]} is for flow matching, which has no noise schedule")
    missing = [key for key in _DEFAULT_BETAS if key not in config]
    if config.get("trained_betas") is not None:
        missing = []
    if missing and name not in _DEFAULT_SAMPLERS:
        raise ValueError(f"expected {missing[0]} in the config of the sampler {name[:60]!r}")
    prediction = config.get("prediction_type", "epsilon")
    if prediction not in PREDICTIONS:
        raise ValueError(f"cannot honour prediction_type={str(prediction)[:60]!r}: expected {', '.join(PREDICTIONS)}")
    given = {"trained_betas": None, "rescale_betas_zero_snr": False, **_DEFAULT_BETAS, **config}
    return beta_schedule(given), prediction
