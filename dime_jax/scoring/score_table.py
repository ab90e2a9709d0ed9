"""The score table: what the model answered about every image, on disk, safe against a kill at any moment.

    TABLE/manifest.json        what the table is of; a run may continue it only if all of this is the same
    TABLE/schedule.npz         the model's noise schedule, so that calibration needs no model
    TABLE/shards/*.parquet     rows of the run so far
    TABLE/shards/*.npz         units of which some calls were made so far (see `unit_progress`)
    TABLE/shards/PROCESS.json  which shards a process has finished, and how far its ledger had got
    TABLE/scores.parquet       all rows, once it is complete; the shards are gone then
    TABLE/terms.npz            terms of a user's own attacks, which may not be known where the table is read
    TABLE/queries-*.bin        every query made (see `query_ledger`); a published table has none, and `queries_made` in
                               its manifest says how many they were (`experiments.publish`)
    TABLE/lock                 held by the run that writes

One row per (image, unit of the plan): unit, index, id, status and the unit's readings as float32, named in the
manifest. Readings are per probe, so every query tier, γ and angle follows from the table. Complete tables of the same
run are equal to the byte, however often it was killed, at the same micro-batch.

The manifest holds digests of the schedule and, once it is complete, of the table and the ledgers; each process's list
those of its shards (see `digests`). All are checked before the Parquet reader, which may crash on damage, is used.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from dime_jax._util import digests
from dime_jax._util import files as _files
from dime_jax._util.digests import Damaged, Sealed
from dime_jax._util.typing import JsonObject
from dime_jax.attacks import BUILT_IN, modules
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.scoring import query_ledger, shards, unit_progress
from dime_jax.scoring.planning import Job, Plan
from dime_jax.scoring.unit_progress import StoredProgress

FORMAT, VERSION = "dime_jax score table", 1
OK, NOT_FINITE, UNREADABLE = 0, 1, 2

_SCORES, _SCHEDULE, _TERMS = "scores.parquet", "schedule.npz", "terms.npz"


def identity(plan: Plan, facts: JsonObject) -> JsonObject:
    """Return what a table is of: the plan, and all other facts that its numbers depend on."""
    files = modules.files_of(job.attack.name for job in plan.jobs)
    settings = [[unit.name, [str(reading) for reading in unit.readings]] for unit in plan.units]
    return {**facts, "settings": settings, **({"attack_files": files} if files else {})}


def open_manifest(directory: pathlib.Path, identity: JsonObject, micro_batch: int, schedule: NoiseSchedule) -> None:
    """Begin a new table, or check that the table to continue has this identity; call it locked.

    Args:
      directory: of the table.
      identity: from `identity`.
      micro_batch: for a new table; one that is continued keeps its own.
      schedule: of the model, kept beside the table; it may not change.

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
        return
    evidence = [*directory.glob(_SCORES), *shards.shards_in(directory), *query_ledger.ledgers(directory)]
    if evidence:
        raise Damaged(f"{path} is missing, but {evidence[0].name} is there")
    _files.write_atomically(directory / _SCHEDULE, digests.dump_arrays(fields))
    manifest = {"format": FORMAT, "version": VERSION, "identity": dict(identity), "micro_batch": micro_batch}
    digests.write(path, manifest, [_SCHEDULE])


def write_manifest(directory: pathlib.Path, manifest: JsonObject) -> None:
    """Replace what the manifest says; the digests in it stay."""
    _files.write_atomically(directory / "manifest.json", digests.seal(manifest, _open(directory).digests))


def read_manifest(directory: pathlib.Path) -> JsonObject:
    """Read the manifest of a score table."""
    return _open(directory).contents


def _open(directory: pathlib.Path) -> Sealed:
    path = directory / "manifest.json"
    try:
        sealed = digests.read(path)
    except FileNotFoundError:
        raise ValueError(f"{directory} is not a score table: no manifest.json in it") from None
    found = sealed.contents.get("format"), sealed.contents.get("version")
    if found != (FORMAT, VERSION):
        raise ValueError(f"{path}: must be a {FORMAT} of version {VERSION}, got {' of version '.join(map(str, found))}")
    return sealed


