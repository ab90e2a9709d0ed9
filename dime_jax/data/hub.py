"""Datasets on the Hugging Face Hub that are kept as Parquet files, by their names and splits.

`huggingface-hub` downloads and caches; what was fetched before is found again without a network.
"""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from dime_jax._util.downloads import PREFIX, DownloadError, fetch_files
from dime_jax._util.text import listed
from dime_jax.data import decoding, parquet
from dime_jax.data.captions import CaptionOptions
from dime_jax.data.sources import Source

_FILE = re.compile(r"[\w./=+-]+\.parquet", re.ASCII)
_SHARD = re.compile(r"(?P<split>[\w.]+)(?:-(?P<number>\d+)-of-(?P<count>\d+))?(?:-[0-9a-f]+)?\.parquet", re.ASCII)
# The Hub's own conversions: CONFIG/SPLIT/0000.parquet.
_CONVERTED = re.compile(r"(?:(?P<config>[\w.-]+)/)?(?P<split>[\w.]+)/(?P<number>\d+)\.parquet", re.ASCII)
_DEFAULT = "default"


def hub(
    path: str,
    split: str = "train",
    config: str | None = None,
    images: str = "image",
    labels: str | None = None,
    decode: decoding.Decode = "strict",
    captions: str | None = None,
    caption_column: str | None = None,
    missing_captions: str = "error",
    endpoint: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Source:
    """One split of a dataset on the Hub; only its files are fetched.

    Args:
      path: "owner/dataset", or "owner/dataset@revision" for a branch, a tag or a commit.
      split: such as "train" or "test".
      config: the name of one of the dataset's configurations, where it has several.
      images: see `parquet.parquet`, as for the next five.
      labels: the labels' column.
      decode: how strictly images are read.
      captions: whether there must be captions.
      caption_column: the captions' column.
      missing_captions: what to do where a caption is null.
      endpoint: address of the Hub; by default HF_ENDPOINT or the public one.
      cache_dir: where files are cached; by default where `huggingface-hub` does it (HF_HOME).

    Raises:
      ValueError: in one line, for a dataset, revision, configuration or split that is not there, and as `parquet` does.
    """
    fetched = fetch_files(
        f"{PREFIX}{path}",
        lambda names: split_files(names, split, config),
        kind="dataset",
        cache_dir=cache_dir,
        endpoint=endpoint,
    )
    files = [fetched.directory / file for file in fetched.files]
    options = CaptionOptions(captions, caption_column, missing_captions)
    return parquet.open_files(files, images, labels, decode, options, name="hf")


class _Part(NamedTuple):
    """What the path of a Parquet file says."""

    config: str
    split: str
    number: int
    shards: int | None
    path: str


def split_files(names: Sequence[str], split: str, config: str | None = None) -> list[str]:
    """Return the Parquet files of one split, in order, given the paths of all files of a dataset.

    Raises:
      DownloadError: if there are none, if nothing tells which configuration is wanted, or if a file of several is
        missing; the error lists what there is.
    """
    parts = [part for part in map(_part, names) if part is not None]
    if not parts:
        raise DownloadError("has no Parquet files; the Hub may keep some of it under the revision refs/convert/parquet")
    configs = sorted({part.config for part in parts})
    if config is None and len(configs) > 1:
        raise DownloadError(f"has several configurations: name one with ?config=: {listed(configs)}")
    chosen = config or configs[0]
    if chosen not in configs:
        raise DownloadError(f"has no configuration {chosen!r}, only {listed(configs)}")
    found = sorted((part.number, part) for part in parts if (part.config, part.split) == (chosen, split))
    if not found:
        splits = sorted({part.split for part in parts if part.config == chosen})
        raise DownloadError(f"has no split {split!r}, only {listed(splits)}")
    numbers, count = [number for number, _ in found], found[0][1].shards
    if count is not None and numbers != list(range(count)):
        raise DownloadError(f"has only {len(numbers)} of the {count} files of the split {split!r}")
    return [part.path for _, part in found]


def _part(path: str) -> _Part | None:
    """Read names such as data/train-00000-of-00002.parquet, CONFIG/test-….parquet or train/0000.parquet."""
    if not _FILE.fullmatch(path) or ".." in path:
        return None
    converted = _CONVERTED.fullmatch(path)
    if converted is not None:
        return _Part(converted["config"] or _DEFAULT, converted["split"], int(converted["number"]), None, path)
    folder, _, file = path.rpartition("/")
    shard = _SHARD.fullmatch(file)
    if shard is None:
        return None
    config = _DEFAULT if folder in ("", "data") else folder
    count = None if shard["count"] is None else int(shard["count"])
    return _Part(config, shard["split"], int(shard["number"] or 0), count, path)
