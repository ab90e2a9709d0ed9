"""What an installed package holds: the library, its converters, and the files they read."""

import pathlib
import zipfile

import pytest
from hatchling import build

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        file = build.build_wheel(str(directory))
    with zipfile.ZipFile(directory / file) as wheel:
        return set(wheel.namelist())


def test_experiments_stay_in_the_clone(names):
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dime_jax", "checkpoints_convert"}


def test_every_file_of_the_packages_is_installed(names):
    here = {
        path.relative_to(ROOT).as_posix()
        for package in ("dime_jax", "checkpoints_convert")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here == {name for name in names if ".dist-info/" not in name}
    assert {path.rpartition(".")[2] for path in here} >= {"html", "css", "js", "typed", "pyi", "npz", "ocdbt"}
