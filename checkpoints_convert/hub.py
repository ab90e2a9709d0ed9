"""Models and datasets on the Hugging Face Hub, by names such as hf:owner/name or hf:owner/name@revision.

`huggingface-hub` downloads and caches. Of models, only the files that a conversion reads are fetched: configs,
tokenisers, and one set of weights for each network, safetensors before pickles. What was fetched before is found again
without a network.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from checkpoints_convert.torch_file import printable
from checkpoints_convert.torch_pickle import CheckpointError
from dime_jax.models.clip_tokenizer import TOKENIZER_FILES

PREFIX = "hf:"

_NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
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


class HubModel(NamedTuple):
    """What was fetched.

    Attributes:
      directory: the files, as they are in the repository.
      commit: 40 hex digits, which say exactly what was fetched, whatever the revision becomes later.
      files: paths of what was fetched, inside the directory.
    """

    directory: Path
    commit: str
    files: tuple[str, ...]


class _Repository(NamedTuple):
    name: str
    revision: str | None
    kind: Literal["model", "dataset"]


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    """Whether a user's name for a model asks for the Hub."""
    return str(name).startswith(PREFIX)


def fetch(
    name: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
) -> HubModel:
    """Fetch a model from the Hub, or find it in the cache if the Hub cannot be reached.

    Args:
      name: "hf:owner/name", or "hf:owner/name@revision" for a branch, a tag or a commit.
      cache_dir: where files are kept; by default as `huggingface-hub` does (HF_HOME).
      endpoint: address of the Hub; by default HF_ENDPOINT or the public one.

    Raises:
      CheckpointError: one line, for a name of another form, a repository or revision that is not there, a gated one, a
        Hub that cannot be reached while the model is not in the cache, or a repository without weights that are known.
    """
    return fetch_files(name, needed_files, cache_dir=cache_dir, endpoint=endpoint)


def fetch_files(
    name: str,
    choose: Callable[[list[str]], list[str]],
    *,
    kind: Literal["model", "dataset"] = "model",
    cache_dir: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
) -> HubModel:
    """Fetch some files of a repository on the Hub, or find them in the cache if the Hub cannot be reached.

    Args:
      name: see `fetch`, as are the last two.
      choose: the files to fetch, of the paths of all; raises CheckpointError with the reason if there is none.
      kind: of repository.
      cache_dir: where files are kept.
      endpoint: address of the Hub.
    """
    repository = _parse(name, kind)
    hub = _import_hub()
    try:
        names = _listed_files(hub, repository, endpoint)
        files = choose(names)
        directory = Path(_snapshot(hub, repository, files, cache_dir, endpoint))
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        raise CheckpointError(f"{name}: {_why_not(hub, error, repository)}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    # No network, a broken one and a Hub in trouble raise types of several libraries, which change with its versions.
    except Exception as error:
        return _from_cache(hub, name, repository, choose, cache_dir, error)
    return _complete(name, directory, files)


def needed_files(names: Iterable[str]) -> list[str]:
    """Return those files of a repository that a conversion reads, from the paths of all.

    A repository is a pipeline (model_index.json and a folder for each part), a network (config.json and weights), a
    LoRA, or a single file of weights. Weights are those of full precision, or the only variant that there is.

    Raises:
      CheckpointError: if there are no weights, or several that nothing tells apart.
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
        heavy = [] if is_pipeline and not folder else _choose_weights(folder, files)
        chosen += [f"{folder}/{file}" if folder else file for file in small + heavy]
    if not any(_is_weights(path) for path in chosen):
        chosen += [_only_single_file([] if is_pipeline else folders[""])]
    return chosen


def _choose_weights(folder: str, files: Sequence[str]) -> list[str]:
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
    variants = {variant for variant, _ in sets}
    if None not in variants and len(variants) > 1:
        several = ", ".join(sorted(map(str, variants)))
        raise CheckpointError(
            f"has the weights of {folder or 'the network'} as {several}: expected full precision or one variant"
        )
    wanted = None if None in variants else variants.pop()
    return next(sets[wanted, kind] for kind in _KINDS if (wanted, kind) in sets)


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
        raise CheckpointError(f"has several files of weights and nothing tells which: {', '.join(single[:5])}")
    raise CheckpointError("has no weights that are known: expected a diffusers folder, or one file of weights")


def _parse(name: str, kind: Literal["model", "dataset"]) -> _Repository:
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        raise CheckpointError(printable(f"expected hf:owner/name or hf:owner/name@revision, got {name[:200]!r}"))
    return _Repository(match["repository"], match["revision"], kind)


def _import_hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise CheckpointError(f"expected the extra dime_jax[latent] to be installed for hf: names: {error}") from None
    return huggingface_hub


def _listed_files(hub: ModuleType, repository: _Repository, endpoint: str | None) -> list[str]:
    info = hub.HfApi(endpoint=endpoint).repo_info(
        repository.name, revision=repository.revision, repo_type=repository.kind
    )
    return [sibling.rfilename for sibling in info.siblings or ()]


def _snapshot(
    hub: ModuleType,
    repository: _Repository,
    patterns: Sequence[str],
    cache_dir: str | os.PathLike[str] | None,
    endpoint: str | None = None,
    local_files_only: bool = False,
) -> str:
    return hub.snapshot_download(
        repository.name,
        revision=repository.revision,
        repo_type=repository.kind,
        allow_patterns=list(patterns),
        cache_dir=cache_dir,
        endpoint=endpoint,
        local_files_only=local_files_only,
    )


def _from_cache(
    hub: ModuleType,
    name: str,
    repository: _Repository,
    choose: Callable[[list[str]], list[str]],
    cache_dir: str | os.PathLike[str] | None,
    why: Exception,
) -> HubModel:
    """What was fetched before, if it is complete."""
    try:
        directory = Path(_snapshot(hub, repository, _CONFIGS, cache_dir, local_files_only=True))
        files = choose(_cached_files(hub, repository, directory, cache_dir))
        return _complete(name, directory, files)
    except (OSError, ValueError):
        reason = printable(" ".join(f"{type(why).__name__}: {why}".split()))[:200]
        raise CheckpointError(
            f"{name}: the Hub cannot be reached, and the {repository.kind} is not complete in the cache ({reason})"
        ) from None


def _cached_files(
    hub: ModuleType, repository: _Repository, directory: Path, cache_dir: str | os.PathLike[str] | None
) -> list[str]:
    """The repository's files as they were listed when it was fetched, or those that are there."""
    try:
        tree = hub.get_cached_repo_tree(
            repository.name, revision=directory.name, repo_type=repository.kind, cache_dir=cache_dir
        )
        return [file.path for file in tree]
    except Exception:  # versions before 2 keep no list, others have not always one
        return [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]


def _complete(name: str, directory: Path, files: Sequence[str]) -> HubModel:
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise CheckpointError(f"{name}: expected {missing[0]} in {directory}, got none")
    if not _COMMIT.fullmatch(directory.name):
        raise CheckpointError(f"{name}: expected a commit of 40 hex digits, got {printable(directory.name[:60])!r}")
    return HubModel(directory, directory.name, tuple(files))


def _why_not(hub: ModuleType, error: Exception, repository: _Repository) -> str:
    if isinstance(error, hub.errors.GatedRepoError):
        return "is gated: accept its terms on its page, then log in with `hf auth login`"
    if isinstance(error, hub.errors.RevisionNotFoundError):
        return f"has no revision {repository.revision or 'main'}"
    return "no such repository, or a private one: check the name, or log in with `hf auth login`"
