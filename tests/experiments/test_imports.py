"""Experiments import each other one way; what they import of the library is in test_rooms.py."""

import ast
import graphlib
import pathlib

import experiments

FOLDER = pathlib.Path(experiments.__file__).parent


def imported(file):
    """Full names of what a file imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


IMPORTS = {file.stem: set(imported(file)) for file in FOLDER.glob("*.py")}


def test_no_module_needs_one_that_needs_it():
    graph = {
        module: {name.split(".")[1] for name in names if name.startswith("experiments.")}
        for module, names in IMPORTS.items()
    }
    assert "runs" in graph["tables"]
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, naming the modules
