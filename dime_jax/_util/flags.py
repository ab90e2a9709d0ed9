"""Options in either spelling: `--flag-name` means `--flag_name`, wherever options are read.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import argparse
import sys
from collections.abc import Iterable
from typing import Any


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
