"""LoRA files for latent models: updates W + scale * (alpha / rank) * up @ down of their layers.

Spellings, for a layer M of the U-Net or the text encoder:

    kohya                lora_unet_M / lora_te_M, dots as underscores, .lora_down.weight, .lora_up.weight, .alpha
    peft                 unet.M / text_encoder.M / base_model.model.M, .lora_A.weight, .lora_B.weight
    diffusers (older)    unet.M.lora.down.weight, text_encoder.M.lora_linear_layer.down.weight
    diffusers (oldest)   [unet.]….processor.to_q_lora.down.weight, text_encoder….self_attn.to_q_lora.down.weight

peft's alpha is in adapter_config.json beside the file, or in the file's own metadata; without either, alpha = rank.
Every tensor is used exactly once, or the file is refused with the name of the first that is not.
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import safetensors

from checkpoints_convert import weights_file
from checkpoints_convert.mapping import StateDict
from checkpoints_convert.torch_pickle import CheckpointError
from checkpoints_convert.weights_file import about
from dime_jax._util.files import read_json, unique
from dime_jax._util.text import shorten
from dime_jax._util.typing import JsonObject
from dime_jax.models import low_rank
from dime_jax.models.checks import MAX_CHANNELS, check_number

UNET, TEXT = "unet", "text_encoder"
PARTS = (UNET, TEXT)

_MAX_METADATA_BYTES = 2**20

# Patterns in the names of other methods' tensors, and why their numbers cannot be merged in this way.
_OTHER_METHODS = {
    "lora_magnitude_vector": "DoRA (it rescales the merged weights)",
    "dora_scale": "DoRA (it rescales the merged weights)",
    "hada_w": "LoHa (its update is a product of two low-rank matrices)",
    "lokr_w": "LoKr (its update is a Kronecker product)",
    "lora_mid": "LoCon in Tucker form (its update has a third factor)",
    "oft_": "OFT (its update is a rotation)",
    "boft_": "BOFT (its update is a rotation)",
    "ia3_": "IA3 (it rescales activations)",
    r"\.diff(_b)?$": "full differences of weights, not low-rank ones",
    "lora_embedding_": "a LoRA of the token embedding",
    "lora_te2_": "a LoRA of SDXL's second text encoder",
    r"^text_encoder_2\.": "a LoRA of SDXL's second text encoder",
    r"^transformer\.": "a LoRA of a diffusion transformer",
}
_SUFFIXES = re.compile(
    r"(?P<module>.+?)(?:"
    r"\.(?P<kohya>lora_(?:down|up))\.weight"
    r"|\.(?P<peft>lora_[AB])(?:\.default)?\.weight"
    r"|(?:\.lora|\.lora_linear_layer|_lora)\.(?P<older>down|up)\.weight"
    r"|\.(?P<alpha>alpha))"
)
_IS_DOWN = {"lora_down": True, "lora_up": False, "lora_A": True, "lora_B": False, "down": True, "up": False}
_KOHYA_PARTS = {"lora_unet_": UNET, "lora_te_": TEXT, "lora_te1_": TEXT}
_DOTTED_PARTS = {"unet.": UNET, "text_encoder.": TEXT}
_TEXT_PREFIX = "text_model."
# The oldest names of a text encoder's layers.
_OLD_TEXT = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}

# Keys of adapter_config.json that change the update, with the only values that mean what is computed here.
_CONFIG_FIXED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA", None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora"), (False, None)),
    **dict.fromkeys(("layer_replication", "trainable_token_indices", "megatron_config"), (None,)),
    "alora_invocation_tokens": (None,),
}


@dataclasses.dataclass(frozen=True)
class Lora:
    """An adapter file to merge.

    Attributes:
      file: safetensors or PyTorch; a folder stands for the one file of either kind in it.
      scale: how strongly to apply it; 1 is what it was trained at.
      path: the file itself.
    """

    file: str | os.PathLike[str]
    scale: float = 1.0
    path: Path = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        check_number(self.scale, -100, 100, "LoRA scale")
        object.__setattr__(self, "path", _weights_file(Path(self.file)))

    @functools.cached_property
    def state(self) -> StateDict:
        """The tensors in the file by name, as views on it.

        Raises:
          ValueError: in one line, for a file that holds anything else.
        """
        contents = weights_file.read(self.path)
        with about(self.path):
            return _flat(contents)

    @functools.cached_property
    def updates(self) -> list["Update"]:
        """The updates in the file.

        Raises:
          ValueError: in one line, for a tensor that is not part of a complete pair, and for other methods than LoRA.
        """
        state = self.state
        with about(self.path):
            _refuse_other_methods(state)
            return list(_updates(state, _adapter_configs(self.path), self.scale))


def _weights_file(path: Path) -> Path:
    """The file itself: where a folder is given, the only weights file in it."""
    if path.is_file():
        return path
    files = [file for suffix in (".safetensors", ".bin", ".pt") for file in sorted(path.glob(f"*{suffix}"))]
    if not path.exists():
        raise CheckpointError(f"no file or folder {path}")
    if len(files) != 1:
        found = ", ".join(file.name for file in files[:5]) or "none"
        raise CheckpointError(f"{path} must be a LoRA file, or a folder with one weights file in it, found {found}")
    return files[0]


class Update(NamedTuple):
    """The low-rank update of one weight.

    Attributes:
      key: of its first tensor in the file, for errors.
      part: "unet" or "text_encoder".
      module: name of the layer, with dots, or with underscores for them (kohya).
      down: [rank, in] or [rank, in, height, width].
      up: [out, rank] or [out, rank, 1, 1].
      factor: alpha / rank (alpha / √rank for rank-stabilised ones), times the user's scale.
    """

    key: str
    part: str
    module: str
    down: np.ndarray
    up: np.ndarray
    factor: float


def _flat(contents: object) -> StateDict:
    if not weights_file.is_state_dict(contents):
        raise ValueError("not a LoRA file: it must hold tensors by name")
    for name, tensor in contents.items():
        if not jax.dtypes.issubdtype(tensor.dtype, np.floating):
            raise ValueError(f"{shorten(name)} must hold floating-point numbers, got {tensor.dtype}")
    return contents


def _refuse_other_methods(state: StateDict) -> None:
    for name in state:
        for mark, method in _OTHER_METHODS.items():
            if re.search(mark, name):
                raise ValueError(f"not supported, because it holds {shorten(name)}: this is {method}")


def _updates(state: StateDict, configs: Mapping[str, JsonObject], scale: float) -> Iterator[Update]:
    layers: dict[tuple[str, str], dict[str, tuple[str, np.ndarray]]] = {}
    for name, tensor in state.items():
        match = _SUFFIXES.fullmatch(name)
        if match is None:
            raise ValueError(f"unknown LoRA tensor {shorten(name)}")
        ending = match["kohya"] or match["peft"] or match["older"]
        role = "alpha" if match["alpha"] else "down" if _IS_DOWN[ending] else "up"
        if layers.setdefault(_layer(match), {}).setdefault(role, (name, tensor))[0] != name:
            raise ValueError(f"each factor of a layer must be one tensor, got {shorten(name)} twice")
    for (part, module), roles in layers.items():
        key = next(iter(roles.values()))[0]
        if not {"down", "up"} <= roles.keys():
            raise ValueError(f"each layer must have a down and an up factor, got {shorten(key)} alone")
        down, up, config = roles["down"][1], roles["up"][1], configs[part]
        rank = _rank(down, up, key)
        alpha = _alpha(roles["alpha"][1], key) if "alpha" in roles else _configured_alpha(config, module, rank)
        factor = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        yield Update(key, part, module, down, up, scale * factor)


def _layer(match: re.Match[str]) -> tuple[str, str]:
    """Part and name of the layer that a tensor belongs to."""
    module = match["module"]
    for prefix, part in _KOHYA_PARTS.items():
        if module.startswith(prefix):
            return part, module.removeprefix(prefix)
    module = module.removeprefix("base_model.model.")
    # A part of the pipeline comes first, or (peft's own files, and diffusers' oldest) nothing does.
    named = next((part for prefix, part in _DOTTED_PARTS.items() if module.startswith(prefix)), None)
    module = module.removeprefix(f"{named}.") if named else module
    is_text = named == TEXT or (named is None and module.startswith((_TEXT_PREFIX, "encoder.layers.")))
    if match["older"]:
        module = _newer_name(module, is_text)
    return (TEXT if is_text else UNET), module


def _newer_name(module: str, is_text: bool) -> str:
    """Today's name of a layer in diffusers' older files."""
    module = module.replace(".processor.", ".")
    stem, _, last = module.rpartition(".")
    if is_text:
        return f"{stem}.{_OLD_TEXT.get(last, last)}"
    return f"{module}.0" if last == "to_out" else module


def _rank(down: np.ndarray, up: np.ndarray, key: str) -> int:
    rank = down.shape[0] if down.ndim else 0
    fits = down.ndim in (2, 4) and up.ndim in (2, 4) and 0 < rank <= MAX_CHANNELS and up.shape[1] == rank
    if not fits or (up.ndim == 4 and up.shape[2:] != (1, 1)):
        shapes = f"{list(up.shape)} and {list(down.shape)}"
        ranks = f"with a rank of at most {MAX_CHANNELS}"
        raise ValueError(f"factors at {shorten(key)} must be [out, rank] and [rank, in] {ranks}, got {shapes}")
    return rank


def _alpha(alpha: np.ndarray, key: str) -> float:
    if alpha.size != 1 or not np.isfinite(float(alpha.reshape(()))):
        raise ValueError(f"alpha at {shorten(key)} must be one finite number")
    return float(alpha.reshape(()))


def _configured_alpha(config: JsonObject, module: str, rank: int) -> float:
    """Return the alpha of a layer by peft's settings; its rank, if they do not say."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            return float(alpha)
    return float(config.get("lora_alpha", rank))


