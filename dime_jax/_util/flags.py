"""Records whose fields are options, each declared once, and command lines that read them in either spelling.

From the declaration come the flags, the documentation and, for audits, the record of what was asked for. `--flag-name`
means `--flag_name`. Nothing slow is imported here: `dime-jax --help` needs it.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Protocol, TypeVar

T = TypeVar("T")
REQUIRED: Any = dataclasses.MISSING


class OptionsRecord(Protocol):
    """A dataclass whose fields are options, see `option`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


R = TypeVar("R", bound=OptionsRecord)


def option(default: T, help: str, heading: str | None = "", metavar: str | None = None, **argument: object) -> T:
    """Return the field of a dataclass of options, with what `argparse` needs to know about it.

    Args:
      default: if it is a tuple, the option may be given more than once; if it is False, the option takes no value.
      help: the text for `--help`, without the default, which is added.
      heading: the heading under which `--help` shows it; "" for the options that come first, None for no flag at all.
      metavar: the placeholder of the value; N or X for numbers if None.
      **argument: see `argparse.ArgumentParser.add_argument`.
    """
    if isinstance(default, bool):
        argument |= {"action": "store_true"}
    elif isinstance(default, tuple):
        argument |= {"action": "append"}
    elif isinstance(default, int | float):
        argument |= {"type": type(default)}
    metavar = metavar or ("N" if argument.get("type") is int else "X" if argument.get("type") is float else None)
    shown = {} if metavar is None else {"metavar": metavar}
    return dataclasses.field(default=default, metadata={"help": help, "heading": heading, **shown, **argument})


def documented(record: type[T]) -> type[T]:
    """Add what each option of a record means to the record's docstring."""
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    lines = [f"  {field.name}: {field.metadata['help']}." for field in fields if field.metadata]
    record.__doc__ = "\n".join([f"{record.__doc__}\n\nAttributes:", *lines])
    return record


def check_choices(options: OptionsRecord) -> None:
    """Require every option that has choices to be one of them, or None."""
    for field in dataclasses.fields(options):
        value, choices = getattr(options, field.name), field.metadata.get("choices")
        if choices and value is not None and value not in choices:
            raise ValueError(f"{field.name} must be one of {', '.join(choices)}, got {value!r}")


def add_options(
    parser: argparse.ArgumentParser, record: type[OptionsRecord], names: Collection[str] | None = None, **defaults: Any
) -> None:
    """Add the options of a record to a parser, each under its heading.

    Args:
      parser: the parser.
      record: the type of the record.
      names: the options to add; all if None.
      **defaults: override those of the record; REQUIRED makes an option required.
    """
    for field in dataclasses.fields(record):
        argument = dict(field.metadata)
        heading = argument.pop("heading", None)
        if heading is None or (names is not None and field.name not in names):
            continue
        default = defaults.get(field.name, field.default)
        if default is REQUIRED:
            argument["required"] = True
        elif isinstance(default, tuple):
            argument["default"] = list(default)
        else:
            argument["default"] = default
            if default is not None and default is not False:
                argument["help"] += f" (default: {default:{'g' if isinstance(default, float) else ''}})"
        under(parser, heading).add_argument(f"--{field.name}", **argument)


def under(parser: argparse.ArgumentParser, heading: str) -> argparse._ActionsContainer:
    """Return the group of a parser's options under a heading, added if needed; the parser itself for ""."""
    groups = {group.title: group for group in parser._action_groups}
    return groups.get(heading) or (parser.add_argument_group(heading) if heading else parser)


def read_options(args: argparse.Namespace, record: type[R], **others: Any) -> R:
    """Return the record of the options that were parsed, and `others`; the rest have their defaults."""
    parsed = {name: getattr(args, name) for name in record.__dataclass_fields__ if hasattr(args, name)}
    return record(**{**parsed, **others})


def changed(options: OptionsRecord) -> dict[str, tuple[Any, ...]]:
    """Return the options that differ from their defaults, by name, each with its values on a command line."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in given.items()}
    return {
        name: tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in values[name])
        for name in given
        if given[name] != defaults[name]
    }


def underscored(arguments: Iterable[str]) -> list[str]:
    """Spell the names of long options as they are declared: `--a-b=c-d` is `--a_b=c-d`.

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
        """Parse as `argparse` does, which calls this whichever way it parses, and for every subcommand."""
        return super().parse_known_args(underscored(sys.argv[1:] if args is None else args), namespace)
