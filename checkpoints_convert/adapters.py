"""Adapters in files: merged into the variables of a stored model, and written.

Latent models take LoRA files of any spelling (`lora`), and theirs are written in peft's. Models of images take their
own: safetensors with the factors of each kernel (`dime_jax.models.low_rank`) under its path, as
params/conv_in/kernel/down and …/up, and metadata {"adapter": {"format", "version", "rank", "alpha", "base"}}, where
"base" is the fingerprint of the only model that it may be merged into.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import safetensors.numpy
import threadpoolctl

from checkpoints_convert import lora, mapping
from checkpoints_convert.diffusers_names import naming_of
from checkpoints_convert.lora import Lora
from checkpoints_convert.mapping import Entry
from checkpoints_convert.weights_file import about
from dime_jax import models
from dime_jax._util import records
from dime_jax._util.files import write_atomically
from dime_jax._util.text import shorten
from dime_jax._util.typing import Array, PyTree
from dime_jax.models import ClipTextSpec, ConditionalUnetSpec, ModelSpec, low_rank
from dime_jax.models.checks import MAX_CHANNELS, Range, check_fields
from dime_jax.models.low_rank import Factors

FORMAT, VERSION = "dime_jax adapter", 1
_KEY = "adapter"
_PEFT_PREFIXES = {lora.UNET: "unet.", lora.TEXT: "text_encoder.text_model."}
_Change = tuple[str, Callable[[np.ndarray], Array]]  # the path of a kernel, and what it becomes


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What an adapter of a model of images says about itself."""

    base: str
    rank: Annotated[int, Range(1, MAX_CHANNELS)]
    alpha: Annotated[float, Range(-1e6, 1e6)]
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.format, self.version) != (FORMAT, VERSION):
            raise ValueError(f"must be {FORMAT}, version {VERSION}, got {shorten(self.format)}, {self.version}")


def merge(variables: PyTree, spec: ModelSpec, fingerprint: str, loras: Sequence[Lora]) -> None:
    """Merge adapters into a model's variables in float32, in place: no more than one kernel is in memory twice.

    Args:
      variables: nested dicts, which are changed.
      spec: of the model.
      fingerprint: of the model.
      loras: in this order.

    Raises:
      ValueError: in one line that names the file, unless every tensor in it is used exactly once.
    """
    for one in loras:
        changes = _own_changes(one, spec, fingerprint) if spec.autoencoder is None else _lora_changes(one, spec)
        # Products over several threads round otherwise: the same model must have the same fingerprint on any machine.
        with about(one.path), threadpoolctl.threadpool_limits(1, "blas"):
            for path, change in changes:
                _replace(variables, path, change)


def _replace(tree: PyTree, path: str, change: Callable[[np.ndarray], Array]) -> None:
    *parents, last = path.split("/")
    for name in parents:
        tree = tree[name]
    with np.errstate(over="ignore", invalid="ignore"):  # reported below
        merged = np.ascontiguousarray(change(np.asarray(tree[last])))
    bad = merged.size - np.count_nonzero(np.isfinite(merged))
    if bad:
        raise ValueError(f"{path}, merged, has {bad} of {merged.size} values NaN or infinite")
    tree[last] = jax.device_put(merged, jax.local_devices()[0])


def _lora_changes(one: Lora, spec: ModelSpec) -> Iterator[_Change]:
    """The changes of a LoRA file for a latent model."""
    layers = {part: {entry.tensor: (path, entry) for path, entry in table.items()} for part, table in _layers(spec)}
    names = {part: lora.layer_names(tensors, part) for part, tensors in layers.items()}
    for update in one.updates:
        if update.part not in names:
            raise ValueError(f"unknown LoRA tensor {shorten(update.key)}: the model has no {update.part}")
        path, entry = layers[update.part][lora.find_layer(update, names[update.part])]
        yield path, functools.partial(_updated, layout=entry.layout, update=update)


def _updated(kernel: np.ndarray, layout: mapping.Layout, update: lora.Update) -> np.ndarray:
    return mapping.to_ours(lora.merge(mapping.to_theirs(kernel, layout), update), layout)


