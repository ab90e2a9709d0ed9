"""diffusers folders: one network (config.json and weights), or a pipeline with a folder for each part.

    unet/ (or unet_ema/, transformer/, or all of it in the root), scheduler/; and of latent models vae/, text_encoder/,
    tokenizer/

Configs are read at once, tensors when they are asked for.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from checkpoints_convert import diffusers_configs as configs
from checkpoints_convert import diffusers_names as names
from checkpoints_convert import part_files
from checkpoints_convert.checkpoint import Checkpoint, Dialect, Facts, Known, Part, Size, make_spec
from checkpoints_convert.config_keys import ConfigKeys, check_class, refuse_code
from checkpoints_convert.mapping import StateDict
from checkpoints_convert.options import ConversionOptions
from checkpoints_convert.unsupported import is_part, refuse_other_pipelines, refuse_parts_of_latent_models
from checkpoints_convert.weights_file import ChosenWeights, about
from dime_jax._util.files import read_json
from dime_jax._util.typing import JsonObject
from dime_jax.models import AutoencoderSpec, ClipTextSpec, DenoiserSpec, NetworkSpec, ScheduleSpec
from dime_jax.models.checks import MAX_IMAGE_SIZE, check_integer
from dime_jax.models.clip_tokenizer import TOKENIZER_FILES

T = TypeVar("T")
SpecT = TypeVar("SpecT", bound=NetworkSpec)

_BLOCKS = ("down_blocks.", "mid_block.", "up_blocks.")
_PREFIXES = ("time_embedding.linear_", "conv_in.", *_BLOCKS, "conv_norm_out.", "conv_out.")
_STABLE_DIFFUSION = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline")


class _Network(NamedTuple):
    """A class of networks.

    Attributes:
      keys: of its config.
      parse: makes a spec of its config and of whether the scheduler expects a variance (None: there is no scheduler).
      pipelines: that it is in.
      part: its name there, and in LoRA files.
      on_latents: whether an autoencoder belongs to it.
      takes_text: whether a text encoder does.
    """

    keys: ConfigKeys
    parse: Callable[[JsonObject, bool | None], DenoiserSpec]
    pipelines: tuple[str, ...]
    part: str = "unet"
    on_latents: bool = True
    takes_text: bool = False


_NETWORKS = (
    _Network(configs.UNET, configs.parse_unet, ("DDPMPipeline", "DDIMPipeline", "PNDMPipeline"), on_latents=False),
    _Network(
        configs.CONDITIONAL_UNET,
        lambda config, learned: configs.parse_conditional_unet(config),
        _STABLE_DIFFUSION,
        takes_text=True,
    ),
    _Network(configs.DIT, lambda config, learned: configs.parse_dit(config), ("DiTPipeline",), "transformer"),
)
_CLASSES = {name: network for network in _NETWORKS for name in network.keys.class_names}


class _Scheduler(NamedTuple):
    """What a scheduler's config says; `learned_sigma` is None if there is no scheduler."""

    schedule: Known[ScheduleSpec] | None = None
    prediction: Known[str] | None = None
    learned_sigma: bool | None = None


def open_folder(folder: Path, options: ConversionOptions) -> Checkpoint:
    """Return the checkpoint of a folder."""
    if options.dialect not in ("auto", DIALECT.name):
        raise ValueError(f"{folder} is a folder: its dialect must be diffusers, got {options.dialect}")
    if options.model_flags is not None:
        raise ValueError(f"{folder} has its own config: omit --model_flags")
    network, place, which, config = _find_network(folder, options.weights)
    scheduler = _read_scheduler(folder, any_sampler=network.on_latents)
    with about(place / "config.json"):
        denoiser = network.parse(config, scheduler.learned_sigma)
    autoencoder = open_autoencoder(Path(options.autoencoder or folder / "vae")) if network.on_latents else None
    text = _read_config(folder / "text_encoder", configs.parse_text_encoder) if network.takes_text else None
    with about(folder):
        size = _image_size(config, 1 if autoencoder is None else autoencoder.spec.reduction)
        facts = Facts(size, scheduler.schedule, scheduler.prediction)
        spec, known = make_spec(options, facts, denoiser, None if autoencoder is None else autoencoder.spec, text)
    parts: dict[str, Part[NetworkSpec]] = {"denoiser": _part(network.part, denoiser, place)}
    if autoencoder is not None:
        parts["autoencoder"] = autoencoder
    if text is not None:
        parts["text_encoder"] = _part("text_encoder", text, folder / "text_encoder")
    lines = [*(f"{part.name}: {part.file.parent.name}/{part.file.name}" for part in parts.values()), *known]
    if getattr(denoiser, "learned_sigma", False) and scheduler.learned_sigma is None:
        lines.append("variance: learned (out_channels is twice in_channels; there is no scheduler to say)")
    lines += configs.describe_defaults(config, network.keys)
    tokenizer = _tokenizer_files(folder / "tokenizer") if text is not None else ()
    return Checkpoint(folder, spec, parts, tuple(lines), which, tokenizer_files=tokenizer)


