"""Fetch models from the Hugging Face Hub: only the files that a conversion reads.

They are configs, tokenisers, and one set of weights for each network, the one that `part_files` would choose.
"""

import os
import re
from collections.abc import Iterable, Sequence

from checkpoints_convert import part_files
from dime_jax._util.downloads import DownloadError, Fetched, fetch_files
from dime_jax.models.clip_tokenizer import TOKENIZER_FILES

# The parts of a pipeline that a conversion reads; others, such as a safety checker, are not fetched.
_PARTS = ("", "unet", "unet_ema", "transformer", "vae", "text_encoder", "tokenizer", "scheduler")
_CONFIGS = ("model_index.json", "config.json", "scheduler_config.json")
_SINGLE_FILE = re.compile(r"[\w.-]+\.(safetensors|ckpt|pt|pth|bin)", re.ASCII)


def fetch(name: str, *, cache_dir: str | os.PathLike[str] | None = None, endpoint: str | None = None) -> Fetched:
    """Fetch a model from the Hub, or find it in the cache if the Hub cannot be reached.

    Args:
      name, cache_dir, endpoint: as in `fetch_files`.

    Raises:
      DownloadError: as `fetch_files` does, and for a repository without weights of a known form.
    """
    return fetch_files(name, needed_files, cache_dir=cache_dir, endpoint=endpoint)


def needed_files(names: Iterable[str]) -> list[str]:
    """Return those files of a repository that a conversion reads, given the paths of all.

    A repository is a pipeline (model_index.json and a folder for each part), a network (config.json and weights), or a
    single file of weights.

    Raises:
      DownloadError: if there are no weights, or several that nothing tells apart.
    """
    folders: dict[str, list[str]] = {part: [] for part in _PARTS}
    for path in sorted(names):
        folder, _, file = path.rpartition("/")
        if folder in folders and not path.startswith("/"):
            folders[folder].append(file)
    is_pipeline = "model_index.json" in folders[""]
    small, heavy = [], []
    for folder, files in folders.items():
        start = f"{folder}/" if folder else ""
        known = (*_CONFIGS, *(TOKENIZER_FILES if folder == "tokenizer" else ()))
        small += [f"{start}{file}" for file in files if file in known]
        if folder or not is_pipeline:
            heavy += [f"{start}{file}" for file in part_files.choose_weights(files)]
    return small + (heavy or [_only_single_file([] if is_pipeline else folders[""])])


def _only_single_file(files: Sequence[str]) -> str:
    single = [file for file in files if _SINGLE_FILE.fullmatch(file)]
    safe = [file for file in single if file.endswith(".safetensors")]
    for candidates in (safe, single):
        if len(candidates) == 1:
            return candidates[0]
    if single:
        raise DownloadError(f"has several files of weights, and it is not clear which to take: {', '.join(single[:5])}")
    raise DownloadError("has no weights of a known form: it must be a diffusers folder, or one file of weights")
