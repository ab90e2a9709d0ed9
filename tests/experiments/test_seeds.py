"""What a seed changes: the split, the training and the draws; and that models of several seeds share no image."""

import functools

import numpy as np
import pytest

from dime_jax import data
from experiments import launch, seeds, study_data
from experiments.configs import cifar10, digits, dp_digits, imagenet256, synthetic


def flat(config, prefix=""):
    for name, value in config.to_dict().items() if hasattr(config, "to_dict") else config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        (digits.get_config(), {"seed", "data.split_seed", "train.recipe.seed"}),
        (dp_digits.get_config(), {"seed", "data.split_seed", "train.recipe.seed"}),
        (cifar10.get_config("laptop"), {"seed", "data.split_seed", "train.recipe.seed"}),
        (cifar10.get_config("overnight"), {"seed", "data.part", "train.recipe.seed"}),
        (imagenet256.get_config(), {"seed", "data.split_seed"}),
    ],
    ids=["digits", "dp_digits", "laptop", "overnight", "imagenet256"],
)
def test_a_seed_changes_split_training_and_draws_and_nothing_else(config, changed):
    before, after = dict(flat(config)), dict(flat(seeds.with_seed(config, 7)))
    assert {name for name in before if before[name] != after[name]} == changed
    assert {after[name] for name in changed} == {7}
    assert changed <= set(seeds.FIELDS)


def test_seed_0_of_the_digits_is_the_study_itself():
    assert seeds.with_seed(digits.get_config(), 0).to_dict() == digits.get_config().to_dict()


def test_each_seed_has_its_workdir(tmp_path):
    made = list(seeds.seeded(digits.get_config("smoke"), tmp_path, ["0", "2"]))
    assert [workdir for _, workdir in made] == [tmp_path / "seed_0", tmp_path / "seed_2"]
    assert [config.data.split_seed for config, _ in made] == [0, 2]
    ((_, workdir),) = seeds.seeded(synthetic.get_config(), tmp_path, [])
    assert workdir == tmp_path


@pytest.mark.parametrize(
    ("config", "wanted", "message"),
    [
        (digits.get_config(), ["1", "1"], "--seeds must be different whole numbers such as 0,1,2, got '1'"),
        (digits.get_config(), ["-1"], "got '-1'"),
        (
            cifar10.get_config(),
            ["0", "1"],
            r"--seeds needs a split that a seed changes, got all images of config\.data\.split=",
        ),
    ],
)
def test_bad_seeds_are_refused(tmp_path, config, wanted, message):
    with pytest.raises(ValueError, match=message):
        list(seeds.seeded(config, tmp_path, wanted))


def test_models_of_several_seeds_share_no_image_with_each_other_or_the_pilot(tmp_path):
    order = np.random.default_rng(0).permutation(len(data.open_source("digits")))
    np.savez(tmp_path / "split.npz", mia_train_idxs=np.sort(order[:800]), mia_eval_idxs=np.sort(order[800:1600]))

    def split_of(variant, seed=None):
        config = cifar10.get_config(variant).unlock()
        config.data.source, config.data.split_file = "digits", str(tmp_path / "split.npz")
        config.data.max_members = config.data.max_heldout = 100
        if variant == "overnight":
            config.data.reserved = 100
        return study_data.open_study(config if seed is None else seeds.with_seed(config, seed), tmp_path).split

    splits = [split_of("laptop"), *(split_of("overnight", seed) for seed in range(3))]
    for side in ("member", "heldout"):
        everyone = np.concatenate([getattr(split, side) for split in splits])
        assert len(everyone) == len(np.unique(everyone)) == 400


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # how ml_collections loads a file
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_the_command_line_runs_one_after_the_other(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(launch.flags, "FLAGS", values := launch.flags.FlagValues())
    for name in ("DEFINE_string", "DEFINE_bool", "DEFINE_integer", "DEFINE_list"):
        define = getattr(launch.flags, name)
        monkeypatch.setattr(launch.flags, name, functools.partial(define, flag_values=values))
    define_config = launch.config_flags.DEFINE_config_file
    monkeypatch.setattr(launch.config_flags, "DEFINE_config_file", functools.partial(define_config, flag_values=values))
    monkeypatch.setattr(
        launch.flags, "mark_flag_as_required", functools.partial(launch.flags.mark_flag_as_required, flag_values=values)
    )
    arguments = ["program", "--config=experiments/configs/digits.py:smoke", f"--workdir={tmp_path}", "--seeds=3,5"]
    monkeypatch.setattr(launch.app, "run", lambda run: run(values(arguments)))
    launch.launch(lambda *call: found.append(call), "experiments/configs/digits.py", many=True)
    assert [(config.seed, workdir, file) for config, workdir, file in found] == [
        (seed, str(tmp_path / f"seed_{seed}"), "experiments/configs/digits.py:smoke") for seed in (3, 5)
    ]
