"""Several models of one study: a seed changes the split, the training and the attack's draws, and nothing else.

    python -m experiments.train  --config=experiments/configs/digits.py --workdir=W --seeds=0,1,2
    python -m experiments.attack --config=experiments/configs/digits.py --workdir=W --seeds=0,1,2

The model of seed N is in W/seed_N, and each is continued where it was stopped.
"""

import pathlib
from collections.abc import Iterator, Sequence

from ml_collections.config_dict import ConfigDict

# What a seed sets: everything that is drawn, who is a member, and how the network is trained.
FIELDS = ("seed", "data.split_seed", "data.part", "train.recipe.seed")


def seeded(
    config: ConfigDict, workdir: str | pathlib.Path, seeds: Sequence[str]
) -> Iterator[tuple[ConfigDict, pathlib.Path]]:
    """Yield the config and workdir of each seed; without seeds, those of the study itself.

    Raises:
      ValueError: if a seed is not a number or is named twice, or if all of a split file is used, so that every model
        would have the same members.
    """
    wrong = next((seed for seed in seeds if not seed.isdecimal() or seeds.count(seed) > 1), None)
    if wrong is not None:
        raise ValueError(f"--seeds must be different whole numbers such as 0,1,2, got {wrong!r}")
    if not seeds:
        yield config, pathlib.Path(workdir)
        return
    data = config.data
    if data.split in ("file", "joined") and data.reserved is None and data.max_members is None:
        raise ValueError(
            f"--seeds needs a split that a seed changes, got all images of config.data.split={data.split!r}"
        )
    for seed in map(int, seeds):
        yield with_seed(config, seed), pathlib.Path(workdir) / f"seed_{seed}"


def with_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """Return the config of another model.

    Where a study takes parts of what it leaves to others (`data.reserved`), the seed is the number of the part, so that
    no two models share an image; elsewhere it draws another split.
    """
    one = config.copy_and_resolve_references()
    with one.unlocked():
        one.seed = seed
        if one.data.reserved is None:
            one.data.split_seed = seed
        else:
            one.data.part = seed
        if "train" in one:
            one.train.recipe.seed = seed
    return one