def rows_done(directory: pathlib.Path, units: int, images: int) -> np.ndarray:
    """Return which rows are on disk: the status [units, images] of each, -1 where there is none.

    Raises:
      Damaged: naming it, if anything of the table on disk is not what was written, the ledgers included.
    """
    sealed = _open(directory).check()
    _check_ledgers(sealed, images)
    table = _read_rows(sealed)
    status = np.full((units, images), -1, np.int8)
    status[shards.column(table, "unit"), shards.column(table, "index")] = shards.column(table, "status")
    return status


def partials(directory: pathlib.Path) -> list[StoredProgress]:
    """Read the units that were unfinished when a run ended; some of them may have been finished since."""
    lists = map(digests.read, shards.lists_in(directory))
    return [unit_progress.decode(one, name) for one in lists for name in one.digests if shards.is_partial(name)]


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
        order = shards.column(table, "unit") * len(index) + place[shards.column(table, "index")]
        if not np.array_equal(np.sort(order), np.arange(units * len(index))):
            raise ValueError(f"{directory}: there must be {units * len(index)} different rows, got {len(order)}")
        seconds = sum(shards.seconds(content) for content in _finished_shards(sealed).values())
        rows = table.take(np.argsort(order)).replace_schema_metadata(None)
        _files.write_atomically(directory / _SCORES, shards.encode(rows))
        names = [_SCHEDULE, _SCORES, *(path.name for path in query_ledger.ledgers(directory))]
        digests.write(sealed.path, {**sealed.contents, "seconds": seconds}, names)
    # Also those that a kill left behind.
    for path in (*shards.shards_in(directory), *shards.partials_in(directory), *shards.lists_in(directory)):
        path.unlink()


def store_own_terms(directory: pathlib.Path, jobs: Sequence[Job]) -> None:
    """Add to a complete table the terms of attacks that do not ship with the package, if they are not there yet."""
    sealed = _open(directory)
    foreign = [job for job in jobs if job.attack is not BUILT_IN.get(job.attack.name)]
    if not foreign or _TERMS in sealed.digests:
        return
    table, names = read_table(directory), np.array([_job_name(job) for job in foreign])
    terms = {f"terms_{number}": table.terms(job) for number, job in enumerate(foreign)}
    _files.write_atomically(directory / _TERMS, digests.dump_arrays({"jobs": names, **terms}))
    named = {**sealed.digests, **digests.digests_of(directory, [_TERMS])}
    _files.write_atomically(sealed.path, digests.seal(sealed.contents, named))


def _own_terms(sealed: Sealed) -> dict[str, np.ndarray]:
    if _TERMS not in sealed.digests:
        return {}
    arrays = sealed.read_arrays(_TERMS)
    return {name: arrays[f"terms_{number}"] for number, name in enumerate(arrays["jobs"].tolist())}


def _job_name(job: Job) -> str:
    return json.dumps([job.attack.name, sorted(job.setting.items())])


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
      own_terms: terms of a user's own attacks, by name and setting.
      reference: the answers of a second model about the same images, row by row; None if none was asked.
    """

    directory: pathlib.Path
    manifest: JsonObject
    index: np.ndarray
    ids: list[str]
    readings: Mapping[str, np.ndarray]
    status: np.ndarray
    queries_made: int
    own_terms: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    reference: "ScoreTable | None" = None

    @functools.cached_property
    def schedule(self) -> NoiseSchedule:
        """The model's noise schedule."""
        return NoiseSchedule(**_open(self.directory).read_arrays(_SCHEDULE))

    @property
    def seconds_per_query(self) -> float:
        """Mean time of a query in this run, on all its devices together."""
        return self.manifest["seconds"] / max(1, self.queries_made)

    def terms(self, job: Job) -> np.ndarray:
        """Return an attack's terms [columns, n] at a setting that the table has; not finite where a reading is not."""
        if _job_name(job) in self.own_terms:
            return self.own_terms[_job_name(job)]
        recipe = job.recipe
        missing = [str(reading) for reading in recipe.readings if str(reading) not in self.readings]
        if missing:
            raise ValueError(f"{self.directory} has no {job.attack.name} at {dict(job.setting)}: no {missing[0]}")
        readings = np.stack([self.readings[str(r)] for r in recipe.readings]).astype(np.float64)
        return np.asarray(recipe.assemble(readings))


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
    status = shards.column(table, "status").reshape(len(units), -1)
    flat = table.column("readings").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum([len(names) * status.shape[1] for _, names in units])
    readings: dict[str, np.ndarray] = {}
    for (_, names), values in zip(units, np.split(flat, ends[:-1])):
        readings.update(zip(names, values.reshape(status.shape[1], len(names)).T))
    rows = table.slice(0, status.shape[1])
    return ScoreTable(
        directory,
        manifest,
        shards.column(rows, "index"),
        rows.column("id").to_pylist(),
        readings,
        status.max(axis=0),
        manifest.get("queries_made", query_ledger.queries_made(directory)),
        _own_terms(sealed),
    )


