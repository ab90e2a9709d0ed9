"""Files of repositories on the Hugging Face Hub, by names such as hf:owner/name or hf:owner/name@revision.

`huggingface-hub` downloads and caches. What was fetched before is found again without a network.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from dime_jax._util.files import printable

PREFIX = "hf:"

_NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_FILES = ("",)


class DownloadError(ValueError):
    """A repository cannot be fetched: one line with its name and the reason."""


class Fetched(NamedTuple):
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
    """Whether a user's name for something asks for the Hub."""
    return str(name).startswith(PREFIX)


def fetch_files(
    name: str,
    choose: Callable[[list[str]], list[str]],
    *,
    kind: Literal["model", "dataset"] = "model",
    cache_dir: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
) -> Fetched:
    """Fetch some files of a repository on the Hub, or find them in the cache if the Hub cannot be reached.

    Args:
      name: "hf:owner/name", or "hf:owner/name@revision" for a branch, a tag or a commit.
      choose: the files to fetch, of the paths of all; raises DownloadError with the reason if there is none.
      kind: of repository.
      cache_dir: where files are kept; by default as `huggingface-hub` does (HF_HOME).
      endpoint: address of the Hub; by default HF_ENDPOINT or the public one.

    Raises:
      DownloadError: in one line, for a name of another form, a repository or revision that is not there, a gated one,
        or a Hub that cannot be reached while the files are not in the cache.
    """
    repository = _parse(name, kind)
    hub = _import_hub()
    try:
        names = _listed_files(hub, repository, endpoint)
        files = choose(names)
        directory = Path(_snapshot(hub, repository, files, cache_dir, endpoint))
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        raise DownloadError(f"{name}: {_why_not(hub, error, repository)}") from None
    except DownloadError as error:
        raise DownloadError(f"{name}: {error}") from None
    # No network, a broken one and a Hub in trouble raise types of several libraries, which change with its versions.
    except Exception as error:
        return _from_cache(hub, name, repository, choose, cache_dir, error)
    return _complete(name, directory, files)


def _parse(name: str, kind: Literal["model", "dataset"]) -> _Repository:
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        raise DownloadError(printable(f"expected hf:owner/name or hf:owner/name@revision, got {name[:200]!r}"))
    return _Repository(match["repository"], match["revision"], kind)


def _import_hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise DownloadError(f"expected the extra dime_jax[latent] to be installed for hf: names: {error}") from None
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
) -> Fetched:
    """What was fetched before, if it is complete."""
    try:
        directory = Path(_snapshot(hub, repository, _NO_FILES, cache_dir, local_files_only=True))
        files = choose(_cached_files(hub, repository, directory, cache_dir))
        return _complete(name, directory, files)
    except (OSError, ValueError):
        reason = printable(" ".join(f"{type(why).__name__}: {why}".split()))[:200]
        raise DownloadError(
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


def _complete(name: str, directory: Path, files: Sequence[str]) -> Fetched:
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise DownloadError(f"{name}: expected {missing[0]} in {directory}, got none")
    if not _COMMIT.fullmatch(directory.name):
        raise DownloadError(f"{name}: expected a commit of 40 hex digits, got {printable(directory.name[:60])!r}")
    return Fetched(directory, directory.name, tuple(files))


def _why_not(hub: ModuleType, error: Exception, repository: _Repository) -> str:
    if isinstance(error, hub.errors.GatedRepoError):
        return "is gated: accept its terms on its page, then log in with `hf auth login`"
    if isinstance(error, hub.errors.RevisionNotFoundError):
        return f"has no revision {repository.revision or 'main'}"
    return "no such repository, or a private one: check the name, or log in with `hf auth login`"
