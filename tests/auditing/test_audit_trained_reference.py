"""What a reference was trained on is never counted as held-out; and a reference that the audit trains itself."""

import json
import pathlib
import re
import sys
import tempfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from memoriser import config, images, memoriser, source

import dime_jax as dj
from dime_jax import auditing, cli, models, training
from dime_jax.auditing import images as audit_images
from dime_jax.auditing.reference import PLACE, draw_whole_groups, train_beside
from dime_jax.data.duplicates import sketch, sketches_file, write_sketches
from dime_jax.data.groups import ALONE
from dime_jax.data.role_checks import CheckedImages
from dime_jax.loading import model_directory
from dime_jax.training import loop, reference

pytestmark = pytest.mark.usefixtures("small_batches", "small_model_check", "no_figures")

MODEL = memoriser(images(30, 0))
MEMBERS, HELDOUT, CANDIDATES, OTHERS = (images(n, seed) for seed, n in enumerate((24, 60, 8, 9)))


def write_reference(directory, pixels, listed=True):
    """A model directory without weights, and the list of the images that it was trained on: files of other names."""
    trained = source(pixels, "renamed")
    fingerprint = dj.data.fingerprint(trained)
    contents = {"format": model_directory.FORMAT, "version": 1, "spec": {}, "fingerprint": "x", "files": {}}
    (directory / "model").mkdir(parents=True)
    metadata = {"images": {"count": len(pixels), "fingerprint": fingerprint}}
    (directory / "model" / "spec.json").write_text(json.dumps({**contents, "metadata": metadata}))
    if listed:
        write_sketches(sketches_file(directory, fingerprint), [sketch(trained[i]) for i in range(len(pixels))])
    return directory / "model"


def opened(directory, **settings):
    return audit_images.open_images(config(directory / "out", **settings), MODEL)


def brighter(pixels):
    """Near copies: the same to the eye."""
    return np.where(pixels < 250, pixels + 3, pixels).astype(np.uint8)


def some(n, most):
    return st.sets(st.integers(0, n - 1), max_size=most).map(sorted)


