"""The shards of a score table: rows of a run so far, as Parquet files, and the lists that say which of them count."""

import io
import pathlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dime_jax._util import digests, files
from dime_jax._util.digests import Damaged
from dime_jax.scoring import query_ledger

SCHEMA = pa.schema(
    [
        ("unit", pa.int32()),
        ("index", pa.int64()),
        ("id", pa.string()),
        ("status", pa.int8()),
        ("readings", pa.list_(pa.float32())),
    ]
)
_SECONDS = b"seconds"


class ShardWriter:
    """Collects rows and writes them as shards; one writer per process.

    A process continues the numbers of its shards that are there. A shard counts once the process's list names it.
    """

    def __init__(self, directory: pathlib.Path, process: int):
        self._shards = directory / "shards"
        self._shards.mkdir(exist_ok=True)
        self._process = process
        numbers = [int(path.stem.split("-")[1]) for path in self._shards.glob(f"{process}-*.parquet")]
        self._number = 1 + max(numbers, default=-1)
        self._rows: list[pa.Table] = []
        self._list = self._shards / f"{process}.json"
        named = dict(digests.read(self._list).digests) if self._list.exists() else {}
        self._finished = {name: digest for name, digest in named.items() if not is_partial(name)}
        self._partial = {name: digest for name, digest in named.items() if is_partial(name)}
        self._written = b""

    def add(self, rows: pa.Table) -> None:
        """Hold rows (`rows_of`) for the next shard."""
        self._rows.append(rows)

    def flush(self, seconds: float, ledger: query_ledger.State, partial: bytes | None = None) -> None:
        """Write the rows collected so far, if any, as one shard, and note it and the state of the ledger in the list.

        Args:
          seconds: how long the rows took.
          ledger: of this process; before its first query too, so that no ledger is without a list.
          partial: an unfinished unit (`unit_progress`), in place of the one before; None to leave that one.
        """
        if self._rows:
            content = encode(pa.concat_tables(self._rows).replace_schema_metadata({_SECONDS: repr(seconds)}))
            name = f"{self._process}-{self._number:06d}.parquet"
            files.write_atomically(self._shards / name, content)
            self._finished[name] = digests.digest(content)
            self._number += 1
            self._rows = []
        before = self._partial
        if partial is not None:
            # A name of its own, since the list names the one before until it is written.
            name = f"{self._process}-{ledger.queries}.npz"
            files.write_atomically(self._shards / name, partial)
            self._partial = {name: digests.digest(partial)}
        sealed = digests.seal(ledger._asdict(), {**self._finished, **self._partial})
        if sealed != self._written:
            files.write_atomically(self._list, sealed)
            self._written = sealed
        for name in before.keys() - self._partial.keys():
            (self._shards / name).unlink(missing_ok=True)


def shards_in(directory: pathlib.Path) -> list[pathlib.Path]:
    """List the shards of all processes, also those that no list names."""
    return sorted((directory / "shards").glob("*.parquet"))


def partials_in(directory: pathlib.Path) -> list[pathlib.Path]:
    """List the unfinished units of all processes, also those that no list names."""
    return sorted((directory / "shards").glob("*.npz"))


def is_partial(name: str) -> bool:
    """Whether a file that a list names is an unfinished unit, not a shard."""
    return name.endswith(".npz")


def lists_in(directory: pathlib.Path) -> list[pathlib.Path]:
    """Find the lists of all processes: digests of their finished shards, and how far their ledgers had got."""
    return sorted((directory / "shards").glob("*.json"))


def rows_of(unit: int, index: np.ndarray, ids: Sequence[str], status: np.ndarray, readings: np.ndarray) -> pa.Table:
    """Return one unit's answers about some images as rows of the table.

    Args:
      unit: its number.
      index: positions of the images in the source, int64 [n].
      ids: of the images.
      status: of the answers [n].
      readings: [r, n].
    """
    count, images = readings.shape
    offsets = np.arange(images + 1, dtype=np.int32) * count
    columns = [
        pa.array(np.full(images, unit, np.int32)),
        pa.array(index),
        pa.array(ids, pa.string()),
        pa.array(status.astype(np.int8)),
        pa.ListArray.from_arrays(offsets, np.ascontiguousarray(readings.T, np.float32).reshape(-1)),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def encode(table: pa.Table) -> bytes:
    """Encode a table as Parquet in memory: the write itself is then Python's, with Python's errors."""
    buffer = io.BytesIO()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        use_dictionary=[name for name in SCHEMA.names if name != "readings"],
        use_byte_stream_split=["readings.list.element"],  # a third less: bytes of one significance are alike
    )
    return buffer.getvalue()


def decode(path: pathlib.Path, content: bytes) -> pa.Table:
    """Decode the rows in what was read from `path`; Damaged, naming it, if they are not those of a score table."""
    try:
        return _open(content).read(use_threads=False).replace_schema_metadata(None).cast(SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None


def _open(content: bytes) -> pq.ParquetFile:
    """Open a Parquet file in memory, to be read in the calling thread only.

    `pq.read_table` reads a Python object in threads of Arrow's own. These may still hold it when the interpreter ends,
    and a thread that then asks for the interpreter aborts the process, its work done or not.
    """
    return pq.ParquetFile(pa.BufferReader(content), pre_buffer=False)


def seconds(content: bytes) -> float:
    """Return how long the rows of a shard took."""
    return float(_open(content).schema_arrow.metadata[_SECONDS])


def column(table: pa.Table, name: str) -> np.ndarray:
    """Return one column as NumPy."""
    return table.column(name).to_numpy()
