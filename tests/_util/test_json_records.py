"""Records to JSON and back: nothing is lost, and what a stranger changed is refused in one line."""

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import pytest

from dime_jax._util.records import Absent, parse, plain

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
    with pytest.raises(TypeError, match="expected something that JSON has, got object"):
        plain(object())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "expected file.name to be text, got '1'"),
        ({"flag": 1}, "expected file.flag to be true or false, got '1'"),
        ({"count": True}, "expected file.count to be a number, got 'True'"),
        ({"count": 1.5}, "expected file.count to be a number"),
        ({"count": None}, "expected file.count to be a number, got 'None'"),
        ({"colour": "blue"}, "expected file.colour to be one of red, got 'blue'"),
        ({"points": [{"x": 0.5}, {"y": 1}]}, r"expected file.points\[1\] to have 'x', it has y"),
        ({"points": {}}, "expected file.points to be a list"),
        ({"corners": [1]}, "expected file.corners to be a list of 2, got 1"),
        ({"sizes": {"t": "70"}}, "expected file.sizes.t to be a number, got '70'"),
        ({"pair": []}, r"expected file.pair to be an object, got '\[\]'"),
        ({"pair": {"first": {"x": "<b>"}, "second": None}}, "expected file.pair.first.x to be a number, got '<b>'"),
    ],
)
def test_what_is_of_another_type_is_named(change, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(Whole, {**JSON, **change}, "file")
    assert "\n" not in str(error.value)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="expected file to have 'flag', it has name"):
        parse(Whole, {"name": "a"}, "file")
