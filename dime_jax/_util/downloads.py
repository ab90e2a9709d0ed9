"""Files of repositories on the Hugging Face Hub, by names such as hf:owner/name or hf:owner/name@revision.

`huggingface-hub` downloads and caches. What was fetched before is found again without a network.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from dime_jax._util.text import one_line, printable

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
    """One repository, as huggingface-hub asks for it."""

    hub: ModuleType
    name: str
    revision: str | None
    kind: Literal["model", "dataset"]
    cache_dir: str | os.PathLike[str] | None
    endpoint: str | None

    def listed_files(self) -> list[str]:
        api = self.hub.HfApi(endpoint=self.endpoint)
        info = api.repo_info(self.name, revision=self.revision, repo_type=self.kind)
        return [sibling.rfilename for sibling in info.siblings or ()]

    def snapshot(self, patterns: Sequence[str], local_files_only: bool = False) -> Path:
        directory = self.hub.snapshot_download(
            self.name,
            revision=self.revision,
            repo_type=self.kind,
            allow_patterns=list(patterns),
            cache_dir=self.cache_dir,
            endpoint=self.endpoint,
            local_files_only=local_files_only,
        )
        return Path(directory)

    def cached_files(self, directory: Path) -> list[str]:
        """Return the repository's files as listed when it was fetched, or else those that are there."""
        try:
            tree = self.hub.get_cached_repo_tree(
                self.name, revision=directory.name, repo_type=self.kind, cache_dir=self.cache_dir
            )
            return [file.path for file in tree]
        except Exception:  # versions before 2 keep no list, and later ones not always
            return [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]

    def why_not(self, error: Exception) -> str:
        if isinstance(error, self.hub.errors.GatedRepoError):
            return "is gated: accept its terms on its page, then log in with `hf auth login`"
        if isinstance(error, self.hub.errors.RevisionNotFoundError):
            return f"has no revision {self.revision or 'main'}"
        return "no such repository, or a private one: check the name, or log in with `hf auth login`"


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    """Whether a name that a user gave refers to the Hub."""
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
      choose: picks the files to fetch from the paths of all; raises DownloadError with the reason if none will do.
      kind: what kind of repository it is.
      cache_dir: where files are cached; by default where `huggingface-hub` does it (HF_HOME).
      endpoint: address of the Hub; by default HF_ENDPOINT or the public one.

    Raises:
      DownloadError: in one line, for a name of another form, a repository or revision that is not there, a gated one,
        or a Hub that cannot be reached while the files are not in the cache.
    """
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        raise DownloadError(printable(f"Hub names must be hf:owner/name or hf:owner/name@revision, got {name[:200]!r}"))
    hub = _import_hub()
    repository = _Repository(hub, match["repository"], match["revision"], kind, cache_dir, endpoint)
    try:
        files = choose(repository.listed_files())
        return _complete(repository.snapshot(files), files)
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        raise DownloadError(f"{name}: {repository.why_not(error)}") from None
    except DownloadError as error:
        raise DownloadError(f"{name}: {error}") from None
    # Without a network, or when the Hub fails, the types raised come from several libraries and change with versions.
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}")
    try:  # what was fetched before
        directory = repository.snapshot(_NO_FILES, local_files_only=True)
        return _complete(directory, choose(repository.cached_files(directory)))
    except (OSError, ValueError):
        raise DownloadError(
            f"{name}: the Hub cannot be reached, and the {kind} is not complete in the cache ({reason})"
        ) from None


def _import_hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise DownloadError(f"hf: names need the extra dime_jax[latent], which is not installed: {error}") from None
    return huggingface_hub


def _complete(directory: Path, files: Sequence[str]) -> Fetched:
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise DownloadError(f"{missing[0]} is missing from {directory}")
    if not _COMMIT.fullmatch(directory.name):
        raise DownloadError(f"the Hub's commit must be 40 hex digits, got {printable(directory.name[:60])!r}")
    return Fetched(directory, directory.name, tuple(files))
