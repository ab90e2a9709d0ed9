"""A tiny Stable Diffusion, trained, saved as diffusers saves one, and attacked: something to audit without a download.

    python -m experiments.latent_study --config=experiments/configs/latent_digits.py[:smoke] --workdir=out/latent

WORKDIR/pipeline/                        unet/, vae/, text_encoder/, tokenizer/, scheduler/, model_index.json
WORKDIR/members/, heldout/, candidates/  digits enlarged to 16 x 16, with captions in metadata.jsonl
WORKDIR/train/                           states and losses of the autoencoder's and the U-Net's training
WORKDIR/attack/                          the run of `experiments.attack` on the pipeline, members and held-out images

An interrupted study resumes when it is started again.
"""

import dataclasses
import json
import pathlib
import string
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from ml_collections.config_dict import ConfigDict
from PIL import Image

from checkpoints_convert import diffusers_configs, diffusers_names, mapping
from dime_jax import data, models
from dime_jax._util import files
from dime_jax._util.distributed import on_first_process
from dime_jax._util.typing import JsonObject, PyTree
from dime_jax.findings.results import StudyFindings
from dime_jax.models import low_rank
from dime_jax.models.clip_tokenizer import END, START, open_tokenizer
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
Loss = Callable[[PyTree, jax.Array], jax.Array]  # of variables and a key

# A tokenizer of single letters and two words.
_MERGES = ("t h", "th e</w>", "d i", "di g", "dig i", "digi t</w>")
_TOKENS = (*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase))
_TOKENS += (*(merge.replace(" ", "") for merge in _MERGES), START, END)

AUTOENCODER = models.AutoencoderSpec(level_channels=(8, 16, 16), num_res_blocks=1, norm_groups=8, scaling_factor=1.0)
TEXT_ENCODER = models.ClipTextSpec(
    vocabulary=len(_TOKENS), max_tokens=8, width=32, num_layers=1, num_heads=2, mlp_width=64
)


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
        """Return some of the images."""
        return CaptionedImages(self.pictures[indices], [self.captions[index] for index in indices])


def run(config: ConfigDict, workdir: str | pathlib.Path, config_file: str = "") -> StudyFindings:
    """Train, and attack as `experiments.attack` does; finished steps are reused. Returns what results.json holds.

    Args:
      config: of `configs.latent_digits`.
      workdir: shared by all processes.
      config_file: where the config came from, for the record.
    """
    located = prepare(config, workdir)
    return attack.run(located, workdir, config_file)


def prepare(config: ConfigDict, workdir: str | pathlib.Path) -> ConfigDict:
    """Train, or finish that; returns the config of a study of what is there."""
    workdir = pathlib.Path(workdir)
    on_first_process(lambda: make(workdir, Size(**config.train), config.seed))
    located = ConfigDict(config)
    located.data.update(places(workdir))
    located.attack.model = str(workdir / "pipeline")
    return located


def places(workdir: pathlib.Path) -> dict[str, str]:
    """Return where the images are, as `config.data` has it."""
    return {"source": f"folder:{workdir / 'members'}", "heldout": f"folder:{workdir / 'heldout'}"}


def make(output: pathlib.Path, size: Size, seed: int = 0) -> None:
    """Train and save the pipeline, and save the images; what is finished is reused.

    Args:
      output: where the folders go.
      size: how much is trained.
      seed: of the split and of everything random in training.

    Raises:
      ValueError: if a training of another size or seed was begun there.
    """
    _begin(output / "train" / "run.json", {**size._asdict(), "seed": seed})
    if (output / "candidates" / METADATA).is_file():  # written last
        return
    digits = all_digits()
    members = digits.part(split_order(digits, seed)[: size.images])
    write_tokenizer(output / "pipeline" / "tokenizer")
    train(output, digits, members, size, seed)
    write_folders(output, digits, size.images, seed)


