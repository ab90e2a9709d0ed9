import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dime_jax import data

DIGITS = data.open_source("digits")
TRANSFORM = data.get_transform("digits")


def counting_source(n, bad=()):
    """Image i is filled with i % 200; the images in `bad` cannot be read."""

    def read(index):
        if index in bad:
            raise data.BadImage("is broken")
        return np.full((8, 8, 1), index % 200, np.uint8)

    return data.Source("counting", [f"id{i}" for i in range(n)], read, labels=np.arange(n, dtype=np.int32))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 99), unique=True, max_size=40), st.integers(1, 16), st.integers(0, 3))
def test_all_batches_together_give_each_image_once_in_order(indices, batch_size, num_threads):
    source = counting_source(100)
    found = list(data.batches(source, batch_size, TRANSFORM, indices=indices, num_threads=num_threads))
    assert len(found) == -(-len(indices) // batch_size)
    assert [i for batch in found for i in batch.index[batch.mask]] == indices
    for batch in found:
        assert batch.images.shape == (batch_size, 8, 8, 1)
        assert batch.images.dtype == np.float32
        assert batch.labels.dtype == np.int32
        assert batch.index.dtype == np.int64
        assert len(batch.ids) == batch_size
        for row in range(batch_size):
            if batch.mask[row]:
                i = batch.index[row]
                np.testing.assert_allclose(batch.images[row], 2 * i / 255 - 1, atol=1e-6)
                assert (batch.ids[row], batch.labels[row]) == (f"id{i}", i)
            else:
                assert (batch.ids[row], batch.labels[row], batch.index[row]) == ("", 0, -1)
                assert not batch.images[row].any()


def test_images_are_the_transformed_ones_in_source_order():
    batches = list(data.batches(DIGITS, 100, TRANSFORM))
    assert [batch.mask.sum() for batch in batches] == [100] * 17 + [97]
    images = np.concatenate([batch.images[batch.mask] for batch in batches])
    for i in (0, 42, 1796):
        np.testing.assert_array_equal(images[i], TRANSFORM(DIGITS[i].image))


def test_sources_without_labels_give_none():
    source = data.from_images(np.zeros((3, 8, 8, 1), np.uint8))
    assert next(data.batches(source, 2, TRANSFORM)).labels is None


def test_reading_overlaps_with_the_consumer_and_between_threads():
    readers, reading, most, lock = set(), 0, 0, threading.Lock()

    def read(index):
        nonlocal reading, most
        with lock:
            readers.add(threading.get_ident())
            reading += 1
            most = max(most, reading)
        time.sleep(0.001)
        with lock:
            reading -= 1
        return DIGITS.read(index)

    list(data.batches(data.Source("threads", DIGITS.ids[:64], read), 8, TRANSFORM, num_threads=4))
    assert threading.get_ident() not in readers
    assert 1 < most <= 4


def test_bad_images_are_masked_and_the_run_goes_on():
    batches = list(data.batches(counting_source(300, bad={7, 250}), 32, TRANSFORM))
    masked = [i for batch in batches for i in batch.index[~batch.mask] if i >= 0]
    assert masked == [7, 250]


def test_more_than_ten_percent_bad_stops_with_the_list():
    seen = []
    with pytest.raises(
        data.TooManyBadImages, match="too many images that cannot be used: must be <= 10% of 30, got 4 so far"
    ) as error:
        seen.extend(data.batches(counting_source(30, bad={1, 2, 13, 14, 29}), 4, TRANSFORM))
    assert str(error.value).splitlines()[1:] == [f"'id{i}' is broken" for i in (1, 2, 13, 14)]
    assert len(seen) == 3


def test_exactly_ten_percent_bad_is_still_fine():
    assert len(list(data.batches(counting_source(30, bad={1, 2, 3}), 5, TRANSFORM))) == 6


def test_other_errors_are_not_taken_for_bad_images():
    with pytest.raises(ValueError, match=r"images must have shape \[32, 32, 3\] after cifar"):
        list(data.batches(DIGITS, 8, data.get_transform("cifar")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"indices": [0, 1797]}, r"indices must be in \[0, 1797\) for digits, got 0 to 1797"),
        ({"indices": [-1]}, "got -1 to -1"),
        ({"indices": [0.5]}, "list of integers, got float64"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.batches(**{"source": DIGITS, "batch_size": 8, "transform": TRANSFORM, **arguments})


def test_an_iteration_can_be_left_early():
    for _ in range(20):
        next(data.batches(DIGITS, 8, TRANSFORM))


# --- fingerprint ---


def sub_source(source, order, change=None):
    def read(index):
        image = source.read(order[index])
        return image if change != index else image ^ 1

    return data.Source("sub", [source.ids[i] for i in order], read, labels=source.labels[order])


def test_fingerprint_does_not_depend_on_order_and_changes_with_everything_else():
    order = np.arange(300)
    base = sub_source(DIGITS, order)
    fingerprint = data.fingerprint(base)
    assert len(fingerprint) == 32
    assert data.fingerprint(sub_source(DIGITS, order[::-1])) == fingerprint
    assert data.fingerprint(DIGITS, np.arange(300)) == fingerprint
    others = [
        sub_source(DIGITS, order, change=123),
        sub_source(DIGITS, order[:-1]),
        data.Source("x", base.ids, base.read),
        data.Source("x", base.ids, base.read, labels=(base.labels + 1)),
        data.Source("x", [*base.ids[:-1], "other"], base.read, labels=base.labels),
    ]
    assert len({fingerprint, *map(data.fingerprint, others)}) == 6


def test_swapping_the_images_of_two_ids_changes_the_fingerprint():
    swapped = data.Source("x", DIGITS.ids, lambda i: DIGITS.read({0: 1, 1: 0}.get(i, i)), labels=DIGITS.labels)
    assert data.fingerprint(swapped) != data.fingerprint(DIGITS)


def test_a_bad_image_enters_the_fingerprint():
    assert data.fingerprint(counting_source(300, bad={5})) != data.fingerprint(counting_source(300))
    with pytest.raises(
        data.TooManyBadImages, match="too many images that cannot be used: must be <= 10% of 30, got 4 so far"
    ):
        data.fingerprint(counting_source(30, bad={1, 2, 13, 14}))


@pytest.mark.slow
def test_large_images_stay_within_a_gigabyte(tmp_path):
    exif = Image.Exif()
    exif[0x112] = 6  # to be rotated, which takes another copy
    Image.new("RGB", (5792, 5792)).save(tmp_path / "0.jpg", exif=exif)
    for i in range(1, 8):
        (tmp_path / f"{i}.jpg").write_bytes((tmp_path / "0.jpg").read_bytes())
    code = f"""
from dime_jax import data
source = data.open_source("folder:" + {str(tmp_path)!r})
batches = list(data.batches(source, 2, data.get_transform("fit", (32, 32, 3)), num_threads=4))
assert sum(batch.mask.sum() for batch in batches) == 8
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 1024
