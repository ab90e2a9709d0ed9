import concurrent.futures
import dataclasses
import pickle
import subprocess
import sys
import tarfile

import miniatures
import numpy as np
import pytest
from miniatures import Cifar, encoded

from dime_jax import data


@pytest.fixture
def cifar10():
    return Cifar(files=6, n=7, classes=10, seed=0)


@pytest.fixture
def cifar100():
    return Cifar(files=2, n=30, classes=100, seed=1)


def random_images(n, height=32, width=32, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def write_images(root, names, images=None):
    images = random_images(len(names)) if images is None else images
    for name, image in zip(names, images):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(image))
    return images


def assert_same(source, images, labels):
    assert len(source) == len(images)
    for i, item in enumerate(source[i] for i in range(len(source))):
        np.testing.assert_array_equal(item.image, images[i])
        assert item.image.dtype == np.uint8
        assert item.label == labels[i]


# --- CIFAR ---


@pytest.mark.parametrize("write", [miniatures.write_cifar10_binary, miniatures.write_cifar10_python])
def test_cifar10_pixels_labels_and_order(write, cifar10, tmp_path):
    folder = write(cifar10, tmp_path / "batches")
    source = data.open_source(f"cifar10:{folder}")
    assert_same(source, cifar10.train, cifar10.train_labels)
    assert source.ids[6] == "train_00006"
    assert_same(data.open_source(f"cifar10:{folder}?split=test"), cifar10.images[5], cifar10.labels[5])


@pytest.mark.parametrize("binary", [True, False])
def test_cifar100_uses_fine_labels(binary, cifar100, tmp_path):
    folder = miniatures.write_cifar100(cifar100, tmp_path / "cifar", binary=binary)
    assert_same(data.open_source(f"cifar100:{folder}"), cifar100.train, cifar100.train_labels)


def test_cifar10_from_the_archive_itself_and_from_the_folder_above(cifar10, tmp_path):
    miniatures.write_cifar10_binary(cifar10, tmp_path / "cifar-10-batches-bin")
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
    for place in (tmp_path, tmp_path / "cifar-10-binary.tar.gz"):
        assert_same(data.open_source(str(place)), cifar10.train, cifar10.train_labels)


def test_cifar_batches_of_any_size_keep_file_order(cifar10, tmp_path):
    folder = miniatures.write_cifar10_binary(cifar10, tmp_path / "b")
    (folder / "data_batch_2.bin").write_bytes((folder / "data_batch_2.bin").read_bytes()[:3073])
    source = data.open_source(f"cifar10:{folder}")
    np.testing.assert_array_equal(source[7].image, cifar10.images[1, 0])
    np.testing.assert_array_equal(source[8].image, cifar10.images[2, 0])


def test_truncated_and_missing_cifar_files_are_refused(cifar10, tmp_path):
    folder = miniatures.write_cifar10_binary(cifar10, tmp_path / "b")
    content = (folder / "data_batch_3.bin").read_bytes()
    (folder / "data_batch_3.bin").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"the size of data_batch_3.bin must be a multiple of 3073 bytes, got 21510"):
        data.open_source(f"cifar10:{folder}")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"must hold data_batch_1, .* all with .bin"):
        data.open_source(f"cifar10:{folder}")


def test_a_full_size_set_with_one_short_file_is_refused(tmp_path):
    for i in range(1, 6):
        records = 9_999 if i == 4 else 10_000
        with open(tmp_path / f"data_batch_{i}.bin", "wb") as file:
            file.truncate(records * 3073)  # sparse: nothing is written
    with pytest.raises(ValueError, match=r"each file of .* must hold 10000 images, .* truncated"):
        data.open_source(f"cifar10:{tmp_path}")


class _Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize(
    "content",
    [
        lambda path: pickle.dumps({b"data": _Touch(path), b"labels": [1]}, protocol=2),
        lambda path: b"\x80\x02cos\nsystem\n(U\x05touchtR.",
        lambda path: b"\x80\x02cbuiltins\neval\n(U\x031+1tR.",
        lambda path: b"",
        lambda path: pickle.dumps({b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 2]}, protocol=2),
        lambda path: pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, protocol=2),
    ],
)
def test_hostile_or_broken_python_batches_are_refused_and_run_nothing(content, cifar10, tmp_path):
    folder = miniatures.write_cifar10_python(cifar10, tmp_path / "b")
    (folder / "data_batch_1").write_bytes(content(tmp_path / "touched"))
    with pytest.raises(ValueError, match="data_batch_1"):
        data.open_source(f"cifar10:{folder}")
    assert not (tmp_path / "touched").exists()


