"""Captions of images, as people keep them: metadata.jsonl or metadata.csv, or a .txt file beside each image.

Files are a stranger's until proven otherwise: sizes, encodings, names and types are checked before anything is kept,
and only names that were found in the folder get a caption, so that no name in a file is ever opened.
"""

import csv
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from dime_jax._util import validate
from dime_jax._util.files import unique
from dime_jax._util.text import shorten
from dime_jax.data import decoding
from dime_jax.data.sources import MAX_CAPTION, check_caption

METADATA_FILES = ("metadata.jsonl", "metadata.csv")
SIDECAR_SUFFIX = ".txt"
CHOICES = ("own", "none")
MISSING = ("error", "empty")

_CAPTION_COLUMNS = ("text", "caption")
_NAME_COLUMN = "file_name"
_MAX_METADATA_BYTES = 2**30
_MAX_LINE_BYTES = 2**20


class CaptionOptions(NamedTuple):
    """What a user may say about captions.

    Attributes:
      captions: "own" requires those of the source; "none" gives every image the empty caption; None takes the source's
        own if every image has one, and no captions otherwise (`Source.caption_problem` says why).
      column: name of the captions' column; by default "text" or "caption", whichever is there.
      missing: "error", or "empty" to give images without a caption the empty one.
    """

    captions: str | None = None
    column: str | None = None
    missing: str = "error"


class Captions(NamedTuple):
    """Captions in the order of the images, or why there are none; the names are those of Source's fields."""

    captions: list[str] | None
    caption_problem: str | None


def choose(options: CaptionOptions, count: int, own: Callable[[], list[str]]) -> Captions:
    """Choose the captions of `count` images by the options; `own` reads those of the source, or raises ValueError."""
    validate.check_choice(options.missing, MISSING, "missing_captions")
    if options.captions is not None:
        validate.check_choice(options.captions, CHOICES, "captions")
    if options.captions == "none":
        return Captions([""] * count, None)
    try:
        return Captions(own(), None)
    except ValueError as error:
        if options != CaptionOptions():  # captions were asked for
            raise
        return Captions(None, str(error))


def complete(found: Mapping[str, str], names: Sequence[str], missing: str, place: str) -> list[str]:
    """Return the captions of all names in order; names without one are refused, or get the empty caption."""
    without = [name for name in names if name not in found]
    if without and missing == "error":
        raise ValueError(
            f"{len(without)} of {len(names)} images in {place} have no caption, the first is {without[0]!r}; "
            "missing_captions=empty gives those the empty caption"
        )
    return [found.get(name, "") for name in names]