def _layers(spec: ModelSpec) -> Iterator[tuple[str, dict[str, Entry]]]:
    """The parts of a model that LoRA files know, and what they call each variable, by its path."""
    for part, name in ((lora.UNET, "denoiser"), (lora.TEXT, "text_encoder")):
        network = spec.parts.get(name)
        if isinstance(network, ConditionalUnetSpec | ClipTextSpec):
            table = mapping.name_table(network, naming_of(network, {}))
            yield part, {"/".join((name, *entry.path)): entry for entry in table}


def _own_changes(one: Lora, spec: ModelSpec, fingerprint: str) -> Iterator[_Change]:
    """The changes of an adapter for a model of images."""
    state, stored = one.state, lora.stored_settings(one.path, _KEY)
    if stored is None:
        raise ValueError(f"must be a {FORMAT}, which says so in its metadata: models of images take no other")
    settings = records.parse(_Settings, stored, _KEY, strict=True)
    if settings.base != fingerprint:
        raise ValueError(f"is for a model of fingerprint {shorten(settings.base)}, and this one has {fingerprint}")
    scale = one.scale * settings.alpha / settings.rank
    kernels = low_rank.kernels(models.param_shapes(spec.denoiser))
    for path, factors in _factors(state, kernels, settings.rank).items():
        yield path, functools.partial(low_rank.merge_kernel, factors=factors, scale=scale)


def _factors(state: mapping.StateDict, kernels: Mapping[str, Array], rank: int) -> dict[str, Factors]:
    """The factors of each kernel, which must be in pairs and of its shape."""
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in state.items():
        path, _, role = name.rpartition("/")
        if path not in kernels or role not in Factors._fields:
            raise ValueError(f"unknown tensor {shorten(name)}: the model has no such kernel")
        *inputs, outputs = kernels[path].shape
        shape = (*inputs, rank) if role == "down" else (rank, outputs)
        if tensor.shape != shape:
            raise ValueError(f"{shorten(name)} must have shape {list(shape)}, got {list(tensor.shape)}")
        pairs.setdefault(path, {})[role] = np.asarray(tensor, np.float32)
    for path, pair in pairs.items():
        if len(pair) == 1:
            raise ValueError(f"each kernel must have a down and an up factor, got {path}/{min(pair)} alone")
    return {path: Factors(**pair) for path, pair in pairs.items()}


def save(file: Path, spec: ModelSpec, adapter: Mapping[str, Factors], fingerprint: str) -> None:
    """Write an adapter for `merge`, with alpha = rank: at scale 1 it is what it was; the same one gives the same bytes.

    Args:
      file: where; one of the same content is left alone.
      spec: of the model that it was trained on.
      adapter: factors by the path of the kernel among the model's variables.
      fingerprint: of that model.

    Raises:
      ValueError: for a kernel of a latent model that has no name in LoRA files.
    """
    rank = next(iter(adapter.values())).down.shape[-1]
    named = _own_tensors(adapter) if spec.autoencoder is None else _peft_tensors(adapter, spec)
    tensors = {name: np.ascontiguousarray(factor) for name, factor in named}
    settings = _Settings(fingerprint, rank, rank)
    content = safetensors.numpy.save(tensors, {_KEY: json.dumps(records.plain(settings))})
    if not file.is_file() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)


def _own_tensors(adapter: Mapping[str, Factors]) -> Iterator[tuple[str, Array]]:
    for path, factors in adapter.items():
        yield from ((f"{path}/{role}", factor) for role, factor in factors._asdict().items())


def _peft_tensors(adapter: Mapping[str, Factors], spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
    layers = {path: (part, entry) for part, table in _layers(spec) for path, entry in table.items()}
    for path, factors in adapter.items():
        if path not in layers:
            raise ValueError(f"{path} has no name in LoRA files, which know Stable Diffusion's U-Net and text encoder")
        part, entry = layers[path]
        module, ones = _PEFT_PREFIXES[part] + entry.tensor.removesuffix(".weight"), len(entry.tensor_shape) - 2
        yield f"{module}.lora_A.weight", mapping.to_theirs(np.asarray(factors.down), entry.layout)
        yield f"{module}.lora_B.weight", np.asarray(factors.up).T.reshape(-1, len(factors.up), *(1,) * ones)
