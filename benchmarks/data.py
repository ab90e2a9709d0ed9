"""Reading speed: decode + transform of 32x32 images, and near-duplicates among 10,000 of them."""

import pathlib
import tempfile
import time

import numpy as np
from PIL import Image

from dime_jax import data


def run() -> None:
    images = np.random.default_rng(0).integers(0, 256, (10_000, 32, 32, 3), dtype=np.uint8)
    transform = data.get_transform("fit", (32, 32, 3))
    with tempfile.TemporaryDirectory() as folder:
        for i, image in enumerate(images[:5_000]):
            Image.fromarray(image).save(pathlib.Path(folder) / f"{i:05d}.png")
        _report_rate("PNG files", data.open_source(f"folder:{folder}"), transform)
    in_memory = data.from_images(images)
    _report_rate("arrays", in_memory, transform)

    start = time.perf_counter()
    found = data.find_duplicates(in_memory)
    seconds = time.perf_counter() - start
    print(f"near-duplicates among {len(images)} images: {seconds:.1f} s ({len(found.near)} pairs)")


def _report_rate(name: str, source: data.Source, transform: data.Transform) -> None:
    start = time.perf_counter()
    count = sum(int(batch.mask.sum()) for batch in data.batches(source, 64, transform))
    print(f"decode + transform, 32x32 {name}: {count / (time.perf_counter() - start):.0f} images/s")
