import numpy as np
import pytest

from dime_jax import data
from dime_jax.data.variations import VARIATIONS, varied, vary


@pytest.mark.parametrize("shape", [(8, 8, 1), (9, 14, 3)])
def test_variations_keep_shape_and_stay_close(shape):
    smooth = np.linspace(0, 255, shape[1])[None, :, None] * np.ones(shape)
    pixels = smooth.astype(np.uint8)
    for name in VARIATIONS:
        picture = vary(pixels, VARIATIONS[name])
        assert (picture.shape, picture.dtype) == (shape, np.uint8)
        straight = picture[:, ::-1] if "mirrored" in name else picture
        assert np.sqrt(np.mean((straight.astype(float) - pixels) ** 2)) < 20, name
        assert name == "mirrored" or not np.array_equal(straight, pixels)


def test_a_mirrored_picture_and_the_middle_of_one():
    pixels = np.random.default_rng(0).integers(0, 256, (10, 20, 3), dtype=np.uint8)
    np.testing.assert_array_equal(vary(pixels, VARIATIONS["mirrored"]), pixels[:, ::-1])
    framed = np.pad(np.full((16, 32, 3), 200, np.uint8), ((2, 2), (4, 4), (0, 0)))  # the frame is what 80 % cuts away
    assert np.min(vary(framed, VARIATIONS["cropped to 80 %"])[2:-2, 2:-2]) >= 195
    assert np.min(vary(framed, VARIATIONS["cropped to 90 %"])) < 100


def test_floats_are_varied_as_bytes():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 1), dtype=np.uint8)
    for change in VARIATIONS.values():
        np.testing.assert_array_equal(vary(pixels.astype(np.float32) / 127.5 - 1, change), vary(pixels, change))


def test_a_source_of_variations_goes_image_by_image():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), dtype=np.uint8)
    source = data.from_images(pixels, labels=np.arange(4), name="x")
    found = varied(source, np.array([2, 0]))
    count = len(VARIATIONS)
    assert len(found) == 2 * count
    assert found.labels.tolist() == [2] * count + [0] * count
    for place, (index, name) in enumerate((index, name) for index in (2, 0) for name in VARIATIONS):
        np.testing.assert_array_equal(found[place].image, vary(pixels[index], VARIATIONS[name]))
        assert found.ids[place] == f"{source.ids[index]} ({name})"