# --- TFDS ---


def test_secmi_indices_select_the_same_images_through_the_archive_and_through_tfds(cifar10, tmp_path):
    folder = miniatures.write_cifar10_binary(cifar10, tmp_path / "b")
    examples = [
        {"id": f"train_{i:05d}", "image": image, "label": int(label)}
        for i, (image, label) in enumerate(zip(cifar10.train, cifar10.train_labels))
    ]
    miniatures.prepare_tfds(tmp_path / "tfds", "cifar10", ("id", "image", "label"), examples)
    np.savez(tmp_path / "split.npz", mia_train_idxs=np.arange(0, 35, 2), mia_eval_idxs=np.arange(1, 35, 2), ratio=0.5)
    archive = data.open_source(f"cifar10:{folder}")
    prepared = data.open_source(f"tfds:cifar10?data_dir={tmp_path / 'tfds'}")
    for source in (archive, prepared):
        split = data.read_split(tmp_path / "split.npz", source)
        for index in split.member:
            np.testing.assert_array_equal(source[index].image, cifar10.train[index])
            assert source[index].label == cifar10.train_labels[index]
    assert prepared.transform == "cifar"
    assert data.fingerprint(archive) == data.fingerprint(prepared)


def test_tfds_really_shuffled_the_records(cifar10, tmp_path):
    import tensorflow_datasets as tfds

    examples = [{"id": f"train_{i:05d}", "image": image, "label": 0} for i, image in enumerate(cifar10.train)]
    miniatures.prepare_tfds(tmp_path, "cifar10", ("id", "image", "label"), examples)
    stored = [r["id"].decode() for r in tfds.data_source("cifar10", split="train", data_dir=tmp_path, download=False)]
    assert stored != sorted(stored)


def test_tfds_without_ids_names_images_by_content_and_refuses_indices(tmp_path):
    images = random_images(12, 96, 96)
    examples = [{"image": image, "label": -1} for image in [*images, images[0]]]
    miniatures.prepare_tfds(tmp_path / "a", "stl10", ("image", "label"), examples)
    miniatures.prepare_tfds(tmp_path / "b", "stl10", ("image", "label"), examples[::-1])
    first, second = (data.open_source("tfds:stl10", data_dir=tmp_path / name) for name in "ab")
    assert first.ids == second.ids
    assert len(set(first.ids)) == 13
    assert first.labels is None
    assert {first[i].image.tobytes() for i in range(13)} == {image.tobytes() for image in images}
    with pytest.raises(ValueError, match="stl10 in TFDS has no ids"):
        data.random_split(first, 3)


def test_tfds_identities_and_file_names(tmp_path):
    images = random_images(3, 60, 50)
    examples = [
        {"image": image, "identity": {"Identity_No": 7 * i}, "file_name": f"{i}.jpg"} for i, image in enumerate(images)
    ]
    miniatures.prepare_tfds(tmp_path, "faces", ("image", "identity", "file_name"), examples)
    source = data.open_source("tfds:faces", data_dir=tmp_path)
    assert [source[i].identity for i in range(3)] == [0, 7, 14]
    assert list(source.ids) == ["0.jpg", "1.jpg", "2.jpg"]


def test_reading_tfds_does_not_import_tensorflow(cifar10, tmp_path):
    miniatures.prepare_tfds(tmp_path, "mine", ("image",), [{"image": cifar10.train[0]}])
    code = (
        "import sys; from dime_jax import data;"
        f"print(data.open_source('tfds:mine', data_dir={str(tmp_path)!r})[0].image.shape, 'tensorflow' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "(32, 32, 3) False"


def test_unprepared_tfds_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"cifar10 .split train. is not prepared as array_record") as error:
        data.open_source("tfds:cifar10", data_dir=tmp_path)
    assert "\n" not in str(error.value)


