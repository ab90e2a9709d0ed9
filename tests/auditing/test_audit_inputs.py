"""What an audit is given: traps are answered in one line, before any query."""

import numpy as np
import pytest
from memoriser import SHAPE, config, images, memoriser, source
from PIL import Image

import dime_jax as dj
from dime_jax import auditing
from dime_jax.auditing import images as audit_images

MODEL = memoriser(images(30, 0))
MEMBERS, HELDOUT = source(images(60, 0), "m"), source(images(60, 1), "h")


def opened(tmp_path, **settings):
    return audit_images.open_images(config(tmp_path, **settings), MODEL)


def folder(path, pixels):
    path.mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(path / f"{number:03}.png")
    return str(path)


def test_roles_are_joined_in_one_source(tmp_path):
    candidates = source(images(5, 2), "c", ids=[f"x{i}" for i in range(5)])
    found = opened(tmp_path, members=MEMBERS, heldout=HELDOUT, candidates=candidates)
    assert [found.source.ids[i] for i in found.candidates] == [f"candidates/x{i}" for i in range(5)]
    np.testing.assert_array_equal(found.source[int(found.split.heldout[0])].image, HELDOUT[0].image)
    np.testing.assert_array_equal(found.source[int(found.candidates[3])].image, candidates[3].image)
    assert found.warnings == []


def test_ids_of_candidates_do_not_hang_on_names_of_others(tmp_path):
    """Draws follow from ids: a name that the held-out images have too must not change those of other candidates."""
    ids = [f"x{i}" for i in range(4)]
    for last in ("x4", HELDOUT.ids[0], f"heldout/{HELDOUT.ids[0]}"):
        found = opened(tmp_path, heldout=HELDOUT, candidates=source(images(5, 2), "c", ids=[*ids, last]))
        assert [found.source.ids[i] for i in found.candidates] == [f"candidates/{id}" for id in [*ids, last]]


def test_each_source_keeps_its_own_preprocessing(tmp_path):
    digits = dj.data.open_source("digits")
    found = opened(tmp_path, members=digits, heldout=HELDOUT)
    transform = dj.data.transform_for(found.source, SHAPE)
    np.testing.assert_allclose(
        transform(found.source[7].image), digits[7].image.astype(np.float32) / 127.5 - 1, atol=1e-6
    )


def test_the_same_folder_twice_is_refused(tmp_path):
    place = folder(tmp_path / "a", images(30, 0))
    with pytest.raises(ValueError, match=r"--members and --heldout must be different images, but 30 of 30"):
        opened(tmp_path, members=place, heldout=place)
    with pytest.raises(ValueError, match="--heldout and --candidates must be different images, but 60 of 60"):
        opened(tmp_path, members=MEMBERS, heldout=HELDOUT, candidates=HELDOUT)
    with pytest.raises(ValueError, match="--members and --candidates must be different images, but 30 of 30"):
        opened(tmp_path, members=place, heldout=HELDOUT, candidates=place)


def test_copies_across_roles_are_left_out_with_a_warning(tmp_path):
    heldout = source(np.concatenate([images(60, 1), images(60, 0)[:3]]), "h")
    candidates = source(np.concatenate([images(60, 0)[10:12], images(60, 1)[:1], images(20, 5)]), "c")
    found = opened(tmp_path, members=MEMBERS, heldout=heldout, candidates=candidates)
    assert (len(found.split.member), len(found.split.heldout)) == (60 - 3 - 2, 60 - 1)
    assert found.duplicates.across_member_heldout == 3
    assert (found.duplicates.candidates_among_members, found.duplicates.candidates_among_heldout) == (2, 1)
    assert [warning.split()[0] for warning in found.warnings] == ["6", "2", "1"]


def test_fewer_than_twenty_images_are_refused(tmp_path):
    few = source(images(19, 3), "few")
    with pytest.raises(ValueError, match="members must be at least 20, got 19"):
        opened(tmp_path, members=few, heldout=HELDOUT)
    with pytest.raises(ValueError, match="held-out images must be at least 20, got 19"):
        opened(tmp_path, members=MEMBERS, heldout=few)


