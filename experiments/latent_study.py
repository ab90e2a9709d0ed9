"""A tiny Stable Diffusion, trained, saved as diffusers saves one, and attacked: something to audit without a download.

    python -m experiments.latent_study --config=experiments/configs/latent_digits.py[:smoke] --workdir=out/latent

WORKDIR/pipeline/                        unet/, vae/, text_encoder/, tokenizer/, scheduler/, model_index.json
WORKDIR/members/, heldout/, candidates/  digits enlarged to 16 x 16, with captions in metadata.jsonl
WORKDIR/train/                           states and losses of the autoencoder's and the U-Net's training
WORKDIR/attack/                          the run of `experiments.attack` on the pipeline, members and held-out images

Everything continues when it is started again.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import safetensors.numpy
from ml_collections.config_dict import ConfigDict
from PIL import Image

from checkpoints_convert import diffusers_configs, diffusers_names, mapping
from dime_jax import data
from dime_jax._util.distributed import on_first_process
from dime_jax._util.typing import PyTree
from dime_jax.models import (
    AutoencoderSpec,
    ClipTextSpec,
    ConditionalUnetSpec,
    ModelSpec,
    NetworkSpec,
    ScheduleSpec,
    build,
    decode,
    denoise,
    embed_tokens,
    encode,
)
from dime_jax.models.clip_tokenizer import END, START, open_tokenizer
from dime_jax.protocol.evaluation import Evaluation
from dime_jax.report import tables
from dime_jax.training import checkpoints
from dime_jax.training.records import Log
from experiments import attack
from experiments.launch import launch

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
IMAGE_SIZE = 16
_BATCH = 32
_LEARNING_RATE = 2e-3
_LOG_EVERY = 500  # updates, after which the state is saved too
CANDIDATES = 20  # members, and as many others
METADATA = "metadata.jsonl"


class Size(NamedTuple):
    """How much is trained: images of a side, updates of the autoencoder and of the U-Net, and its width."""

    images: int
    autoencoder_steps: int
    unet_steps: int
    width: int


class CaptionedImages(NamedTuple):
    """Pictures uint8 [n, H, W, 3] and a caption for each."""

    pictures: np.ndarray
    captions: list[str]

    def part(self, indices: np.ndarray) -> "CaptionedImages":
        """Some of them."""
        return CaptionedImages(self.pictures[indices], [self.captions[index] for index in indices])


def run(config: ConfigDict, workdir: str | pathlib.Path, config_file: str = "") -> Evaluation:
    """Train, and attack as `experiments.attack` does; what is there is kept. Returns what results.json holds.

    Args:
      config: of `configs.latent_digits`.
      workdir: shared by all processes.
      config_file: where the config came from, for the record.
    """
    workdir = pathlib.Path(workdir)
    on_first_process(lambda: make(workdir, Size(**config.train), config.seed))
    located = ConfigDict(config)
    located.data.source, located.data.heldout = f"folder:{workdir / 'members'}", f"folder:{workdir / 'heldout'}"
    located.attack.model = str(workdir / "pipeline")
    return attack.run(located, workdir, config_file)


def make(output: pathlib.Path, size: Size, seed: int = 0) -> None:
    """Train and save the pipeline, and save the images; what is there is kept.

    Args:
      output: where the folders go.
      size: how much is trained.
      seed: of the split and of everything random in training.

    Raises:
      ValueError: if another size or seed was begun there.
    """
    _begin(output / "train" / "run.json", {**size._asdict(), "seed": seed})
    if (output / "candidates" / METADATA).is_file():  # written last
        return
    digits = _digits()
    order = np.random.default_rng(seed).permutation(len(digits.captions))
    members, heldout = digits.part(order[: size.images]), digits.part(order[size.images : 2 * size.images])
    write_tokenizer(output / "pipeline" / "tokenizer")
    train(output, digits, members, size, seed)
    write_images(output / "members", members.part(np.arange(CANDIDATES, size.images)))
    write_images(output / "heldout", heldout.part(np.arange(CANDIDATES, size.images)))
    first = [side.part(np.arange(CANDIDATES)) for side in (members, heldout)]
    pictures = np.concatenate([side.pictures for side in first])
    write_images(output / "candidates", CaptionedImages(pictures, [*first[0].captions, *first[1].captions]))


def _begin(path: pathlib.Path, facts: Mapping[str, object]) -> None:
    """Write down what is trained; another training in the same place is refused."""
    there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else facts
    if there != facts:
        raise ValueError(f"{path.parent} holds another training, expected the same: {there} -> {dict(facts)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_json(path, facts)


def train(output: pathlib.Path, images: CaptionedImages, members: CaptionedImages, size: Size, seed: int) -> None:
    """Train the autoencoder on images and the U-Net on members, and save the pipeline beside its tokenizer."""
    folder, states = output / "pipeline", output / "train"
    keys = jax.random.split(jax.random.key(seed), 5)
    spec = model_spec(size.width, len(json.loads((folder / "tokenizer" / "vocab.json").read_text(encoding="utf-8"))))
    text_spec, vae_spec = spec.text_encoder, spec.autoencoder
    assert text_spec is not None
    assert vae_spec is not None
    vae = train_autoencoder(vae_spec, _floats(images.pictures), size.autoencoder_steps, keys[0], states)
    latents = jax.jit(encode(vae_spec))(vae, _floats(images.pictures))
    scaled = dataclasses.replace(vae_spec, scaling_factor=float(1 / jnp.std(latents)))
    spec = dataclasses.replace(spec, autoencoder=scaled)
    text = _init(text_spec, keys[1])
    tokenizer = open_tokenizer(folder / "tokenizer", text_spec.vocabulary, text_spec.max_tokens)
    embed = jax.jit(embed_tokens(text_spec))
    condition, empty = (embed(text, tokenizer.encode(captions)) for captions in (members.captions, [""]))
    x = jax.jit(encode(scaled))(vae, _floats(members.pictures))
    unet = train_unet(spec, x, condition, empty, size.unet_steps, keys[2], states)
    write_pipeline(folder, spec, {"unet": unet, "vae": vae, "text_encoder": text})


def model_spec(width: int, vocabulary: int) -> ModelSpec:
    """The three networks, of which only the U-Net has a width to choose; latents are 4 x 4 x 4."""
    return ModelSpec(
        denoiser=ConditionalUnetSpec(
            channels=4,
            level_channels=(width,),
            num_res_blocks=1,
            attention_levels=(0,),
            up_attention_levels=(0,),
            level_heads=(2,),
            context_channels=32,
            time_channels=4 * width,
            norm_groups=8,
        ),
        autoencoder=AutoencoderSpec(level_channels=(8, 16, 16), num_res_blocks=1, norm_groups=8, scaling_factor=1.0),
        text_encoder=ClipTextSpec(
            vocabulary=vocabulary, max_tokens=8, width=32, num_layers=1, num_heads=2, mlp_width=64
        ),
        image_shape=(IMAGE_SIZE, IMAGE_SIZE, 3),
        schedule=ScheduleSpec(kind="scaled_linear", beta_start=0.00085, beta_end=0.012),
    )


def train_autoencoder(
    spec: AutoencoderSpec, images: jax.Array, steps: int, key: jax.Array, states: pathlib.Path
) -> PyTree:
    """Mean squared error of the reconstruction, and a little of the posterior's distance from a standard normal."""
    to_latents, to_images = encode(spec), decode(spec)

    def loss(variables: PyTree, key: jax.Array) -> jax.Array:
        pick = jax.random.choice(key, len(images), (_BATCH,))
        latents = to_latents(variables, images[pick])
        noisy = latents + 0.1 * jax.random.normal(key, latents.shape)
        return jnp.mean((to_images(variables, noisy) - images[pick]) ** 2) + 1e-3 * jnp.mean(latents**2)

    return _train(loss, _init(spec, key), steps, key, states / "vae")


