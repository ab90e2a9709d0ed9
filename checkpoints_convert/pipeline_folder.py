"""Opens latent models: diffusers pipelines of Stable Diffusion 1 and 2 and of DiT, and the DiT authors' files.

    pipeline = open_pipeline("stable-diffusion-v1-5", loras=(Lora("style.safetensors", scale=0.8),))
    pipeline.spec, pipeline.variables()

A pipeline folder holds model_index.json, unet/ (or transformer/), vae/, text_encoder/, tokenizer/ and scheduler/.
Configs are read at once, tensors when they are asked for.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert import latent_configs, latent_names, lora, mapping, part_files, weights_file
from checkpoints_convert.json_file import read_json
from checkpoints_convert.lora import Lora
from checkpoints_convert.mapping import Entry, StateDict, width_of
from checkpoints_convert.options import NO_OPTIONS, ConversionOptions
from checkpoints_convert.part_files import DIFFUSERS_FILES, TRANSFORMERS_FILES
from checkpoints_convert.unsupported import is_part, refuse_other_pipelines
from checkpoints_convert.weights_file import about
from dime_jax.loading import latent_checkpoints
from dime_jax.models import ScheduleSpec
from dime_jax.models.latent import count_values, network_shapes
from dime_jax.models.latent_spec import ClipTextSpec, DitSpec, LatentModelSpec, NetworkSpec
from dime_jax.models.schedule_spec import describe_schedule, parse_schedule

TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
_PIPELINES = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "DiTPipeline")
_HEADS_BY_WIDTH = {1152: 16, 1024: 16, 768: 12, 384: 6}  # of the published DiTs


@dataclasses.dataclass(frozen=True)
class PipelinePart:
    """One network of a pipeline.

    Attributes:
      name: of the part, in LoRA files too: "unet", "transformer", "vae" or "text_encoder".
      spec: the network.
      file: its weights file, or the index of its shards.
      weights: which of several sets of weights in the file (`ConversionOptions.weights`).
      loras: to merge.
    """

    name: str
    spec: NetworkSpec
    file: Path
    weights: str | None = None
    loras: tuple[Lora, ...] = ()

    def state(self) -> StateDict:
        """The tensors by the names of the file's dialect, with LoRAs merged; views on the files where nothing is."""
        state = self._stored()
        for one in self.loras:
            updates = lora.read_updates(one)
            with about(lora.find_file(Path(one.file))):
                state = lora.merge(state, updates, self.name)
        return state

    def _stored(self) -> StateDict:
        if isinstance(self.spec, DitSpec) and self.spec.is_original:
            return _dit_state(self.file, self.weights)
        state = part_files.read_tensors(self.file)
        return latent_names.without_text_prefix(state) if isinstance(self.spec, ClipTextSpec) else state

    def name_table(self, state: StateDict) -> list[Entry]:
        """The variable that each tensor of the state becomes."""
        return latent_names.name_table(self.spec, latent_names.naming_of(self.spec, state))

    def variables(self) -> dict[str, Any]:
        """The network's variables in float32, as a nested dict of NumPy arrays."""
        state = self.state()
        with about(self.file):
            needed, held = count_values(network_shapes(self.spec)), sum(tensor.size for tensor in state.values())
            if needed > 2 * held:
                raise ValueError(f"expected the {needed:,} values of the network that it describes, got {held:,}")
            return mapping.to_variables(state, self.name_table(state))


