"""Data walks one way through the code: which room imports which, over everything that ships and the experiments.

A room is a subpackage of `dime_jax`, or `checkpoints_convert`, or `experiments`. Imports inside functions and under
TYPE_CHECKING count.
"""

import ast
import collections
import functools
import pathlib
import re
import tokenize

import pytest

import dime_jax

ROOT = pathlib.Path(dime_jax.__file__).parents[1]
TREES = ("dime_jax", "checkpoints_convert", "experiments")
# Each room imports only from those before it.
ROOMS = (
    "_util",
    "core",
    "data",
    "evidence",
    "attacks",
    "models",
    "checkpoints_convert",
    "scoring",
    "remote",
    "loading",
    "guards",
    "protocol",
    "findings",
    "report",
    "training",
    "auditing",
    "cli",
    "experiments",
)
# `python -m checkpoints_convert` is `dime-jax convert`; the version stands in `dime_jax/__init__.py`.
EXCEPTIONS = {("checkpoints_convert/__main__.py", "cli")}
MOST_CODE_LINES = 24_000


def files():
    return [file for top in TREES for file in sorted((ROOT / top).rglob("*.py"))]


def name_of(file):
    return file.relative_to(ROOT).as_posix()


def room_of(file):
    top, *rest = file.relative_to(ROOT).with_suffix("").parts
    return rest[0] if top == "dime_jax" else top


def imported(tree, package):
    """Full names of what a file imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)


def rooms_imported(file):
    """The rooms that a file imports, its own included."""
    package = file.relative_to(ROOT).parent.parts
    for name in imported(ast.parse(file.read_text(encoding="utf-8")), package):
        top, _, rest = name.partition(".")
        room = rest.partition(".")[0] if top == "dime_jax" else top
        if top in TREES and room and not (top == "dime_jax" and room in ("__init__", "__version__")):
            yield room


@functools.cache
def imports():
    """(file, room) for every import from another room; the lazy public names of the package itself aside."""
    return sorted(
        {
            (name_of(file), room)
            for file in files()
            if file != ROOT / "dime_jax" / "__init__.py"
            for room in rooms_imported(file)
            if room != room_of(file)
        }
    )


def test_imports_are_found_wherever_they_stand():
    code = "def f():\n from . import b\n from ..c import d\n import e\nif TYPE_CHECKING:\n import g"
    assert set(imported(ast.parse(code), ("dime_jax", "x"))) == {"dime_jax.x.b", "dime_jax.c.d", "e", "g"}
    assert ("dime_jax/findings/finding.py", "evidence") in imports()


def test_the_rooms_are_those_of_the_design():
    found = {room_of(file) for file in files()}
    assert found - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_those_before_it(room):
    allowed = set(ROOMS[: ROOMS.index(room)])
    later = [
        (file, other)
        for file, other in imports()
        if room_of(ROOT / file) == room and other not in allowed and (file, other) not in EXCEPTIONS
    ]
    assert later == []


def test_converters_know_only_specs_and_shapes():
    used = {room for file, room in imports() if file.startswith("checkpoints_convert/")}
    assert used <= {"models", "_util", "cli"}
    assert (
        len([file for file, room in imports() if room == "checkpoints_convert" and file.startswith("dime_jax/")]) == 1
    )


def test_experiments_use_of_the_private_modules_only_util():
    for file in (ROOT / "experiments").rglob("*.py"):
        for name in imported(ast.parse(file.read_text(encoding="utf-8")), ("experiments",)):
            private = [part for part in name.split(".")[:-1] if part.startswith("_") and part != "__future__"]
            assert private in ([], ["_util"]), (file.name, name)


def test_every_room_has_a_folder_of_tests():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert set(ROOMS) - {"cli"} <= folders
    assert {path.name for path in (ROOT / "tests").glob("test_*.py")} == {
        f"test_{name}.py" for name in ("cli", "docs", "readme", "rooms", "wheel")
    }


def code_lines(file):
    """Lines with code on them: no blank lines, comments or docstrings."""
    lines, statement = set(), True
    with file.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
                statement = True
            elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER):
                if not (statement and token.type == tokenize.STRING):
                    lines.update(range(token.start[0], token.end[0] + 1))
                statement = False
    return len(lines)


def python_outside_tests():
    return [*files(), *(file for top in ("benchmarks", "docs") for file in (ROOT / top).rglob("*.py"))]


def test_the_code_stays_small(tmp_path):
    sample = tmp_path / "sample.py"
    sample.write_text('"""Doc."""\n\n# why\ndef f():\n    """Doc\n    on."""\n    return (\n        1\n    )\n')
    assert code_lines(sample) == 4
    assert sum(map(code_lines, python_outside_tests())) <= MOST_CODE_LINES


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "_util"])
def test_types_are_said_where_they_are_known(room):
    source = "".join(file.read_text(encoding="utf-8") for file in files() if room_of(file) == room)
    assert 1000 * len(re.findall(r"\bAny\b", source)) <= 5 * source.count("\n")


def test_no_two_public_classes_share_a_name():
    homes = collections.defaultdict(list)
    for file in files():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name_of(file))
    assert "Denoiser" in homes
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
