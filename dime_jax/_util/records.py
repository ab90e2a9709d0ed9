"""Frozen records as JSON and back, by their type hints: each field is named once, where it is declared.

A record is a frozen dataclass or a NamedTuple. Numbers that are not finite are null in JSON, and NaN when read.
"""

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, Union

import numpy as np

_ABSENT = "absent"

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Record = TypeVar("Record")
# The type of a field that JSON does not have where it is None; its default must be None.
Absent = Annotated[Record | None, _ABSENT]


def plain(value: object) -> Json:
    """A value as JSON has it: records as objects, arrays as lists, NumPy numbers as numbers.

    A record with a method `to_json` is what that returns.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields") or isinstance(value, Mapping):
        return plain_object(value)
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    raise TypeError(f"expected something that JSON has, got {type(value).__name__}")


def plain_object(value: object) -> dict[str, Json]:
    """A record or mapping as JSON has it."""
    if hasattr(value, "to_json"):
        value = value.to_json()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    absent = _absent(value)
    return {name: plain(getattr(value, name)) for name in field_names(value) if name not in absent}


def field_names(record: object) -> tuple[str, ...]:
    """The names of a record's fields, or of its type's, in their order."""
    if hasattr(record, "_fields"):
        return tuple(record._fields)
    return tuple(field.name for field in dataclasses.fields(typing.cast(Any, record)))


def parse(kind: type[Record], value: object, where: str) -> Record:
    """A record of some type from JSON. Keys that the type does not know are passed over.

    Args:
      kind: the type; its fields may be numbers, strings, enums, records, and tuples, lists and mappings of these.
      value: what JSON has.
      where: the file and the place in it, for errors.

    Raises:
      ValueError: in one line, if something is missing or of another type.
    """
    return _parse(kind, value, where)


def _parse(kind: Any, value: object, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _parse_union(arguments, value, where)
    base = origin or kind
    if dataclasses.is_dataclass(base) or hasattr(base, "_fields"):
        return _parse_record(base, arguments, value, where)
    if base is tuple and arguments[-1:] != (...,):
        items = _expect(list, value, where)
        if len(items) != len(arguments):
            raise ValueError(f"expected {where} to be a list of {len(arguments)}, got {len(items)}")
        return tuple(_parse(one, item, f"{where}[{i}]") for i, (one, item) in enumerate(zip(arguments, items)))
    if base in (tuple, list, Sequence):
        items = [_parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(_expect(list, value, where))]
        return items if base is list else tuple(items)
    if base in (dict, Mapping):
        return {key: _parse(arguments[1], one, f"{where}.{key}") for key, one in _expect(dict, value, where).items()}
    if issubclass(base, enum.Enum):
        if value not in [member.value for member in base]:
            raise ValueError(f"expected {where} to be one of {', '.join(str(m.value) for m in base)}, got {value!r}")
        return base(value)
    if base is float:
        return math.nan if value is None else _expect((int, float), value, where)
    return _expect(base, value, where)


def _parse_union(kinds: Sequence[Any], value: object, where: str) -> Any:
    """The first of the types that fits."""
    if value is None and type(None) in kinds:
        return None
    errors = []
    for kind in (kind for kind in kinds if kind is not type(None)):
        try:
            return _parse(kind, value, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _parse_record(kind: Any, arguments: Sequence[Any], value: object, where: str) -> Any:
    contents, hints = _expect(dict, value, where), typing.get_type_hints(kind)
    variables = dict(zip(getattr(kind, "__parameters__", ()), arguments))
    optional = _optional(kind)
    values = {}
    for name in field_names(kind):
        if name in contents:
            hint = variables.get(hints[name], hints[name])
            values[name] = _parse(hint, contents[name], f"{where}.{name}")
        elif name not in optional:
            raise ValueError(f"expected {where} to have {name!r}, it has {', '.join(contents) or 'nothing'}")
    return kind(**values)


def _optional(kind: Any) -> set[str]:
    if not dataclasses.is_dataclass(kind):
        return set(kind._field_defaults)
    missing = dataclasses.MISSING
    return {f.name for f in dataclasses.fields(kind) if f.default is not missing or f.default_factory is not missing}


def _expect(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = {dict: "an object", list: "a list", str: "text", bool: "true or false"}.get(kind, "a number")
        raise ValueError(f"expected {where} to be {wanted}, got {str(value)[:40]!r}")
    return value


def _absent(record: object) -> set[str]:
    """The fields that stay out of the JSON: they are None, and declared as `Absent`."""
    hints = typing.get_type_hints(type(record), include_extras=True)
    declared = (name for name, hint in hints.items() if _ABSENT in getattr(hint, "__metadata__", ()))
    return {name for name in declared if getattr(record, name) is None}
