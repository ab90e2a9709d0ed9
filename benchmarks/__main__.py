"""`make bench`: every benchmark, or those named: `python -m benchmarks ideal data`."""

import importlib
import importlib.metadata
import os
import pathlib
import platform
import sys

ALL = sorted(
    path.stem
    for path in pathlib.Path(__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "__main__", "timing") and not path.stem.startswith("torch_")
)


def machine() -> str:
    """What the ratios of this run are of, in one line; docs/performance.md quotes it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # another system
        lines = []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    packages = {dist.name: dist.version for dist in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {packages[name]}" for name in ("jax", "jaxlib", "torch") if name in packages)
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{cpu or platform.machine()}, {os.cpu_count()} cores{load}; Python {platform.python_version()}, {versions}"


def main(names: list[str]) -> None:
    print(machine())
    for name in names or ALL:
        if name not in ALL:
            sys.exit(f"unknown benchmark {name!r}; expected one of {', '.join(ALL)}")
        importlib.import_module(f"benchmarks.{name}").run()


if __name__ == "__main__":
    main(sys.argv[1:])
