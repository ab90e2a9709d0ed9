"""Searches 200,000 generated pictures for duplicates; prints what it took, as JSON."""

import json
import sys
import time

import numpy as np
from PIL import Image

from dime_jax import data
from dime_jax.data import duplicates

COUNT, PLANTED, COMPARED = 200_000, 2_000, 5_000


def make_source():
    """Smooth pictures of 32x32; each of the last ones is one of the first, slightly brighter."""
    small = np.random.default_rng(0).integers(0, 240, (COUNT - PLANTED, 6, 6, 3), dtype=np.uint8)

    def read(index):
        copy = index >= len(small)
        chosen = small[index - len(small)] + np.uint8(6) if copy else small[index]
        return np.asarray(Image.fromarray(chosen).resize((32, 32), Image.Resampling.BICUBIC))

    return data.Source("pictures", [str(number) for number in range(COUNT)], read)


def all_pairs(source):
    """The near pairs of some images of which many are copies, by comparing each with each."""
    indices = np.concatenate([np.arange(COMPARED - PLANTED), np.arange(COUNT - PLANTED, COUNT)])
    found = data.find_duplicates(source, indices).near.tolist()
    sketches = [duplicates.sketch(source[index]) for index in indices]
    hashes = duplicates.perceptual_hashes(np.stack([one.grey for one in sketches]))
    thumbnails = np.stack([one.thumbnail for one in sketches]).reshape(len(indices), -1).astype(np.float32)
    expected = []
    for i in range(len(indices)):
        for j in i + 1 + np.flatnonzero(np.bitwise_count(hashes[i] ^ hashes[i + 1 :]) <= duplicates.MAX_DISTANCE):
            if np.sqrt(np.mean((thumbnails[i] - thumbnails[j]) ** 2)) <= duplicates.MAX_RMS:
                expected.append([int(indices[i]), int(indices[j])])
    return found, expected


def most_memory():
    """Gigabytes that this process has held at most; not ru_maxrss, which starts with what its parent had."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20


def main():
    source = make_source()
    start = time.perf_counter()
    found = data.find_duplicates(source)
    seconds = time.perf_counter() - start
    gigabytes = most_memory()
    near, expected = all_pairs(source)
    measured = {
        "images": len(source),
        "planted": PLANTED,
        "pairs": len(found.near),
        "seconds": seconds,
        "gigabytes": gigabytes,
        "same_as_all_pairs": near == expected and len(near) >= PLANTED,
    }
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
