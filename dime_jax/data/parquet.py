"""A source over Parquet files of images and captions, as datasets on the Hugging Face Hub are kept.

A row group is the smallest part of a Parquet file that can be read, so the last few are kept in memory.
"""

import bisect
import collections
import itertools
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dime_jax._util import validate
from dime_jax._util.text import listed, one_line
from dime_jax.data import captions as caption_files
from dime_jax.data import decoding
from dime_jax.data.captions import CaptionOptions
from dime_jax.data.sources import BadImage, Source, check_caption, numbered_ids

if TYPE_CHECKING:  # imported late elsewhere: it takes half a second, and most sources do without
    import pyarrow as pa
    import pyarrow.parquet as pq

_MAX_ROW_GROUP = 2**30  # bytes of its images, unpacked
_MAX_TEXT = 2**31  # bytes of all captions, unpacked
_MAX_ROWS = 10**7
_MAX_NAME = 1000  # characters of an image's path
_CACHED_BYTES = 2**28
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 64, 2**26


def parquet(
    path: str | os.PathLike[str],
    images: str = "image",
    labels: str | None = None,
    decode: decoding.Decode = "strict",
    captions: str | None = None,
    caption_column: str | None = None,
    missing_captions: str = "error",
) -> Source:
    """The images of a Parquet file, or of all .parquet files of a folder in the order of their names.

    An image is its encoded bytes: a binary column, or a struct of {bytes, path}, as Hugging Face's datasets has it. Its
    id is its path if all have different ones, else its number. An image without bytes is a BadImage when it is read.

    Args:
      path: the file or folder.
      images: the images' column.
      labels: an integer column of class labels; by default "label", if there is one.
      decode: see `decoding.decode_image`.
      captions: see `captions.CaptionOptions`, as are the next two.
      caption_column: the captions' column, of text; by default "text" or "caption".
      missing_captions: what to do where the caption is null.

    Raises:
      ValueError: for files that are not Parquet, columns that are missing or of other types, and row groups too
        large to read.
    """
    path = pathlib.Path(path).expanduser()
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{str(path)!r} is not a Parquet file or a folder of .parquet files")
    return open_files(files, images, labels, decode, CaptionOptions(captions, caption_column, missing_captions))


def open_files(
    paths: Sequence[pathlib.Path],
    images: str,
    labels: str | None,
    decode: decoding.Decode,
    options: CaptionOptions,
    name: str = "parquet",
) -> Source:
    """The images of these Parquet files, in this order; the arguments are those of `parquet`."""
    validate.check_choice(decode, decoding.DECODES, "decode")
    files = _Files([_open(file, images) for file in paths])
    names = files.names(images)
    chosen = caption_files.choose(options, len(files), lambda: files.captions(options, names))
    cache = _Cache(files, images)

    def read(index: int) -> np.ndarray:
        encoded = cache.read(index)
        if encoded is None:
            raise BadImage("has no bytes in the Parquet file")
        return decoding.decode_image(encoded, decode)

    return Source(name=name, ids=names, read=read, labels=files.labels(labels), **chosen._asdict())


def _open(path: pathlib.Path, images: str) -> "pq.ParquetFile":
    """Open a file and check its columns and sizes by its footer, before any of its data is read."""
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, memory_map=True)
        schema = file.schema_arrow
    # A damaged footer raises nearly anything.
    except Exception as error:
        raise ValueError(f"{path} is not a Parquet file: {one_line(error)}") from None
    twice = [name for name, count in collections.Counter(schema.names).items() if count > 1]
    if twice:
        raise ValueError(f"{path} has more than one column {twice[0]!r}")
    if images not in schema.names:
        raise ValueError(f"{path} has no column {images!r} of images, only {listed(map(repr, schema.names))}")
    if not _holds_images(schema.field(images).type):
        kind = one_line(schema.field(images).type, 80)
        raise ValueError(f"column {images!r} in {path} must be binary or a struct of bytes and path, got {kind}")
    for group in range(file.num_row_groups):
        size = _unpacked(file, group, images)
        if size > _MAX_ROW_GROUP:
            raise ValueError(
                f"each row group of {path} must hold at most {_MAX_ROW_GROUP} bytes of images, got {size}: write it "
                "with smaller ones, such as row_group_size=100"
            )
    return file


