"""The score table: what the model answered about every image, on disk, safe against being killed at any moment.

    TABLE/manifest.json        what the table is of; a run may continue it only if all of this is the same
    TABLE/schedule.npz         the model's noise schedule, so that calibration needs no model
    TABLE/shards/*.parquet     rows of the run so far
    TABLE/shards/PROCESS.json  which shards a process has finished, and how far its ledger was then
    TABLE/scores.parquet       all rows, once it is complete; the shards are gone then
    TABLE/queries-*.bin        every query made (see `query_ledger`)
    TABLE/lock                 held by the run that writes

One row per (image, unit of the plan): unit, index, id, status and the unit's readings as float32, named in the
manifest. Readings are per probe, so every query tier, γ and angle follows from the table. Complete tables of the same
run are equal to the byte, however often it was killed, at the same micro-batch.

The manifest holds digests of the schedule and, once it is complete, of the table and the ledgers; each process's list
those of its shards (see `digests`). All are checked before the Parquet reader, which may crash on damage, is used.
"""

import contextlib
import dataclasses
import fcntl
import io
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dime_jax import digests, query_ledger
from dime_jax.digests import Damaged, Sealed
from dime_jax.planning import Job, Plan
from dime_jax.schedule import NoiseSchedule

FORMAT, VERSION = "dime_jax score table", 1
OK, NOT_FINITE, UNREADABLE = 0, 1, 2

_SCHEMA = pa.schema(
    [
        ("unit", pa.int32()),
        ("index", pa.int64()),
        ("id", pa.string()),
        ("status", pa.int8()),
        ("readings", pa.list_(pa.float32())),
    ]
)
_SECONDS = b"seconds"
_SCORES, _SCHEDULE = "scores.parquet", "schedule.npz"


