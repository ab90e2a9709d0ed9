"""openai/guided-diffusion checkpoints: bare state dicts of its UNetModel.

Head counts and the order of attention channels cannot be read off the weights: the published models are recognised by
their shapes (`PRESETS`, from the repository's README), others come with their constructor arguments in a JSON file.
"""

from pathlib import Path
from typing import NamedTuple

from checkpoints_convert.checkpoint import (
    Checkpoint,
    Dialect,
    Facts,
    Known,
    by_convention,
    file_checkpoint,
    stored_schedule,
)
from checkpoints_convert.config_keys import ConfigKeys, read_keys
from checkpoints_convert.mapping import (
    SHORTCUT,
    Naming,
    StateDict,
    block_names,
    block_parts,
    numbered,
    trunk_names,
    width_of,
)
from checkpoints_convert.options import ConversionOptions
from checkpoints_convert.weights_file import ChosenWeights, about
from dime_jax._util.files import read_json
from dime_jax._util.typing import JsonObject
from dime_jax.models import GuidedUnetSpec, ScheduleSpec
from dime_jax.models.checks import MAX_CHANNELS, MAX_IMAGE_SIZE, check_flag, check_integer, check_number

_CODE = "guided-diffusion"
_PARTS = {
    **block_parts("in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3", "skip_connection"),
    **{"norm": "norm", "qkv": "qkv", "out": "proj_out"},
}
_PREFIXES = ("time_embed.", "label_emb.", "input_blocks.", "middle_block.", "output_blocks.", "out.")


def naming(spec: GuidedUnetSpec) -> Naming:
    """Return the names of its modules."""
    time, middle = ("time_embed.0", "time_embed.2"), ("middle_block.0", "middle_block.1", "middle_block.2")
    names = trunk_names(time, "input_blocks.0.0", middle, ("out.0", "out.2")) | {"label_embedding": "label_emb"}
    levels = len(spec.level_channels)
    for level in range(levels):
        *down, downsample = numbered("input_blocks", level, spec.num_res_blocks + 1, start=1)
        up = numbered("output_blocks", levels - 1 - level, spec.num_res_blocks + 1)
        names |= block_names("down", level, [f"{block}.0" for block in down], [f"{block}.1" for block in down])
        names |= block_names("up", level, [f"{block}.0" for block in up], [f"{block}.1" for block in up])
        position = 2 if level in spec.up_attention else 1  # in the same block as the level's last residual block
        names[f"down_{level}_downsample"] = f"{downsample}.0" + ("" if spec.resblock_updown else ".op")
        names[f"up_{level}_upsample"] = f"{up[-1]}.{position}" + ("" if spec.resblock_updown else ".conv")
    return Naming(names, _PARTS, {**SHORTCUT, "qkv": "conv1d", "out": "conv1d"})


class GuidedNetwork(NamedTuple):
    """A network of guided-diffusion, with what belongs to it and is not in the file."""

    name: str
    architecture: GuidedUnetSpec
    image_size: int
    schedule: ScheduleSpec


def open_weights(weights: ChosenWeights, options: ConversionOptions) -> Checkpoint:
    """Return the checkpoint of a file's weights: a published network, or the one of `options.model_flags`."""
    if options.model_flags is None:
        network = recognise(weights.state)
        how = f"the published {network.name} network, told by its shapes"
        schedule = Known(network.schedule, how)
    else:
        flags_file = Path(options.model_flags)
        with about(flags_file):
            network = setting_from_flags(read_json(flags_file))
        how = flags_file.name
        schedule = by_convention(network.schedule, _CODE)
    size = Known((network.image_size, network.image_size), how)
    facts = Facts(size, stored_schedule(weights) or schedule, by_convention("epsilon", _CODE))
    spec = network.architecture
    return file_checkpoint(weights, options, spec, naming(spec), facts, network.name)


# Constructor arguments of UNetModel, with its defaults.
_FLAGS = ConfigKeys(
    class_names=(),
    fixed={"dims": (2,), "conv_resample": (True,)},
    fields={
        "in_channels": ("image_channels", 3),
        "num_res_blocks": ("num_res_blocks", None),
        "num_heads": ("num_heads", 1),
        "dropout": ("dropout", 0.0),
        "resblock_updown": ("resblock_updown", False),
        "use_scale_shift_norm": ("scale_shift_norm", False),
        "use_new_attention_order": ("new_attention_order", False),
    },
    honoured={
        **dict.fromkeys(("image_size", "model_channels", "attention_resolutions", "out_channels", "learn_sigma")),
        **dict.fromkeys(("class_cond", "num_classes")),
        "channel_mult": (1, 2, 4, 8),
        "num_head_channels": -1,
        "num_heads_upsample": -1,
    },
    ignored=("use_checkpoint", "use_fp16"),
)
_NEEDED = ("image_size", "model_channels", "num_res_blocks", "attention_resolutions")