@dataclasses.dataclass(frozen=True)
class LatentPipeline:
    """A latent model, opened.

    Attributes:
      source: the folder or file.
      spec: everything but the weights: networks, schedule, prediction, image size, scaling and shift factor.
      denoiser: the network that predicts noise.
      autoencoder: makes latents of images.
      text_encoder: embeds captions; None if classes condition the network.
      tokenizer_files: of the tokenizer, those of `TOKENIZER_FILES` that there are.
      loras: merged into the networks.
      facts: one line on each thing that had to be known, with how it is known.
    """

    source: Path
    spec: LatentModelSpec
    denoiser: PipelinePart
    autoencoder: PipelinePart
    text_encoder: PipelinePart | None
    tokenizer_files: tuple[Path, ...]
    loras: tuple[Lora, ...]
    facts: tuple[str, ...]

    def parts(self) -> dict[str, PipelinePart]:
        """The parts by the names that they have among the variables."""
        parts = {"denoiser": self.denoiser, "autoencoder": self.autoencoder, "text_encoder": self.text_encoder}
        return {name: part for name, part in parts.items() if part is not None}

    def variables(self) -> dict[str, Any]:
        """The variables of all networks: {"denoiser", "autoencoder", and "text_encoder" if there is one}."""
        self._check_loras()
        return {name: part.variables() for name, part in self.parts().items()}

    def _check_loras(self) -> None:
        """Refuse a LoRA with updates of a part that the pipeline does not have: they would be used nowhere."""
        names = {part.name for part in self.parts().values()}
        for one in self.loras:
            for update in lora.read_updates(one):
                if update.part not in names:
                    raise ValueError(
                        f"{one.file}: unknown LoRA tensor {update.key}: {self.source} has no {update.part}"
                    )


def open_pipeline(
    source: str | os.PathLike[str],
    options: ConversionOptions = NO_OPTIONS,
    loras: tuple[Lora, ...] = (),
    autoencoder: str | os.PathLike[str] | None = None,
    num_heads: int | None = None,
) -> LatentPipeline:
    """Open a latent model.

    Args:
      source: a pipeline folder, or a DiT file of its authors' code.
      options: what the source does not say itself; a dialect or model flags are refused.
      loras: to merge, in this order.
      autoencoder: the folder of an AutoencoderKL, for a source that holds none.
      num_heads: attention heads of a DiT file, which it does not hold; None: those of the published one of its width.

    Raises:
      ValueError: in one line, for anything that cannot be opened faithfully.
    """
    source = Path(source)
    vae = None if autoencoder is None else Path(autoencoder)
    if options.model_flags is not None or options.dialect not in ("auto", "diffusers"):
        raise ValueError(f"{source} has its own config: expected neither --dialect nor --model_flags")
    if source.is_dir():
        return _open_folder(source, options, loras, vae)
    if not source.is_file():
        raise ValueError(f"no file or folder {source}")
    return _open_dit_file(source, options, loras, vae, num_heads)


def _open_folder(folder: Path, options: ConversionOptions, loras: tuple[Lora, ...], vae: Path | None) -> LatentPipeline:
    _check_index(folder)
    network, name = _network_folder(folder, options.weights)
    parse = latent_configs.parse_dit if name == "transformer" else latent_configs.parse_unet
    config = _config(network)
    with about(network / "config.json"):
        denoiser = PipelinePart(name, parse(config), part_files.find_weights(network, DIFFUSERS_FILES), loras=loras)
    autoencoder = _autoencoder(vae or folder / "vae")
    text_encoder = _text_encoder(folder / "text_encoder", loras) if name == "unet" else None
    schedule, prediction = _scheduler(folder)
    with about(folder):
        size = _image_size(config, autoencoder, options)
        spec = _model_spec(options, denoiser, autoencoder, text_encoder, size, schedule, prediction)
    return LatentPipeline(
        folder,
        spec,
        denoiser,
        autoencoder,
        text_encoder,
        _tokenizer_files(folder / "tokenizer") if text_encoder else (),
        loras,
        _facts(spec, (denoiser, autoencoder, text_encoder), options, "scheduler_config.json"),
    )


def _check_index(folder: Path) -> None:
    file = folder / "model_index.json"
    index = read_json(file) if file.is_file() else {}
    class_name = str(index.get("_class_name", ""))
    parts = {name for name, value in index.items() if is_part(value)}
    refuse_other_pipelines(folder, class_name, parts or {entry.name for entry in folder.iterdir()})
    with about(file):
        if index and class_name not in _PIPELINES:
            raise ValueError(f"cannot honour _class_name={class_name[:60]!r}: expected {' or '.join(_PIPELINES)}")


