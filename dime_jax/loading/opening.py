"""Opening whatever a user names as a model.

CACHE/model-HASH/  a model directory that `open_model` converted, by its content, the options and the converter
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from checkpoints_convert.options import NO_OPTIONS, ConversionOptions
from dime_jax.core.denoiser import Denoiser
from dime_jax.loading import checkpoints, latent_checkpoints
from dime_jax.loading.latent_denoiser import LatentDenoiser, LatentOptions, describe_memory
from dime_jax.models import LatentModelSpec
from dime_jax.remote.options import NO_REMOTE_OPTIONS, RemoteOptions, is_address

Say = Callable[[str], object]


class OpenedModel(NamedTuple):
    """A model, and where it came from.

    Attributes:
      denoiser: the model.
      origin: in words.
      facts: a line on each thing that had to be known to convert it.
      commit: of a model from the Hub, 40 hex digits that say exactly which files it was made from.
    """

    denoiser: Denoiser
    origin: str
    facts: tuple[str, ...] = ()
    commit: str | None = None

    def describe(self) -> str:
        """A few lines for people."""
        return "\n  ".join([f"model {self.denoiser.name} ({self.origin})", *self.facts])


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def open_model(
    model: str | os.PathLike[str] | Denoiser,
    cache: str | os.PathLike[str],
    options: ConversionOptions = NO_OPTIONS,
    say: Say = _say,
    remote: RemoteOptions = NO_REMOTE_OPTIONS,
) -> OpenedModel:
    """Open a Denoiser, a model directory, a shipped model, a checkpoint file, a diffusers folder, hf:… or http(s)://….

    Args:
      model: what a user names; "hf:owner/name" or "hf:owner/name@revision" is fetched from the Hugging Face Hub, and
        "https://HOST/v2/models/NAME" stays where it is and is asked there.
      cache: where checkpoints are converted to: once, and again if they, the options or the converter change.
      options: what a checkpoint does not say itself, and how a latent model is used.
      say: is told how much memory a latent model takes, before any of it is read; prints to standard error.
      remote: how a hosted model is asked.

    Raises:
      ValueError: in one line, for what is none of these or cannot be converted faithfully, and for options that have
        nothing to convert.
    """
    if is_address(model):
        return _hosted(str(model), options, remote, say)
    if remote != NO_REMOTE_OPTIONS:
        given = [f"--{name}" for name, value in vars(remote).items() if value != getattr(NO_REMOTE_OPTIONS, name)]
        raise ValueError(f"expected no {' '.join(given)}: the model is not asked over a network")
    if isinstance(model, Denoiser):
        return _needs_no_conversion(OpenedModel(model, "a Python object"), options.given())
    from checkpoints_convert import hub

    if hub.is_hub_name(model):
        fetched = hub.fetch(str(model))
        origin = f"{str(model).partition('@')[0]} at commit {fetched.commit}"
        opened = _converted(fetched.directory, origin, Path(cache), options, say)._replace(commit=fetched.commit)
        return _as_named(opened, str(model).partition("@")[0], options)
    path = Path(model)
    if not path.exists() or (path / checkpoints.SPEC_FILE).is_file():
        origin = "a model directory" if path.exists() else "shipped with dime_jax"
        return _needs_no_conversion(_opened(path, origin, options, say), options.conversion())
    return _as_named(_converted(path, path.name, Path(cache), options, say), path.resolve().name, options)


def _hosted(url: str, options: ConversionOptions, remote: RemoteOptions, say: Say) -> OpenedModel:
    """A model that stays where it is."""
    from dime_jax.remote import RemoteDenoiser

    facts = {name: getattr(options, name) for name in ("schedule", "prediction", "image_size")}
    denoiser = RemoteDenoiser(url, **facts, options=remote, say=say)
    opened = OpenedModel(denoiser, denoiser.origin, denoiser.contract.facts)
    if denoiser.contract.latents:
        raise ValueError(
            f"{denoiser.name} takes latents: expected a model of images, which can be asked about pictures"
        )
    rest = {name: value for name, value in options.given().items() if name not in facts}
    return _needs_no_conversion(opened, rest)


def load_denoiser(path: str | os.PathLike[str]) -> Denoiser:
    """Open a model directory, or a shipped model by its name ("digits"), as a Denoiser.

    The weights are checked against the fingerprint that was written with them.

    Raises:
      ValueError: in one line, if there is no such model, or it is foreign, incomplete or changed.
    """
    return _load(checkpoints.find_model(path), NO_OPTIONS, lambda text: None)


def _converted(path: Path, what: str, cache: Path, options: ConversionOptions, say: Say) -> OpenedModel:
    """The model of a checkpoint, converted now or before."""
    from checkpoints_convert import convert

    key = [_content_hash(path), options.identity(), convert.CONVERTER_VERSION]
    directory = cache / f"model-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}"
    if directory.exists():
        return _opened(directory, f"converted from {what} before, kept in {directory.name}", options, say)
    convert.convert(path, directory, options.without_use(), lambda spec: say(describe_memory(spec, options.hold)))
    return _opened(directory, f"converted from {what}, kept in {directory.name}", options, lambda text: None)


def _as_named(opened: OpenedModel, name: str, options: ConversionOptions) -> OpenedModel:
    """The model under the name by which its user knows it, LoRAs included, and not that of where it is kept."""
    opened.denoiser.name = " + ".join([name, *(Path(lora).name for lora in options.lora)])
    return opened


def _opened(path: Path, origin: str, options: ConversionOptions, say: Say) -> OpenedModel:
    directory = checkpoints.find_model(path)
    denoiser = _load(directory, options, say)
    facts = checkpoints.read_spec_file(directory)["metadata"].get("facts", [])
    lines = [str(fact)[:500] for fact in facts[:20]] if isinstance(facts, list) else []
    if isinstance(denoiser, LatentDenoiser):
        lines.append(denoiser.describe_use())
    # A stranger's file may hold anything, line breaks and terminal escapes included.
    return OpenedModel(denoiser, origin, tuple("".join(c if c.isprintable() else "?" for c in line) for line in lines))


def _load(directory: Path, options: ConversionOptions, say: Say) -> Denoiser:
    use = options.use()
    if not latent_checkpoints.is_latent_model(directory):
        return _needs_no_conversion(OpenedModel(checkpoints.load_denoiser(directory), "no latent model"), use).denoiser
    wanted = LatentOptions(**use).check()
    try:
        say(describe_memory(LatentModelSpec.from_json(checkpoints.read_spec_file(directory)["spec"]), wanted.hold))
    except ValueError as error:
        raise ValueError(f"{directory / checkpoints.SPEC_FILE}: {error}") from None
    return LatentDenoiser(latent_checkpoints.load_latent_model(directory), wanted)


def _needs_no_conversion(opened: OpenedModel, given: Mapping[str, str | int]) -> OpenedModel:
    if given:
        options = " ".join(f"--{name}={value}" for name, value in given.items())
        raise ValueError(f"model {opened.denoiser.name} is {opened.origin} and not converted: expected no {options}")
    return opened


def _content_hash(path: Path) -> str:
    """SHA-256 over the names and bytes of a checkpoint file, or of everything in a folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(json.dumps([file.relative_to(path.parent).as_posix(), content]).encode())
    return digest.hexdigest()
