import io
import json
import pathlib
import subprocess
import sys

import imagehash
import numpy as np
import pytest
from PIL import Image

from dime_jax import data
from dime_jax.data import duplicates
from dime_jax.data.groups import ALONE


def pictures(n, size=48, seed=0):
    """Smooth random pictures: noise at 6x6, enlarged."""
    small = np.random.default_rng(seed).integers(0, 256, (n, 6, 6, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(s).resize((size, size), Image.Resampling.BICUBIC)) for s in small])


def as_source(images):
    return data.Source("pictures", [f"p{i}" for i in range(len(images))], lambda i: images[i])


def jpeg(image, quality):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer))


def resized(image, size):
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(
    "images", [pictures(200), np.random.default_rng(1).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)]
)
def test_hashes_are_imagehashs(images):
    grey = np.stack(
        [np.asarray(Image.fromarray(i).convert("L").resize((32, 32), Image.Resampling.LANCZOS)) for i in images]
    )
    expected = [str(imagehash.phash(Image.fromarray(image))) for image in images]
    assert [f"{h:016x}" for h in duplicates.perceptual_hashes(grey).byteswap()] == expected


def test_hashes_of_digits_are_imagehashs():
    source = data.open_source("digits")
    images = [Image.fromarray(source[i].image[..., 0]) for i in range(300)]
    grey = np.stack([np.asarray(image.resize((32, 32), Image.Resampling.LANCZOS)) for image in images])
    expected = [str(imagehash.phash(image)) for image in images]
    assert [f"{h:016x}" for h in duplicates.perceptual_hashes(grey).byteswap()] == expected


def test_exact_and_near_copies_are_found_and_nothing_else():
    base = pictures(60)
    copies = [
        base[0],
        base[0],
        jpeg(base[1], 60),
        resized(base[2], 100),
        np.clip(base[3].astype(int) + 6, 0, 255).astype(np.uint8),
    ]
    found = data.find_duplicates(as_source([*base, *copies]))
    assert sorted(map(tuple, found.exact)) == [(0, 60), (0, 61)]
    assert sorted(map(tuple, found.near)) == [(1, 62), (2, 63), (3, 64)]
    clusters = {frozenset(np.flatnonzero(found.groups == g)) for g in set(found.groups) - {ALONE}}
    assert clusters == {frozenset({0, 60, 61}), frozenset({1, 62}), frozenset({2, 63}), frozenset({3, 64})}


def test_exact_pairs_equal_a_naive_comparison():
    images = np.random.default_rng(0).integers(0, 2, (120, 2, 2, 1), dtype=np.uint8) * 255
    found = data.find_duplicates(as_source(images), max_distance=0, max_rms=0)
    for i in range(120):
        same = [j for j in range(120) if np.array_equal(images[i], images[j])]
        together = np.flatnonzero(found.groups == found.groups[i]) if found.groups[i] != ALONE else [i]
        assert list(together) == same


@pytest.mark.parametrize("max_distance", [0, 1, 2, 3, 6, 7, 14, 15, 30, 64])
def test_near_pairs_equal_a_naive_comparison(monkeypatch, max_distance):
    monkeypatch.setattr(duplicates, "_PAIRS_AT_ONCE", 500)  # several blocks
    rng = np.random.default_rng(0)
    # Around few centres, so that there are pairs at every distance; and a bucket that holds more than a block.
    flips = rng.random((90, 64)) < rng.choice([0.0, 0.02, 0.05, 0.2], (90, 1))
    hashes = rng.integers(0, 2**64, 3, dtype=np.uint64)[rng.integers(0, 3, 90)]
    hashes ^= np.packbits(flips, axis=1).view(np.uint64)[:, 0]
    thumbnails = rng.integers(0, 40, (90, 12), dtype=np.uint8)
    expected = [
        (i, j)
        for i in range(90)
        for j in range(i + 1, 90)
        if (int(hashes[i]) ^ int(hashes[j])).bit_count() <= max_distance
        and np.sqrt(np.mean((thumbnails[i].astype(float) - thumbnails[j]) ** 2)) <= 16
    ]
    assert list(map(tuple, duplicates._near_pairs(hashes, thumbnails, max_distance, 16.0).tolist())) == expected
    assert len(expected) > 10