class Rows(NamedTuple):
    """One unit's answers about some images: readings [r, n]."""

    unit: int
    index: np.ndarray  # type: ignore[assignment]  # int64 [n], positions in the source
    ids: Sequence[str]
    status: np.ndarray
    readings: np.ndarray


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a file so that it is there completely or not at all, whenever the machine stops."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from None
    _sync_directory(path.parent)


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
    """Hold the directory's lock; the operating system lets go of it when the process ends, however it ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "shards").mkdir(exist_ok=True)
        file = open(directory / "lock", "ab")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise OSError(error.errno, f"cannot write a score table: {error.strerror}", str(directory)) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing the score table {directory}; wait for it or stop it") from None
        yield


def identity(
    plan: Plan, *, model: str, data: str, images: int, transform: str, seed: int, precision: str, code: str
) -> dict[str, Any]:
    """What a table is of: everything that its numbers depend on."""
    return {
        "model": model,
        "data": data,
        "images": images,
        "transform": transform,
        "seed": seed,
        "precision": precision,
        "code": code,
        "settings": [[unit.name, [str(reading) for reading in unit.readings]] for unit in plan.units],
    }


def open_manifest(
    directory: pathlib.Path, identity: Mapping[str, Any], micro_batch: int, schedule: NoiseSchedule
) -> dict[str, Any]:
    """The manifest of a new table, or that of the table to continue if it has this identity; call it locked.

    Raises:
      ValueError: naming the difference, if the table is of something else.
    """
    for leftover in directory.rglob(".*.tmp"):
        leftover.unlink()
    path = directory / "manifest.json"
    fields = {field.name: np.asarray(getattr(schedule, field.name)) for field in dataclasses.fields(schedule)}
    if path.exists():
        sealed = _open(directory).check()
        _check_same(directory, sealed.contents["identity"], identity)
        there = sealed.read_arrays(_SCHEDULE)
        if not all(np.array_equal(there[name], table) for name, table in fields.items()):
            raise ValueError(f"cannot continue the score table {directory}: the model's noise schedule has changed")
        _drop_unfinished(sealed)
        return sealed.contents
    evidence = [*directory.glob(_SCORES), *_shards(directory), *query_ledger.ledgers(directory)]
    if evidence:
        raise Damaged(f"{path} is missing, and {evidence[0].name} goes with it")
    tables = io.BytesIO()
    np.savez(tables, allow_pickle=False, **fields)
    write_atomically(directory / _SCHEDULE, tables.getvalue())
    manifest = {"format": FORMAT, "version": VERSION, "identity": dict(identity), "micro_batch": micro_batch}
    write_atomically(path, digests.seal(manifest, digests.digests_of(directory, [_SCHEDULE])))
    return manifest


def write_manifest(directory: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    """Replace what the manifest says; the digests in it stay."""
    write_atomically(directory / "manifest.json", digests.seal(manifest, _open(directory).digests))


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    """The manifest of a score table."""
    return _open(directory).contents


def _open(directory: pathlib.Path) -> Sealed:
    path = directory / "manifest.json"
    try:
        sealed = digests.read(path)
    except FileNotFoundError:
        raise ValueError(f"{directory} is not a score table: no manifest.json in it") from None
    if (sealed.contents.get("format"), sealed.contents.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path}: expected format {FORMAT!r}, version {VERSION}")
    return sealed


class ShardWriter:
    """Collects rows and writes them as shards; one writer per process.

    Shards of one process are numbered on from those that are there. A shard counts once the process's list names it.
    """

    def __init__(self, directory: pathlib.Path, process: int):
        self._shards = directory / "shards"
        self._process = process
        self._number = 1 + max(
            (int(p.stem.split("-")[1]) for p in self._shards.glob(f"{process}-*.parquet")), default=-1
        )
        self._rows: list[Rows] = []
        self._list = self._shards / f"{process}.json"
        self._finished = dict(_read_list(self._list).digests or {}) if self._list.exists() else {}
        self._written = b""

    def add(self, rows: Rows) -> None:
        """Keep rows for the next shard."""
        self._rows.append(rows)

    def flush(self, seconds: float, ledger: query_ledger.State) -> None:
        """Write the rows collected so far, if any, as one shard, and note it and the state of the ledger in the list.

        Args:
          seconds: how long the rows took.
          ledger: of this process; before its first query too, so that no ledger is without a list.
        """
        if self._rows:
            table = pa.concat_tables([_to_arrow(rows) for rows in self._rows])
            content = _encode(table.replace_schema_metadata({_SECONDS: repr(seconds)}))
            name = f"{self._process}-{self._number:06d}.parquet"
            write_atomically(self._shards / name, content)
            self._finished[name] = digests.digest(content)
            self._number += 1
            self._rows = []
        sealed = digests.seal(ledger._asdict(), self._finished)
        if sealed != self._written:
            write_atomically(self._list, sealed)
            self._written = sealed


def rows_done(directory: pathlib.Path, units: int, images: int) -> np.ndarray:
    """Which rows are on disk: the status [units, images] of each, -1 where there is none.

    Raises:
      Damaged: naming it, if anything of the table on disk is not what was written, the ledgers included.
    """
    sealed = _open(directory).check()
    _check_ledgers(sealed, images)
    table = _read_rows(sealed)
    status = np.full((units, images), -1, np.int8)
    status[_column(table, "unit"), _column(table, "index")] = _column(table, "status")
    return status


def merge(directory: pathlib.Path, units: int, index: np.ndarray) -> None:
    """Turn the shards of a complete run into scores.parquet, rows by unit and by the order of `index`.

    Raises:
      ValueError: if a row is missing or there twice.
    """
    sealed = _open(directory)
    if not _is_complete(sealed):
        table = _read_rows(sealed)
        place = np.full(int(index.max()) + 1, -1, np.int64)
        place[index] = np.arange(len(index))
        order = _column(table, "unit") * len(index) + place[_column(table, "index")]
        if not np.array_equal(np.sort(order), np.arange(units * len(index))):
            raise ValueError(f"{directory}: expected {units * len(index)} rows, each once, got {len(order)}")
        seconds = sum(_seconds(content) for content in _finished_shards(sealed).values())
        write_atomically(directory / _SCORES, _encode(table.take(np.argsort(order)).replace_schema_metadata(None)))
        names = [_SCHEDULE, _SCORES, *(path.name for path in query_ledger.ledgers(directory))]
        manifest = {**sealed.contents, "seconds": seconds}
        write_atomically(sealed.path, digests.seal(manifest, digests.digests_of(directory, names)))
    for path in (*_shards(directory), *_lists(directory)):  # also those that a kill left behind
        path.unlink()


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreTable:
    """A complete score table.

    Attributes:
      directory: where it is.
      manifest: what it is of.
      index: positions of the images in their source [n].
      ids: their ids.
      readings: by name, float32 [n]; NaN where the image could not be read, NaN or infinite where the answer was.
      status: OK, NOT_FINITE or UNREADABLE: the worst over the image's units [n].
      queries_made: what it cost, resumes and retries included.
    """

    directory: pathlib.Path
    manifest: Mapping[str, Any]
    index: np.ndarray
    ids: list[str]
    readings: Mapping[str, np.ndarray]
    status: np.ndarray
    queries_made: int

    @property
    def schedule(self) -> NoiseSchedule:
        """The model's noise schedule."""
        return NoiseSchedule(**_open(self.directory).read_arrays(_SCHEDULE))  # type: ignore[arg-type]

    @property
    def seconds_per_query(self) -> float:
        """Mean time of a query in this run, on all its devices together."""
        return self.manifest["seconds"] / max(1, self.queries_made)

    def terms(self, job: Job) -> np.ndarray:
        """An attack's terms [columns, n] at a setting that the table has; not finite where a reading is not."""
        recipe = job.recipe
        missing = [str(reading) for reading in recipe.readings if str(reading) not in self.readings]
        if missing:
            raise ValueError(
                f"{self.directory} does not hold {job.attack.name} at {dict(job.setting)}: no {missing[0]}"
            )
        return recipe.assemble(np.stack([self.readings[str(r)] for r in recipe.readings]).astype(np.float64))


