"""Write frozen records as JSON and read them back, by their type hints: a field is named once, where it is declared.

A record is a frozen dataclass or a NamedTuple. Numbers that are not finite are null in JSON, and NaN when read. The
class variable `kind` of a record's type, if it has one, is the first key in JSON, and tells the types of a `Tagged`
field apart.
"""

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, Union

import numpy as np

from dime_jax._util.text import shorten

_ABSENT = "absent"

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Record = TypeVar("Record")
# The type of a field that is left out of the JSON where it is None; its default must be None.
Absent = Annotated[Record | None, _ABSENT]


@dataclasses.dataclass(frozen=True, eq=False)
class Tagged:
    """In `Annotated[Base, Tagged(types)]`: the record's `kind` says which of these types it is."""

    types: Collection[type]


@dataclasses.dataclass(frozen=True)
class Null:
    """In `Annotated[float, Null(x)]`: null in JSON is read as x, not as NaN."""

    means: float


def plain(value: object) -> Json:
    """Return a value as JSON holds it: records as objects, arrays as lists, NumPy numbers as numbers.

    A record with a method `to_json` becomes what that returns.
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
    raise TypeError(f"JSON cannot hold a value of type {type(value).__name__}")


def plain_object(value: object) -> dict[str, Json]:
    """Return a record or mapping as a JSON object."""
    if hasattr(value, "to_json"):
        value = value.to_json()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    absent = _absent(value)
    fields = {name: plain(getattr(value, name)) for name in field_names(value) if name not in absent}
    return {**_tag(type(value)), **fields}


def field_names(record: object) -> tuple[str, ...]:
    """Return the names of the fields of a record, or of a record's type, in order."""
    if hasattr(record, "_fields"):
        return tuple(record._fields)
    return tuple(field.name for field in dataclasses.fields(typing.cast(Any, record)))


def parse(kind: type[Record], value: object, where: str, *, strict: bool = False) -> Record:
    """Read a record of some type from JSON.

    Args:
      kind: the type; its fields may be numbers, strings, enums, records, and tuples, lists and mappings of these.
      value: the JSON value.
      where: the file and the place in it, for errors.
      strict: require exactly the fields of each record; otherwise fields with defaults may be missing, and unknown
        keys are ignored.

    Raises:
      ValueError: in one line, if something is missing or of another type.
    """
    return _parse(kind, value, where, strict)


def _parse(kind: Any, value: object, where: str, strict: bool) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        base, note = arguments[:2]
        if isinstance(note, Null) and value is None:
            return note.means
        return _parse(_choose(note, base, value, where) if isinstance(note, Tagged) else base, value, where, strict)
    if origin in (Union, types.UnionType):
        return _parse_union(arguments, value, where, strict)
    base = origin or kind
    if dataclasses.is_dataclass(base) or hasattr(base, "_fields"):
        return _parse_record(base, arguments, value, where, strict)
    if base in (tuple, list, Sequence):
        return _parse_items(base, arguments, _expect(list, value, where), where, strict)
    if base in (dict, Mapping):
        items = _expect(dict, value, where).items()
        return {key: _parse(arguments[1], one, f"{where}.{key}", strict) for key, one in items}
    if issubclass(base, enum.Enum):
        if value not in [member.value for member in base]:
            raise ValueError(f"{where} must be one of {', '.join(str(m.value) for m in base)}, got {value!r}")
        return base(value)
    if base is float:
        return math.nan if value is None else _expect((int, float), value, where)
    return _expect(base, value, where)


def _parse_items(base: Any, kinds: Sequence[Any], items: list[object], where: str, strict: bool) -> Any:
    """Parse a list, or a tuple of fixed or any length."""
    if base is tuple and kinds[-1:] != (...,):
        if len(items) != len(kinds):
            raise ValueError(f"{where} must be a list of {len(kinds)}, got {len(items)}")
    else:
        plain_kind = getattr(kinds[0], "__origin__", kinds[0])  # without the notes of `Annotated`
        if plain_kind in (bool, int, float, str) and all(type(item) is plain_kind for item in items):
            return items if base is list else tuple(items)  # a stranger's list may be very long
        kinds = [kinds[0]] * len(items)
    parsed = [_parse(kind, item, f"{where}[{i}]", strict) for i, (kind, item) in enumerate(zip(kinds, items))]
    return parsed if base is list else tuple(parsed)


def _parse_union(kinds: Sequence[Any], value: object, where: str, strict: bool) -> Any:
    """Parse a value as the first of the types that fits."""
    if value is None and type(None) in kinds:
        return None
    errors = []
    for kind in (kind for kind in kinds if kind is not type(None)):
        try:
            return _parse(kind, value, where, strict)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _tag(kind: Any) -> dict[str, str]:
    """Return what JSON holds of a type besides its fields: its class variable `kind`, if there is one."""
    tag = getattr(kind, "kind", None)
    return {"kind": tag} if isinstance(tag, str) and "kind" not in field_names(kind) else {}


def _choose(tagged: Tagged, base: Any, value: object, where: str) -> Any:
    """Return the type that the kind of a record names."""
    kinds = {kind.kind: kind for kind in tagged.types if issubclass(kind, base)}  # type: ignore[attr-defined]
    return kinds[_expect_kind(list(kinds), _expect(dict, value, where), where)]


def _expect_kind(kinds: Sequence[Any], contents: Mapping[str, object], where: str) -> Any:
    kind = contents.get("kind")
    if kind not in kinds:
        raise ValueError(f"unknown {where} kind {shorten(repr(kind))}; expected one of {', '.join(kinds)}")
    return kind


def _parse_record(kind: Any, arguments: Sequence[Any], value: object, where: str, strict: bool) -> Any:
    contents, hints = _expect(dict, value, where), typing.get_type_hints(kind, include_extras=True)
    variables = dict(zip(getattr(kind, "__parameters__", ()), arguments))
    names = field_names(kind)
    if _tag(kind):
        _expect_kind([kind.kind], contents, where)
    if strict:
        _check_keys(contents, {*names, *_tag(kind)}, where)
    for name in names:
        if name not in contents and name not in _optional(kind):
            raise ValueError(f"{where} must have {name!r}, got {', '.join(contents) or 'nothing'}")
    values = {name: (variables.get(hints[name], hints[name]), contents[name]) for name in names if name in contents}
    return kind(**{name: _parse(*of, f"{where}.{name}", strict) for name, of in values.items()})


def _check_keys(contents: Mapping[str, object], expected: set[str], where: str) -> None:
    problems = [f"unknown {shorten(repr(key))}" for key in sorted(contents.keys() - expected)]
    problems += [f"missing {key!r}" for key in sorted(expected - contents.keys())]
    if problems:
        raise ValueError(f"bad fields in {where}: {', '.join(problems[:5])}")


def _optional(kind: Any) -> set[str]:
    if not dataclasses.is_dataclass(kind):
        return set(kind._field_defaults)
    missing = dataclasses.MISSING
    return {f.name for f in dataclasses.fields(kind) if f.default is not missing or f.default_factory is not missing}


def _expect(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = {dict: "an object", list: "a list", str: "text", bool: "true or false"}.get(kind, "a number")
        raise ValueError(f"{where} must be {wanted}, got {shorten(str(value), 40)!r}")
    return value


def _absent(record: object) -> set[str]:
    """Return the fields that are left out of the JSON: they are None, and declared as `Absent`."""
    hints = typing.get_type_hints(type(record), include_extras=True)
    declared = (name for name, hint in hints.items() if _ABSENT in getattr(hint, "__metadata__", ()))
    return {name for name in declared if getattr(record, name) is None}
