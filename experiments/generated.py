"""Miniatures for `:smoke`: a dataset as its makers pack it, a split file, and a checkpoint in the right dialect.

Everything is random: a run on it shows that the pipeline works from the first file to the last table, and nothing else.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections.config_dict import ConfigDict
from PIL import Image

from checkpoints_convert import guided, mapping, secmi
from dime_jax import data, models
from dime_jax._util import validate
from dime_jax.models import DdpmUnetSpec, GuidedUnetSpec
from experiments import torch_writer

NUM_IMAGES = 80
# Labels at which ImageNetV2's folders "0", "1", "2", "10", "11" fall out of step if they are sorted as strings.
CLASSES = (0, 1, 2, 10, 11)
IMAGES_PER_CLASS = 8
_WNIDS = pathlib.Path(data.__file__).with_name("imagenet_wnids.txt")
CHECKPOINT, MODEL_FLAGS = "checkpoint.pt", "model_flags.json"

_DDPM = DdpmUnetSpec(
    stem_channels=32,
    time_features=32,
    time_channels=32,
    level_channels=(32,),
    num_res_blocks=1,
    attention_levels=(),
    time_table_steps=1000,
    norm_eps=1e-5,
    symmetric_downsample=True,
)
_GUIDED_FLAGS = {
    "image_size": 16,
    "model_channels": 32,
    "channel_mult": [1],
    "num_res_blocks": 1,
    "attention_resolutions": [],
    "num_classes": 1000,
    "learn_sigma": True,
    "resblock_updown": True,
    "use_scale_shift_norm": True,
}


def generate(section: ConfigDict, directory: pathlib.Path, seed: int) -> None:
    """Write what `config.data` describes, and a checkpoint, into `directory`, unless it exists.

    Args:
      section: `config.data`.
      directory: where the files go.
      seed: for all that is random in them.
    """
    if directory.exists():
        return
    building = directory.with_name(f".{directory.name}")  # renamed when complete: a killed run leaves no half of it
    building.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    kind = kind_of(section.source)
    _WRITERS[kind](building / "source", rng)
    if section.heldout:
        _WRITERS[kind_of(section.heldout)](building / "heldout", rng)
    if section.split == "file":
        order = rng.permutation(NUM_IMAGES)
        member, heldout = np.sort(order[: NUM_IMAGES // 2]), np.sort(order[NUM_IMAGES // 2 :])
        np.savez(building / "split.npz", mia_train_idxs=member, mia_eval_idxs=heldout, ratio=0.5)
    _write_checkpoint(kind, building, rng)
    building.rename(directory)


def located(section: ConfigDict, directory: pathlib.Path) -> ConfigDict:
    """Return `config.data` with the places of what `generate` wrote."""
    section = ConfigDict(section)
    section.source = f"{kind_of(section.source)}:{directory / 'source'}"
    if section.heldout:
        section.heldout = f"{kind_of(section.heldout)}:{directory / 'heldout'}"
    section.split_file = str(directory / "split.npz")
    return section


def kind_of(uri: str) -> str:
    """Return the kind of a source that can be generated: what comes before the colon."""
    kind = uri.partition(":")[0]
    validate.check_choice(kind, tuple(_WRITERS), "generated source")
    return kind


def _images(rng: np.random.Generator, count: int, height: int, width: int) -> np.ndarray:
    """Make random colour gradients, uint8 [count, height, width, 3]."""
    corners = rng.uniform(0, 255, (count, 2, 2, 3))
    return np.round(np.einsum("nijc,ih,jw->nhwc", corners, _fade(height), _fade(width))).astype(np.uint8)


def _fade(size: int) -> np.ndarray:
    """Weights of two opposite edges [2, size], from all of the first to all of the second."""
    ramp = np.linspace(0, 1, size)
    return np.stack([1 - ramp, ramp])


def _write_cifar(folder: pathlib.Path, rng: np.random.Generator, files: list[str], label_bytes: int) -> None:
    """Write the binary version: records of one or two labels and three planes of 32 x 32 pixels."""
    folder.mkdir()
    for name in files:
        count = NUM_IMAGES // len(files)
        labels = rng.integers(0, 10, (count, label_bytes), dtype=np.uint8)
        planes = _images(rng, count, 32, 32).transpose(0, 3, 1, 2).reshape(count, -1)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels, planes], axis=1).tobytes())


def _write_stl10u(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Write planes of columns, as MATLAB does."""
    folder.mkdir()
    (folder / "unlabeled_X.bin").write_bytes(_images(rng, NUM_IMAGES, 96, 96).transpose(0, 3, 2, 1).tobytes())


def _write_celeba(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Write aligned photos of 218 x 178, two of each person, all in the training partition."""
    names = [f"{number:06d}.jpg" for number in range(1, NUM_IMAGES + 1)]
    (folder / "img_align_celeba").mkdir(parents=True)
    for name, pixels in zip(names, _images(rng, NUM_IMAGES, 218, 178)):
        Image.fromarray(pixels).save(folder / "img_align_celeba" / name)
    (folder / "identity_CelebA.txt").write_text("".join(f"{name} {i // 2}\n" for i, name in enumerate(names)))
    (folder / "list_eval_partition.txt").write_text("".join(f"{name} 0\n" for name in names))


def _write_class_folders(folder: pathlib.Path, rng: np.random.Generator, names: Sequence[object]) -> None:
    """Write a folder for each of CLASSES, by the names of all classes."""
    for name in (str(names[label]) for label in CLASSES):
        (folder / name).mkdir(parents=True)
        for number, pixels in enumerate(_images(rng, IMAGES_PER_CLASS, 40, 48)):
            Image.fromarray(pixels).save(folder / name / f"{number}.JPEG")


_WRITERS: dict[str, Callable[[pathlib.Path, np.random.Generator], None]] = {
    "cifar10": functools.partial(_write_cifar, files=[f"data_batch_{i}" for i in range(1, 6)], label_bytes=1),
    "cifar100": functools.partial(_write_cifar, files=["train"], label_bytes=2),
    "stl10u": _write_stl10u,
    "celeba": _write_celeba,
    "imagenet": functools.partial(_write_class_folders, names=_WNIDS.read_text().split()),
    "imagenetv2": functools.partial(_write_class_folders, names=range(1000)),
}


def _write_checkpoint(kind: str, directory: pathlib.Path, rng: np.random.Generator) -> None:
    """Write Guided Diffusion's bare state dict for ImageNet, pytorch-ddpm's file with EMA weights for the others."""
    if kind == "imagenet":
        (directory / MODEL_FLAGS).write_text(json.dumps(_GUIDED_FLAGS))
        architecture = guided.setting_from_flags(_GUIDED_FLAGS).architecture
        contents: object = _random_state(architecture, guided.naming(architecture), rng)
    else:
        contents = secmi_contents(rng, image_size=32)
    torch_writer.write_zip(directory / CHECKPOINT, contents)


def secmi_contents(rng: np.random.Generator, image_size: int) -> dict[str, object]:
    """Return what a file of pytorch-ddpm holds, for a very small network of random weights."""
    raw, ema = (_random_state(_DDPM, secmi.naming(_DDPM), rng) for _ in range(2))
    x = np.zeros((1, 3, image_size, image_size), np.float32)
    return {"net_model": raw, "ema_model": ema, "step": 0, "x_T": x}


def _random_state(
    spec: DdpmUnetSpec | GuidedUnetSpec, naming: mapping.Naming, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return 0.1 * rng.normal(size=leaf.shape).astype(np.float32)

    return mapping.to_state_dict(jax.tree.map(draw, models.param_shapes(spec)), mapping.name_table(spec, naming))
