"""Any damage to any file of evidence is one line that names the file, and exit code 2; never an abort or an answer."""

import collections
import json
import pathlib
import subprocess
import sys

import pytest
from damaged_files import CASES, FLIPS

SCRIPT = pathlib.Path(__file__).with_name("damaged_files.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What came out of every case, by kind and file."""
    directory = tmp_path_factory.mktemp("damage")
    done = subprocess.run([sys.executable, str(SCRIPT), str(directory)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    found = collections.defaultdict(list)
    for line in map(json.loads, done.stdout.splitlines()):
        found[line["kind"], line["file"]].append(line)
    return found


@pytest.mark.parametrize(("kind", "file"), [(kind, file) for kind, files in CASES.items() for file in files])
def test_a_damaged_file_is_named(outcomes, kind, file):
    cases = outcomes[kind, file]
    assert len(cases) >= FLIPS + 3
    for case in cases:
        assert case["code"] == 2, case
        assert case["error"].startswith("dime-jax: ")
        assert case["error"].count("\n") == 1, case
        assert pathlib.PurePath(file).name in case["error"], case
        assert case["out"] == ""


@pytest.mark.parametrize("kind", CASES)
def test_undamaged_and_older_directories_open(outcomes, kind):
    whole, older = outcomes[kind, ""]
    assert (whole["damage"], whole["code"]) == ("none", 0), whole
    assert (older["damage"], older["code"]) == ("older", 0), older
    said = whole["out"] + whole["error"], older["out"] + older["error"]
    assert ["without digests" in " ".join(text.split()) for text in said] == [False, True], older
