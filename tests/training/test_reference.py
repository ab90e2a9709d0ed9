"""A reference trained beside a model: what is trained, on what, at what cost, continued, and everything refused."""

import dataclasses
import json
import pathlib
import re

import jax
import numpy as np
import pytest
import tiny

import dime_jax as dj
from dime_jax import cli, data, models, training
from dime_jax.data.duplicates import read_sketches
from dime_jax.data.sources import pixel_digest
from dime_jax.loading import model_directory, opening
from dime_jax.training import loop, reference
from dime_jax.training.reference import recipe_for, reference_spec, train_reference

FEW = dj.ReferenceOptions(steps=6, batch_size=4)
SHAPE = (8, 8, 1)


def saved(directory, spec):
    return model_directory.save_model(directory, spec, models.init(spec.denoiser, jax.random.key(3)))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The directory of a model of tiny architecture, with a schedule of its own."""
    spec = dataclasses.replace(tiny.spec(SHAPE), schedule=models.ScheduleSpec(kind="cosine", num_steps=200))
    return saved(tmp_path_factory.mktemp("target") / "model", spec)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "some.npz"
    np.savez(path, images=tiny.images(24, SHAPE))
    return path


@pytest.fixture(scope="module")
def unbroken(target, images, tmp_path_factory):
    """The output of a training that nobody disturbs."""
    output = tmp_path_factory.mktemp("unbroken") / "reference"
    train_reference(dj.open_model(target), dj.data.open_source(str(images)), output, FEW, silent=True)
    return output


def weights(model):
    return opening.load_denoiser(model).params


def equal(first, second):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, first, second)))


def command(target, images, output, *more):
    few = ["--steps", "6", "--batch-size", "4"]
    return ["reference", "--model", str(target), "--images", str(images), "--output", str(output), *few, *more]


@pytest.fixture
def without_training(monkeypatch):
    """The arguments of each training, of which there is none."""
    asked = []

    def train(*arguments, options):
        asked.append((*arguments, options))
        return arguments[0] / "model"

    monkeypatch.setattr(reference, "train", train)
    return asked


def test_the_shipped_model_gets_a_reference_by_one_command(tmp_path, monkeypatch, capsys):
    before_each, real = [], loop.update_keys

    def update_keys(seed, number):
        before_each.append(capsys.readouterr().err)
        return real(seed, number)

    monkeypatch.setattr(loop, "update_keys", update_keys)
    pixels = dj.data.open_source("digits")
    np.savez(tmp_path / "digits.npz", images=np.stack([pixels[i].image for i in range(20)]))
    output = tmp_path / "out" / "reference"
    given = ["--images", str(tmp_path / "digits.npz"), "--output", str(output), "--steps", "2", "--batch_size", "4"]
    assert cli.main(["reference", "--model", "digits", *given]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"the reference is {output}/model: use it as --reference {output}/model\n"
    cost = "20 images: 2 updates of 4 images, each image 0.4 times in all, of a network of 651,041 weights"
    cost_line = f"training a reference on {cost}; the first updates show how long that takes\n"
    assert before_each[0].startswith(cost_line)
    assert re.search(r"8 of 8 images, \d+ images/s, 0 s left, update 2", printed.err)
    shipped, trained = dj.open_model("digits"), dj.open_model(output / "model")
    assert trained.spec == shipped.spec
    assert not equal(trained.denoiser.params, shipped.denoiser.params)
    assert model_directory.read_spec_file(output / "model")["metadata"]["steps"] == 2


def test_it_is_plain_training_of_the_same_architecture_and_schedule(target, images, unbroken, tmp_path):
    source, spec = dj.data.open_source(str(images)), model_directory.read_spec(target)
    assert model_directory.read_spec(unbroken / "model") == spec
    assert spec.schedule.kind == "cosine"
    recipe = training.TrainingRecipe(
        steps=6, batch_size=4, learning_rate=1e-3, warmup_steps=200, ema_decay=0.995, flips=False, seed=1000
    )
    by_hand = training.train(
        tmp_path, spec, source, np.arange(24), recipe, options=training.TrainingOptions(silent=True)
    )
    assert equal(weights(by_hand), weights(unbroken / "model"))
    assert not equal(weights(target), weights(unbroken / "model"))


def test_the_options_reach_the_training_and_quietly_nothing_is_said(target, images, tmp_path, without_training, capsys):
    more = ["--seed", "1", "--learning_rate", "0.5", "--quiet"]
    assert cli.main(command(target, images, tmp_path, *more)) == 0
    assert capsys.readouterr().err == ""
    ((_, _, _, _, recipe, options),) = without_training
    assert (recipe.steps, recipe.batch_size, recipe.seed, recipe.learning_rate) == (6, 4, 1001, 0.5)
    assert options.silent


def test_interrupted_and_started_again_it_ends_with_the_same_weights(
    target, images, unbroken, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(reference, "_LOG_EVERY", 1)
    monkeypatch.setattr(reference, "_SAVE_EVERY", 2)
    real = loop.update_keys

    def until_the_fifth(seed, number):
        if number == 5:
            raise KeyboardInterrupt
        return real(seed, number)

    monkeypatch.setattr(loop, "update_keys", until_the_fifth)
    assert cli.main(command(target, images, tmp_path)) == cli.INTERRUPTED
    assert "re-run the same command to resume" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert len(list(tmp_path.glob("trained_on-*.npy"))) == 1  # before there is a model that was trained on them
    seen = []
    monkeypatch.setattr(loop, "update_keys", lambda seed, number: seen.append(number) or real(seed, number))
    assert cli.main(command(target, images, tmp_path)) == 0
    assert "6 updates of 4 images, 4 of which are made" in capsys.readouterr().err
    assert seen == [5, 6]
    assert equal(weights(tmp_path / "model"), weights(unbroken / "model"))
    assert cli.main(command(target, images, tmp_path)) == 0  # finished: nothing is trained again
    assert "all 6 updates of the reference in" in capsys.readouterr().err
    assert seen == [5, 6]


def test_the_images_are_listed_by_what_they_show(target, images, unbroken):
    source = dj.data.open_source(str(images))
    fingerprint = model_directory.read_spec_file(unbroken / "model")["metadata"]["images"]["fingerprint"]
    assert fingerprint == data.fingerprint(source)
    listed = read_sketches(unbroken / f"trained_on-{fingerprint}.npy")
    assert [one.digest for one in listed] == [pixel_digest(image) for image in tiny.images(24, SHAPE)]


def test_a_lost_list_is_written_again(target, images, unbroken):
    (file,) = unbroken.glob("trained_on-*.npy")
    content = file.read_bytes()
    file.unlink()
    train_reference(dj.open_model(target), dj.data.open_source(str(images)), unbroken, FEW, silent=True)
    assert file.read_bytes() == content


def test_only_the_given_images_train_it_and_bad_ones_are_left_out(target, tmp_path, without_training, capsys):
    pixels = tiny.images(40, SHAPE)

    def read(index):
        if index == 7:
            raise data.BadImage("is truncated")
        return pixels[index]

    source = data.Source("some", [f"{i}\n.png" for i in range(40)], read)
    chosen = np.arange(3, 33)
    train_reference(dj.open_model(target), source, tmp_path, FEW, indices=chosen)
    assert (
        "warning: 1 images cannot be used and are left out, such as 7\\n.png: is truncated\n" in capsys.readouterr().err
    )
    ((_, _, _, members, _, _),) = without_training
    assert members.tolist() == [i for i in range(3, 33) if i != 7]
    (listed,) = tmp_path.glob("trained_on-*.npy")
    assert listed.name == f"trained_on-{data.fingerprint(source, members)}.npy"
    assert [one.digest for one in read_sketches(listed)] == [pixel_digest(pixels[i]) for i in members]


@pytest.mark.parametrize(
    ("count", "options", "steps", "rate"),
    [
        (500, {}, 3000, 1e-3),
        (20, {}, 1000, 1e-3),
        (250, {}, 1500, 1e-3),
        (5000, {}, 5000, 1e-3),
        (500, {"batch_size": 32}, 1500, 1e-3),
        (500, {"steps": 7, "learning_rate": 0.5}, 7, 0.5),
    ],
)
def test_the_recipe_follows_from_the_number_of_images(count, options, steps, rate):
    recipe = recipe_for(count, tiny.spec(SHAPE), dj.ReferenceOptions(seed=9, **options))
    assert (recipe.steps, recipe.learning_rate, recipe.seed) == (steps, rate, 1009)
    assert (recipe.warmup_steps, recipe.ema_decay, recipe.flips) == (200, 0.995, False)


@pytest.mark.parametrize(("more", "rate"), [(0, 2e-4), (1, 1e-3)])
def test_large_networks_learn_more_slowly(monkeypatch, more, rate):
    assert reference.LARGE == 6_000_000
    spec = tiny.spec(SHAPE)
    monkeypatch.setattr(reference, "LARGE", reference._count_weights(spec.denoiser) + more)
    assert recipe_for(500, spec, dj.ReferenceOptions()).learning_rate == rate


def opened(spec):
    return opening.OpenedModel(dj.open_model("digits").denoiser, "a test", spec=spec)


WIDE = models.DdpmUnetSpec(num_res_blocks=1, attention_levels=(), time_table_steps=500)
GUIDED = models.GuidedUnetSpec(
    stem_channels=64,
    level_channels=(64, 64, 128, 128, 256),
    num_res_blocks=1,
    attention_levels=(),
    learned_sigma=True,
    num_classes=10,
)


@pytest.mark.parametrize(
    ("network", "shape", "widths"),
    [
        (WIDE, (32, 32, 3), (16, 32, 64, 128)),
        (GUIDED, (64, 64, 3), (16, 32, 64, 128, 128)),
    ],
)
def test_a_small_reference_takes_the_same_images_and_is_narrower(network, shape, widths):
    schedule = models.ScheduleSpec(kind="cosine", num_steps=500)
    spec = models.ModelSpec(denoiser=network, image_shape=shape, schedule=schedule, prediction="v_prediction")
    small = reference_spec(opened(spec), "small")
    assert small.denoiser.level_channels == widths
    assert (small.image_shape, small.schedule, small.prediction) == (shape, schedule, "v_prediction")
    assert small.num_classes == network.num_classes
    assert reference._count_weights(small.denoiser) < reference._count_weights(network) / 4
    assert reference_spec(opened(spec)) == spec


def test_what_is_small_already_stays_as_it_is():
    spec = tiny.spec(SHAPE)
    assert reference_spec(opened(spec), "small") == spec


LATENT = models.ModelSpec(
    denoiser=models.DdpmUnetSpec(image_channels=4, level_channels=(32,), attention_levels=(), stem_channels=32),
    autoencoder=models.AutoencoderSpec(),
    image_shape=(64, 64, 3),
)
DIT = models.ModelSpec(
    denoiser=models.DitSpec(
        channels=1, latent_size=8, width=16, num_heads=2, num_layers=1, mlp_width=16, num_classes=3
    ),
    image_shape=SHAPE,
)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "no reference can be trained for digits: it is a test, of unknown architecture"),
        (LATENT, "digits is a latent model: its reference is the base of the fine-tune, --reference MODEL"),
        (DIT, "references are trained for U-Nets on images, and digits is a dit"),
    ],
)
def test_models_that_none_can_be_trained_for(spec, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        train_reference(opened(spec), tiny.source(30, SHAPE), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_function_has_no_architecture(tmp_path):
    function = dj.Denoiser.from_function(lambda x, t: x, dj.linear_schedule(), SHAPE, name="mine")
    with pytest.raises(ValueError, match="no reference can be trained for mine: it is a Python object"):
        train_reference(dj.open_model(function), tiny.source(30, SHAPE), tmp_path / "out")


def test_a_class_conditional_model_needs_labels_that_it_knows(tmp_path, without_training, capsys):
    target, spec = tmp_path / "target", tiny.spec(SHAPE, num_classes=3)
    saved(target, spec)
    pixels, right = tiny.images(24, SHAPE), np.arange(24) % 3
    for name, columns in (("none", {}), ("right", {"labels": right}), ("wrong", {"labels": right + 1})):
        np.savez(tmp_path / f"{name}.npz", images=pixels, **columns)

    def run(images, *more):
        code = cli.main(command(target, tmp_path / f"{images}.npz", tmp_path / f"out_{images}", *more))
        return code, capsys.readouterr().err.splitlines()[-1]

    code, error = run("none")
    assert code == 2
    assert error.startswith("dime-jax: target is class-conditional: all images need class labels")
    assert run("wrong") == (2, "dime-jax: labels must be >= 0 and < 3, the classes of target, got 1 to 3")
    assert not list(tmp_path.glob("out_*"))
    assert run("right")[0] == 0
    labels = tmp_path / "labels.csv"
    labels.write_text("".join(f"npz-{number:05},{label}\n" for number, label in enumerate(right)))
    assert run("none", "--labels", str(labels))[0] == 0
    assert [source.labels.tolist() for _, _, source, *_ in without_training] == [right.tolist()] * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "0"], "steps must be >= 1, got 0"),
        (["--batch_size", "0"], "batch_size must be >= 1, got 0"),
        (["--learning_rate", "-1"], "learning_rate must be finite and > 0, got -1.0"),
        (["--model", "nothing"], "no model directory 'nothing'"),
        (["--images", "nothing"], "images must be digits, an existing path, or a name that starts with"),
        (["--images", "few.npz"], "a reference must be trained on at least 20 images, got 19"),
        (
            ["--images", "narrow.npz"],
            "too many images that cannot be used: must be <= 10% of 30, got 30, such as npz-00000: is",
        ),
    ],
)
def test_bad_input_is_one_line(target, images, tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.chdir(tmp_path)
    np.savez("few.npz", images=tiny.images(19, SHAPE))
    np.savez("narrow.npz", images=tiny.images(30, (8, 6, 1)))
    assert cli.main(command(target, images, "out", *more)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"dime-jax: {message}")
    assert not pathlib.Path("out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "1"], "recipe.seed 1000 -> 1001"),
        (["--learning_rate", "0.1"], "recipe.learning_rate 0.001 -> 0.1"),
        (["--images", "others.npz"], "images.count 24 -> 30"),
    ],
)
def test_another_training_in_the_same_directory_is_refused(
    target, images, unbroken, tmp_path, monkeypatch, capsys, more, message
):
    monkeypatch.chdir(tmp_path)
    np.savez("others.npz", images=tiny.images(30, SHAPE, seed=1))
    before = sorted(unbroken.rglob("*"))
    assert cli.main(command(target, images, unbroken, *more)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "holds another run, which differs: " in error
    assert message in error
    assert sorted(unbroken.rglob("*")) == before


def test_the_model_says_what_it_was_trained_with(unbroken):
    facts = json.loads((unbroken / "model" / "spec.json").read_text())["metadata"]
    assert (facts["steps"], facts["weights"], facts["images"]["count"]) == (6, "ema", 24)
