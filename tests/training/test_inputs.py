"""Batches: every image once a pass, exact continuation, padding, and refusals in one line."""

import itertools

import numpy as np
import pytest
import tiny

from dime_jax import data
from dime_jax.training import inputs


def draws(*batches):
    """Given batches of positions, over and over."""
    import grain

    return grain.MapDataset.source([np.array(batch) for batch in batches]).repeat()


def test_every_position_once_a_pass_in_another_order_each_time():
    batches = inputs.shuffled(10, 4, seed=0)
    stream = np.concatenate([batches[k] for k in range(5)])
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert list(stream[:10]) != list(stream[10:])
    assert list(stream) != list(np.concatenate([inputs.shuffled(10, 4, seed=1)[k] for k in range(5)]))


def test_sets_smaller_than_a_batch_are_repeated():
    assert sorted(inputs.shuffled(3, 6, seed=0)[0]) == [0, 0, 1, 1, 2, 2]


def test_batches_hold_the_drawn_members():
    source, members = tiny.source(10), np.array([7, 2, 5])
    examples = next(inputs.read_examples(draws([2, 0, -1, 1]), source, members, tiny.spec()))
    np.testing.assert_array_equal(examples.mask, [True, True, False, True])
    expected = tiny.images(10)[[5, 7, 0, 2]] / np.float32(127.5) - np.float32(1)
    expected[2] = 0
    np.testing.assert_array_equal(examples.images, expected)
    assert examples.condition is None


def test_labels_come_with_class_conditional_networks():
    labels = np.arange(10, dtype=np.int32) % 3
    spec = tiny.spec(num_classes=3)
    examples = next(inputs.read_examples(draws([4, 1]), tiny.source(10, labels=labels), np.arange(10), spec))
    np.testing.assert_array_equal(examples.condition, [1, 1])
    with pytest.raises(ValueError, match="class-conditional, but arrays has no labels"):
        inputs.read_examples(draws([0]), tiny.source(10), np.arange(10), spec)


@pytest.mark.parametrize("consumed", [0, 1, 7])
def test_a_restored_iterator_continues_where_it_was(consumed):
    def fresh():
        return inputs.read_examples(inputs.shuffled(10, 4, 0), tiny.source(10), np.arange(10), tiny.spec())

    unbroken, broken = fresh(), fresh()
    for _ in range(consumed):
        next(unbroken), next(broken)
    restored = fresh()
    restored.set_state(broken.get_state())
    for expected, found in itertools.islice(zip(unbroken, restored), 5):
        np.testing.assert_array_equal(expected.images, found.images)


def test_processes_share_a_batch(monkeypatch):
    def shares(count):
        found = []
        for index in range(count):
            monkeypatch.setattr("jax.process_count", lambda: count)
            monkeypatch.setattr("jax.process_index", lambda index=index: index)
            found.append(
                next(inputs.read_examples(inputs.shuffled(10, 4, 0), tiny.source(10), np.arange(10), tiny.spec()))
            )
        return np.concatenate([examples.images for examples in found])

    np.testing.assert_array_equal(shares(1), shares(2))


def test_a_bad_training_image_is_named():
    def read(index):
        if index == 3:
            raise data.BadImage("is cut short")
        return tiny.images(10)[index]

    source = data.Source(name="files", ids=[f"file-{i}" for i in range(10)], read=read)
    batches = inputs.read_examples(draws([0, 3]), source, np.arange(10), tiny.spec())
    with pytest.raises(ValueError, match="training image 'file-3' is cut short: leave it out of the split"):
        next(batches)


def test_images_of_another_size_are_refused_where_they_cannot_be_resized():
    source = data.from_images(np.random.default_rng(0).uniform(-1, 1, (4, 6, 6, 1)).astype(np.float32))
    with pytest.raises(ValueError, match=r"float images are not resized: they must be 4x4, got \[6, 6, 1\]"):
        next(inputs.read_examples(draws([0, 1]), source, np.arange(4), tiny.spec()))
