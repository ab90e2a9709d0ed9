"""Models on the Hugging Face Hub: only the files that a conversion reads are fetched.

They are configs, tokenisers, and one set of weights for each network, safetensors before pickles.
"""

import os
import re
from collections.abc import Iterable, Sequence

from dime_jax._util.downloads import DownloadError, Fetched, fetch_files
from dime_jax.models.clip_tokenizer import TOKENIZER_FILES

# The parts of a pipeline that a conversion reads; others, such as a safety checker, are left alone.
_PARTS = ("", "unet", "unet_ema", "transformer", "vae", "text_encoder", "tokenizer", "scheduler")
_CONFIGS = ("model_index.json", "config.json", "scheduler_config.json", "adapter_config.json")
_WEIGHTS = re.compile(
    r"(?P<base>diffusion_pytorch_model|pytorch_model|model|pytorch_lora_weights|adapter_model)"
    r"(?:\.(?P<variant>[\w-]+?))?(?:-\d{5}-of-\d{5})?(?:\.(?P<late_variant>\w+))?\.(?P<kind>safetensors|bin)",
    re.ASCII,
)
_INDEX = re.compile(r"(?P<base>\w+)\.(?P<kind>safetensors|bin)\.index(?:\.(?P<variant>[\w-]+))?\.json", re.ASCII)
_SINGLE_FILE = re.compile(r"[\w.-]+\.(safetensors|ckpt|pt|pth|bin)", re.ASCII)
_KINDS = ("safetensors", "bin")


def fetch(
    name: str,
    *,
    variant: str | None = None,
    weights: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
) -> Fetched:
    """Fetch a model from the Hub, or find it in the cache if the Hub cannot be reached.

    Args:
      name: "hf:owner/name", or "hf:owner/name@revision" for a branch, a tag or a commit.
      variant: of the weights, such as "fp16"; by default the plain ones, or the only variant where there are none.
      weights: whether weights are fetched; False takes a few kilobytes that say what kind of model it is.
      cache_dir: where files are kept; by default as `huggingface-hub` does (HF_HOME).
      endpoint: address of the Hub; by default HF_ENDPOINT or the public one.

    Raises:
      DownloadError: as `fetch_files` does, and for a repository without weights that are known.
    """
    return fetch_files(
        name, lambda names: needed_files(names, variant, weights), cache_dir=cache_dir, endpoint=endpoint
    )


def needed_files(names: Iterable[str], variant: str | None = None, weights: bool = True) -> list[str]:
    """Those files of a repository that a conversion reads.

    A repository is a pipeline (model_index.json and a folder for each part), a network (config.json and weights), a
    LoRA, or a single file of weights.

    Args:
      names: paths of all files in the repository.
      variant: of the weights, such as "fp16"; None: full precision, or the only variant that there is.
      weights: whether the weights are read too, or only what describes the model.

    Raises:
      DownloadError: if there are no weights, or several that nothing tells apart.
    """
    folders: dict[str, list[str]] = {part: [] for part in _PARTS}
    for path in sorted(names):
        folder, _, file = path.rpartition("/")
        if folder in folders and not path.startswith("/"):
            folders[folder].append(file)
    is_pipeline = "model_index.json" in folders[""]
    chosen: list[str] = []
    for folder, files in folders.items():
        small = [file for file in files if _is_small(folder, file)]
        heavy = _choose_weights(folder, files, variant) if weights and not (is_pipeline and not folder) else []
        chosen += [f"{folder}/{file}" if folder else file for file in small + heavy]
    if weights and not any(_is_weights(path) for path in chosen):
        chosen += [_only_single_file([] if is_pipeline else folders[""])]
    return chosen


def _choose_weights(folder: str, files: Sequence[str], variant: str | None) -> list[str]:
    """One set of weights of a folder, with its index if it is in several files."""
    sets: dict[tuple[str | None, str], list[str]] = {}
    for file in files:
        match = _WEIGHTS.fullmatch(file) or _INDEX.fullmatch(file)
        if match:
            parts = match.groupdict()
            sets.setdefault((parts["variant"] or parts.get("late_variant"), parts["kind"]), []).append(file)
    sets = {key: found for key, found in sets.items() if any(_WEIGHTS.fullmatch(file) for file in found)}
    if not sets:
        return []
    variants = sorted({str(found) for found, _ in sets if found is not None})
    wanted = variant
    if wanted is None and not any((None, kind) in sets for kind in _KINDS):
        if len(variants) > 1:
            raise DownloadError(
                f"has the weights of {folder or 'the network'} as {', '.join(variants)}: expected a variant"
            )
        wanted = variants[0]
    for kind in _KINDS:
        if (wanted, kind) in sets:
            return sets[wanted, kind]
    if any((None, kind) in sets for kind in _KINDS):  # as in diffusers, parts without the variant are taken as they are
        return _choose_weights(folder, files, None)
    raise DownloadError(f"has no variant {wanted} of {folder or 'the network'}, only {', '.join(variants)}")


def _is_small(folder: str, file: str) -> bool:
    """Whether it is a config or part of a tokeniser; a single file of weights has its config beside it, as YAML."""
    return (
        file in _CONFIGS
        or (folder == "tokenizer" and file in TOKENIZER_FILES)
        or (folder == "" and re.fullmatch(r"[\w.-]+\.yaml", file, re.ASCII) is not None)
    )


def _is_weights(path: str) -> bool:
    return _WEIGHTS.fullmatch(path.rpartition("/")[2]) is not None


def _only_single_file(files: Sequence[str]) -> str:
    single = [file for file in files if _SINGLE_FILE.fullmatch(file)]
    safe = [file for file in single if file.endswith(".safetensors")]
    for candidates in (safe, single):
        if len(candidates) == 1:
            return candidates[0]
    if single:
        raise DownloadError(f"has several files of weights and nothing tells which: {', '.join(single[:5])}")
    raise DownloadError("has no weights that are known: expected a diffusers folder, or one file of weights")
