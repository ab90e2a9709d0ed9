"""Files and locks, also where the operating system lacks what Unix has."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import dime_jax
from dime_jax._util import files

ROOT = pathlib.Path(dime_jax.__file__).parents[1]
UNIX_ONLY = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
HOLD = """
import pathlib, sys
from dime_jax._util import files
with files.locked(pathlib.Path(sys.argv[1]), "run"):
    print(flush=True)
    sys.stdin.read()
"""


def test_nothing_is_imported_that_only_unix_has():
    for file in [file for package in ("dime_jax", "checkpoints_convert") for file in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not UNIX_ONLY & {name.partition(".")[0] for name in names}, file


def test_files_are_written_without_the_flags_of_unix(tmp_path, monkeypatch):
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY"):
        monkeypatch.delattr(os, name, raising=False)
    files.write_atomically(tmp_path / "a.txt", b"\r\n\x1a")
    assert (tmp_path / "a.txt").read_bytes() == b"\r\n\x1a"


def test_a_lock_ends_with_its_process_however_it_ends(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match=r"another run is writing the run .*; wait for it or stop it"):
            files.locked(tmp_path, "run").__enter__()
        other.kill()
        other.wait()
    with files.locked(tmp_path, "run"):
        pass


def test_a_lock_is_let_go_of_when_its_work_fails(tmp_path):
    with pytest.raises(RuntimeError), files.locked(tmp_path, "run"):
        raise RuntimeError
    with files.locked(tmp_path, "run"):
        pass


def test_where_no_lock_can_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write a run"):
        files.locked(tmp_path / "file", "run").__enter__()
