"""A process ends with its exit code and not by a signal; no thread of Arrow's holds what Python gave it."""

import collections
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dime_jax._util.digests import Damaged
from dime_jax.scoring import shards

SCRIPT = pathlib.Path(__file__).with_name("ended_run.py")
PROCESSES, AT_ONCE = 24, 4


@pytest.mark.parametrize("damage", [False, True])
def test_shards_are_read_in_the_calling_thread_alone(tmp_path, monkeypatch, damage):
    """A reader that another thread holds aborts the process if the interpreter ends before that thread does."""
    rows = shards.rows_of(0, np.arange(1000), [str(i) for i in range(1000)], np.zeros(1000), np.ones((3, 1000)))
    content = shards.encode(rows)
    if damage:
        content = content[:100] + bytes(200) + content[300:]
    held = sys.getrefcount(content)
    for _ in range(20):
        if damage:
            with pytest.raises(Damaged, match="is damaged"):
                shards.decode(tmp_path / "shard", content)
        else:
            assert shards.decode(tmp_path / "shard", content).num_rows == 1000
        assert sys.getrefcount(content) == held


@pytest.mark.slow
def test_every_process_ends_with_its_own_code(tmp_path):
    """A third is done, a third fails, a third is interrupted, several at a time."""
    expected = {"done": 0, "error": 2, "interrupt": 130}
    rng, ended = random.Random(0), collections.Counter()
    for first in range(0, PROCESSES, AT_ONCE):
        running = []
        for number in range(first, first + AT_ONCE):
            end = list(expected)[number % 3]
            command = [sys.executable, str(SCRIPT), str(tmp_path / str(number)), end]
            running.append((end, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
        for end, process in running:
            assert process.stdout.readline() == "ready\n"
            if end == "interrupt":
                time.sleep(rng.uniform(0, 0.5))
                os.kill(process.pid, signal.SIGINT)
        for end, process in running:
            _, err = process.communicate(timeout=240)
            done_before = end == "interrupt" and process.returncode == 0
            assert done_before or process.returncode == expected[end], (end, err)
            ended[end] += 1
    assert sum(ended.values()) == PROCESSES