# --- STL-10, CelebA, ImageNet, ImageNetV2 ---


def test_stl10_is_column_major(tmp_path):
    images = random_images(5, 96, 96)
    with open(tmp_path / "unlabeled_X.bin", "wb") as file:
        for image in images:
            for channel in range(3):
                for column in range(96):
                    file.write(image[:, column, channel].tobytes())
    for place in (tmp_path, tmp_path / "unlabeled_X.bin"):
        source = data.open_source(f"stl10u:{place}")
        for i in range(5):
            np.testing.assert_array_equal(source[i].image, images[i])
    assert source.ids[4] == "unlabeled_00004"
    (tmp_path / "unlabeled_X.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"multiple of 27648 bytes, got 3"):
        data.open_source(f"stl10u:{tmp_path}")


def write_celeba(root):
    names = [f"{i:06d}.jpg" for i in range(1, 9)]
    images = write_images(root / "img_align_celeba", names, random_images(8, 218, 178))
    (root / "list_eval_partition.txt").write_text(
        "".join(f"{n} {p}\n" for n, p in zip(names, [0, 0, 1, 0, 2, 0, 1, 0]))
    )
    # In the published file the identities come in the same order; here they do not, which must not matter.
    identity = dict(zip(names, [2880, 2937, 8692, 5805, 9295, 2880, 9040, 6369]))
    (root / "identity_CelebA.txt").write_text("".join(f"{n} {identity[n]}\n" for n in reversed(names)))
    return images


def test_celeba_partitions_identities_and_order(tmp_path):
    images = write_celeba(tmp_path)
    source = data.open_source(f"celeba:{tmp_path}")
    assert list(source.ids) == ["000001.jpg", "000002.jpg", "000004.jpg", "000006.jpg", "000008.jpg"]
    assert [source[i].identity for i in range(5)] == [2880, 2937, 5805, 2880, 6369]
    np.testing.assert_array_equal(source[2].image, images[3])
    assert list(data.open_source(f"celeba:{tmp_path}", split="valid").ids) == ["000003.jpg", "000007.jpg"]
    assert len(data.open_source(f"celeba:{tmp_path}?split=all")) == 8


def test_celeba_without_an_identity_is_refused(tmp_path):
    write_celeba(tmp_path)
    lines = (tmp_path / "identity_CelebA.txt").read_text().splitlines()
    (tmp_path / "identity_CelebA.txt").write_text("\n".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"image '000001.jpg' of .* has no identity"):
        data.open_source(f"celeba:{tmp_path}")
    (tmp_path / "identity_CelebA.txt").write_text("000001.jpg\n")
    with pytest.raises(
        ValueError, match=r"identity_CelebA.txt line 1 must be a new file name and a number, got '000001.jpg'"
    ):
        data.open_source(f"celeba:{tmp_path}")


def test_imagenet_labels_do_not_depend_on_which_folders_are_there(tmp_path):
    # Published: tench is class 0, goldfish 1, toilet tissue 999.
    write_images(tmp_path / "train", ["n15075141/a.png", "n01443537/b.png", "n01440764/c.png"])
    for place in (tmp_path, tmp_path / "train"):
        source = data.open_source(f"imagenet:{place}")
        assert dict(zip(source.ids, source.labels)) == {
            "n01440764/c.png": 0,
            "n01443537/b.png": 1,
            "n15075141/a.png": 999,
        }
    write_images(tmp_path / "train", ["n00000001/a.png"])
    with pytest.raises(ValueError, match=r"1000 wnids .* 'n00000001'"):
        data.open_source(f"imagenet:{tmp_path}")


def test_imagenetv2_all_1000_folders_are_right_and_as_published_gets_12(tmp_path):
    content = encoded(random_images(1)[0])
    for i in range(1000):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / f"{i}.png").write_bytes(content)
    source = data.open_source(f"imagenetv2:{tmp_path}")
    truth = np.array([int(i.split("/")[0]) for i in source.ids])
    np.testing.assert_array_equal(source.labels, truth)
    assert source[1].label == int(source[1].id.split("/")[0])
    with pytest.warns(UserWarning, match="12 of 1000 right"):
        published = data.open_source(f"imagenetv2:{tmp_path}?labels=as_published")
    assert np.sum(published.labels == truth) == 12
    np.testing.assert_array_equal(data.open_source(f"folder:{tmp_path}").labels, truth)


