"""Opening whatever a user names as a model."""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dime_jax import models
from dime_jax._util.allocator import returnable
from dime_jax._util.downloads import is_hub_name
from dime_jax._util.files import user_cache
from dime_jax._util.text import printable
from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import Denoiser
from dime_jax.loading import conversion, model_directory
from dime_jax.loading.conversion import NO_OPTIONS, NO_USE_OPTIONS, ConversionOptions, UseOptions
from dime_jax.loading.latent_denoiser import LatentDenoiser, describe_memory, describe_size
from dime_jax.loading.model_directory import StoredModel, find_model
from dime_jax.remote.options import NO_REMOTE_OPTIONS, RemoteOptions, is_address

Say = Callable[[str], object]


class OpenedModel(NamedTuple):
    """A model, and where it came from.

    Attributes:
      denoiser: the model.
      origin: in words.
      facts: a line on each thing that had to be known to convert it.
      commit: of a model from the Hub, 40 hex digits that say exactly which files it was made from.
      spec: of its networks; None if they are not known here, as of a hosted model or a function.
    """

    denoiser: Denoiser
    origin: str
    facts: tuple[str, ...] = ()
    commit: str | None = None
    spec: models.ModelSpec | None = None

    def describe(self) -> str:
        """A few lines for people."""
        return "\n  ".join([f"model {self.denoiser.name} ({self.origin})", *self.facts])


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def open_model(
    what: str | os.PathLike[str] | Denoiser,
    *,
    cache: str | os.PathLike[str] | None = None,
    remote: RemoteOptions = NO_REMOTE_OPTIONS,
    say: Say = _say,
    **options: Any,
) -> OpenedModel:
    """Open a Denoiser, a model directory, a shipped model, a checkpoint file, a diffusers folder, hf:… or http(s)://….

    A checkpoint is converted once, and again if it, the options or the converter change; processes that open the same
    one at the same time wait for the first.

    Args:
      what: the model, as a user names it; "hf:owner/name" or "hf:owner/name@revision" is fetched from the Hugging Face
        Hub, and "https://HOST/v2/models/NAME" stays where it is and is asked there.
      cache: where converted models are kept; the user's own cache directory if None. Runs on several hosts name a
        directory that all of them see.
      remote: how a hosted model is asked.
      say: is told how much memory a latent model takes, before any of it is read, and where a converted model is kept;
        prints to standard error.
      **options: what a checkpoint does not say itself, the fields of `ConversionOptions` (dialect, weights,
        model_flags, image_size, schedule, prediction, autoencoder); and how a latent model is used, those of
        `UseOptions` (latent, latent_weighting, hold, lora, lora_scale).

    Raises:
      ValueError: in one line, for what is none of these or cannot be converted faithfully, for unknown options, and for
        options that do not apply to the model.
    """
    how, use = _sorted_options(options)
    if is_address(what):
        return _hosted(str(what), how, use, remote, say)
    if remote != NO_REMOTE_OPTIONS:
        names = [f"--{name}" for name, value in vars(remote).items() if value != getattr(NO_REMOTE_OPTIONS, name)]
        raise ValueError(f"{' '.join(names)} applies only to hosted models; this one is not asked over a network")
    if isinstance(what, Denoiser):
        return _needs_no_conversion(OpenedModel(what, "a Python object"), {**how.given(), **use.given()})
    place = user_cache() / "models" if cache is None else Path(cache)
    if is_hub_name(what):
        path, commit = conversion.fetch(str(what))
        name = str(what).partition("@")[0]
        return _converted(path, name, f"{name} at commit {commit}", place, how, use, say)._replace(commit=commit)
    path = Path(what)
    if not is_converted(what):
        origin, directory = "a model directory" if path.exists() else "shipped with dime_jax", find_model(path)
        return _needs_no_conversion(_opened(directory, directory.name, origin, use, say), how.given())
    return _converted(path, path.resolve().name, path.name, place, how, use, say)


def is_converted(what: str | os.PathLike[str] | Denoiser) -> bool:
    """Whether a model, as a user names it, is converted when it is opened: a checkpoint, not a model directory."""
    if isinstance(what, Denoiser) or is_address(what):
        return False
    path = Path(what)
    return is_hub_name(what) or (path.exists() and not (path / model_directory.SPEC_FILE).is_file())


def _sorted_options(options: Mapping[str, Any]) -> tuple[ConversionOptions, UseOptions]:
    """What converts, and how the model is used."""
    unknown = sorted(options.keys() - vars(NO_OPTIONS).keys() - vars(NO_USE_OPTIONS).keys())
    if unknown:
        known = ", ".join([*vars(NO_OPTIONS), *vars(NO_USE_OPTIONS)])
        raise ValueError(f"unknown option {unknown[0]!r}; expected one of {known}")
    how = {name: value for name, value in options.items() if name in vars(NO_OPTIONS)}
    use = {name: value for name, value in options.items() if name in vars(NO_USE_OPTIONS)}
    return ConversionOptions(**how), UseOptions(**use)


