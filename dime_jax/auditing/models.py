"""Opening the models of an audit: the model and the reference beside it, or the two that are compared."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from dime_jax._util.distributed import shared_cache
from dime_jax.auditing.config import AuditConfig
from dime_jax.core.denoiser import Denoiser
from dime_jax.loading.conversion import NO_OPTIONS
from dime_jax.loading.opening import OpenedModel, is_converted, open_model
from dime_jax.remote.options import NO_REMOTE_OPTIONS, is_address
from dime_jax.remote.transport import parse_url

_Model = str | os.PathLike[str] | Denoiser


def open_models(config: AuditConfig) -> tuple[OpenedModel, OpenedModel | None]:
    """Open the model, and the reference if there is one: a named one, or the model without its LoRAs.

    Both are opened at the same image size, and encode images in the same way.
    """
    if not config.has_reference:
        return _open(config, config.model, config.model_options), None
    named = config.model if config.reference is None else config.reference
    model = _open(config, config.model, config.model_options, named)
    model.denoiser.release()
    loras, scales = _reference_loras(config.reference_lora or ())
    own = dataclasses.replace(config.use, lora=loras, lora_scale=scales)
    how = config.conversion
    if config.reference is not None:
        size = model.denoiser.image_shape[0] if is_converted(named) else None
        how = dataclasses.replace(NO_OPTIONS, image_size=size)
    reference = _open(config, named, vars(how) | vars(own), config.model)
    reference.denoiser.release()
    return model, reference


def denoisers(opened: tuple[OpenedModel, OpenedModel | None]) -> tuple[Denoiser, Denoiser | None]:
    """The models that were opened."""
    model, reference = opened
    return model.denoiser, None if reference is None else reference.denoiser


def open_compared(config: AuditConfig, after: _Model) -> tuple[OpenedModel, OpenedModel]:
    """Open the models before and after a deletion, by the same options."""
    before = _open(config, config.model, config.model_options, after)
    return before, _open(config, after, config.model_options, config.model)


def _open(
    config: AuditConfig, named: _Model, options: Mapping[str, object], other: _Model | None = None
) -> OpenedModel:
    """Open one of one or two models; how to ask a hosted one is said once, and a token is for one server only."""
    hosted = [model for model in (named, other) if model is not None and is_address(model)]
    if config.remote.has_token and len({parse_url(str(model))[0] for model in hosted}) > 1:
        raise ValueError("both models must be on one server if a token is given, since it is sent to no other")
    remote = config.remote if is_address(named) or not hosted else NO_REMOTE_OPTIONS
    cache = shared_cache(config.directory)
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