def _adapter_configs(file: Path) -> Mapping[str, JsonObject]:
    """Return peft's settings for each part; empty where there are none."""
    stored, beside = stored_settings(file, "lora_adapter_metadata"), file.parent / "adapter_config.json"
    if stored is None:
        configs = dict.fromkeys(PARTS, read_json(beside) if beside.is_file() else {})
    else:
        configs = {part: _part_config(stored, f"{part}.") for part in PARTS}
    for config in configs.values():
        _check_config(config)
    return configs


def stored_settings(file: Path, name: str) -> JsonObject | None:
    """Return the settings in a safetensors file's metadata, of which diffusers keeps one JSON text; None if none."""
    if not weights_file.is_safetensors(file):
        return None
    with safetensors.safe_open(file, framework="numpy") as opened:
        text = (opened.metadata() or {}).get(name)
    if text is None:
        return None
    try:
        config = json.loads(text, object_pairs_hook=unique) if len(text) <= _MAX_METADATA_BYTES else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"{name} must be a small JSON object")
    return config


def _part_config(stored: JsonObject, prefix: str) -> JsonObject:
    return {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}


def _check_config(config: JsonObject) -> None:
    for key, values in _CONFIG_FIXED.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(f"adapter_config.json: cannot honour {key}={str(config[key])[:60]}")
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict):
        raise ValueError("adapter_config.json: alpha_pattern must be a JSON object")
    for pattern in alphas:
        if not re.fullmatch(r"[\w.]+", pattern):
            raise ValueError(f"adapter_config.json: cannot honour the pattern {shorten(pattern)}: it must be a name")
    for alpha in (*alphas.values(), *([config["lora_alpha"]] if "lora_alpha" in config else [])):
        check_number(alpha, -1e6, 1e6, "lora_alpha")


