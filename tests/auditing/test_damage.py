"""Any damage to any file of evidence is one line that names the file, and exit code 2; never an abort or an answer."""

import collections
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from damaged_files import CASES, FLIPS
from memoriser import config, images, memoriser, source

from dime_jax import auditing
from dime_jax.report import html

SCRIPT = pathlib.Path(__file__).with_name("damaged_files.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What came out of every case, by kind and file."""
    directory = tmp_path_factory.mktemp("damage")
    done = subprocess.run([sys.executable, str(SCRIPT), str(directory)], capture_output=True, text=True, timeout=900)
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
def test_undamaged_directories_open_and_those_without_digests_do_not(outcomes, kind):
    whole, unsealed = outcomes[kind, ""]
    assert (whole["damage"], whole["code"]) == ("none", 0), whole
    assert (unsealed["damage"], unsealed["code"], unsealed["out"]) == ("no digests", 2, ""), unsealed
    assert unsealed["error"].startswith("dime-jax: ")
    assert ".json holds no digests" in unsealed["error"]
    assert unsealed["error"].count("\n") == 1


class Killed(BaseException):
    """Stands for SIGKILL: from the moment it is raised nothing reaches the disk any more."""


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_an_audit_killed_between_two_writes_is_not_damaged(tmp_path, monkeypatch, step):
    """Between a file and the one that holds its digest as well: the audit continues, and its report opens."""
    monkeypatch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")
    replace, limit, count = os.replace, None, itertools.count()

    def write(*names):
        if limit is not None and next(count) >= limit:
            raise Killed
        replace(*names)

    def run(directory):
        return auditing.audit(config(directory, model=memoriser(known), attacks=("sima_l4",), **roles)).results

    known = images(24, 0)
    roles = {
        "members": source(known, "m"),
        "heldout": source(images(24, 1), "h"),
        "candidates": source(images(4, 2), "c"),
    }
    monkeypatch.setattr(os, "replace", write)
    whole = run(tmp_path / "whole")
    table = 7  # schedule, manifest, list, shard, list, scores, manifest
    for killed in range(0, 2 + table + 1 + table + table + 4, step):
        directory, limit, count = tmp_path / str(killed), killed, itertools.count()
        with pytest.raises(Killed):
            run(directory)
        limit = None
        again = run(directory)
        assert [row["auc"] for row in again["results"]] == [row["auc"] for row in whole["results"]]
        assert auditing.report(directory).results == again