def test_imagenetv2_with_some_folders(tmp_path):
    write_images(tmp_path, ["7/a.png", "10/b.png", "999/c.png"])
    source = data.open_source(f"imagenetv2:{tmp_path}")
    assert dict(zip(source.ids, source.labels)) == {"7/a.png": 7, "10/b.png": 10, "999/c.png": 999}
    write_images(tmp_path, ["1000/a.png"])
    with pytest.raises(ValueError, match=r"must be named 0 to 999, got '1000'"):
        data.open_source(f"imagenetv2:{tmp_path}")


# --- folders, arrays, digits ---


def test_folder_ids_labels_and_order(tmp_path):
    images = write_images(tmp_path, ["cat/2.png", "cat/10.png", "dog/sub/1.png"])
    (tmp_path / "notes.txt").write_text("not an image")
    source = data.open_source(str(tmp_path))
    assert list(source.ids) == ["cat/10.png", "cat/2.png", "dog/sub/1.png"]
    assert list(source.labels) == [0, 0, 1]
    np.testing.assert_array_equal(source[1].image, images[0])
    write_images(tmp_path, ["loose.png"])
    assert data.open_source(str(tmp_path)).labels is None


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^no images \(.*\) in "):
        data.open_source(f"folder:{tmp_path}")


@pytest.mark.parametrize("as_float", [lambda v: v / 255, lambda v: v / 127.5 - 1, lambda v: v])
def test_arrays_that_are_8_bit_in_disguise_come_back_as_uint8(as_float, tmp_path):
    images = random_images(10)
    np.savez(tmp_path / "a.npz", images=as_float(images), labels=np.arange(10))
    source = data.open_source(str(tmp_path / "a.npz"))
    assert_same(source, images, np.arange(10))
    np.save(tmp_path / "a.npy", as_float(images))
    np.testing.assert_array_equal(data.open_source(f"npz:{tmp_path / 'a.npy'}")[3].image, images[3])


def test_other_float_arrays_stay_float_on_the_model_scale(tmp_path):
    values = np.random.default_rng(0).uniform(0, 1, (20, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "a.npz", values, ids=[f"img{i}" for i in range(20)])
    source = data.open_source(str(tmp_path / "a.npz"), images="arr_0")
    np.testing.assert_allclose(source[2].image, 2 * values[2][..., None] - 1, atol=1e-6)
    assert source[2].id == "img2"


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 8, 8, 4), np.uint8), "1 or 3 channels"),
        (np.zeros((2, 8), np.uint8), r"must have shape \[\*, \*, \*, \*\]"),
        (np.zeros((2, 8, 8, 1), np.int64), "uint8 or floats, got int64"),
        (np.full((2, 8, 8, 1), 0.5), "fill"),
        (np.zeros((0, 8, 8, 1), np.uint8), "npz must have at least one image"),
        (np.array([None]), "without pickled objects"),
    ],
)
def test_unusable_arrays_are_refused(array, message, tmp_path):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        data.open_source(str(tmp_path / "a.npy"))