def _hosted(url: str, how: ConversionOptions, use: UseOptions, remote: RemoteOptions, say: Say) -> OpenedModel:
    """A model that stays where it is."""
    from dime_jax.remote import RemoteDenoiser

    facts = {name: getattr(how, name) for name in ("schedule", "prediction", "image_size")}
    denoiser = RemoteDenoiser(url, **facts, options=remote, say=say)
    opened = OpenedModel(denoiser, denoiser.origin, denoiser.contract.facts)
    if denoiser.contract.latents:
        raise ValueError(f"{denoiser.name} takes latents; a hosted model must take images")
    given = {**how.given(), **use.given()}
    return _needs_no_conversion(opened, {name: value for name, value in given.items() if name not in facts})


def load_denoiser(path: str | os.PathLike[str]) -> Denoiser:
    """Open a model directory, or a shipped model by its name ("digits"), as a Denoiser.

    The weights are checked against the fingerprint that was written with them.

    Raises:
      ValueError: in one line, if there is no such model, or it is foreign, incomplete or changed.
    """
    return _load(find_model(path), NO_USE_OPTIONS)


def _converted(
    path: Path, name: str, source: str, cache: Path, how: ConversionOptions, use: UseOptions, say: Say
) -> OpenedModel:
    """The model of a checkpoint, converted now or before."""
    use.loras()  # one that is not there is found before anything is converted
    directory, before = conversion.convert_once(path, cache, how, _say_memory(use, say))
    size = describe_size(sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()))
    say(f"the converted model is cached in {directory} ({size})")
    origin = f"converted from {source}{' before' if before else ''}, cached in {directory.name}"
    return _opened(directory, name, origin, use, say if before else lambda text: None)


def _opened(directory: Path, name: str, origin: str, use: UseOptions, say: Say) -> OpenedModel:
    """The model of a directory, under the name by which its user knows it."""
    _say_memory(use, say)(model_directory.read_spec(directory))
    denoiser, loras = _load(directory, use), use.loras()
    denoiser.name = " + ".join([name, *(Path(one.file).name for one in loras)])
    facts = model_directory.read_spec_file(directory)["metadata"].get("facts", [])
    lines = [str(fact)[:500] for fact in facts[:20]] if isinstance(facts, list) else []
    lines += [f"LoRA: {one.path.name} at scale {one.scale:g}" for one in loras]
    if isinstance(denoiser, LatentDenoiser):
        lines.append(denoiser.describe_use())
    return OpenedModel(denoiser, origin, tuple(map(printable, lines)), spec=model_directory.read_spec(directory))


def _say_memory(use: UseOptions, say: Say) -> Callable[[models.ModelSpec], object]:
    return lambda spec: None if spec.autoencoder is None else say(describe_memory(spec, use.hold))


@returnable()
def _load(directory: Path, use: UseOptions) -> Denoiser:
    model = _read(directory, use)
    reload = functools.partial(_read_again, directory, use, model.fingerprint)
    if model.spec.autoencoder is not None:
        return LatentDenoiser(model, use, reload)
    given = [f"--{name}" for name in use.given() if not name.startswith("lora")]
    if given:
        raise ValueError(f"{given[0]} applies only to latent models; {model.name} takes images")
    return models.image_denoiser(model.spec, model.variables, model.fingerprint, model.name, reload)


def _read(directory: Path, use: UseOptions) -> StoredModel:
    """A model with LoRAs merged."""
    return conversion.with_adapters(model_directory.read_model(directory), use.loras())


def _read_again(directory: Path, use: UseOptions, fingerprint: str) -> PyTree:
    """The variables of a model that was opened before; neither it nor its LoRAs may have changed since."""
    model = _read(directory, use)
    if model.fingerprint != fingerprint:
        raise ValueError(f"{directory} must hold the model that was opened, {fingerprint}, got {model.fingerprint}")
    return model.variables


def _needs_no_conversion(opened: OpenedModel, given: Mapping[str, str | int]) -> OpenedModel:
    if given:
        options = " and ".join(f"--{name}" for name in given) + (" applies" if len(given) == 1 else " apply")
        when = "when a checkpoint is converted" if given.keys() <= vars(NO_OPTIONS).keys() else "to models in files"
        raise ValueError(f"{options} only {when}; {opened.denoiser.name} is {opened.origin}")
    return opened
