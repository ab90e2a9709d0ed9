"""Which copies does the search for near duplicates find, and which pictures does it wrongly take for copies?

    python -m experiments.near_copies --source=cifar10:DIR --split=SPLIT.npz [--picture=found.png]

prints three counts. First, generated copies of eight kinds, 200 of each, among the first 20,000 images. Second, pairs
found among these images as they are. Only the eye can tell which of them are copies, so the picture shows all whose
high-pass correlation is 0.8 or less. Third, copies across the split: held-out images whose high-pass correlation with
a member, or with its mirror image, is above 0.9 or 0.8. These pairs took no part in choosing any limit of the search;
images of pairs above 0.6 are left out of the 20,000. Takes a minute on two cores.

High-pass: the mean of the channels minus its Gaussian blur (sigma 2 pixels, edges repeated), normalised.
"""

import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.ndimage
from absl import flags
from PIL import Image, ImageDraw

from dime_jax import data
from dime_jax.data.batches import map_items
from experiments.launch import run_app

AMONG, OF_EACH = 20_000, 200
_BLOCK = 1000

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class Nearest(NamedTuple):
    """For each held-out image the member that is most like it: its position, and the high-pass correlation."""

    member: np.ndarray
    correlation: np.ndarray


class Found(NamedTuple):
    """What was found among images and generated copies of them.

    Attributes:
      copies: by kind, how many were found to be copies of their originals.
      pairs: positions [k, 2] of the originals that were found to be copies of one another.
    """

    copies: dict[str, int]
    pairs: np.ndarray