class _Files:
    """Parquet files as one table; positions are rows of all of them, row group after row group."""

    def __init__(self, files: Sequence["pq.ParquetFile"]):
        self.files = files
        self.groups = [(file, group) for file in files for group in range(file.num_row_groups)]
        rows = [file.metadata.row_group(group).num_rows for file, group in self.groups]
        self.starts = [0, *itertools.accumulate(rows)]
        if len(self) > _MAX_ROWS:
            raise ValueError(f"the Parquet files must have at most {_MAX_ROWS} rows, got {len(self)}")

    def __len__(self) -> int:
        return self.starts[-1]

    def names(self, images: str) -> list[str]:
        """Return the paths of the images if all have different ones, else numbers."""
        numbers = numbered_ids("row_", len(self))
        if not all(_is_text(_field(file.schema_arrow.field(images).type, "path")) for file in self.files):
            return numbers
        paths = [row[images]["path"] if isinstance(row[images], dict) else None for row in self.rows(f"{images}.path")]
        found = {path for path in paths if isinstance(path, str) and 0 < len(path) <= _MAX_NAME}
        return list(map(str, paths)) if len(found) == len(self) else numbers

    def labels(self, given: str | None) -> np.ndarray | None:
        """Return the class labels, if there are any."""
        name = given or "label"
        kinds = [file.schema_arrow.field(name).type for file in self.files if name in file.schema_arrow.names]
        if len(kinds) == len(self.files) and all(_is(kind, "integer") for kind in kinds):
            values = [row[name] for row in self.rows(name)]
            if all(isinstance(value, int) and 0 <= value < 2**31 for value in values):
                return np.array(values, np.int32)
        if given is not None:
            raise ValueError(f"every Parquet file must have a column {given!r} of labels, integers >= 0")
        return None

    def captions(self, options: CaptionOptions, names: Sequence[str]) -> list[str]:
        """Return the captions as the options say."""
        columns = {self._caption_column(file, options.column) for file in self.files}
        if len(columns) > 1:
            raise ValueError(
                f"all Parquet files must have captions in the same column, got {listed(sorted(map(repr, columns)))}"
            )
        column = columns.pop()
        found = {
            name: check_caption(row[column], repr(name))
            for name, row in zip(names, self.rows(column))
            if row[column] is not None
        }
        return caption_files.complete(found, names, options.missing, "the Parquet file")

    def _caption_column(self, file: "pq.ParquetFile", given: str | None) -> str:
        schema = file.schema_arrow
        column = caption_files.caption_column(schema.names, given)
        if column is None:
            wanted = "text or caption" if given is None else given
            raise ValueError(
                f"the Parquet file has no column {wanted} of captions, only {listed(map(repr, schema.names))}"
            )
        kind = schema.field(column).type
        if not _is_text(kind):
            raise ValueError(f"column {column!r} of the Parquet file must be text, got {one_line(kind, 80)}")
        return column

    def rows(self, column: str) -> Iterator[dict[str, Any]]:
        """Yield every row, of which only this column is read."""
        size = sum(_unpacked(file, group, column) for file, group in self.groups)
        if size > _MAX_TEXT:
            raise ValueError(f"column {column!r} must have at most {_MAX_TEXT} bytes, got {size}")
        count = 0
        for file, group in self.groups:
            for row in _read(file, group, column):
                count += 1
                yield row
        if count != len(self):
            raise ValueError(f"column {column!r} must have {len(self)} rows, as the footer says, got {count}")


def _read(file: "pq.ParquetFile", group: int, column: str) -> Iterator[dict[str, Any]]:
    """The rows of one column of a row group, a few at a time.

    A value that is stored once can stand in every row. It is at most as large as its column, so few rows of a large
    column are unpacked at once.
    """
    import pyarrow as pa

    at_once = min(_ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // (1 + _unpacked(file, group, column))))
    try:
        for batch in file.iter_batches(at_once, row_groups=[group], columns=[column], use_threads=False):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"column {column!r} of the Parquet file cannot be read: {one_line(error)}") from None


class _RowGroup(NamedTuple):
    images: list[bytes | None]
    size: int


class _Cache:
    """The encoded images of the row groups that were read last; any thread may ask."""

    def __init__(self, files: _Files, images: str):
        self.files, self.images = files, images
        self.kept: collections.OrderedDict[int, _RowGroup] = collections.OrderedDict()
        self.lock = threading.Lock()

    def read(self, index: int) -> bytes | None:
        number = bisect.bisect_right(self.files.starts, index) - 1
        with self.lock:  # two threads that want one row group would read it twice
            group = self.kept.pop(number, None) or self._load(number)
            self.kept[number] = group
            while len(self.kept) > 1 and sum(one.size for one in self.kept.values()) > _CACHED_BYTES:
                self.kept.popitem(last=False)
        return group.images[index - self.files.starts[number]]

    def _load(self, number: int) -> _RowGroup:
        file, group = self.files.groups[number]
        expected = self.files.starts[number + 1] - self.files.starts[number]
        found: list[bytes | None] = []
        size = 0
        try:
            for row in _read(file, group, self.images):
                value = row[self.images]
                encoded = value.get("bytes") if isinstance(value, dict) else value
                found.append(encoded if isinstance(encoded, bytes) else None)
                size += len(found[-1] or b"")
                if size > _MAX_ROW_GROUP:
                    raise ValueError(f"more than {_MAX_ROW_GROUP} bytes of images in its row group")
        except ValueError as error:
            raise BadImage(str(error)) from None
        if len(found) != expected:
            raise BadImage(f"its row group has {len(found)} rows, but the footer says {expected}")
        return _RowGroup(found, size)


def _holds_images(kind: "pa.DataType") -> bool:
    return _is(_field(kind, "bytes") if _is(kind, "struct") else kind, "binary", "large_binary")


def _is_text(kind: "pa.DataType | None") -> bool:
    return _is(kind.value_type if kind is not None and _is(kind, "dictionary") else kind, "string", "large_string")


def _field(kind: "pa.DataType", name: str) -> "pa.DataType | None":
    """Return the type of a struct's field; None if it is not a struct, or has no such field."""
    return next((field.type for field in kind if field.name == name), None) if _is(kind, "struct") else None


def _is(kind: "pa.DataType | None", *names: str) -> bool:
    """Return whether there is a type and it is one of these, as `pyarrow.types` names them."""
    import pyarrow as pa

    return kind is not None and any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def _unpacked(file: "pq.ParquetFile", group: int, path: str) -> int:
    """Bytes of a column, or of all columns below it, in a row group, as the footer says."""
    row_group = file.metadata.row_group(group)
    columns = (row_group.column(number) for number in range(row_group.num_columns))
    return sum(
        column.total_uncompressed_size for column in columns if f"{column.path_in_schema}.".startswith(f"{path}.")
    )
