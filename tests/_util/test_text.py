"""Text for messages."""

import pytest

from dime_jax._util.text import listed, one_line, printable, shorten


def test_control_characters_are_escaped():
    assert printable("a\nb\x1b[31m é \u202e") == r"a\nb\x1b[31m é \u202e"


def test_a_message_is_one_printable_line():
    assert one_line(ValueError("two\n  lines\x07")) == r"two lines\x07"
    assert one_line("x" * 300) == "x" * 197 + "..."
    assert one_line("x" * 300, None) == "x" * 300


@pytest.mark.parametrize(("text", "expected"), [("abcdef", "abcdef"), ("abcdefg", "abc...")])
def test_longer_text_ends_in_dots(text, expected):
    assert shorten(text, 6) == expected


def test_only_some_names_are_listed():
    assert listed("abcdefgh") == "a, b, c, d, e, f, g, h"
    assert listed(map(repr, range(9))) == "0, 1, 2, 3, 4, 5, 6, 7, ..."
    assert listed([]) == ""
