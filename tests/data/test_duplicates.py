import io
import itertools
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import scipy.fft
import scipy.ndimage
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from dime_jax import data
from dime_jax.data import duplicates, near_copies
from dime_jax.data.groups import ALONE, connect
from experiments.near_copies import CHANGES, find_generated


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


def colour(rng):
    return tuple(np.clip(rng.integers(0, 256) + rng.normal(0, 25, 3), 0, 255).astype(int).tolist())


def leaves(n, size=32, seed=0):
    """Pictures with the statistics of photographs: leaves of all sizes that hide each other, lit from one side."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        image = Image.new("RGB", (4 * size, 4 * size), colour(rng))
        draw = ImageDraw.Draw(image)
        for _ in range(60):
            radius = 0.2 * size / np.sqrt(rng.uniform(0.005, 1))
            (x, y), wide, high = rng.uniform(0, 4 * size, 2), *radius * rng.uniform(0.5, 1, 2)
            draw.ellipse((x - wide, y - high, x + wide, y + high), fill=colour(rng))
        light = np.linspace(*rng.uniform(0.5, 1, 2), size)[:, None, None]
        made.append(np.asarray(image.resize((size, size), Image.Resampling.BOX)) * light)
    return np.stack(made).astype(np.uint8)


def as_pictures(images):
    sketches = [duplicates.sketch(item) for item in map(as_source(images).__getitem__, range(len(images)))]
    grey, thumbnails, sides = ([getattr(one, name) for one in sketches] for name in ("grey", "thumbnail", "side"))
    return near_copies.Pictures(np.stack(grey), np.stack(thumbnails), np.array(sides))


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
    groups = connect(120, data.find_duplicates(as_source(images)).exact)
    for i in range(120):
        same = [j for j in range(120) if np.array_equal(images[i], images[j])]
        together = np.flatnonzero(groups == groups[i]) if groups[i] != ALONE else [i]
        assert list(together) == same


def naive_high_pass(grey):
    high = grey - scipy.ndimage.gaussian_filter(grey, 2, mode="nearest")
    return (high - high.mean()) / max(np.linalg.norm(high - high.mean()), 1e-2)


def naive_details(grey, side):
    high = naive_high_pass(grey)
    power, energy = np.abs(np.fft.fft2(high)) ** 2, high**2
    details = power.sum() ** 2 / (power**2).sum() * energy.sum() ** 2 / (energy**2).sum() / 1024
    return details * min(side / 32, 1) ** 2


def naive_coarse(grey):
    frequency = np.hypot(*np.mgrid[:32, :32])
    kept = (frequency > 0) & (frequency <= 7)
    low = np.append((scipy.fft.dctn(grey, norm="ortho") * frequency)[kept], 60)
    return low / np.linalg.norm(low)


def naive_shifted(grey):
    shifts = [(0, 0), (1.3, 1.3), (1.3, -1.3), (-1.3, 1.3), (-1.3, -1.3)]
    return [naive_coarse(scipy.ndimage.shift(grey, shift, order=1, mode="nearest")) for shift in shifts]


def naive_correlation(one, two):
    def middle(grey):
        image = Image.fromarray(grey.astype(np.float32))
        return np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC, box=(1.5, 1.5, 30.5, 30.5)))

    def best(one, two):
        one, two = naive_high_pass(one), naive_high_pass(two)
        shifts = [(down, right) for down in range(-2, 3) for right in range(-2, 3)]
        return max(np.sum(one * np.roll(two, shift, (0, 1))) for shift in shifts)

    plain = best(one, two)
    return max(plain, best(middle(one), two), best(one, middle(two))) if plain >= 0.35 else plain


def naive_copies(pictures):
    grey, sides = pictures.grey.astype(float), pictures.sides
    shifted = [naive_shifted(one) for one in grey]
    details = [naive_details(one, side) for one, side in zip(grey, sides)]
    found = []
    for i, j in itertools.combinations(range(len(grey)), 2):
        for step in (1, -1):  # as it is, mirrored
            other = grey[j][:, ::step]
            likeness = max(one @ naive_coarse(other) for one in shifted[i])
            first, second = pictures.thumbnails[i].astype(float), pictures.thumbnails[j][:, ::step]
            rms = np.sqrt(np.mean((first - second) ** 2))
            fewer = min(details[i], details[j])
            needed = max(0.75, np.tanh(4.5 / np.sqrt(fewer - 3))) if fewer > 3 else 2
            if (likeness >= 0.9 and rms <= 14 * min(sides[i] / 16, sides[j] / 16, 1)) or (
                likeness >= 0.75 and naive_correlation(grey[i], other) >= needed
            ):
                found.append([i, j])
                break
    return found


def test_near_pairs_equal_a_naive_comparison(monkeypatch):
    for name in ("_ROWS", "_COLUMNS", "_PAIRS"):
        monkeypatch.setattr(near_copies, name, 16)  # several blocks
    rng = np.random.default_rng(0)
    base = [*leaves(6), *(resized(image, 12) for image in leaves(2, seed=1)), *pictures(2)]
    images = base + [CHANGES[kind](image, rng) for image in base for kind in ("mirrored", "brightened", "cropped")]
    compared = as_pictures(images)
    expected = naive_copies(compared)
    assert near_copies.find_near_copies(compared).tolist() == expected
    assert 20 < len(expected) < 60


@pytest.mark.parametrize("kind", ["mirrored", "recoloured", "brightened", "re-encoded", "shifted", "resized"])
@pytest.mark.parametrize("size", [32, 80])
def test_copies_of_each_kind_are_found_and_nothing_else(kind, size):
    base, rng = leaves(60, size), np.random.default_rng(1)
    copies = [CHANGES[kind](image, rng) for image in base[:10]]
    found = data.find_duplicates(as_source([*base, *copies]))
    assert found.near.tolist() == [[i, 60 + i] for i in range(10)]


def test_a_copy_of_another_size_and_aspect_is_found():
    base = leaves(30, 64)
    wide = np.asarray(Image.fromarray(base[4]).resize((90, 50)))
    assert data.find_duplicates(as_source([*base, wide])).near.tolist() == [[4, 30]]


@pytest.mark.slow
def test_copies_among_5_000_pictures_are_found_and_few_others():
    found = find_generated(leaves(5_000))
    print(found)
    assert min(found.copies[kind] for kind in ("mirrored", "recoloured", "brightened", "re-encoded")) >= 184
    assert min(found.copies["shifted"], found.copies["resized"]) >= 184
    assert found.copies["cropped"] >= 150
    assert found.copies["captioned"] >= 60
    assert len(found.pairs) <= 5


def test_shapes_on_a_plain_ground_are_not_copies_of_each_other():
    """Bars correlate whatever they show: with so few details that means nothing."""
    rng = np.random.default_rng(0)
    bars = []
    for _ in range(200):
        image = Image.new("L", (112, 112))
        top, bottom = rng.normal(0, 10, 2)
        ImageDraw.Draw(image).line((56 + top, 20, 56 + bottom, 92), fill=255, width=int(rng.integers(8, 16)))
        bars.append(np.asarray(image.resize((28, 28), Image.Resampling.BOX))[..., None])
    compared = as_pictures(bars)
    found = near_copies.find_near_copies(compared, max_rms=0)
    difference = np.diff(compared.grey[found].astype(float), axis=1)
    assert np.count_nonzero(np.any(difference, axis=(1, 2, 3))) <= 1  # others happen to be the same
    high = near_copies.high_pass(compared.grey.astype(np.float32)).reshape(200, -1)
    assert np.sum(np.triu(high @ high.T, 1) > near_copies.MIN_CORRELATION) > 500  # by correlation alone they would be


def test_pictures_that_are_all_alike_do_not_all_get_a_closer_look(monkeypatch):
    source, looked_at = data.open_source("digits"), []
    compared, confirm = as_pictures([source[i].image for i in range(600)]), near_copies._confirm

    def counted(pictures, some, *rest):
        looked_at.append(len(some.first))
        return confirm(pictures, some, *rest)

    monkeypatch.setattr(near_copies, "_confirm", counted)
    near_copies.find_near_copies(compared)
    everything = sum(looked_at)
    looked_at.clear()
    monkeypatch.setattr(near_copies, "_PROPOSED_AT_LEAST", 0)
    monkeypatch.setattr(near_copies, "_PROPOSED_PER_PICTURE", 2)
    near_copies.find_near_copies(compared)
    assert 600 < sum(looked_at) < 1.5 * 2 * 600 < everything / 3


@pytest.mark.slow
def test_200_000_images_take_minutes_and_less_than_one_and_a_half_gigabytes():
    script = pathlib.Path(__file__).with_name("many_pictures.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    print(measured)
    assert measured["images"] == 200_000
    assert measured["planted"] == 2_000
    assert measured["others"] == 0
    assert measured["processor_seconds"] < 600
    assert measured["gigabytes"] < 1.5


def test_digits_do_not_chain_into_one_cluster():
    source = data.open_source("digits")
    assert np.all(data.find_duplicates(source).groups == ALONE)
    loose = data.find_duplicates(source, max_rms=255)
    assert max(np.bincount(loose.groups[loose.groups != ALONE])) >= 100  # by coarse likeness alone they would


def test_flat_images_of_different_brightness_are_not_duplicates():
    images = [np.full((32, 32, 3), v, np.uint8) for v in (0, 60, 120, 123, 255)]
    spotted = images[0].copy()
    spotted[:4, :4] = 1
    found = data.find_duplicates(as_source([*images, spotted]))
    assert sorted(map(tuple, found.near)) == [(0, 5), (2, 3)]


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
    with pytest.raises(ValueError, match="min_correlation must be >= 0, got -1"):
        data.find_duplicates(data.open_source("digits"), min_correlation=-1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=12), st.integers(1, 9))
def test_others_are_taken_out_again(pairs, n):
    """Against walks from copy to copy: what leads to one that goes is marked, what stays is grouped by itself."""
    pairs = [(min(a, b), max(a, b), same) for a, b, same in pairs if a != b]
    exact, near = (np.array([(a, b) for a, b, same in pairs if same == kind], int).reshape(-1, 2) for kind in (1, 0))
    everything = data.Duplicates(connect(10, np.concatenate([exact, near])), exact, near)

    def reached(start, among):
        found = {start}
        for _ in among:
            found |= {b for a, b, _ in pairs if a in found and {a, b} <= among}
            found |= {a for a, b, _ in pairs if b in found and {a, b} <= among}
        return found

    kept, copied = duplicates.copies_of_others(everything, n)
    assert copied.tolist() == [any(i >= n for i in reached(one, set(range(10)))) for one in range(n)]
    for one, two in itertools.combinations(range(n), 2):
        together = kept.groups[one] == kept.groups[two] != ALONE
        assert together == (two in reached(one, set(range(n))))
    assert {tuple(pair) for pair in kept.exact.tolist()} == {(a, b) for a, b, same in pairs if same and b < n}
    assert {tuple(pair) for pair in kept.near.tolist()} == {(a, b) for a, b, same in pairs if not same and b < n}


def test_sketches_are_the_same_once_they_are_read_again(tmp_path):
    source = as_source(pictures(5))
    made = [duplicates.sketch(source[i]) for i in range(5)]
    duplicates.write_sketches(tmp_path / "x.npy", made)
    assert (tmp_path / "x.npy").stat().st_size < 5 * 1900
    for one, two in zip(made, duplicates.read_sketches(tmp_path / "x.npy"), strict=True):
        assert (one.digest, one.side) == (two.digest, two.side)
        np.testing.assert_array_equal(one.grey, two.grey)
        np.testing.assert_array_equal(one.thumbnail, two.thumbnail)


@pytest.mark.parametrize("kind", ["empty", "text", "other", "pickle", "truncated", "huge", "npz", "side"])
def test_files_that_hold_no_sketches_are_refused_in_one_line(tmp_path, kind):
    path, source = tmp_path / "x.npy", as_source(pictures(2))
    duplicates.write_sketches(path, [duplicates.sketch(source[i]) for i in range(2)])
    content = path.read_bytes()
    if kind == "other":
        np.save(path, np.zeros((2, 3)))
    elif kind == "pickle":
        np.save(path, np.array([{"a": 1}]), allow_pickle=True)
    elif kind == "npz":
        with path.open("wb") as file:
            np.savez(file, np.load(io.BytesIO(content)))
    elif kind == "side":
        rows = np.load(io.BytesIO(content))
        rows["side"] = -1
        np.save(path, rows)
    else:
        huge = content.replace(b"'shape': (2,)", b"'shape': (2000000000,)")
        path.write_bytes({"empty": b"", "text": b"hello", "truncated": content[:-9], "huge": huge}[kind])
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        duplicates.read_sketches(path)
    assert "\n" not in str(error.value)
