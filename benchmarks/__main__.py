"""`make bench`: every benchmark, or those named: `python -m benchmarks ideal data`."""

import importlib
import pathlib
import sys

ALL = sorted(
    path.stem
    for path in pathlib.Path(__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "__main__", "timing") and not path.stem.startswith("torch_")
)


def main(names: list[str]) -> None:
    for name in names or ALL:
        if name not in ALL:
            sys.exit(f"unknown benchmark {name!r}; expected one of {', '.join(ALL)}")
        importlib.import_module(f"benchmarks.{name}").run()


if __name__ == "__main__":
    main(sys.argv[1:])
