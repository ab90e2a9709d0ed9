"""The checks that specs make of their own fields, each a one-line ValueError: specs come from strangers' files too."""

import dataclasses
from typing import Protocol

import numpy as np

# Far above every published model, far below what would exhaust memory: a typo or a hostile config fails here.
MAX_CHANNELS = 8192
MAX_LEVELS = 10
MAX_BLOCKS = 128  # in all levels together; tracing that many takes seconds
MAX_LAYERS = 128
MAX_CLASSES = 100_000
MAX_STEPS = 100_000
MAX_IMAGE_SIZE = 4096

_NUMBERS = (int, float, np.integer, np.floating)


def check_integer(value: object, low: int, high: int, name: str) -> None:
    """Require an int (not a bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"expected {name} to be an integer in [{low}, {high}], got {name}={short(value)}")


def check_integers(spec: object, low: int, high: int, *names: str) -> None:
    """Require integers in [low, high] in these fields of a spec."""
    for name in names:
        check_integer(getattr(spec, name), low, high, name)


def check_number(value: object, low: float, high: float, name: str) -> None:
    """Require a finite real number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not low <= value <= high:
        raise ValueError(f"expected {name} to be a number in [{low:g}, {high:g}], got {name}={short(value)}")


def check_flag(value: object, name: str) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be true or false, got {name}={short(value)}")


def check_flags(spec: object) -> None:
    """Require a bool in each field of a spec that is declared as one."""
    assert dataclasses.is_dataclass(spec)
    for field in dataclasses.fields(spec):
        if field.type is bool:
            check_flag(getattr(spec, field.name), field.name)


def check_tuple(spec: object, name: str, low: int, high: int) -> None:
    """Require a list of at most MAX_LEVELS integers in [low, high]; it becomes a tuple."""
    value = getattr(spec, name)
    if not isinstance(value, (tuple, list)) or len(value) > MAX_LEVELS:
        raise ValueError(f"expected {name} to be a list of at most {MAX_LEVELS} integers, got {name}={short(value)}")
    for item in value:
        check_integer(item, low, high, name)
    object.__setattr__(spec, name, tuple(value))


class HasLevels(Protocol):
    """A spec of levels of residual blocks."""

    @property
    def level_channels(self) -> tuple[int, ...]:
        """Width of each level."""

    @property
    def num_res_blocks(self) -> int:
        """Residual blocks in a level on the way down; there is one more on the way up."""

    @property
    def norm_groups(self) -> int:
        """Groups of every GroupNorm."""


def check_norm_groups(spec: HasLevels, *widths: int) -> None:
    """Require norm_groups that divide these widths."""
    for width in widths:
        if width % spec.norm_groups:
            raise ValueError(f"expected widths divisible by norm_groups={spec.norm_groups}, got {width}")


def check_levels(spec: HasLevels) -> None:
    """Require levels that are not too many to be traced, of widths that norm_groups divide."""
    check_integers(spec, 1, MAX_CHANNELS, "norm_groups")
    check_tuple(spec, "level_channels", 1, MAX_CHANNELS)
    check_integer(len(spec.level_channels), 1, MAX_LEVELS, "number of level_channels")
    check_norm_groups(spec, *spec.level_channels)
    check_integer(spec.num_res_blocks, 1, MAX_BLOCKS, "num_res_blocks")
    blocks = len(spec.level_channels) * (2 * spec.num_res_blocks + 1)
    check_integer(blocks, 1, MAX_BLOCKS, "number of residual blocks")


def short(value: object) -> str:
    """The value in at most 60 characters, for errors."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
