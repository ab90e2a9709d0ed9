"""The images of a study and who is a member, from `config.data`: the same for training and for attacks."""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from dime_jax import data
from dime_jax._util import validate
from dime_jax._util.distributed import on_first_process
from experiments import generated


class Study(NamedTuple):
    """A source and the split of it; a second, held-out source is joined to the first."""

    source: data.Source
    split: data.Split


# Splits of one source by (source, size, seed).
SPLITS: dict[str, Callable[[data.Source, int, int], data.Split]] = {
    "random": data.random_split,
    "sima_celeba": data.sima_celeba_split,
    "identity": lambda source, size, seed: data.identity_split(source, size, seed=seed),
}


def open_study(config: ConfigDict, workdir: str | pathlib.Path) -> Study:
    """Open what `config.data` describes; with `data.generate`, write it to WORKDIR/generated before.

    `data.split` is "file" (indices in `split_file`), one of SPLITS, "joined" (all of `source` are members, all of
    `heldout` are not) or "per_class" (`split_size` of each class from both).
    """
    section = config.data
    validate.check_choice(section.split, ("file", *SPLITS, "joined", "per_class"), "config.data.split")
    if section.generate:
        directory = generated_directory(workdir)
        on_first_process(lambda: generated.generate(section, directory, config.seed))
        section = generated.located(section, directory)
    source, split = _open(section)
    if section.reserved is None:
        return Study(source, _drawn(split, section.max_members, section.max_heldout, section.split_seed))
    reserved = _drawn(split, section.reserved, section.reserved, section.split_seed)
    rest = data.Split(np.setdiff1d(split.member, reserved.member), np.setdiff1d(split.heldout, reserved.heldout))
    member = _part(section.max_members, section.part, rest.member, section.split_seed)
    return Study(source, data.Split(member, _part(section.max_heldout, section.part, rest.heldout, section.split_seed)))


def generated_directory(workdir: str | pathlib.Path) -> pathlib.Path:
    """Return where a workdir has what was generated."""
    return pathlib.Path(workdir) / "generated"


def _open(section: ConfigDict) -> Study:
    for name in ("source", "heldout"):
        if section[name].endswith(":"):
            raise ValueError(
                f"config.data.{name} must name a folder: --config.data.{name}={section[name]}DIR, got {section[name]!r}"
            )
    source = data.open_source(section.source)
    if section.split == "file":
        if not section.split_file:
            raise ValueError(
                "config.data.split_file must be set for the split 'file': --config.data.split_file=FILE.npz"
            )
        return Study(source, data.read_split(section.split_file, source))
    if section.split in SPLITS:
        return Study(source, SPLITS[section.split](source, section.split_size, section.split_seed))
    heldout = data.open_source(section.heldout, **section.heldout_options)
    if section.split == "joined":
        split = data.split_of_joined(source, heldout)
    else:
        split = data.per_class_split(source, heldout, section.split_size, section.split_seed)
    return Study(data.join(source, heldout), split)


def _drawn(split: data.Split, max_members: int | None, max_heldout: int | None, seed: int) -> data.Split:
    rng = np.random.default_rng(seed)
    member = _at_most(max_members, split.member, rng)
    return data.Split(member, _at_most(max_heldout, split.heldout, rng))


def _part(size: int, part: int, index: np.ndarray, seed: int) -> np.ndarray:
    """Return images part · size … (part + 1) · size of a random order, sorted."""
    start = part * size
    if start + size > len(index):
        raise ValueError(f"config.data.part must be < {len(index) // size}, got {part}")
    return np.sort(np.random.default_rng(seed).permutation(index)[start : start + size])


def _at_most(size: int | None, index: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return all of them, or `size` drawn at random, sorted."""
    if size is None or size >= len(index):
        return index
    return np.sort(rng.choice(index, size=size, replace=False))
