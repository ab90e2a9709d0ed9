"""How large a network is, by arithmetic: what a stranger's spec asks for is known before anything is built."""

from dime_jax.models.build import count_values, param_shapes
from dime_jax.models.ddpm_unet import DdpmUnetSpec
from dime_jax.models.guided_unet import GuidedUnetSpec
from dime_jax.models.network_spec import NetworkSpec


def num_values(spec: NetworkSpec) -> int:
    """Return how many numbers the variables of a network hold: the sizes in `param_shapes`, added up."""
    if not isinstance(spec, DdpmUnetSpec | GuidedUnetSpec):
        return count_values(param_shapes(spec))
    total, width = _embedding(spec) + _conv(spec.image_channels, spec.stem_channels), spec.stem_channels
    skips = [width]
    last = len(spec.level_channels) - 1
    for level, channels in enumerate(spec.level_channels):
        for _ in range(spec.num_res_blocks):
            total += _res_block(spec, width, channels) + (_attention(channels) if level in spec.attention_levels else 0)
            width = channels
            skips.append(width)
        if level != last:
            total += _resample(spec, width)
            skips.append(width)
    total += 2 * _res_block(spec, width, width) + (_attention(width) if getattr(spec, "middle_attention", True) else 0)
    for level, channels in reversed(list(enumerate(spec.level_channels))):
        for _ in range(spec.num_res_blocks + 1):
            total += _res_block(spec, width + skips.pop(), channels)
            total += _attention(channels) if level in spec.up_attention else 0
            width = channels
        total += _resample(spec, width) if level else 0
    return total + 2 * width + _conv(width, spec.out_channels)


def _embedding(spec: DdpmUnetSpec | GuidedUnetSpec) -> int:
    width = spec.time_channels
    table = (getattr(spec, "time_table_steps", None) or 0) * spec.time_features
    return table + _dense(spec.time_features, width) + _dense(width, width) + (spec.num_classes or 0) * width


def _dense(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _conv(inputs: int, outputs: int) -> int:
    return 9 * inputs * outputs + outputs


def _attention(channels: int) -> int:
    return 2 * channels + 4 * _dense(channels, channels)


def _res_block(spec: DdpmUnetSpec | GuidedUnetSpec, inputs: int, outputs: int) -> int:
    condition = outputs * (2 if getattr(spec, "scale_shift_norm", False) else 1)
    shortcut = _dense(inputs, outputs) if inputs != outputs else 0
    convolutions = _conv(inputs, outputs) + _conv(outputs, outputs)
    return 2 * inputs + convolutions + 2 * outputs + _dense(spec.time_channels, condition) + shortcut


def _resample(spec: DdpmUnetSpec | GuidedUnetSpec, channels: int) -> int:
    in_block = getattr(spec, "resblock_updown", False)
    return _res_block(spec, channels, channels) if in_block else _conv(channels, channels)