def read_table(directory: str | os.PathLike[str]) -> ScoreTable:
    """Open a complete score table.

    Raises:
      ValueError: if it is not complete, or a file of it is damaged or missing, naming that.
    """
    directory = pathlib.Path(directory)
    sealed = _open(directory).check()
    if not _is_complete(sealed):
        raise ValueError(f"{directory} is not complete: run the scoring again to finish it")
    manifest, table = sealed.contents, _read_rows(sealed)
    units = manifest["identity"]["settings"]
    shape = (len(units), -1)
    status = _column(table, "status").reshape(shape)
    readings: dict[str, np.ndarray] = {}
    offsets = table.column("readings").combine_chunks()
    flat = offsets.flatten().to_numpy(zero_copy_only=False)
    start = 0
    for _, names in units:
        size = len(names) * status.shape[1]
        columns = flat[start : start + size].reshape(status.shape[1], len(names)).T
        readings.update(zip(names, columns))
        start += size
    rows = table.slice(0, status.shape[1])
    return ScoreTable(
        directory,
        manifest,
        _column(rows, "index"),
        rows.column("id").to_pylist(),
        readings,
        status.max(axis=0),
        query_ledger.queries_made(directory),
    )


def _check_same(directory: pathlib.Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differences = [
        f"{key} was {was.get(key)!r}, now {now[key]!r}" for key in now if key != "settings" and was.get(key) != now[key]
    ]
    before, after = ({name for _, names in side["settings"] for name in names} for side in (was, now))
    if before != after:
        lost, new = sorted(before - after), sorted(after - before)
        parts = [f"{len(names)} {what} (such as {names[0]})" for names, what in ((lost, "gone"), (new, "new")) if names]
        differences.append(f"settings have changed: of the readings {' and '.join(parts)}")
    if differences:
        raise ValueError(f"cannot continue the score table {directory}: {'; '.join(differences)}")


def _to_arrow(rows: Rows) -> pa.Table:
    count, images = rows.readings.shape
    offsets = np.arange(images + 1, dtype=np.int32) * count
    columns = [
        pa.array(np.full(images, rows.unit, np.int32)),
        pa.array(rows.index),
        pa.array(rows.ids, pa.string()),
        pa.array(rows.status.astype(np.int8)),
        pa.ListArray.from_arrays(offsets, np.ascontiguousarray(rows.readings.T, np.float32).reshape(-1)),
    ]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def _encode(table: pa.Table) -> bytes:
    # In memory first: the write itself is then Python's, with Python's errors.
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _is_complete(sealed: Sealed) -> bool:
    """Whether all rows are in scores.parquet; one that is there unnamed was cut short by a kill, and is made again."""
    if sealed.digests is None:
        return (sealed.path.parent / _SCORES).exists()
    return _SCORES in sealed.digests


def _shards(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted((directory / "shards").glob("*.parquet"))


def _lists(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted((directory / "shards").glob("*.json"))


def _read_list(path: pathlib.Path) -> Sealed:
    sealed = digests.read(path)
    if sealed.digests is None:
        raise Damaged(f"{path} is damaged: it holds no digests")
    return sealed


def _drop_unfinished(sealed: Sealed) -> None:
    """Remove shards that a kill kept from being noted; their rows are asked for again."""
    if sealed.digests is not None and not _is_complete(sealed):
        _check_lists(sealed)
        finished = _finished_shards(sealed)
        for path in _shards(sealed.path.parent):
            if path.name not in finished:
                path.unlink()


def _finished_shards(sealed: Sealed) -> dict[str, bytes]:
    """The shards that count, by name, checked. In a table without digests also those that no list names."""
    directory = sealed.path.parent
    shards = {name: one.read(name) for one in map(_read_list, _lists(directory)) for name in one.digests or {}}
    if sealed.digests is None:
        shards |= {path.name: path.read_bytes() for path in _shards(directory) if path.name not in shards}
    return shards


def _check_lists(sealed: Sealed) -> None:
    """Require a list of every process that has written a shard or made a query."""
    directory = sealed.path.parent
    writers = {path.stem.partition("-")[0] for path in _shards(directory)}
    writers |= {path.stem.partition("-")[2] for path in query_ledger.ledgers(directory) if path.stat().st_size}
    missing = sorted(writers - {path.stem for path in _lists(directory)})
    if missing:
        raise Damaged(f"{directory / 'shards' / missing[0]}.json is missing, and shards and queries go with it")


def _check_ledgers(sealed: Sealed, images: int) -> None:
    """Require that the ledgers begin with what the processes' lists say, and are about images of the source."""
    directory, complete = sealed.path.parent, _is_complete(sealed)
    noted = dict.fromkeys(query_ledger.ledgers(directory), query_ledger.State(0, digests.digest(b"")))
    for path in [] if complete else _lists(directory):
        noted[query_ledger.ledger_path(directory, path.stem)] = query_ledger.State(**_read_list(path).contents)
    for ledger, state in noted.items():
        query_ledger.check(ledger, state, images)


def _read_rows(sealed: Sealed) -> pa.Table:
    shards = {_SCORES: sealed.read(_SCORES)} if _is_complete(sealed) else _finished_shards(sealed)
    tables = [_read_parquet(sealed.path.parent / name, content) for name, content in shards.items()]
    return pa.concat_tables([_SCHEMA.empty_table(), *tables])


def _read_parquet(path: pathlib.Path, content: bytes) -> pa.Table:
    try:
        return pq.read_table(io.BytesIO(content), schema=_SCHEMA).replace_schema_metadata(None)
    except pa.ArrowException as error:
        raise Damaged(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None


def _seconds(content: bytes) -> float:
    return float(pq.read_schema(io.BytesIO(content)).metadata[_SECONDS])


def _column(table: pa.Table, name: str) -> np.ndarray:
    return table.column(name).to_numpy()


def _sync_directory(directory: pathlib.Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