def _network_folder(folder: Path, weights: str | None) -> tuple[Path, str]:
    """The folder of the network that predicts noise, and the name of its part."""
    ema = folder / "unet_ema"
    if ema.is_dir() and weights in (None, "ema"):
        return ema, "unet"
    if ema.is_dir() and weights == "raw" and (folder / "unet").is_dir():
        return folder / "unet", "unet"
    if weights is not None:
        raise ValueError(f"{folder} does not tell EMA from raw weights: expected no --weights={weights}")
    for name in ("unet", "transformer"):
        if (folder / name).is_dir():
            return folder / name, name
    raise ValueError(f"{folder} is not a latent pipeline: no unet/ and no transformer/ in it")


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json")


def _autoencoder(folder: Path) -> PipelinePart:
    config = _config(folder)
    with about(folder / "config.json"):
        spec = latent_configs.parse_autoencoder(config)
    return PipelinePart("vae", spec, part_files.find_weights(folder, DIFFUSERS_FILES))


def _text_encoder(folder: Path, loras: tuple[Lora, ...]) -> PipelinePart:
    config = _config(folder)
    with about(folder / "config.json"):
        spec = latent_configs.parse_text_encoder(config)
    return PipelinePart("text_encoder", spec, part_files.find_weights(folder, TRANSFORMERS_FILES), loras=loras)


def _tokenizer_files(folder: Path) -> tuple[Path, ...]:
    files = tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
    names = {file.name for file in files}
    if "tokenizer.json" not in names and not {"vocab.json", "merges.txt"} <= names:
        raise ValueError(f"{folder}: expected tokenizer.json, or vocab.json and merges.txt")
    return files


def _scheduler(folder: Path) -> tuple[ScheduleSpec | None, str | None]:
    file = folder / "scheduler" / "scheduler_config.json"
    if not file.is_file():
        return None, None
    config = read_json(file)
    with about(file):
        return latent_configs.parse_scheduler(config)


def _image_size(config: Mapping[str, Any], autoencoder: PipelinePart, options: ConversionOptions) -> tuple[int, int]:
    """Height and width of an image: as the user says, or the network's sample_size in pixels."""
    if options.image_size is not None:
        return options.image_size, options.image_size
    size = config.get("sample_size")
    sides: list[Any] = size if isinstance(size, list) and len(size) == 2 else [size, size]
    for side in sides:
        if isinstance(side, bool) or not isinstance(side, int):
            raise ValueError("expected --image_size: the config holds no sample_size")
    reduction: int = autoencoder.spec.reduction  # type: ignore[union-attr]
    return reduction * sides[0], reduction * sides[1]


def _model_spec(
    options: ConversionOptions,
    denoiser: PipelinePart,
    autoencoder: PipelinePart,
    text_encoder: PipelinePart | None,
    image_size: tuple[int, int],
    schedule: ScheduleSpec | None,
    prediction: str | None,
) -> LatentModelSpec:
    schedule, prediction = parse_schedule(options.schedule) or schedule, options.prediction or prediction
    if schedule is None or prediction is None:
        raise ValueError("expected scheduler/scheduler_config.json, or --schedule and --prediction")
    vae: Any = autoencoder.spec
    network: Any = denoiser.spec
    text: Any = None if text_encoder is None else text_encoder.spec
    return LatentModelSpec(
        denoiser=network,
        autoencoder=vae,
        text_encoder=text,
        image_shape=(*image_size, vae.image_channels),
        schedule=schedule,
        prediction=prediction,
    )


def _facts(
    spec: LatentModelSpec, parts: tuple[PipelinePart | None, ...], options: ConversionOptions, says: str
) -> tuple[str, ...]:
    height, width, _ = spec.image_shape
    sizes = "as given" if options.image_size is not None else "the network's sample_size"
    files = [f"{part.name}: {part.file.parent.name}/{part.file.name}" for part in parts if part is not None]
    loras = [f"LoRA: {Path(one.file).name} at scale {one.scale:g}" for part in parts[:1] if part for one in part.loras]
    return (
        *files,
        *loras,
        f"image size: {height} x {width} ({sizes})",
        f"noise schedule: {describe_schedule(spec.schedule)} ({'as given' if options.schedule else says})",
        f"prediction: {spec.prediction} ({'as given' if options.prediction else says})",
    )