def write_folders(output: pathlib.Path, digits: CaptionedImages, count: int, seed: int) -> None:
    """Save members, held-out images, and candidates that are some of both.

    Args:
      output: where the folders go.
      digits: all.
      count: of members, and of held-out images, with the candidates among them.
      seed: of the split.
    """
    order = split_order(digits, seed)
    write_images(output / "members", digits.part(order[CANDIDATES:count]))
    write_images(output / "heldout", digits.part(order[count + CANDIDATES : 2 * count]))
    first = np.concatenate([order[:CANDIDATES], order[count : count + CANDIDATES]])
    write_images(output / "candidates", digits.part(first))


def split_order(digits: CaptionedImages, seed: int) -> np.ndarray:
    """Positions in the order in which roles are given: first the U-Net's images, candidates before the others."""
    return np.random.default_rng(seed).permutation(len(digits.captions))


def _begin(path: pathlib.Path, facts: Mapping[str, object]) -> None:
    """Record what is trained; another training in the same place is refused."""
    there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else facts
    if there != facts:
        raise ValueError(f"{path.parent} holds another training, of {there}; this one is of {dict(facts)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, facts)


def train(output: pathlib.Path, images: CaptionedImages, members: CaptionedImages, size: Size, seed: int) -> None:
    """Train the autoencoder on images and the U-Net on members, and save the pipeline beside its tokenizer.

    Args:
      output: of the study.
      images: all digits.
      members: those that the U-Net sees.
      size: how much is trained.
      seed: of the weights, the batches and the noise.
    """
    keys, pixels = jax.random.split(jax.random.key(seed), 5), _floats(images.pictures)
    states = output / "train"
    vae = fit(autoencoder_loss(pixels), _init(AUTOENCODER, keys[0]), size.autoencoder_steps, keys[0], states / "vae")
    latents = jax.jit(models.encode(AUTOENCODER))(vae, pixels)
    scaled = dataclasses.replace(AUTOENCODER, scaling_factor=float(1 / jnp.std(latents)))
    text, embed = _init(TEXT_ENCODER, keys[1]), jax.jit(models.embed_tokens(TEXT_ENCODER))
    tokenizer = open_tokenizer(output / "pipeline" / "tokenizer", TEXT_ENCODER.vocabulary, TEXT_ENCODER.max_tokens)
    condition, empty = embed(text, tokenizer.encode(members.captions)), embed(text, tokenizer.encode([""]))
    x = jax.jit(models.encode(scaled))(vae, _floats(members.pictures))
    spec = model_spec(size.width, scaled)
    loss = unet_loss(spec, x, condition, empty)
    unet = fit(loss, _init(spec.denoiser, keys[2]), size.unet_steps, keys[2], states / "unet")
    write_pipeline(output / "pipeline", spec, {"unet": unet, "vae": vae, "text_encoder": text})


def model_spec(width: int, autoencoder: models.AutoencoderSpec) -> models.ModelSpec:
    """Return the spec of the three networks, of which only the U-Net has a width to choose; latents are 4 x 4 x 4."""
    unet = models.ConditionalUnetSpec(
        channels=4,
        level_channels=(width,),
        num_res_blocks=1,
        attention_levels=(0,),
        up_attention_levels=(0,),
        level_heads=(2,),
        context_channels=32,
        time_channels=4 * width,
        norm_groups=8,
    )
    return models.ModelSpec(
        denoiser=unet,
        autoencoder=autoencoder,
        text_encoder=TEXT_ENCODER,
        image_shape=(IMAGE_SIZE, IMAGE_SIZE, 3),
        schedule=models.ScheduleSpec(kind="scaled_linear", beta_start=0.00085, beta_end=0.012),
    )


def autoencoder_loss(images: jax.Array) -> Loss:
    """Mean squared error of the reconstruction, and a little of the posterior's distance from a standard normal."""
    to_latents, to_images = models.encode(AUTOENCODER), models.decode(AUTOENCODER)

    def loss(variables: PyTree, key: jax.Array) -> jax.Array:
        pick = jax.random.choice(key, len(images), (_BATCH,))
        latents = to_latents(variables, images[pick])
        noisy = latents + 0.1 * jax.random.normal(key, latents.shape)
        return jnp.mean((to_images(variables, noisy) - images[pick]) ** 2) + 1e-3 * jnp.mean(latents**2)

    return loss


def unet_loss(
    spec: models.ModelSpec, x: jax.Array, condition: jax.Array, empty: jax.Array, batch: int = _BATCH
) -> Loss:
    """Mean squared error of the noise on latents, with their captions, one in ten of which is left out.

    Args:
      spec: of the pipeline.
      x: latents of the members.
      condition: their captions, embedded.
      empty: the empty caption, embedded.
      batch: images in an update.
    """
    apply, schedule = models.denoise(spec), spec.schedule.build()

    def loss(variables: PyTree, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 4)
        pick = jax.random.choice(keys[0], len(x), (batch,))
        t = jax.random.randint(keys[1], (batch,), 0, schedule.num_steps)
        noise = jax.random.normal(keys[2], (batch, *x.shape[1:]))
        silent = jax.random.bernoulli(keys[3], 0.1, (batch, 1, 1))
        told = jnp.where(silent, empty, condition[pick])
        return jnp.mean((apply(variables, schedule.noised(x[pick], noise, t), t, told) - noise) ** 2)

    return loss


def fit(
    loss: Loss,
    params: PyTree,
    steps: int,
    key: jax.Array,
    directory: pathlib.Path,
    *,
    base: PyTree = None,
    rate: float | None = None,
    batch: int = _BATCH,
    every: int = _LOG_EVERY,
    keep: Callable[[int, PyTree], object] = lambda number, average: None,
) -> PyTree:
    """Adam, resumed from its checkpoints; returns the average of the last updates' weights.

    Args:
      loss: of variables and a key.
      params: variables to start at, or with a base an adapter for it.
      steps: how many updates.
      key: of everything random.
      directory: of states and log.
      base: variables that an adapter is trained for, which stay as they are.
      rate: of learning; by default one that decays along a cosine.
      batch: images in an update, for the log.
      every: updates after which log and state are written.
      keep: what to do with the average then.
    """
    optimiser = optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, steps) if rate is None else rate)

    @jax.jit
    def step(base: PyTree, state: PyTree, number: jax.Array) -> tuple[PyTree, jax.Array]:
        def own(params: PyTree) -> jax.Array:
            variables = params if base is None else low_rank.merge(base, params)
            return loss(variables, jax.random.fold_in(key, number))

        params, moments, average = state
        value, gradient = jax.value_and_grad(own)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes floats and integers, which strict callers forbid
            updates, moments = optimiser.update(gradient, moments)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda mean, new: 0.99 * mean + 0.01 * new, average, params)
        return (params, moments, average), value

    base, state = jax.device_put((base, (params, optimiser.init(params), params)), jax.local_devices()[0])
    with checkpoints.TrainingCheckpoints(directory / "state") as states:
        first = states.latest_step or 0
        if first:
            state, _ = states.restore(state)
        with Log(directory, first, steps, batch, silent=False) as log:
            for number in range(first + 1, steps + 1):  # in a compiled loop, convolutions on CPUs are slow
                state, value = step(base, state, jnp.uint32(number))
                log.add(value)
                if number % every == 0 or number == steps:
                    log.write(number)
                    keep(number, state[2])
                    states.save(number, state, None)
    return state[2]