def find_layer(update: Update, names: Mapping[str, str]) -> str:
    """Return the name of the weight that an update is for.

    Args:
      update: of a `Lora`.
      names: from `layer_names`, of its part.

    Raises:
      ValueError: naming the update, if there is none.
    """
    name = names.get(update.module.removeprefix(_TEXT_PREFIX).removeprefix("text_model_"))
    if name is None:
        raise ValueError(f"unknown LoRA tensor {shorten(update.key)}: the {update.part} has no such layer")
    return name


def layer_names(tensors: Iterable[str], part: str) -> dict[str, str]:
    """Return the weight of each layer, by the layer's name with dots and with underscores.

    Args:
      tensors: by the names of diffusers or transformers (with or without `text_model.`).
      part: "unet" or "text_encoder".

    Raises:
      ValueError: naming two layers that have the same name in a LoRA file.
    """
    names: dict[str, str] = {}
    for name in tensors:
        module = name.removesuffix(".weight").removeprefix(_TEXT_PREFIX if part == TEXT else "")
        if not name.endswith(".weight"):
            continue
        for spelling in {module, module.replace(".", "_")}:
            if names.setdefault(spelling, name) != name:
                raise ValueError(f"{part}: the layers {names[spelling]} and {name} have the same name in a LoRA file")
    return names


def merge(weight: np.ndarray, update: Update) -> np.ndarray:
    """Return a weight, [out, in] or [out, in, height, width], with an update added, in float32.

    Raises:
      ValueError: naming the update, if it is for another shape.
    """
    down, up = np.asarray(update.down, np.float32), np.asarray(update.up, np.float32)
    rank = down.shape[0]
    shape = (up.shape[0], *down.shape[1:])
    is_matrix = weight.ndim == 2 and shape[2:] == (1, 1)
    if shape != weight.shape and not (is_matrix and shape[:2] == weight.shape):
        raise ValueError(f"{shorten(update.key)} must update a weight of shape {list(shape)}, got {list(weight.shape)}")
    factors = low_rank.Factors(np.moveaxis(down.reshape(rank, *weight.shape[1:]), 0, -1), up.reshape(-1, rank).T)
    kernel = np.moveaxis(np.asarray(weight, np.float32), 0, -1)
    return np.moveaxis(np.asarray(low_rank.merge_kernel(kernel, factors, update.factor)), -1, 0)