def train_unet(
    spec: ModelSpec,
    x: jax.Array,
    condition: jax.Array,
    empty: jax.Array,
    steps: int,
    key: jax.Array,
    states: pathlib.Path,
) -> PyTree:
    """Mean squared error of the noise on latents x, with their captions, one in ten of which is left out."""
    apply, schedule = denoise(spec), spec.schedule.build()

    def loss(variables: PyTree, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 4)
        pick = jax.random.choice(keys[0], len(x), (_BATCH,))
        t = jax.random.randint(keys[1], (_BATCH,), 0, schedule.num_steps)
        noise = jax.random.normal(keys[2], (_BATCH, *x.shape[1:]))
        silent = jax.random.bernoulli(keys[3], 0.1, (_BATCH, 1, 1))
        told = jnp.where(silent, empty, condition[pick])
        return jnp.mean((apply(variables, schedule.noised(x[pick], noise, t), t, told) - noise) ** 2)

    return _train(loss, _init(spec.denoiser, key), steps, key, states / "unet")


def _train(
    loss: Callable[[PyTree, jax.Array], jax.Array],
    variables: PyTree,
    steps: int,
    key: jax.Array,
    directory: pathlib.Path,
) -> PyTree:
    """Adam with a cosine decay, its states kept in a directory; gives the average of the last updates' weights."""
    optimiser = optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, steps))

    @jax.jit
    def step(state: PyTree, number: jax.Array) -> tuple[PyTree, jax.Array]:
        variables, moments, average = state
        value, gradient = jax.value_and_grad(loss)(variables, jax.random.fold_in(key, number))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes floats and integers, which strict callers forbid
            updates, moments = optimiser.update(gradient, moments)
        variables = optax.apply_updates(variables, updates)
        average = jax.tree.map(lambda mean, new: 0.99 * mean + 0.01 * new, average, variables)
        return (variables, moments, average), value

    state = jax.device_put((variables, optimiser.init(variables), variables), jax.local_devices()[0])
    with checkpoints.TrainingCheckpoints(directory / "state") as states:
        first = states.latest_step or 0
        if first:
            state, _ = states.restore(state)
        with Log(directory, first, steps, _BATCH, silent=False) as log:
            for number in range(first + 1, steps + 1):  # in a compiled loop, convolutions on CPUs are slow
                state, value = step(state, jnp.uint32(number))
                log.add(value)
                if number % _LOG_EVERY == 0 or number == steps:
                    log.write(number)
                    states.save(number, state, None)
    return state[2]