def write_pipeline(folder: pathlib.Path, spec: models.ModelSpec, variables: Mapping[str, PyTree]) -> None:
    """Write the networks and their configs, as diffusers and transformers do."""
    unet, vae, text = spec.denoiser, spec.autoencoder, spec.text_encoder
    assert isinstance(unet, models.ConditionalUnetSpec)
    assert vae is not None
    assert text is not None
    weights = "diffusion_pytorch_model.safetensors"
    _write_network(folder / "unet" / weights, unet, variables["unet"], _unet_config(unet, spec.shape[0]))
    _write_network(folder / "vae" / weights, vae, variables["vae"], _vae_config(vae))
    text_config = {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"}
    text_config |= diffusers_configs.CLIP.values(text)
    _write_network(folder / "text_encoder" / "model.safetensors", text, variables["text_encoder"], text_config)
    schedule = {
        "_class_name": "DDIMScheduler",
        "beta_schedule": spec.schedule.kind,
        "num_train_timesteps": spec.schedule.num_steps,
        "beta_start": spec.schedule.beta_start,
        "beta_end": spec.schedule.beta_end,
        "prediction_type": spec.prediction,
    }
    (folder / "scheduler").mkdir(exist_ok=True)
    files.write_json(folder / "scheduler" / "scheduler_config.json", schedule)
    index = {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
    }
    files.write_json(folder / "model_index.json", index)


def _write_network(file: pathlib.Path, spec: models.NetworkSpec, variables: PyTree, config: JsonObject) -> None:
    table = mapping.name_table(spec, diffusers_names.naming_of(spec, {}))
    state = mapping.to_state_dict(jax.tree.map(np.asarray, variables), table)
    file.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file({key: np.ascontiguousarray(tensor) for key, tensor in state.items()}, file)
    files.write_json(file.with_name("config.json"), config)


def _unet_config(unet: models.ConditionalUnetSpec, size: int) -> JsonObject:
    return {
        **diffusers_configs.CONDITIONAL_UNET.values(unet),
        "_class_name": "UNet2DConditionModel",
        "attention_head_dim": unet.level_heads[0],
        "block_out_channels": list(unet.level_channels),
        "down_block_types": ["CrossAttnDownBlock2D"] * len(unet.attention_levels),
        "up_block_types": ["CrossAttnUpBlock2D"] * len(unet.up_attention_levels),
        "out_channels": unet.channels,
        "sample_size": size,
    }


def _vae_config(vae: models.AutoencoderSpec) -> JsonObject:
    return {
        **diffusers_configs.AUTOENCODER.values(vae),
        "_class_name": "AutoencoderKL",
        "block_out_channels": list(vae.level_channels),
        "down_block_types": ["DownEncoderBlock2D"] * len(vae.level_channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(vae.level_channels),
        "out_channels": vae.image_channels,
        "sample_size": IMAGE_SIZE,
    }


def write_tokenizer(folder: pathlib.Path) -> None:
    """Write vocab.json and merges.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "vocab.json", {token: number for number, token in enumerate(_TOKENS)})
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *_MERGES, ""]), encoding="utf-8")


def write_images(folder: pathlib.Path, images: CaptionedImages) -> None:
    """Write a folder of pictures, and metadata.jsonl with their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:04d}.png" for number in range(len(images.captions))]
    for name, picture in zip(names, images.pictures):
        Image.fromarray(picture).save(folder / name)
    rows = [json.dumps({"file_name": name, "text": caption}) for name, caption in zip(names, images.captions)]
    (folder / METADATA).write_text("\n".join([*rows, ""]), encoding="utf-8")


def all_digits() -> CaptionedImages:
    """Return every digit, enlarged, with its caption."""
    source = data.open_source("digits")
    assert source.labels is not None
    small = np.concatenate([source.read(index)[None].repeat(3, axis=-1) for index in range(len(source))])
    side = IMAGE_SIZE // small.shape[1]
    return CaptionedImages(
        small.repeat(side, axis=1).repeat(side, axis=2), [f"the digit {WORDS[n]}" for n in source.labels]
    )


def _floats(pictures: np.ndarray) -> jax.Array:
    return jnp.asarray(pictures, jnp.float32) / 127.5 - 1


def _init(spec: models.NetworkSpec, key: jax.Array) -> PyTree:
    inputs = [jnp.zeros(one.shape, one.dtype) for one in spec.example()]
    return jax.jit(models.build(spec).init)(key, *inputs)


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Run, and print the table in the first process."""
    attack.print_results(run(config, workdir, config_file))


if __name__ == "__main__":
    launch(main, "experiments/configs/latent_digits.py")