def _check_same(directory: pathlib.Path, was: JsonObject, now: JsonObject) -> None:
    changed = [key for key in {**was, **now} if key != "settings" and was.get(key) != now.get(key)]
    differences = [f"{key} was {was.get(key)!r}, now {now.get(key)!r}" for key in changed]
    before, after = _readings(was), _readings(now)
    if before != after:
        lost, new = sorted(before - after), sorted(after - before)
        parts = [f"{len(names)} {what} (such as {names[0]})" for names, what in ((lost, "gone"), (new, "new")) if names]
        differences.append(f"settings have changed: of the readings {' and '.join(parts)}")
    if differences:
        raise ValueError(f"cannot continue the score table {directory}: {'; '.join(differences)}")


def _readings(manifest: JsonObject) -> set[str]:
    return {name for _, names in manifest["settings"] for name in names}


def _is_complete(sealed: Sealed) -> bool:
    """Whether all rows are in scores.parquet; one that is not named was left by a kill, and is made again."""
    return _SCORES in sealed.digests


def _drop_unfinished(sealed: Sealed) -> None:
    """Remove shards that a kill left unnoted; their rows are asked for again."""
    if not _is_complete(sealed):
        _check_lists(sealed)
        directory = sealed.path.parent
        # Checked before anything is removed: a list of another run must not decide what to keep.
        named = {name for path in shards.lists_in(directory) for name in digests.read(path).check().digests}
        for path in (*shards.shards_in(directory), *shards.partials_in(directory)):
            if path.name not in named:
                path.unlink()


def _finished_shards(sealed: Sealed) -> dict[str, bytes]:
    """Return the shards that the lists name, checked."""
    lists = map(digests.read, shards.lists_in(sealed.path.parent))
    return {name: one.read(name) for one in lists for name in one.digests if not shards.is_partial(name)}


def _check_lists(sealed: Sealed) -> None:
    """Require a list of every process that has written a shard or made a query."""
    directory = sealed.path.parent
    writers = {path.stem.partition("-")[0] for path in shards.shards_in(directory)}
    writers |= {path.stem.partition("-")[2] for path in query_ledger.ledgers(directory) if path.stat().st_size}
    missing = sorted(writers - {path.stem for path in shards.lists_in(directory)})
    if missing:
        raise Damaged(f"{directory / 'shards' / missing[0]}.json is missing, but its shards or queries are there")


def _check_ledgers(sealed: Sealed, images: int) -> None:
    """Require that the ledgers begin with what the processes' lists say, and are about images of the source."""
    directory = sealed.path.parent
    noted = dict.fromkeys(query_ledger.ledgers(directory), query_ledger.State(0, digests.digest(b"")))
    for path in [] if _is_complete(sealed) else shards.lists_in(directory):
        noted[query_ledger.ledger_path(directory, path.stem)] = query_ledger.State(**digests.read(path).contents)
    for ledger, state in noted.items():
        query_ledger.check(ledger, state, images)


def _read_rows(sealed: Sealed) -> pa.Table:
    files = {_SCORES: sealed.read(_SCORES)} if _is_complete(sealed) else _finished_shards(sealed)
    tables = [shards.decode(sealed.path.parent / name, content) for name, content in files.items()]
    return pa.concat_tables([shards.SCHEMA.empty_table(), *tables])
