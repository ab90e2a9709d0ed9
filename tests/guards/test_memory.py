"""What a run remembers of each model."""

from typing import NamedTuple

import pytest

from dime_jax._util import files
from dime_jax.guards import memory
from dime_jax.scoring.query_ledger import LedgerUnwritable


class Entry(NamedTuple):
    queries: int = 0
    answer: tuple[float, ...] | None = None


def test_models_are_remembered_apart(tmp_path):
    path = tmp_path / "memory.json"
    assert memory.recall(path, "one", Entry) == Entry()
    memory.remember(path, "one", Entry(1))
    memory.remember(path, "two", Entry(2, (0.5, 1.0)))
    memory.remember(path, "one", Entry(3))
    assert [memory.recall(path, name, Entry) for name in ("one", "two", "three")] == [
        Entry(3),
        Entry(2, (0.5, 1.0)),
        Entry(),
    ]


def test_damage_is_named(tmp_path):
    path = tmp_path / "memory.json"
    memory.remember(path, "one", Entry(1))
    path.write_bytes(path.read_bytes().replace(b'"queries": 1', b'"queries": 0'))
    for use in (lambda: memory.recall(path, "one", Entry), lambda: memory.remember(path, "one", Entry(2))):
        with pytest.raises(ValueError, match=r"memory\.json is damaged"):
            use()


def test_what_cannot_be_written_is_not_blamed_on_the_model(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_atomically", full)
    with pytest.raises(LedgerUnwritable, match="No space left on device"):
        memory.remember(tmp_path / "memory.json", "one", Entry(1))
