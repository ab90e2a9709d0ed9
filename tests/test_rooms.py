"""Data walks one way through the package: which room imports which. A room is a top-level module or a subpackage."""

import ast
import collections
import functools
import graphlib
import pathlib
import re

import pytest

import dime_jax

PACKAGE = pathlib.Path(dime_jax.__file__).parent
TREES = ("dime_jax", "checkpoints_convert", "experiments")
UPSTREAM = ("data", "models", "core", "guards", "attacks", "scoring")
DOWNSTREAM = ("findings", "report", "auditing")


def room_of(file):
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(tree, package):
    """Full names of what a file imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)


@functools.cache
def rooms():
    """The rooms that each room imports."""
    found = collections.defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        if file.parent == PACKAGE and file.stem in ("__init__", "cli"):  # the lazy public names; imports when it runs
            continue
        here = ("dime_jax", *file.relative_to(PACKAGE).parent.parts)
        for name in imported(ast.parse(file.read_text(encoding="utf-8")), here):
            top, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            if top == "dime_jax" and room not in ("", room_of(file)):
                found[room_of(file)].add(room)
    return dict(found)


def test_the_rooms_are_found():
    assert {"evidence", "protocol", "_util"} <= rooms()["findings"]
    assert list(
        imported(ast.parse("def f():\n from . import b\n from ..c import d\n import e"), ("dime_jax", "x"))
    ) == [
        "dime_jax.x.b",
        "dime_jax.c.d",
        "e",
    ]


def test_no_room_needs_one_that_needs_it():
    list(graphlib.TopologicalSorter(rooms()).static_order())  # raises CycleError, naming the rooms


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("report", {"auditing"}),
        ("findings", {"auditing", "report"}),
        ("protocol", {"auditing", "report", "findings"}),
        *((room, set(DOWNSTREAM)) for room in UPSTREAM),
    ],
)
def test_nothing_upstream_knows_what_is_downstream(room, forbidden):
    assert not rooms().get(room, set()) & forbidden


def test_types_are_said_where_they_are_known():
    files = [file for top in TREES for file in (PACKAGE.parent / top).rglob("*.py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    assert 1000 * len(re.findall(r"\bAny\b", source)) <= 10 * source.count("\n")
    assert len(re.findall(r"\b(?:dict|Mapping)\[str, Any\]", source)) <= 20


def test_no_two_public_classes_share_a_name():
    homes = collections.defaultdict(list)
    for file in (file for top in TREES for file in (PACKAGE.parent / top).rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(file.relative_to(PACKAGE.parent).as_posix())
    assert "Denoiser" in homes
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
