"""Records to JSON and back: nothing is lost, and what a stranger changed is refused in one line."""

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import pytest

from dime_jax._util.records import Absent, Null, Tagged, parse, plain

T = TypeVar("T")


class Colour(enum.StrEnum):
    RED = "red"


class Point(NamedTuple):
    x: float
    y: float = 1.0


@dataclasses.dataclass(frozen=True)
class Pair(Generic[T]):
    first: T
    second: T


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    name: str
    flag: bool
    count: int
    colour: Colour
    points: tuple[Point, ...]
    corners: tuple[int, str]
    sizes: Mapping[str, int | float]
    pair: Pair[Point | None]
    listed: list[int]
    nothing: str | None = None
    old: Absent[int] = None


WHOLE = Whole(
    name="a",
    flag=True,
    count=2,
    colour=Colour.RED,
    points=(Point(0.5), Point(1.0, 2.0)),
    corners=(1, "b"),
    sizes={"t": 70, "gamma": 0.1},
    pair=Pair(Point(1.0), None),
    listed=[1, 2],
)
JSON = {
    "name": "a",
    "flag": True,
    "count": 2,
    "colour": "red",
    "points": [{"x": 0.5, "y": 1.0}, {"x": 1.0, "y": 2.0}],
    "corners": [1, "b"],
    "sizes": {"t": 70, "gamma": 0.1},
    "pair": {"first": {"x": 1.0, "y": 1.0}, "second": None},
    "listed": [1, 2],
    "nothing": None,
}


def test_there_and_back():
    assert plain(WHOLE) == JSON
    assert list(json.loads(json.dumps(plain(WHOLE)))) == list(JSON)  # in the order of the fields
    assert parse(Whole, JSON, "file") == WHOLE
    assert plain(dataclasses.replace(WHOLE, old=3)) == {**JSON, "old": 3}
    assert parse(Whole, {**JSON, "old": 3, "of a later version": 1}, "file").old == 3


def test_numbers_as_json_has_them():
    assert plain((np.float32(0.5), np.int64(3), np.bool_(True), np.arange(2))) == [0.5, 3, True, [0, 1]]
    assert plain([np.nan, np.inf, float("-inf")]) == [None, None, None]
    assert np.isnan(parse(Point, {"x": None}, "file").x)
    with pytest.raises(TypeError, match="JSON cannot hold a value of type object"):
        plain(object())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "file.name must be text, got '1'"),
        ({"flag": 1}, "file.flag must be true or false, got '1'"),
        ({"count": True}, "file.count must be a number, got 'True'"),
        ({"count": 1.5}, "file.count must be a number"),
        ({"count": None}, "file.count must be a number, got 'None'"),
        ({"colour": "blue"}, "file.colour must be one of red, got 'blue'"),
        ({"points": [{"x": 0.5}, {"y": 1}]}, r"file.points\[1\] must have 'x', got y"),
        ({"points": {}}, "file.points must be a list"),
        ({"corners": [1]}, "file.corners must be a list of 2, got 1"),
        ({"sizes": {"t": "70"}}, "file.sizes.t must be a number, got '70'"),
        ({"pair": []}, r"file.pair must be an object, got '\[\]'"),
        ({"pair": {"first": {"x": "<b>"}, "second": None}}, "file.pair.first.x must be a number, got '<b>'"),
    ],
)
def test_what_is_of_another_type_is_named(change, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(Whole, {**JSON, **change}, "file")
    assert "\n" not in str(error.value)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="file must have 'flag', got name"):
        parse(Whole, {"name": "a"}, "file")


class Shape:
    pass


@dataclasses.dataclass(frozen=True)
class Circle(Shape):
    kind: ClassVar[str] = "circle"
    radius: float = 1.0


@dataclasses.dataclass(frozen=True)
class Square(Shape):
    kind: ClassVar[str] = "square"
    side: float = 1


@dataclasses.dataclass(frozen=True)
class Colourless:
    kind: ClassVar[str] = "colourless"


@dataclasses.dataclass(frozen=True)
class Drawing:
    shape: Annotated[Shape, Tagged((Circle, Square, Colourless))]
    circle: Circle | None
    level: Annotated[float, Null(-np.inf)] = 0.5


def test_the_kind_of_a_record_is_its_first_key():
    drawing = Drawing(Square(2), Circle(0.5))
    shape, circle = {"kind": "square", "side": 2}, {"kind": "circle", "radius": 0.5}
    assert plain(drawing) == {"shape": shape, "circle": circle, "level": 0.5}
    assert list(plain(drawing.shape)) == ["kind", "side"]
    again = parse(Drawing, plain(drawing), "file", strict=True)
    assert again == drawing
    assert type(again.shape.side) is int  # numbers keep their type


def test_null_as_a_field_declares_it():
    assert parse(Drawing, {"shape": {"kind": "circle"}, "circle": None, "level": None}, "file").level == -np.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": {"kind": "star"}}, "unknown file.shape kind 'star'; expected one of circle, square$"),
        ({"shape": {"kind": "colourless"}}, "unknown file.shape kind 'colourless'; expected one of circle, square$"),
        ({"shape": {"kind": ["star\n"]}}, "unknown file.shape kind "),
        ({"shape": {"side": 1}}, "unknown file.shape kind None"),
        ({"shape": {"kind": "square"}}, "bad fields in file.shape: missing 'side'"),
        ({"circle": {"kind": "square", "radius": 1}}, "unknown file.circle kind 'square'; expected one of circle$"),
        ({"x" * 99: 1, "\n": 2}, r"bad fields in file: unknown '\\n', unknown 'x{76}\.\.\.$"),
    ],
)
def test_strict_keys_and_kinds(change, message):
    fields = plain(Drawing(Square(2), None))
    with pytest.raises(ValueError, match=message) as error:
        parse(Drawing, {**fields, **change}, "file", strict=True)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="bad fields in file: missing 'level'"):
        parse(Drawing, {name: fields[name] for name in ("shape", "circle")}, "file", strict=True)
