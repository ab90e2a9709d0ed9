"""A user's own attacks: Python files that register them, and how a finished run finds such a file again."""

import os
import pathlib
import sys
import traceback
import types
from collections.abc import Iterable
from typing import NamedTuple

from dime_jax._util import digests
from dime_jax._util.text import one_line
from dime_jax.attacks import registry


class Loaded(NamedTuple):
    """A file that was run: its digest then, and the names of the attacks that it registered."""

    digest: str
    names: tuple[str, ...]


class ModuleFacts(NamedTuple):
    """The file that a run's attacks come from: where it was, and its digest."""

    path: str
    digest: str


_LOADED: dict[pathlib.Path, Loaded] = {}


def load_attack_module(path: str | os.PathLike[str]) -> Loaded:
    """Run a Python file that calls `register_attack`. One that was run before is run again only if it has changed.

    Raises:
      ValueError: in one line, if it is not there, fails or registers nothing; the registry is then as it was.
    """
    file = pathlib.Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"no attack module {os.fspath(path)}: name a Python file that registers attacks")
    source, before = file.read_bytes(), _LOADED.get(file)
    digest = digests.digest(source)
    if before is not None and before.digest == digest and set(before.names) <= set(registry.attack_names()):
        return before
    registered = dict(registry._REGISTRY)
    for name in before.names if before else ():
        registry._REGISTRY.pop(name, None)
    others = dict(registry._REGISTRY)
    try:
        _execute(file, source)
        names = tuple(name for name, attack in registry._REGISTRY.items() if others.get(name) is not attack)
        if not names:
            raise ValueError(f"attack module {file} registers no attack: it must call dime_jax.register_attack(...)")
    except ValueError:
        registry._REGISTRY.clear()
        registry._REGISTRY.update(registered)
        raise
    _LOADED[file] = Loaded(digest, names)
    return _LOADED[file]


def files_of(names: Iterable[str]) -> dict[str, str]:
    """Return the digest of the file of each of these attacks that comes from one, by the attack's name."""
    loaded = {name: file.digest for file in _LOADED.values() for name in file.names}
    return {name: loaded[name] for name in sorted(set(names) & loaded.keys())}


def describe_module(path: str | os.PathLike[str] | None) -> ModuleFacts | None:
    """Return what a run records about the file that its attacks come from, for `load_again`."""
    if path is None:
        return None
    file = pathlib.Path(path).resolve()
    return ModuleFacts(str(file), load_attack_module(file).digest)


def load_again(module: ModuleFacts | None, directory: pathlib.Path) -> list[str]:
    """Run the file that a finished run in `directory` names, if this is safe; else return a warning that says why not.

    A directory may come from a stranger, and must not make us run what it brings along or points to: the file has to be
    the one that the run had, outside the directory, and our own. Without it, the run's numbers follow from its score
    tables all the same, and its attacks are shown by their names.
    """
    if module is None:
        return []
    file = pathlib.Path(module.path)
    why = _why_not(file, module.digest, directory)
    if why is None:
        load_attack_module(file)
        return []
    return [f"attacks of {file} are shown by their names only: {why}"]


def _why_not(file: pathlib.Path, digest: str, directory: pathlib.Path) -> str | None:
    """Say why a file that a finished run names must not be run; None if it may."""
    if not file.is_absolute() or not file.is_file():
        return "it is not there"
    if file.resolve().is_relative_to(directory.resolve()):
        return "it is in the directory of the run, from which nothing is executed"
    if hasattr(os, "getuid") and file.stat().st_uid != os.getuid():
        return "it belongs to another user"
    if digests.digest(file.read_bytes()) != digest:
        return "it has changed since"
    return None


def _execute(file: pathlib.Path, source: bytes) -> None:
    """Run exactly these bytes of a file as a module of its own, never bytecode that was cached for others."""
    module = types.ModuleType(f"dime_jax_attack_module_{digests.digest(os.fsencode(file))}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(source, str(file), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = "" if line is None else f", line {line}"
        raise ValueError(f"attack module {file}{where}: {type(error).__name__}: {one_line(error, None)}") from error