def setting_from_flags(flags: JsonObject, name: str = "model_flags") -> GuidedNetwork:
    """Return the network of UNetModel's constructor arguments; what our network does not have is refused by name.

    `attention_resolutions` are downsampling factors, as in the constructor. `learn_sigma` (from the repository's
    scripts) may stand for `out_channels`. Flags for precision and checkpointing change nothing here.

    Args:
      flags: named as in the constructor.
      name: the network's name in the record.
    """
    fields, given = read_keys(flags, _FLAGS)
    missing = [key for key in _NEEDED if given[key] is None]
    if missing:
        raise ValueError(f"missing model flags: {', '.join(missing)}")
    if given["num_heads_upsample"] not in (-1, given["num_heads"]) and given["num_head_channels"] == -1:
        raise ValueError(f"cannot honour num_heads_upsample={given['num_heads_upsample']!r}: must be num_heads or -1")
    check_integer(given["model_channels"], 1, MAX_CHANNELS, "model_channels")
    check_integer(given["image_size"], 1, MAX_IMAGE_SIZE, "image_size")
    for key in ("channel_mult", "attention_resolutions"):
        if not isinstance(given[key], (list, tuple)):
            raise ValueError(f"{key} must be a list, got {given[key]!r}")
    for multiplier in given["channel_mult"]:
        check_number(multiplier, 0, 64, "channel_mult")
    width = given["model_channels"]
    level_channels = tuple(int(multiplier * width) for multiplier in given["channel_mult"])
    factors = [2**level for level in range(len(level_channels))]
    for factor in given["attention_resolutions"]:
        check_integer(factor, 1, MAX_IMAGE_SIZE, "attention_resolutions")
    architecture = GuidedUnetSpec(
        **fields,
        learned_sigma=_learned_sigma(given),
        stem_channels=level_channels[0] if level_channels else width,
        time_features=width,
        time_channels=4 * width,
        level_channels=level_channels,
        attention_levels=tuple(factors.index(f) for f in factors if f in given["attention_resolutions"]),
        head_channels=None if given["num_head_channels"] == -1 else given["num_head_channels"],
        num_classes=_num_classes(given),
    )
    return GuidedNetwork(name, architecture, given["image_size"], ScheduleSpec())


def _learned_sigma(given: JsonObject) -> bool:
    if given["out_channels"] is None:
        check_flag(given["learn_sigma"], "learn_sigma")
        return given["learn_sigma"]
    learned = given["out_channels"] == 2 * given["in_channels"]
    if not learned and given["out_channels"] != given["in_channels"]:
        raise ValueError(f"cannot honour out_channels={given['out_channels']!r}: must be in_channels or twice that")
    if given["learn_sigma"] not in (None, learned):
        raise ValueError(f"learn_sigma={given['learn_sigma']} contradicts out_channels={given['out_channels']}")
    return learned


def _num_classes(given: JsonObject) -> int | None:
    if given["class_cond"] not in (None, given["num_classes"] is not None):
        raise ValueError(f"class_cond={given['class_cond']!r} contradicts num_classes={given['num_classes']!r}")
    return given["num_classes"]


def _preset(
    name: str, size: int, channels: int, multipliers: tuple[float, ...], schedule: str = "linear", **flags: object
) -> GuidedNetwork:
    """Describe a published model: attention at 32×32, 16×16 and 8×8, learned variance, resampling residual blocks."""
    common = {
        "image_size": size,
        "model_channels": channels,
        "channel_mult": multipliers,
        "attention_resolutions": [size // 32, size // 16, size // 8],
        "learn_sigma": True,
        "num_classes": 1000,
        "num_res_blocks": 2,
        "num_head_channels": 64,
        "resblock_updown": True,
        "use_scale_shift_norm": True,
    }
    return setting_from_flags({**common, **flags}, name)._replace(schedule=ScheduleSpec(kind=schedule))


def presets() -> dict[str, GuidedNetwork]:
    """The published models, by size; `256x256_uncond` is also LSUN's."""
    settings = (
        _preset("64x64", 64, 192, (1, 2, 3, 4), "cosine", num_res_blocks=3, dropout=0.1, use_new_attention_order=True),
        _preset("128x128", 128, 256, (1, 1, 2, 3, 4), num_heads=4, num_head_channels=-1),
        _preset("256x256", 256, 256, (1, 1, 2, 2, 4, 4)),
        _preset("256x256_uncond", 256, 256, (1, 1, 2, 2, 4, 4), num_classes=None),
        _preset("512x512", 512, 256, (0.5, 1, 1, 2, 2, 4, 4)),
    )
    return {setting.name: setting for setting in settings}


def recognise(state: StateDict) -> GuidedNetwork:
    """Find the published model that has these tensors, by stem, depth and labels; `to_variables` checks the rest."""
    numbers = [name.split(".")[1] for name in state if name.startswith("input_blocks.")]
    depth = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
    stem_tensors = ("input_blocks.0.0.weight", "input_blocks.0.0.bias", "out.0.weight", "out.0.bias")
    stem = width_of(state, [(name, 0) for name in stem_tensors])
    for setting in presets().values():
        spec = setting.architecture
        its_depth = len(spec.level_channels) * (spec.num_res_blocks + 1)
        has_labels = spec.num_classes is not None
        if (spec.stem_channels, its_depth, has_labels) == (stem, depth, "label_emb.weight" in state):
            return setting
    names = ", ".join(presets())
    raise ValueError(f"not one of the published networks ({names}): give --model_flags, the network's arguments")


DIALECT = Dialect("guided", _PREFIXES, open_weights, takes_model_flags=True)
