"""Options in either spelling (`--flag-name` means `--flag_name`), and records of options that are declared once.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, TypeVar

T = TypeVar("T")


class OptionsRecord(Protocol):
    """A dataclass whose fields are options, see `option`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


R = TypeVar("R", bound=OptionsRecord)


def option(default: T, help: str, **argument: object) -> T:
    """Return the field of a dataclass of options, with what `argparse` needs to know about it.

    Args:
      default: if it is a tuple, the option may be given more than once.
      help: for people.
      **argument: see `argparse.ArgumentParser.add_argument`.
    """
    several = {"action": "append"} if isinstance(default, tuple) else {}
    return dataclasses.field(default=default, metadata={"help": help, **several, **argument})


def add_options(parser: argparse._ActionsContainer, record: type[OptionsRecord], only: str = "") -> None:
    """Add the options of a record to a parser or a group of one, or only those whose names begin so."""
    for field in dataclasses.fields(record):
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        if field.name.startswith(only):
            parser.add_argument(f"--{field.name}", default=default, **field.metadata)


def read_options(args: argparse.Namespace, record: type[R]) -> R:
    """Return the record of the options that were parsed; those that the parser does not have are at their defaults."""
    return record(**{name: getattr(args, name) for name in record.__dataclass_fields__ if hasattr(args, name)})


def changed(options: OptionsRecord) -> dict[str, tuple[Any, ...]]:
    """Return the options that are not at their defaults, by name, each as the values that a command line gives it."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in given.items()}
    return {
        name: tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in values[name])
        for name in given
        if given[name] != defaults[name]
    }


def words(options: OptionsRecord) -> list[str]:
    """Return the options that are not at their defaults as words of a command line."""
    return [word for name, values in changed(options).items() for one in values for word in (f"--{name}", str(one))]


def underscored(arguments: Iterable[str]) -> list[str]:
    """The arguments, with the names of long options spelt as they are declared: `--a-b=c-d` is `--a_b=c-d`.

    Values are left alone, and so is everything after a lone `--`, which ends the options.
    """
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    return [_underscored(word) for word in words[:end]] + words[end:]


def _underscored(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class Parser(argparse.ArgumentParser):
    """A parser, and parsers of subcommands, that read both spellings; options are declared with underscores."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As `argparse` does, which calls this for every way to parse and for every subcommand."""
        return super().parse_known_args(underscored(sys.argv[1:] if args is None else args), namespace)
