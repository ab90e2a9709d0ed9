"""Sealed JSON files: what they hold, and that no change of a byte passes."""

import hashlib
import json

import pytest

from dime_jax._util import digests

FILES = {"halves.npz": "5f0c"}
CONTENTS = [{}, {"seed": 0, "digest of": {"digest": "x", "digests": [1, "ü\n"]}, "last": None}]


@pytest.mark.parametrize("contents", CONTENTS)
def test_a_sealed_file_is_json_that_ends_with_its_digest(tmp_path, contents):
    """The digest is over what the file would be without it."""
    without = json.dumps({**contents, "digests": FILES}, indent=1) + "\n"
    own = hashlib.blake2b(without.encode(), digest_size=16).hexdigest()
    sealed = digests.seal(contents, FILES)
    assert sealed.decode() == json.dumps({**contents, "digests": FILES, "digest": own}, indent=1) + "\n"
    (tmp_path / "run.json").write_bytes(sealed)
    found = digests.read(tmp_path / "run.json")
    assert (found.contents, found.digests) == (contents, FILES)


def test_a_file_without_digests_is_refused(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"seed": 0}, indent=1) + "\n")
    with pytest.raises(digests.Damaged, match=r"run\.json holds no digests: not written by this version") as error:
        digests.read(tmp_path / "run.json")
    assert "\n" not in str(error.value)


def test_only_files_that_are_named_are_read(tmp_path):
    (tmp_path / "halves.npz").write_bytes(b"one")
    digests.write(tmp_path / "run.json", {}, ["halves.npz"])
    (tmp_path / "other.npz").write_bytes(b"one")
    found = digests.read(tmp_path / "run.json")
    assert found.read("halves.npz") == b"one"
    with pytest.raises(digests.Damaged, match=r"other\.npz is damaged or from another run"):
        found.read("other.npz")


def test_no_change_of_a_byte_passes(tmp_path):
    path, sealed = tmp_path / "run.json", digests.seal(CONTENTS[1], FILES)
    for place in range(len(sealed)):
        head, byte, tail = sealed[:place], sealed[place], sealed[place + 1 :]
        flipped = [head + bytes([byte ^ 1 << bit]) + tail for bit in range(8)]
        for content in (*flipped, head + tail, head + b" " + bytes([byte]) + tail, head):
            path.write_bytes(content)
            with pytest.raises(digests.Damaged, match=r"run\.json is damaged"):
                digests.read(path)


@pytest.mark.parametrize("key", ["digest", "digests"])
def test_contents_may_not_use_the_names_of_digests(key):
    with pytest.raises(ValueError, match="contents must not have the keys"):
        digests.seal({key: 1}, {})
