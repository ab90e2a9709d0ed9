"""Searches 200,000 generated pictures for duplicates; prints what it took, as JSON."""

import json
import sys
import time

import numpy as np
from PIL import Image

from dime_jax import data

COUNT, PLANTED = 200_000, 2_000


def make_source():
    """Pictures of 32x32, coarse and fine; each of the last ones is one of the first, mirrored and brighter."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 160, (COUNT - PLANTED, 6, 6, 3), dtype=np.uint8)
    fine = rng.integers(0, 80, (COUNT - PLANTED, 16, 16), dtype=np.uint8)

    def read(index):
        copy, index = divmod(index, len(coarse))
        light = Image.fromarray(coarse[index]).resize((32, 32), Image.Resampling.BICUBIC)
        texture = Image.fromarray(fine[index]).resize((32, 32), Image.Resampling.BICUBIC)
        picture = np.asarray(light) + np.asarray(texture)[..., None]
        return picture[:, ::-1] + np.uint8(15) if copy else picture

    return data.Source("pictures", [str(number) for number in range(COUNT)], read)


def most_memory():
    """Gigabytes that this process has held at most; not ru_maxrss, which starts with what its parent had."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20


def main():
    source = make_source()
    start, busy = time.perf_counter(), time.process_time()
    found = set(map(tuple, data.find_duplicates(source).near.tolist()))
    measured = {
        "images": len(source),
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - busy,
        "gigabytes": most_memory(),
    }
    planted = {(number, COUNT - PLANTED + number) for number in range(PLANTED)}
    print(json.dumps(measured | {"planted": len(planted & found), "others": len(found - planted)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
