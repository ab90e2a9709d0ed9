"""Text for messages: on one line, of bounded length, without control characters that a terminal would obey."""

from collections.abc import Iterable


def printable(text: str) -> str:
    r"""Return a text with what cannot be printed as escapes such as \n: a stranger's names may hold anything."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: object, most: int | None = 200) -> str:
    """Return a text on one printable line, of at most `most` characters (any number if None)."""
    line = printable(" ".join(str(text).split()))
    return line if most is None else shorten(line, most)


def shorten(text: str, most: int = 80) -> str:
    """Return a text of at most `most` characters; "..." stands for what was cut off."""
    return text if len(text) <= most else text[: most - 3] + "..."


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return the first few of some names, joined by commas."""
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