def write_pipeline(folder: pathlib.Path, spec: ModelSpec, variables: Mapping[str, PyTree]) -> None:
    """The networks and their configs, as diffusers and transformers write them."""
    parts = {"unet": spec.denoiser, "vae": spec.autoencoder, "text_encoder": spec.text_encoder}
    configs = {"unet": _unet_config(spec), "vae": _vae_config(spec), "text_encoder": _text_config(spec)}
    for name, part in parts.items():
        assert part is not None
        table = mapping.name_table(part, diffusers_names.naming_of(part, {}))
        state = mapping.to_state_dict(jax.tree.map(np.asarray, variables[name]), table)
        file = "model.safetensors" if name == "text_encoder" else "diffusion_pytorch_model.safetensors"
        (folder / name).mkdir(parents=True, exist_ok=True)
        tensors = {key: np.ascontiguousarray(tensor) for key, tensor in state.items()}
        safetensors.numpy.save_file(tensors, folder / name / file)
        _write_json(folder / name / "config.json", configs[name])
    schedule = {"beta_schedule": spec.schedule.kind, "num_train_timesteps": spec.schedule.num_steps}
    schedule |= {"beta_start": spec.schedule.beta_start, "beta_end": spec.schedule.beta_end}
    (folder / "scheduler").mkdir(exist_ok=True)
    _write_json(
        folder / "scheduler" / "scheduler_config.json",
        {"_class_name": "DDIMScheduler", **schedule, "prediction_type": spec.prediction},
    )
    classes = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "scheduler": "DDIMScheduler"}
    index: dict[str, object] = {name: ["diffusers", kind] for name, kind in classes.items()}
    index |= {"text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    _write_json(folder / "model_index.json", {"_class_name": "StableDiffusionPipeline", **index})


def _unet_config(spec: ModelSpec) -> dict[str, object]:
    unet = spec.denoiser
    assert isinstance(unet, ConditionalUnetSpec)
    levels = range(len(unet.level_channels))
    return {
        **diffusers_configs.CONDITIONAL_UNET.values(unet),
        "_class_name": "UNet2DConditionModel",
        "attention_head_dim": unet.level_heads[0],
        "block_out_channels": list(unet.level_channels),
        "down_block_types": [_block(level in unet.attention_levels, "Down") for level in levels],
        "up_block_types": [_block(level in unet.up_attention_levels, "Up") for level in reversed(levels)],
        "out_channels": unet.channels,
        "sample_size": spec.shape[0],
    }


def _block(attends: bool, way: str) -> str:
    return f"{'CrossAttn' if attends else ''}{way}Block2D"


def _vae_config(spec: ModelSpec) -> dict[str, object]:
    vae = spec.autoencoder
    assert vae is not None
    return {
        **diffusers_configs.AUTOENCODER.values(vae),
        "_class_name": "AutoencoderKL",
        "block_out_channels": list(vae.level_channels),
        "down_block_types": ["DownEncoderBlock2D"] * len(vae.level_channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(vae.level_channels),
        "out_channels": vae.image_channels,
        "sample_size": IMAGE_SIZE,
    }


def _text_config(spec: ModelSpec) -> dict[str, object]:
    assert spec.text_encoder is not None
    values = diffusers_configs.CLIP.values(spec.text_encoder)
    return {**values, "architectures": ["CLIPTextModel"], "model_type": "clip_text_model"}


def write_tokenizer(folder: pathlib.Path) -> None:
    """A tokeniser of single letters: vocab.json and merges.txt."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = {"the": ["t h", "th e</w>"], "digit": ["d i", "di g", "dig i", "digi t</w>"]}
    merges = [merge for word in words.values() for merge in word]
    made = dict.fromkeys(merge.replace(" ", "") for merge in merges)
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *made, START, END]
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "vocab.json", {token: number for number, token in enumerate(tokens)})
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


def write_images(folder: pathlib.Path, images: CaptionedImages) -> None:
    """A folder of pictures, and metadata.jsonl with their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:04d}.png" for number in range(len(images.captions))]
    for name, picture in zip(names, images.pictures):
        Image.fromarray(picture).save(folder / name)
    rows = [json.dumps({"file_name": name, "text": caption}) for name, caption in zip(names, images.captions)]
    (folder / METADATA).write_text("\n".join([*rows, ""]), encoding="utf-8")


def _digits() -> CaptionedImages:
    source = data.open_source("digits")
    assert source.labels is not None
    small = np.concatenate([source.read(index)[None].repeat(3, axis=-1) for index in range(len(source))])
    side = IMAGE_SIZE // small.shape[1]
    return CaptionedImages(
        small.repeat(side, axis=1).repeat(side, axis=2), [f"the digit {WORDS[n]}" for n in source.labels]
    )


def _floats(pictures: np.ndarray) -> jax.Array:
    return jnp.asarray(pictures, jnp.float32) / 127.5 - 1


def _init(spec: NetworkSpec, key: jax.Array) -> PyTree:
    inputs = [jnp.zeros(one.shape, one.dtype) for one in spec.example()]
    return jax.jit(build(spec).init)(key, *inputs)


def _write_json(file: pathlib.Path, contents: Mapping[str, object]) -> None:
    file.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Run, and print the table in the first process."""
    results = run(config, workdir, config_file)
    if jax.process_index() == 0:
        tables.print_results(results, rich.console.Console())


if __name__ == "__main__":
    launch(main, "experiments/configs/latent_digits.py")
