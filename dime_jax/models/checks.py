"""The checks that specs make of their own fields, each a one-line ValueError: specs come from strangers' files too."""

import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Union

import numpy as np

from dime_jax._util.records import field_names
from dime_jax._util.text import shorten

# Far above every published model, far below what would exhaust memory: a typo or a hostile config fails here.
MAX_CHANNELS = 8192
MAX_LEVELS = 10
MAX_BLOCKS = 128  # in all levels together
MAX_LAYERS = 128
MAX_CLASSES = 100_000
MAX_STEPS = 100_000
MAX_IMAGE_SIZE = 4096

_NUMBERS = (int, float, np.integer, np.floating)


def check_integer(value: object, low: int, high: int, name: str) -> None:
    """Require an int (not a bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {short(value)}")


def check_number(value: object, low: float, high: float, name: str) -> None:
    """Require a finite real number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not low <= value <= high:
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], got {short(value)}")


def check_flag(value: object, name: str) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {short(value)}")


class Range(NamedTuple):
    """In `Annotated[int, Range(low, high)]`: what a field may hold; also of floats, and of the items of tuples."""

    low: float
    high: float


Channels = Annotated[int, Range(1, MAX_CHANNELS)]
FewChannels = Annotated[int, Range(1, 64)]
Level = Annotated[int, Range(0, MAX_LEVELS - 1)]
Blocks = Annotated[int, Range(1, MAX_BLOCKS)]
Layers = Annotated[int, Range(1, MAX_LAYERS)]
Hidden = Annotated[int, Range(1, 8 * MAX_CHANNELS)]
Classes = Annotated[int, Range(1, MAX_CLASSES)]
Eps = Annotated[float, Range(1e-12, 1.0)]
Dropout = Annotated[float, Range(0.0, 0.99)]


def check_fields(spec: object) -> None:
    """Require each field of a dataclass to be what its annotation declares; a list becomes a tuple."""
    for name, hint in typing.get_type_hints(type(spec), include_extras=True).items():
        if typing.get_origin(hint) is not ClassVar and name in field_names(spec):
            object.__setattr__(spec, name, _checked(hint, getattr(spec, name), name))


def _checked(hint: Any, value: Any, name: str) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _checked(arguments[0], value, name)
    if origin is tuple and typing.get_origin(arguments[0]) is Annotated:
        if not isinstance(value, (tuple, list)) or len(value) > MAX_LEVELS:
            raise ValueError(f"{name} must be a list of at most {MAX_LEVELS} integers, got {short(value)}")
        return tuple(_checked(arguments[0], item, name) for item in value)
    if origin is Annotated:
        base, bounds = arguments
        check = check_integer if base is int else check_number
        check(value, bounds.low, bounds.high, name)
    elif hint is bool:
        check_flag(value, name)
    return value


def check_levels(level_channels: Sequence[int], num_res_blocks: int) -> None:
    """Require one level or more, and no more residual blocks, down and up, than can be traced in seconds."""
    check_integer(len(level_channels), 1, MAX_LEVELS, "number of level_channels")
    blocks = len(level_channels) * (2 * num_res_blocks + 1)
    check_integer(blocks, 1, MAX_BLOCKS, "number of residual blocks")


def check_norm_groups(norm_groups: int, *widths: int) -> None:
    """Require groups that divide these widths."""
    for width in widths:
        if width % norm_groups:
            raise ValueError(f"widths must be divisible by norm_groups={norm_groups}, got {width}")


def short(value: object) -> str:
    """Return the value as text of bounded length, for errors."""
    return shorten(repr(value))