@hypothesis.settings(max_examples=12, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(some(24, 8), some(60, 30), some(8, 6), st.booleans(), st.booleans())
def test_no_image_of_the_reference_or_copy_of_one_is_held_out_or_judged(members, heldout, candidates, near, known):
    used = np.concatenate([MEMBERS[members], HELDOUT[heldout], CANDIDATES[candidates], OTHERS])
    roles = {"heldout": source(HELDOUT, "h"), "candidates": source(CANDIDATES, "c")}
    if known:
        roles["members"] = source(MEMBERS, "m")
    with tempfile.TemporaryDirectory() as place:
        directory = pathlib.Path(place)
        model = write_reference(directory / "reference", brighter(used) if near else used)
        alone, found = opened(directory, **roles), opened(directory, reference=model, **roles)
    first = 24 if known else 0
    assert found.split.heldout.tolist() == [first + i for i in range(60) if i not in heldout]
    assert found.candidates.tolist() == [first + 60 + i for i in range(8) if i not in candidates]
    assert found.split.member.tolist() == alone.split.member.tolist()
    reason = "the reference was trained on it, or on a copy of it"
    assert found.unusable_candidates() == tuple((f"candidates/c-{i:05}", reason) for i in candidates)
    assert (found.duplicates, found.groups.tolist()) == (alone.duplicates, alone.groups.tolist())
    said = " ".join(found.warnings)
    assert (f"{len(heldout)} held-out images were left out: the reference was trained" in said) == bool(heldout)
    assert (f"{len(candidates)} images cannot be used ({len(candidates)} candidates" in said) == bool(candidates)
    assert (f"{len(members)} known members are copies of images that the reference" in said) == bool(members and known)


def test_images_of_one_group_with_a_trained_one_are_left_out_too(tmp_path):
    model = write_reference(tmp_path, HELDOUT[:2])
    ids = [f"heldout/h-{i:05}" for i in (1, 5, 7)] + ["candidates/c-00003"]
    (tmp_path / "groups.csv").write_text("".join(f"{id},anna\n" for id in ids) + "heldout/h-00008,ben\n")
    roles = {"heldout": source(HELDOUT, "h"), "candidates": source(CANDIDATES, "c")}
    found = opened(tmp_path, reference=model, groups=tmp_path / "groups.csv", **roles)
    assert found.split.heldout.tolist() == [i for i in range(60) if i not in (0, 1, 5, 7)]
    assert found.candidates.tolist() == list(range(60, 68))


def test_candidates_that_all_trained_the_reference_are_refused(tmp_path):
    roles = {"heldout": source(HELDOUT, "h"), "candidates": source(CANDIDATES, "c")}
    with pytest.raises(ValueError, match="none of the 8 candidates can be used, such as candidates/c-00000: the refe"):
        opened(tmp_path, reference=write_reference(tmp_path / "a", CANDIDATES), **roles)
    with pytest.raises(ValueError, match="held-out images must be at least 20, got 0 that are usable"):
        opened(tmp_path, reference=write_reference(tmp_path / "b", HELDOUT), **roles)


def test_a_list_that_is_missing_is_a_warning_and_one_that_is_damaged_an_error(tmp_path):
    roles = {"heldout": source(HELDOUT, "h"), "candidates": source(CANDIDATES, "c")}
    model = write_reference(tmp_path / "a", HELDOUT[:5], listed=False)
    (warning,) = opened(tmp_path, reference=model, **roles).warnings
    file = sketches_file(tmp_path / "a", dj.data.fingerprint(source(HELDOUT[:5], "renamed")))
    assert f"was trained with dime_jax, but {file.name}, which says on which images, is not beside it" in warning
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read as sketches of images"):
        opened(tmp_path, reference=model, **roles)
    contents = json.loads((model / "spec.json").read_text())
    for strange in ({}, {"images": []}, {"images": {"fingerprint": "../../etc/passwd"}}, {"images": {}}):
        (model / "spec.json").write_text(json.dumps({**contents, "metadata": strange}))
        assert opened(tmp_path, reference=model, **roles).warnings == []


def test_the_halves_of_a_run_lose_what_trained_the_reference(tmp_path):
    model = write_reference(tmp_path, HELDOUT[:25])
    roles = {"members": source(MEMBERS, "m"), "heldout": source(HELDOUT, "h")}
    _, before = audit_images.open_as_given(config(tmp_path / "out", **roles), MODEL)
    found, halves = audit_images.open_as_given(config(tmp_path / "out", reference=model, **roles), MODEL)
    trained = 24 + np.arange(25)
    for half, full in zip(halves, before):
        assert half.member.tolist() == full.member.tolist()
        assert half.heldout.tolist() == [i for i in full.heldout if i not in trained]
    assert not np.isin(found.split.heldout, trained).any()
    assert "25 held-out images were left out: the reference was trained" in " ".join(found.warnings)


def checked(groups, members, heldout, candidates):
    split = dj.data.Split(members, heldout)
    nothing = source(images(len(groups), 0))
    return CheckedImages(nothing, split, candidates, None, groups, None, [], [])


@hypothesis.given(
    st.lists(st.integers(-1, 7), min_size=30, max_size=30), st.integers(1, 25), st.integers(0, 5), st.integers(0, 9)
)
def test_whole_groups_are_drawn_and_none_with_members_or_candidates(groups, count, seed, others):
    groups, order = np.array(groups), np.random.default_rng(others).permutation(30)
    members, heldout, candidates = (np.sort(part) for part in np.split(order, [others // 2, 30 - others]))
    given = checked(groups, members, heldout, candidates)
    chosen = draw_whole_groups(given, count, seed)
    assert chosen.tolist() == draw_whole_groups(given, count, seed).tolist()
    assert set(chosen) <= set(heldout)
    assert len(chosen) == len(set(chosen)) <= count
    of_others = {group for group in groups[[*members, *candidates]] if group != ALONE}
    left = set(heldout) - set(chosen)
    assert not {groups[i] for i in chosen if groups[i] != ALONE} & (of_others | {groups[i] for i in left})
    if len(chosen) < count:  # then nothing that is left would fit
        sizes = [1 if groups[i] == ALONE else np.sum(groups[heldout] == groups[i]) for i in left]
        free = [groups[i] == ALONE or groups[i] not in of_others for i in left]
        assert not any(may and len(chosen) + size <= count for may, size in zip(free, sizes))


def test_every_image_has_the_same_chance_to_train_it():
    given = checked(np.full(20, ALONE), np.arange(4), np.arange(4, 18), np.arange(18, 20))
    drawn = np.concatenate([draw_whole_groups(given, 7, seed) for seed in range(600)])
    counts = np.bincount(drawn, minlength=20)[4:18]
    assert np.abs(counts - 300).max() < 5 * np.sqrt(600 / 4)


# ------------------------------------------------------------------------------------------- training one in an audit


def quick_recipe(count, spec, options):
    """Enough to predict noise after seconds."""
    return training.TrainingRecipe(
        steps=40, learning_rate=1e-2, warmup_steps=0, batch_size=16, ema_decay=0.8, flips=False, seed=options.seed
    )


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(reference, "recipe_for", quick_recipe)
    monkeypatch.setattr(reference, "_SAVE_EVERY", 20)


ARCHITECTURE = models.DdpmUnetSpec(
    image_channels=1,
    stem_channels=8,
    time_features=8,
    time_channels=16,
    level_channels=(8,),
    num_res_blocks=1,
    attention_levels=(),
    norm_groups=4,
    middle_attention=False,
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A model that was trained on some digits for a moment, and the options that name it, others and candidates."""
    place, all_digits = tmp_path_factory.mktemp("digits"), dj.data.open_source("digits")
    spec = models.ModelSpec(denoiser=ARCHITECTURE, image_shape=(8, 8, 1))
    recipe = quick_recipe(100, spec, dj.ReferenceOptions(seed=5))
    model = training.train(
        place, spec, all_digits, np.arange(60), recipe, options=training.TrainingOptions(silent=True)
    )
    pixels = np.stack([all_digits[i].image for i in range(180)])
    np.savez(place / "heldout.npz", images=pixels[60:160])
    np.savez(place / "candidates.npz", images=np.concatenate([pixels[50:60], pixels[160:170]]))
    return ["--model", str(model), *(f"--{role}={place / role}.npz" for role in ("heldout", "candidates"))]


def test_one_command_trains_the_reference_and_audits_beside_it(digits, tmp_path, monkeypatch, quickly, capsys):
    real, updates = loop.update_keys, []

    def stopped_in_the_middle(seed, number):
        updates.append(number)
        if len(updates) == 30:
            raise KeyboardInterrupt
        return real(seed, number)

    monkeypatch.setattr(loop, "update_keys", stopped_in_the_middle)
    out, beside = (str(tmp_path / name) for name in ("out", "beside"))
    command = ["audit", *digits, "--reference", "train:50", "--output"]
    assert cli.main([*command, out]) == cli.INTERRUPTED
    printed = capsys.readouterr().err
    assert "training a reference on 50 images: 40 updates of 16 images" in printed
    assert "queries" not in printed  # nothing is asked before
    assert cli.main([*command, out]) == 0
    assert updates == [*range(1, 31), *range(21, 41)]
    assert "50 held-out images, 20 candidates" in capsys.readouterr().err

    # An audit beside the model that it trained finds the same.
    trained = tmp_path / "out" / PLACE / "model"
    assert cli.main(["audit", *digits, "--reference", str(trained), "--output", beside, "--quiet"]) == 0
    results = {name: json.loads((tmp_path / name / "results.json").read_text()) for name in ("out", "beside")}
    rows = [(tmp_path / name / "candidates.csv").read_bytes() for name in results]
    assert rows[0] == rows[1]
    assert {found["reference"]["fingerprint"] for found in results.values()} == {dj.load_denoiser(trained).fingerprint}
    assert results["out"]["reference"]["origin"] == "trained on 50 of the held-out images"
    assert results["out"]["settings"]["reference"] == "train:50"
    assert any(warning.startswith("50 held-out images were left out") for warning in results["beside"]["warnings"])

    # What was begun is not continued as something else.
    for more, difference in (
        (["--reference", "train:49"], "images.count 50 -> 49"),
        (["--seed", "1"], "recipe.seed 0 -> 1"),
    ):
        assert cli.main([*command, out, *more]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"{PLACE}/train holds another run, which differs: " in error
        assert difference in error
    assert cli.main([*command, beside]) == 2
    assert capsys.readouterr().err.endswith(f"dime-jax: {beside} holds another audit: choose another directory\n")
    assert not (tmp_path / "beside" / PLACE).exists()


@pytest.mark.parametrize("size", ["same", "small"])
def test_what_is_drawn_for_the_reference_is_drawn_besides(digits, tmp_path, monkeypatch, size):
    """With known members no more images are opened than are used, and those of the reference come on top."""
    all_digits, asked_for = dj.data.open_source("digits"), []
    pixels = np.stack([all_digits[i].image for i in range(400)])
    asked = config(
        tmp_path,
        model=digits[1],
        members=source(pixels[:60], "m"),
        heldout=source(pixels[60:260], "h"),
        reference="train:80" + ":small" * (size == "small"),
        calibration_size=20,
        test_size=30,
        seed=4,
    )

    def train_reference(model, source, output, options, *, indices, silent):
        asked_for.append((model, output, options, indices, silent))
        return digits[1]

    monkeypatch.setattr(training, "train_reference", train_reference)
    model, _ = auditing.models.open_models(asked)
    drawn = audit_images.open_images(asked, model.denoiser)
    assert len(drawn.split.heldout) == 2 * 30 + 80
    left, found = train_beside(asked, model, drawn)
    ((_, output, options, indices, silent),) = asked_for
    assert sorted([*left.split.heldout, *indices]) == drawn.split.heldout.tolist()
    assert (len(indices), options, silent) == (80, dj.ReferenceOptions(size=size, seed=4), True)
    assert (output, found.origin) == (tmp_path / PLACE, "trained on 80 of the held-out images")
    assert left.split.member.tolist() == drawn.split.member.tolist()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--reference", "train:81"],
            "--reference train:81 must leave at least 20 held-out images, got 19 of 100 that",
        ),
        (["--reference", "train:5"], "a reference must be trained on at least 20 images, got 5"),
        (["--reference", "train:0"], "reference must be train:N or train:N:small to train one, got 'train:0'"),
        (["--reference", "train:"], "reference must be train:N or train:N:small to train one, got 'train:'"),
        (["--reference", "train:50:big"], "reference must be train:N or train:N:small to train one, got"),
        (["--reference", "train:50", "--reference_lora", "x"], "reference_lora needs a reference to merge it into"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_trained(digits, tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.setattr(reference, "train", lambda *args, **options: pytest.fail("trained"))
    assert cli.main(["audit", *digits, *more, "--output", str(tmp_path / "out"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dime-jax: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_stages_take_a_reference_that_is_there(digits, tmp_path, capsys):
    given = [*digits[:3], "--members", digits[3].partition("=")[2], "--reference", "train:50"]
    assert cli.main(["score", str(tmp_path / "run"), *given]) == 2
    assert "reference must be a model, got train:50: train it first, with dime-jax reference" in capsys.readouterr().err


def test_a_function_is_refused_before_any_image_is_read(tmp_path):
    unread = dj.data.Source("unread", [str(i) for i in range(99)], lambda index: pytest.fail("read"))
    asked = config(tmp_path, model=MODEL, heldout=unread, candidates=unread, reference="train:50", attacks=None)
    with pytest.raises(ValueError, match="no reference can be trained for memoriser: it is a Python object"):
        auditing.audit(asked)


def test_without_the_extra_training_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "dime_jax.training")
    with pytest.raises(
        ImportError, match=re.escape("training needs the extra dime_jax[train], which is not installed")
    ):
        import dime_jax.training  # noqa: F401