def _mirror(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return image[:, ::-1]


def _recolour(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    colours = (image[..., rng.permutation(3)] / 255) ** rng.uniform(0.8, 1.25)
    return _to_pixels(255 * (colours * rng.uniform(0.6, 1, 3) + rng.uniform(0, 0.1, 3)))


def _brighten(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return _to_pixels(image * rng.uniform(0.7, 1.3) + rng.uniform(-40, 40))


def _encode_again(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=int(rng.choice([75, 50])))
    return np.asarray(Image.open(file))


def _shift(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shift by up to a sixteenth of a side either way: two pixels of 32."""
    most = len(image) // 16
    down, right = rng.integers(0, 2 * most + 1, 2)
    while down == right == most:
        down, right = rng.integers(0, 2 * most + 1, 2)
    padded = np.pad(image, ((most, most), (most, most), (0, 0)), "edge" if rng.random() < 0.5 else "reflect")
    return padded[down : down + image.shape[0], right : right + image.shape[1]]


def _resize(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Resize to a smaller or larger picture, and back."""
    return _to_size(_to_size(image, round(len(image) * rng.choice([0.6, 0.75, 2, 3]))), len(image))


def _crop(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Crop to nine tenths, and enlarge."""
    side = round(len(image) * 0.9)
    top, left = rng.integers(0, len(image) - side + 1, 2)
    return _to_size(image[top : top + side, left : left + side], len(image))


def _caption(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Write a line of text at the bottom, or paint over a corner."""
    changed = Image.fromarray(image)
    draw, side = ImageDraw.Draw(changed), len(image)
    if rng.random() < 0.5:
        draw.rectangle((0, side * 13 // 16, side, side), fill=(255, 255, 255))
        draw.text((1, side - 10), "abcd", fill=(0, 0, 0))
    else:
        size = int(rng.integers(side * 3 // 16, side * 5 // 16 + 1))
        left, top = rng.integers(0, 2, 2) * (side - size)
        draw.rectangle((left, top, left + size - 1, top + size - 1), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return np.asarray(changed)


CHANGES: dict[str, Change] = {
    "mirrored": _mirror,
    "recoloured": _recolour,
    "brightened": _brighten,
    "re-encoded": _encode_again,
    "shifted": _shift,
    "resized": _resize,
    "cropped": _crop,
    "captioned": _caption,
}


def find_generated(images: np.ndarray, of_each: int = OF_EACH, seed: int = 0) -> Found:
    """Search images uint8 [n, side, side, 3] together with `of_each` copies of each kind."""
    rng = np.random.default_rng(seed)
    originals = {kind: rng.choice(len(images), of_each, replace=False) for kind in CHANGES}
    copies = [CHANGES[kind](images[index], rng) for kind, chosen in originals.items() for index in chosen]
    everything = [*images, *copies]
    source = data.Source("pictures", [str(number) for number in range(len(everything))], everything.__getitem__)
    found = data.find_duplicates(source)
    pairs = np.concatenate([found.exact, found.near])
    known = set(map(tuple, pairs.tolist()))
    counts, copy = {}, len(images)
    for kind, chosen in originals.items():
        counts[kind] = sum((index, copy + row) in known for row, index in enumerate(chosen.tolist()))
        copy += of_each
    return Found(counts, pairs[pairs[:, 1] < len(images)])


def high_pass(images: np.ndarray) -> np.ndarray:
    """Return the high-pass of images [n, side, side, 3], as rows of norm 1."""
    grey = images.mean(-1, dtype=np.float32)
    high = grey - scipy.ndimage.gaussian_filter(grey, (0, 2, 2), mode="nearest")
    high = (high - high.mean((1, 2), keepdims=True)).reshape(len(images), images.shape[1] * images.shape[2])
    return high / np.maximum(np.linalg.norm(high, axis=1, keepdims=True), 1e-6)


def nearest_members(images: np.ndarray, split: data.Split) -> Nearest:
    """Find for each held-out image the member, or its mirror image, of the largest high-pass correlation."""
    members = [high_pass(images[split.member]), high_pass(images[split.member, :, ::-1])]
    found = []
    for start in range(0, len(split.heldout), _BLOCK):
        some = high_pass(images[split.heldout[start : start + _BLOCK]])
        both = np.maximum(some @ members[0].T, some @ members[1].T)
        found.append(Nearest(split.member[both.argmax(1)], both.max(1)))
    return Nearest(*map(np.concatenate, zip(*found)))


def show_pairs(images: np.ndarray, pairs: np.ndarray, columns: int = 10) -> Image.Image:
    """Lay out all pairs in one picture, the two images of each side by side."""
    side, gap = images.shape[1], 4
    sheet = Image.new("RGB", (columns * (2 * side + gap), max(-(-len(pairs) // columns), 1) * (side + gap)), "white")
    for number, pair in enumerate(pairs):
        row, column = divmod(number, columns)
        both = Image.fromarray(np.concatenate(images[pair], axis=1))
        sheet.paste(both, (column * (2 * side + gap), row * (side + gap)))
    return sheet


def _to_pixels(image: np.ndarray) -> np.ndarray:
    return np.clip(np.round(image), 0, 255).astype(np.uint8)


def _to_size(image: np.ndarray, side: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC))


def main(source: str, split: str, picture: str | None) -> None:
    """Print the counts."""
    opened = data.open_source(source)
    sides = data.read_split(split, opened)
    images = np.stack([item for item in map_items(opened, lambda item: item.image) if item is not None])
    nearest = nearest_members(images, sides)
    related = nearest.correlation > 0.6
    kept = np.setdiff1d(
        np.arange(min(AMONG, len(images))), np.concatenate([nearest.member[related], sides.heldout[related]])
    )
    unrelated = images[kept]

    found = find_generated(unrelated)
    print(f"generated copies among {len(unrelated)} images, found of {OF_EACH}:")
    for kind, count in found.copies.items():
        print(f"  {kind} {count}")
    first, second = (high_pass(unrelated[found.pairs[:, side]]) for side in (0, 1))
    mirrored = high_pass(unrelated[found.pairs[:, 1], :, ::-1])
    correlation = np.maximum(np.sum(first * second, axis=1), np.sum(first * mirrored, axis=1))
    print(
        f"pairs among the images themselves: {len(correlation)}, {np.sum(correlation > 0.8)} of them above 0.8", end=""
    )
    if opened.labels is not None:
        labels = opened.labels[kept][found.pairs]
        print(f", {np.sum(labels[:, 0] != labels[:, 1])} of different classes", end="")
    print()
    if picture:
        show_pairs(unrelated, found.pairs[correlation <= 0.8]).save(picture)

    duplicates = data.find_duplicates(opened)
    pairs = {frozenset(pair) for pair in np.concatenate([duplicates.exact, duplicates.near]).tolist()}
    known = np.array([frozenset(pair) in pairs for pair in zip(sides.heldout.tolist(), nearest.member.tolist())])
    for limit in (0.9, 0.8):
        these = nearest.correlation > limit
        print(f"across the split, correlation above {limit}: found {np.sum(known & these)} of {np.sum(these)}")


if __name__ == "__main__":
    flags.DEFINE_string("source", None, "the images, such as cifar10:DIR.", required=True)
    flags.DEFINE_string("split", None, "members and held-out images: SecMI's file.", required=True)
    flags.DEFINE_string("picture", None, "where to draw the pairs to look at.")
    run_app(lambda: main(flags.FLAGS.source, flags.FLAGS.split, flags.FLAGS.picture))