def all_close_pairs(hashes, max_distance):
    return [
        (i, j)
        for i in range(len(hashes))
        for j in i + 1 + np.flatnonzero(np.bitwise_count(hashes[i] ^ hashes[i + 1 :]) <= max_distance)
    ]


def test_pairs_of_close_hashes_are_found_once_and_completely_among_pictures():
    grey = np.stack([np.asarray(Image.fromarray(one).convert("L")) for one in pictures(400, size=32)])
    noisy = np.clip(grey + np.random.default_rng(1).normal(0, 8, grey.shape), 0, 255).astype(np.uint8)
    hashes = duplicates.perceptual_hashes(np.concatenate([grey, noisy, grey // 2]))
    found = np.concatenate(list(duplicates._close_hashes(hashes, duplicates.MAX_DISTANCE)))
    assert sorted(map(tuple, found.tolist())) == all_close_pairs(hashes, duplicates.MAX_DISTANCE)
    assert len(found) > 800


@pytest.mark.slow
def test_200_000_images_take_less_than_two_minutes_and_two_gigabytes():
    """Hashing included; on the first 5,000, the pairs are those of comparing all with all."""
    script = pathlib.Path(__file__).with_name("many_pictures.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    print(measured)
    assert measured["images"] == 200_000
    assert measured["pairs"] >= measured["planted"] == 2_000
    assert measured["same_as_all_pairs"]
    assert measured["seconds"] < 120
    assert measured["gigabytes"] < 2


def test_digits_do_not_chain_into_one_cluster():
    source = data.open_source("digits")
    assert np.all(data.find_duplicates(source).groups == ALONE)
    loose = data.find_duplicates(source, max_distance=8, max_rms=255)
    assert max(np.bincount(loose.groups[loose.groups != ALONE])) >= 100  # by the hash alone they would


def test_flat_images_of_different_brightness_are_not_duplicates():
    images = [np.full((32, 32, 3), v, np.uint8) for v in (0, 60, 120, 123, 255)]
    found = data.find_duplicates(as_source(images))
    assert sorted(map(tuple, found.near)) == [(2, 3)]


def test_only_the_given_images_are_compared_and_groups_cover_the_source():
    base = pictures(10)
    source = as_source([*base, base[0], base[1]])
    found = data.find_duplicates(source, [0, 5, 10])
    assert found.exact.tolist() == [[0, 10]]
    assert len(found.groups) == 12
    assert found.groups[1] == found.groups[11] == ALONE


def test_float_images_are_compared_too():
    images = pictures(5).astype(np.float32) / 127.5 - 1
    found = data.find_duplicates(as_source([*images, images[2], images[3] * 0.99]))
    assert (found.exact.tolist(), found.near.tolist()) == ([[2, 5]], [[3, 6]])


def test_bad_images_have_no_duplicates():
    base = pictures(150)

    def read(index):
        if index == 3:
            raise data.BadImage("is broken")
        return base[index % 149]

    found = data.find_duplicates(data.Source("x", [f"p{i}" for i in range(150)], read))
    assert found.exact.tolist() == [[0, 149]]


def test_report_and_removal():
    base = pictures(40)
    # 0 = 20 across member/held-out; 1 = 2 both members; 39 = 0 again.
    images = [*base]
    images[20], images[2], images[39] = base[0], base[1], base[0]
    source = as_source(images)
    split = data.Split(np.arange(20), np.arange(20, 40))
    found = data.find_duplicates(source)
    report = data.report_duplicates(found, split)
    assert report == data.DuplicateReport(3, 0, 2, 3, 1, None)
    clean = data.remove_shared(split, found.groups)
    assert set(split.member) - set(clean.member) == {0}
    assert set(split.heldout) - set(clean.heldout) == {20, 39}
    halves = data.halves(split, source.ids, groups=found.groups)
    assert data.report_duplicates(found, split, halves).across_calibration_test == 0
    cut = data.Halves(data.Split([0, 1], [21]), data.Split([2], [20]))
    assert data.report_duplicates(found, split, cut).across_calibration_test == 2


def test_bad_thresholds_are_refused():
    with pytest.raises(ValueError, match="max_distance must be >= 0, got -1"):
        data.find_duplicates(data.open_source("digits"), max_distance=-1)