def reduced_captions(caption: str, parts: int = 3) -> tuple[str, ...]:
    """Return what CLiD (Zhai et al. 2024, simple clipping) compares a caption with: its parts, and the empty one.

    Parts are equal numbers of characters, rounded as published, whether that cuts through a word or not; together they
    are the caption. Parts of a caption of fewer characters than parts may be empty.

    Args:
      caption: the whole one.
      parts: how many; CLiD takes thirds.

    Returns:
      `parts` texts and "".
    """
    validate.check_at_least(parts, 1, "parts")
    cuts = [number * len(caption) // parts for number in range(parts + 1)]
    return (*(caption[start:stop] for start, stop in itertools.pairwise(cuts)), "")


def read_folder(root: pathlib.Path, images: Sequence[str], others: Sequence[str], options: CaptionOptions) -> list[str]:
    """Return the captions of a folder's images, from its metadata files or from .txt files beside the images.

    Args:
      root: the folder.
      images: paths of the images inside it.
      others: paths of the other files inside it.
      options: of the captions.

    Raises:
      ValueError: if there are none, some are missing, or both kinds are there and nothing tells which is meant.
    """
    metadata = [name for name in others if pathlib.PurePosixPath(name).name in METADATA_FILES]
    sidecars = sidecar_files(images, others)
    found = _from_metadata(root, metadata, images, options.column)
    if found and sidecars:
        raise ValueError(
            f"{root} has captions both in {metadata[0]} and in {len(sidecars)} .txt files beside images: "
            "remove one or the other"
        )
    if sidecars and options.column is None:
        found = {image: _read_sidecar(root, file) for image, file in sidecars.items()}
    if not found:
        column = options.column or " or ".join(_CAPTION_COLUMNS)
        files = f"{' or '.join(METADATA_FILES)} (columns {_NAME_COLUMN} and {column})"
        raise ValueError(f"{root} has no captions, neither in {files} nor in .txt files beside the images")
    return complete(found, images, options.missing, str(root))


def sidecar_files(images: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Return the .txt file beside each image that has one: "cats/1.txt" for "cats/1.png"."""
    texts = {name for name in others if name.endswith(SIDECAR_SUFFIX)}
    beside = {image: os.path.splitext(image)[0] + SIDECAR_SUFFIX for image in images}
    return {image: text for image, text in beside.items() if text in texts}


def without_captions(images: Iterable[str], others: Sequence[str]) -> list[str]:
    """Return those of a folder's other files that hold no captions."""
    texts = set(sidecar_files(images, others).values())
    return [name for name in others if name not in texts and pathlib.PurePosixPath(name).name not in METADATA_FILES]


def _read_sidecar(root: pathlib.Path, file: str) -> str:
    _check_inside(root, file)
    limit = 4 * MAX_CAPTION + 8  # bytes of the longest caption, with a byte order mark and a line end
    try:
        with decoding.open_regular(root / file, "a text file") as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"must have at most {MAX_CAPTION} characters, got more than {limit} bytes")
        return check_caption(_decoded(content, "it").strip(), "it")
    except (ValueError, OSError) as error:
        raise ValueError(f"caption {root / file}: {error}") from None


def _check_inside(root: pathlib.Path, file: str) -> None:
    if not pathlib.Path(os.path.realpath(root / file)).is_relative_to(os.path.realpath(root)):
        raise ValueError(f"captions must be inside {root}, but {file!r} is a link that leaves it")


def _from_metadata(
    root: pathlib.Path, files: Sequence[str], images: Sequence[str], column: str | None
) -> dict[str, str]:
    """Read captions by image from all metadata files with a column of captions; names in a file are relative to it."""
    found: dict[str, str] = {}
    for file in files:
        _check_inside(root, file)
        captions = read_metadata(root / file, column)
        parent = pathlib.PurePosixPath(file).parent
        for name, caption in captions.items():
            path = (parent / name).as_posix()
            if path in found:
                raise ValueError(f"{root} has two captions for {path!r}")
            found[path] = caption
    here = set(images)
    elsewhere = [path for path in found if path not in here]
    if elsewhere:
        logging.warning(
            "%d captions of %s are for files that are not there, such as %r", len(elsewhere), root, elsewhere[0]
        )
    return {path: caption for path, caption in found.items() if path in here}


def read_metadata(file: pathlib.Path, column: str | None = None) -> dict[str, str]:
    """Read captions by file name from a metadata.jsonl or metadata.csv file; empty if it has no column of captions.

    Rows whose caption is null, or an empty cell of a CSV file, name no caption. Names are relative paths, as written.

    Raises:
      ValueError: for a file that is too large, not UTF-8, or not what its name says; names that are absolute, leave
        the folder or occur twice; captions that are not text or are too long.
    """
    try:
        with decoding.open_regular(file, "a text file") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > _MAX_METADATA_BYTES:
                raise ValueError(f"must have at most {_MAX_METADATA_BYTES} bytes, got {size}")
            lines = _lines(stream)
            rows = _csv_rows(lines) if file.suffix == ".csv" else _json_rows(lines)
            return _captions_of_rows(rows, column)
    except (ValueError, OSError) as error:
        raise ValueError(f"captions in {file}: {error}") from None


class _Row(NamedTuple):
    number: int
    cells: Mapping[str, Any]


def _captions_of_rows(rows: Iterable[_Row], column: str | None) -> dict[str, str]:
    found: dict[str, str] = {}
    seen: set[str] = set()
    for number, cells in rows:
        if _NAME_COLUMN not in cells:
            raise ValueError(f"line {number} has no {_NAME_COLUMN}, only {shorten(', '.join(map(str, cells)))!r}")
        name = _checked_name(cells[_NAME_COLUMN], number)
        if name in seen:
            raise ValueError(f"line {number} names {shorten(name)!r} a second time")
        seen.add(name)
        caption = cells.get(caption_column(list(cells), column) or "")
        if caption is not None:
            found[name] = check_caption(caption, f"line {number}")
    return found


def caption_column(columns: Sequence[str], given: str | None) -> str | None:
    """Return the column that holds captions: the given one, or "text" or "caption"; None if there is none of these.

    Raises:
      ValueError: if both are there.
    """
    usual = [column for column in _CAPTION_COLUMNS if column in columns]
    if given is None and len(usual) > 1:
        raise ValueError(f"caption_column must say which of {' and '.join(usual)} holds the captions")
    return next(iter(usual), None) if given is None else given if given in columns else None


def _checked_name(name: object, number: int) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{_NAME_COLUMN} in line {number} must be a string, got {shorten(str(name))!r}")
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"line {number} names {shorten(name)!r}, which is not inside the folder")
    return path.as_posix()


def _json_rows(lines: Iterable[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} must be a JSON object, got {type(row).__name__}")
        yield _Row(number, row)


def _csv_rows(lines: Iterator[str]) -> Iterator[_Row]:
    reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise ValueError(f"columns must have different names, got {shorten(','.join(header))!r}")
        for row in reader:
            if row and len(row) != len(header):
                raise ValueError(f"line {reader.line_num} must have {len(header)} cells, got {len(row)}")
            if row:
                yield _Row(reader.line_num, {column: cell or None for column, cell in zip(header, row)})
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} is not CSV: {error}") from None


def _lines(stream: Any) -> Iterator[str]:
    """Yield the lines of a binary file as text; lines too long for memory are refused."""
    number = 0
    while line := stream.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > _MAX_LINE_BYTES:
            raise ValueError(f"line {number} has more than {_MAX_LINE_BYTES} bytes")
        yield _decoded(line, f"line {number}", is_start=number == 1)


def _decoded(content: bytes, place: str, is_start: bool = True) -> str:
    try:
        return content.decode("utf-8-sig" if is_start else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8: it has the byte {error.object[error.start]:#04x}") from None
