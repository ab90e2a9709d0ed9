"""Opening the models of an audit: the model and the reference beside it, or the two that are compared."""

import dataclasses
import os
import re
from collections.abc import Sequence

from dime_jax._util.distributed import shared_cache
from dime_jax.auditing.config import AuditConfig
from dime_jax.core.denoiser import Denoiser
from dime_jax.data.duplicates import Sketch, read_sketches, sketches_file
from dime_jax.loading import model_directory
from dime_jax.loading.conversion import NO_OPTIONS
from dime_jax.loading.opening import OpenedModel, is_converted, open_model
from dime_jax.remote.options import NO_REMOTE_OPTIONS, is_address
from dime_jax.remote.transport import parse_url

_Model = str | os.PathLike[str] | Denoiser


def open_models(config: AuditConfig) -> tuple[OpenedModel, OpenedModel | None]:
    """Open the model, and the reference if there is one: a named one, or the model without its LoRAs.

    Both are opened at the same image size, and encode images in the same way. A reference that is still to be trained
    is not among them (see `reference.train_beside`).
    """
    if not config.has_reference or config.trains_reference:
        model = _open(config, config.model)
        if config.trains_reference:
            from dime_jax.training.reference import reference_spec  # needs the extra `train`

            reference_spec(model, config.reference_size)  # before any image is read
        return model, None
    named = config.model if config.reference is None else config.reference
    model = _open(config, config.model, named)
    model.denoiser.release()
    loras, scales = _reference_loras(config.reference_lora or ())
    own = dataclasses.replace(config, use=dataclasses.replace(config.use, lora=loras, lora_scale=scales))
    if config.reference is not None:
        size = model.denoiser.image_shape[0] if is_converted(named) else None
        own = dataclasses.replace(own, conversion=dataclasses.replace(NO_OPTIONS, image_size=size))
    reference = _open(own, named, config.model)
    reference.denoiser.release()
    return model, reference


def denoisers(opened: tuple[OpenedModel, OpenedModel | None]) -> tuple[Denoiser, Denoiser | None]:
    """The models that were opened."""
    model, reference = opened
    return model.denoiser, None if reference is None else reference.denoiser


def trained_on(config: AuditConfig) -> tuple[list[Sketch], list[str]]:
    """The images that a named reference was trained on, as far as it says so, and a warning if they are not known."""
    named = config.reference
    if named is None or not config.has_reference or config.trains_reference or isinstance(named, Denoiser):
        return [], []
    if is_address(named) or is_converted(named):
        return [], []
    directory = model_directory.find_model(named).resolve()
    images = model_directory.read_spec_file(directory)["metadata"].get("images")
    fingerprint = str(images.get("fingerprint")) if isinstance(images, dict) else ""
    if not re.fullmatch("[0-9a-f]{32}", fingerprint):
        return [], []
    file = sketches_file(directory.parent, fingerprint)
    if file.is_file():
        return read_sketches(file), []
    unknown = f"the reference was trained with dime_jax, but {file.name}, which says on which images, is not beside it"
    return [], [f"{unknown}: if held-out images are among them, innocent candidates may be taken for members"]


def open_compared(config: AuditConfig, after: _Model) -> tuple[OpenedModel, OpenedModel]:
    """Open the models before and after a deletion, by the same options."""
    return _open(config, config.model, after), _open(config, after, config.model)


def _open(config: AuditConfig, named: _Model, other: _Model | None = None) -> OpenedModel:
    """Open one of one or two models; how to ask a hosted one is said once, and a token is for one server only."""
    hosted = [model for model in (named, other) if model is not None and is_address(model)]
    if config.remote.has_token and len({parse_url(str(model))[0] for model in hosted}) > 1:
        raise ValueError("both models must be on one server if a token is given, since it is sent to no other")
    remote = config.remote if is_address(named) or not hosted else NO_REMOTE_OPTIONS
    cache = shared_cache(config.directory)
    options = vars(config.conversion) | vars(config.use)
    return open_model(named, cache=cache, remote=remote, say=config.options.say, **options)


def _reference_loras(named: Sequence[str]) -> tuple[list[str], list[float]]:
    """The LoRAs of the reference and their strengths, from FILE or FILE:X."""
    files, scales = list[str](), list[float]()
    for one in named:
        file, _, scale = one.rpartition(":")
        try:
            files, scales = [*files, file or one], [*scales, float(scale) if file else 1.0]
        except ValueError:  # a colon of the file's own
            files, scales = [*files, one], [*scales, 1.0]
    return files, scales