class _Found(NamedTuple):
    """The network that predicts noise: its class, its folder, which weights it has, and its config."""

    network: _Network
    place: Path
    which: str
    config: JsonObject


def _find_network(folder: Path, weights: str | None) -> _Found:
    index = read_json(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
    there = {name for name, value in index.items() if is_part(value)} or {entry.name for entry in folder.iterdir()}
    refuse_other_pipelines(folder, str(index.get("_class_name", "")), there)
    place, which = _choose_network(folder, weights)
    config = read_json(place / "config.json")
    with about(place / "config.json"):
        check_class(config.get("_class_name"), tuple(_CLASSES))
    network = _CLASSES[config["_class_name"]]
    if index:
        with about(folder / "model_index.json"):
            _check_index(index, network)
    if not network.on_latents:
        refuse_parts_of_latent_models(folder, there)
    return _Found(network, place, which, config)


def open_autoencoder(folder: Path) -> Part[AutoencoderSpec]:
    """Return the AutoencoderKL in a folder."""
    return _part("vae", _read_config(folder, configs.parse_autoencoder), folder)


def _open_weights(weights: ChosenWeights, options: ConversionOptions) -> NoReturn:
    """Refuse a weights file by itself, which does not say enough."""
    del weights, options
    raise ValueError("diffusers weights without their config: name the folder that holds config.json")


def _part(name: str, spec: SpecT, folder: Path) -> Part[SpecT]:
    is_text = isinstance(spec, ClipTextSpec)
    file = part_files.find_weights(folder, part_files.TRANSFORMERS_FILES if is_text else part_files.DIFFUSERS_FILES)

    def read() -> StateDict:
        state = part_files.read_tensors(file)
        return names.without_text_prefix(state) if is_text else state

    return Part(name, spec, file, read, lambda state: names.naming_of(spec, state))


def _read_config(folder: Path, parse: Callable[[JsonObject], T]) -> T:
    with about(folder / "config.json"):
        return parse(read_json(folder / "config.json"))


def _check_index(index: JsonObject, network: _Network) -> None:
    check_class(index.get("_class_name"), network.pipelines)
    refuse_code(index)
    for part in ("unet", "transformer", "scheduler"):
        library = index.get(part, ["diffusers"])
        if not isinstance(library, list) or library[:1] != ["diffusers"]:
            raise ValueError(f"{part} must be from the library 'diffusers', got {str(library)[:60]}")


def _choose_network(folder: Path, weights: str | None) -> tuple[Path, str]:
    """The folder of the network that predicts noise, and which weights it holds."""
    ema, raw = folder / "unet_ema", folder / "unet"
    if ema.is_dir() and weights in (None, "ema"):
        return ema, "ema"
    if ema.is_dir() and raw.is_dir() and weights == "raw":
        return raw, "raw"
    if weights is not None and ema.is_dir():
        raise ValueError(f"{folder} has no {weights} weights: --weights must be ema or raw")
    if weights is not None:
        raise ValueError(f"{folder} has one set of weights, not marked as EMA or raw: omit --weights={weights}")
    place = next((place for place in (raw, folder / "transformer") if place.is_dir()), folder)
    if not (place / "config.json").is_file():
        raise ValueError(f"{folder} is not a diffusers folder: no config.json, and no unet/ or transformer/ in it")
    return place, "only"


def _read_scheduler(folder: Path, any_sampler: bool) -> _Scheduler:
    files = [folder / "scheduler" / "scheduler_config.json", folder / "scheduler_config.json"]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return _Scheduler()
    config = read_json(file)
    with about(file):
        schedule, prediction = configs.parse_scheduler(config, any_sampler)
    defaults = ", ".join(configs.missing_betas(config))
    says = "prediction_type" in config
    return _Scheduler(
        Known(schedule, f"{file.name}, with diffusers' defaults for {defaults}" if defaults else file.name),
        Known(prediction, file.name if says else f"diffusers' default; {file.name} does not say"),
        config.get("variance_type") in ("learned", "learned_range"),
    )


def _image_size(config: JsonObject, reduction: int) -> Known[Size] | None:
    size = config.get("sample_size")
    if size is None:
        return None
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    for side in (height, width):
        check_integer(side, 1, MAX_IMAGE_SIZE, "image size")
    return Known((reduction * height, reduction * width), "config.json")


def _tokenizer_files(folder: Path) -> tuple[Path, ...]:
    files = tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
    found = {file.name for file in files}
    if "tokenizer.json" not in found and not {"vocab.json", "merges.txt"} <= found:
        raise ValueError(f"{folder}: must hold tokenizer.json, or vocab.json and merges.txt")
    return files


DIALECT = Dialect("diffusers", _PREFIXES, _open_weights)