def test_images_of_the_wrong_size(tmp_path):
    small, large = source(images(30, 3, (6, 8, 1)), "small"), source(images(30, 4, (16, 12, 1)), "large")
    with pytest.raises(
        ValueError,
        match=r"too many members that .* must be <= 10% of 30, got 30, such as .*: is 6x8, smaller than the model's",
    ):
        opened(tmp_path, members=small, heldout=HELDOUT)
    found = opened(tmp_path, members=large, heldout=HELDOUT)
    assert "30 of 30 members were resized to the model's 8x8 (most are 16x12)" in found.warnings[0]
    assert "members and held-out images come in different sizes" in found.warnings[1]


def test_a_class_conditional_model_needs_labels(tmp_path):
    model = memoriser(images(30, 0), num_classes=10)
    settings = config(tmp_path, members=MEMBERS, heldout=HELDOUT)
    with pytest.raises(ValueError, match="is class-conditional: all images need class labels"):
        audit_images.open_images(settings, model)
    ids = [f"members/{id}" for id in MEMBERS.ids] + [f"heldout/{id}" for id in HELDOUT.ids]
    lines = [f"{id},{number % 10}" for number, id in enumerate(ids)]
    labels = tmp_path / "labels.csv"
    labels.write_text("\n".join(["id,label", *lines]))
    settings = config(tmp_path, members=MEMBERS, heldout=HELDOUT, labels=labels)
    found = audit_images.open_images(settings, model)
    assert found.source.labels[63] == 3
    labels.write_text("\n".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"has no label for 'heldout/h-00059'"):
        audit_images.open_images(settings, model)
    labels.write_text("a,b")
    with pytest.raises(ValueError, match=r"lines of .* must be id,label, got"):
        audit_images.open_images(settings, model)


def test_more_images_than_the_profile_uses_are_not_opened(tmp_path):
    reads = []
    pixels = images(200, 3)

    def read(index):
        reads.append(index)
        return pixels[index]

    many = dj.data.Source("many", [f"{i}" for i in range(200)], read)
    found = opened(tmp_path, members=many, heldout=HELDOUT, calibration_size=10, test_size=15)
    assert len(found.split.member) == 30
    assert set(reads) == set(found.split.member.tolist())


def test_held_out_images_are_needed_for_other_shapes_than_the_example(tmp_path):
    model = dj.Denoiser.from_function(lambda x, t: x, dj.linear_schedule(), (32, 32, 3))
    with pytest.raises(ValueError, match=r"--heldout is missing: .* but this model takes \[32, 32, 3\]"):
        audit_images.open_images(config(tmp_path, members=MEMBERS), model)


def test_nobody_knows_the_members_of_another_model_of_the_examples_shape(tmp_path):
    with pytest.raises(
        ValueError, match=r"heldout must be given, and members if you know any: no split\.npz beside the model"
    ):
        opened(tmp_path, members=MEMBERS)


def test_without_members_all_held_out_images_are_used(tmp_path):
    found = opened(tmp_path, heldout=HELDOUT, candidates=source(images(5, 2), "c"), calibration_size=10, test_size=10)
    assert len(found.split.heldout) == 60


def test_nothing_to_find(tmp_path):
    with pytest.raises(ValueError, match="give --candidates or --members"):
        opened(tmp_path, heldout=HELDOUT)


def test_a_split_file_names_members_and_held_out_images(tmp_path):
    dj.data.write_split(tmp_path / "split.npz", dj.data.Split(np.arange(30), np.arange(30, 60)))
    found = opened(tmp_path, images=MEMBERS, split=tmp_path / "split.npz")
    np.testing.assert_array_equal(found.split.heldout, np.arange(30, 60))


def test_classes_by_folder_name_must_be_the_same_everywhere(tmp_path):
    """A folder that lacks a class would number all the others differently: images would be asked under wrong labels."""
    for role, classes in {"members": "abc", "heldout": "bc"}.items():
        for name in classes:
            (tmp_path / role / name).mkdir(parents=True)
            for number, pixels in enumerate(images(20, (ord(name), len(classes)))):
                Image.fromarray(pixels[..., 0]).save(tmp_path / role / name / f"{number}.png")
    model = memoriser(images(20, 0), num_classes=3, labels=np.zeros(20, np.int32))
    roles = {role: str(tmp_path / role) for role in ("members", "heldout")}
    with pytest.raises(ValueError, match=r"is class-conditional: .*must have the same names everywhere"):
        auditing.audit(config(tmp_path / "audit", model=model, **roles))
    with pytest.raises(ValueError, match="there must be 3 folders of classes, as many as memoriser has classes, got 2"):
        auditing.audit(config(tmp_path / "audit", model=model, **{**roles, "members": roles["heldout"]}))