def test_unknown_keys_and_repeated_ids_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", foo=random_images(2), bar=np.zeros(2))
    with pytest.raises(ValueError, match="has no key images or x or data, only foo, bar"):
        data.open_source(str(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", images=random_images(2), ids=["x", "x"])
    with pytest.raises(ValueError, match="ids in npz must be unique, got 'x'"):
        data.open_source(str(tmp_path / "b.npz"))


def test_digits_can_be_undone():
    from sklearn.datasets import load_digits

    source = data.open_source("digits")
    assert len(source) == 1797
    item = source[42]
    assert (item.id, item.image.shape, item.image.dtype, item.identity) == ("digits-00042", (8, 8, 1), np.uint8, None)
    assert item.label == load_digits().target[42]
    np.testing.assert_array_equal(np.round(item.image[..., 0] * (16 / 255)), load_digits().images[42])


# --- opening and joining ---


def test_unknown_uris_list_the_choices():
    with pytest.raises(ValueError, match=r"folder:, npz:, tfds:, cifar10:, .* imagenetv2:.*; got 'cifar11:x'"):
        data.open_source("cifar11:x")
    with pytest.raises(ValueError, match="unknown option 'spilt' for cifar10; expected one of split"):
        data.open_source("cifar10:x?spilt=test")
    with pytest.raises(ValueError, match="unknown split 'tset'; expected one of train, test"):
        data.open_source("cifar10:x?split=tset")
    with pytest.raises(ValueError, match="as in cifar10:PLACE, got"):
        data.open_source("cifar10")
    with pytest.raises(ValueError, match=r"'/nowhere' is not a folder or .tar.gz of cifar10"):
        data.open_source("cifar10:/nowhere")


def test_a_question_mark_in_a_path_is_part_of_the_path(tmp_path):
    write_images(tmp_path / "what?", ["a.png"])
    assert len(data.open_source(f"folder:{tmp_path / 'what?'}")) == 1


def test_index_out_of_range():
    source = data.open_source("digits")
    for index in (-1, 1797):
        with pytest.raises(IndexError, match="must be >= 0 and < 1797"):
            source[index]


def test_joined_sources_keep_equal_names_apart(tmp_path):
    first = write_images(tmp_path / "a", ["0/x.png", "1/y.png"])
    second = write_images(tmp_path / "b", ["0/x.png"], random_images(1, seed=9))
    members, heldout = (data.open_source(str(tmp_path / name)) for name in "ab")
    joined = data.join(members, heldout)
    split = data.split_of_joined(members, heldout)
    assert list(joined.ids) == ["members/0/x.png", "members/1/y.png", "heldout/0/x.png"]
    assert list(joined.labels) == [0, 1, 0]
    np.testing.assert_array_equal(joined[split.member[1]].image, first[1])
    np.testing.assert_array_equal(joined[split.heldout[0]].image, second[0])
    with pytest.raises(ValueError, match="it joins two sources"):
        split.check(joined)


def test_reading_from_many_threads(tmp_path):
    images = write_images(tmp_path, [f"{i:03d}.png" for i in range(64)], random_images(64))
    source = data.open_source(f"folder:{tmp_path}")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        items = list(pool.map(source.__getitem__, [*range(64)] * 4))
    for position, item in enumerate(items):
        np.testing.assert_array_equal(item.image, images[position % 64])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 4, 4, 1), np.int64), "images of mine must be uint8 or floats, got int64: convert 0..255"),
        (
            np.linspace(0, 1, 32).reshape(2, 4, 4, 1),
            r"images of mine must be in \[-1, 1\], got values from 0 to 1: scale",
        ),
        (
            np.linspace(0, 255, 32).reshape(2, 4, 4, 1),
            r"images of mine must be in \[-1, 1\], got values from 0 to 255",
        ),
    ],
)
def test_arrays_on_another_scale_are_refused(images, message):
    with pytest.raises(ValueError, match=message):
        data.from_images(images, name="mine")


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "1 of 16 values are NaN or infinite"), (3.0, r"values must be in \[-1, 1\], got 0 to 3")],
)
def test_one_bad_array_among_good_ones_is_a_bad_image(value, message):
    images = np.zeros((3, 4, 4, 1), np.float32)
    images[1, 2, 3] = value
    images[2] = -1
    source = data.from_images(images)
    with pytest.raises(data.BadImage, match=message):
        source[1]
    np.testing.assert_array_equal(source[2].image, images[2])


def test_some_images_are_taken_with_all_that_is_known_of_them():
    digits = data.open_source("digits")
    captioned = dataclasses.replace(
        digits, captions=[f"a {label}" for label in digits.labels], identities=np.arange(len(digits)), parts=(digits,)
    )
    taken = captioned.take(np.array([5, 2]))
    assert [taken[place]._replace(image=0) for place in range(2)] == [captioned[i]._replace(image=0) for i in (5, 2)]
    np.testing.assert_array_equal(taken[1].image, digits[2].image)
    assert taken.parts == ()
    twice = captioned.take(np.array([5, 5]), ids=["one", "two"])
    assert list(twice.ids) == ["one", "two"]
    assert twice[1].caption == captioned[5].caption
