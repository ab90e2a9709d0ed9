"""Experiments import each other one way, and of the library's private modules only its utilities."""

import ast
import graphlib
import pathlib

import experiments

FOLDER = pathlib.Path(experiments.__file__).parent
UTILITIES = {"_util", "_validate", "_typing", "_distributed", "_files", "_records", "_flags"}


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


def test_of_the_private_modules_only_utilities_are_used():
    private = {name.split(".")[1] for names in IMPORTS.values() for name in names if name.startswith("dime_jax._")}
    assert "_validate" in private or "_util" in private
    assert private <= UTILITIES