def _open_dit_file(
    file: Path, options: ConversionOptions, loras: tuple[Lora, ...], vae: Path | None, num_heads: int | None
) -> LatentPipeline:
    if loras:
        raise ValueError(f"{file} is a DiT: expected no LoRAs")
    if vae is None:
        raise ValueError(
            f"{file} holds no autoencoder: expected --autoencoder, the folder of the one that it was trained with"
        )
    with about(file):
        network = dit_spec(_dit_state(file, options.weights), num_heads)
        denoiser = PipelinePart("transformer", network, file, options.weights)
        autoencoder = _autoencoder(vae)
        size = _image_size({"sample_size": network.latent_size}, autoencoder, options)
        spec = _model_spec(options, denoiser, autoencoder, None, size, ScheduleSpec(), "epsilon")
    facts = _facts(spec, (denoiser, autoencoder), options, "by convention of DiT; the file does not say")
    return LatentPipeline(file, spec, denoiser, autoencoder, None, (), (), facts)


def _dit_state(file: Path, wanted: str | None) -> StateDict:
    """The tensors of a DiT file; the table of positions, which has no dot in its name, counts as the network's."""
    weights = weights_file.choose(file, weights_file.read(file), wanted)
    return {**weights.state, **{name: weights.buffers[name] for name in ("pos_embed",) if name in weights.buffers}}


def is_dit(names: Iterable[str]) -> bool:
    """Whether these are names of tensors in a DiT file of its authors' code, under whatever key."""
    return {"pos_embed", "x_embedder"} <= {name.partition(".")[0] for name in names}


def dit_spec(state: StateDict, num_heads: int | None = None) -> DitSpec:
    """The DiT of its authors' code that has these tensors, and this number of heads or the published one.

    Raises:
      ValueError: if it is not one, or has a width whose number of heads is not published.
    """
    if "pos_embed" not in state or "x_embedder.proj.weight" not in state:
        raise ValueError("expected a DiT of its authors' code (x_embedder, pos_embed, blocks), or a pipeline folder")
    width = width_of(state, [("x_embedder.proj.bias", 0), ("x_embedder.proj.weight", 0), ("pos_embed", 2)])
    if num_heads is None and width not in _HEADS_BY_WIDTH:
        raise ValueError(f"expected num_heads for a DiT of width {width}: none of that width is published")
    patch = width_of(state, [("x_embedder.proj.weight", 2), ("x_embedder.proj.weight", 3)])
    channels = width_of(state, [("x_embedder.proj.weight", 1)])
    outputs = width_of(state, [("final_layer.linear.bias", 0), ("final_layer.linear.weight", 0)])
    side = round(width_of(state, [("pos_embed", 1)]) ** 0.5)
    return DitSpec(
        channels=channels,
        learned_sigma=outputs == 2 * channels * patch**2,
        latent_size=side * patch,
        patch_size=patch,
        width=width,
        num_layers=len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        num_heads=_HEADS_BY_WIDTH[width] if num_heads is None else num_heads,
        mlp_width=width_of(state, [("blocks.0.mlp.fc1.bias", 0), ("blocks.0.mlp.fc1.weight", 0)]),
        num_classes=width_of(state, [("y_embedder.embedding_table.weight", 0)]) - 1,
    )


def convert_pipeline(pipeline: LatentPipeline, output: str | os.PathLike[str]) -> Path:
    """Write a latent model to a model directory, completely or not at all."""
    output = Path(output)
    if output.exists() or output.is_symlink():
        raise ValueError(f"output {output} exists already; nothing was written")
    loras = [{"file": Path(one.file).name, "scale": one.scale, "sha256": one.fingerprint()} for one in pipeline.loras]
    metadata = {"source": pipeline.source.name, "facts": list(pipeline.facts), "loras": loras}
    variables = pipeline.variables()
    return latent_checkpoints.save_latent_model(output, pipeline.spec, variables, pipeline.tokenizer_files, metadata)
