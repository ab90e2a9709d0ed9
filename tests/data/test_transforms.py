import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dime_jax import data
from dime_jax.data import transforms

# Outputs of torchvision 0.28.0 (Resize, CenterCrop, ToTensor, 2x - 1) on seeded noise; of 256x256 every 16th pixel.
TORCHVISION = dict(np.load(pathlib.Path(__file__).with_name("torchvision_transforms.npz")))


def noise(height, width, channels=3):
    return np.random.default_rng([height, width]).integers(0, 256, (height, width, channels), dtype=np.uint8)


@pytest.mark.parametrize("case", TORCHVISION)
def test_named_pipelines_equal_torchvision_to_the_bit(case):
    name, size = case.split("-")
    out = data.get_transform(name)(noise(*map(int, size.split("x"))))
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out[::16, ::16] if name == "imagenet256" else out, TORCHVISION[case])


@pytest.mark.parametrize(
    ("height", "width"), [(1100, 1301), (511, 700), (512, 512), (2100, 1025), (256, 256), (90, 131)]
)
def test_guided_pipeline(height, width):
    # Guided Diffusion's loader in Pillow's own terms: sizes are (width, height), crops are boxes.
    image = Image.fromarray(noise(height, width))
    while min(image.size) >= 512:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - 256) // 2, (image.height - 256) // 2
    expected = np.asarray(image.crop((left, top, left + 256, top + 256)))
    out = data.get_transform("imagenet256_guided")(noise(height, width))
    np.testing.assert_array_equal(np.round((out + 1) * 127.5), expected)


def test_the_two_imagenet_pipelines_differ():
    image = noise(1100, 1301)
    plain, guided = (data.get_transform(name)(image) for name in ("imagenet256", "imagenet256_guided"))
    assert np.abs(plain - guided).mean() > 0.01


@given(st.integers(4, 60), st.integers(4, 60), st.sampled_from([(8, 8), (32, 32), (16, 24)]), st.sampled_from([1, 3]))
def test_fit_gives_the_models_shape(height, width, size, channels):
    transform = data.get_transform("fit", (*size, channels))
    out = transform(noise(height, width, channels))
    assert out.shape == (*size, channels)
    assert out.dtype == np.float32
    assert -1 <= out.min() <= out.max() <= 1


def test_fit_keeps_the_centre_and_the_aspect_ratio():
    image = np.zeros((40, 120, 3), np.uint8)
    image[:, 40:80] = 200
    np.testing.assert_allclose(data.get_transform("fit", (20, 20, 3))(image)[:, 2:-2], 2 * 200 / 255 - 1, atol=0.02)


def test_fit_changes_nothing_at_the_right_size():
    image = noise(32, 32)
    expected = image.astype(np.float64) / 127.5 - 1
    np.testing.assert_allclose(data.get_transform("fit", (32, 32, 3))(image), expected, atol=1e-6)


def test_channels_change_only_where_it_is_exact():
    grey = noise(8, 8, 1)
    coloured = data.get_transform("fit", (8, 8, 3))(grey)
    np.testing.assert_array_equal(coloured, np.repeat(coloured[..., :1], 3, axis=-1))
    back = data.get_transform("fit", (8, 8, 1))(np.repeat(grey, 3, axis=-1))
    np.testing.assert_array_equal(back, coloured[..., :1])
    with pytest.raises(data.BadImage, match="is coloured"):
        data.get_transform("fit", (8, 8, 1))(noise(8, 8, 3))


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match=r"images must have shape \[32, 32, 3\] after cifar, got \[31, 32, 3\]"):
        data.get_transform("cifar")(noise(31, 32))
    with pytest.raises(data.BadImage, match="100x178, smaller than the crop of 140x140"):
        data.get_transform("celeba")(noise(100, 178))
    with pytest.raises(ValueError, match="float images are not resized"):
        data.get_transform("fit", (8, 8, 1))(np.zeros((9, 8, 1), np.float32))
    with pytest.raises(ValueError, match=r"cifar gives \[32, 32, 3\], but the model takes \[64, 64, 3\]"):
        data.get_transform("cifar", (64, 64, 3))
    with pytest.raises(ValueError, match=r"unknown transform 'cifra'; expected one of cifar, .*fit"):
        data.get_transform("cifra")
    with pytest.raises(ValueError, match="needs image_shape"):
        data.get_transform("fit")


def test_each_source_gets_its_own_pipeline_or_fit():
    digits = data.open_source("digits")
    assert data.transform_for(digits, (8, 8, 1)).name == "digits"
    assert data.transform_for(digits, (16, 16, 1)).name == "fit-16x16x1"


def test_float_images_pass_unchanged():
    image = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8, 1)
    np.testing.assert_array_equal(data.get_transform("digits")(image), image)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, "[0, 1]"), (-1, 1, "[-1, 1]"), (0.01, 0.99, "[0, 1]"), (-0.95, 0.93, "[-1, 1]")],
)
def test_ranges_are_recognised(low, high, expected):
    assert data.recognise_range(np.linspace(low, high, 100)) == expected


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 255), (0.2, 0.9), (-0.5, 0.5), (0, 0), (1, 1), (0, 0.5), (-1, 0), (-1, 1.001), (-0.01, 1), (0, np.nan)],
)
def test_ambiguous_and_unknown_ranges_are_refused(low, high):
    with pytest.raises(ValueError, match=r"fill \[0, 1\] or \[-1, 1\]|finite"):
        data.recognise_range(np.array([low, high], np.float64))


def test_a_named_range_settles_an_ambiguous_set():
    bright = np.full((1, 2, 2, 1), 0.5, np.float32)
    np.testing.assert_array_equal(transforms.to_stored_range(bright, "[-1, 1]"), bright)
    np.testing.assert_array_equal(transforms.to_stored_range(bright, "[0, 1]"), 0 * bright)
    with pytest.raises(ValueError, match=r"images must be in \[0, 1\], got values from -1 to -1"):
        transforms.to_stored_range(-2 * bright, "[0, 1]")
    with pytest.raises(ValueError, match="unknown value_range '0-255'"):
        transforms.to_stored_range(bright, "0-255")
    with pytest.raises(ValueError, match="value_range uint8, got float32"):
        transforms.to_stored_range(bright, "uint8")
