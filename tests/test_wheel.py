"""What an installed package holds: the library, its converters, and the files they read."""

import ast
import email
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import venv
import zipfile

import pytest
import yaml
from hatchling import build

import dime_jax as dj

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("dime_jax", "checkpoints_convert")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return directory / build.build_wheel(str(directory))


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


@pytest.fixture(scope="module")
def metadata(wheel, names):
    with zipfile.ZipFile(wheel) as file:
        return email.message_from_bytes(file.read(next(name for name in names if name.endswith(".dist-info/METADATA"))))


def test_experiments_stay_in_the_clone(names):
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_every_file_of_the_packages_is_installed(names):
    here = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here == {name for name in names if ".dist-info/" not in name}
    assert {path.rpartition(".")[2] for path in here} >= {"html", "css", "js", "typed", "pyi", "npz", "ocdbt"}


def test_metadata_claims_what_was_tried(metadata):
    assert metadata["Version"] == dj.__version__
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    assert not [line for line in metadata.get_all("Classifier") if re.search("Windows|MacOS|OS Independent", line)]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (dj.__version__, metadata["License-Expression"])


def test_every_package_imported_is_a_dependency(metadata):
    """Of those imported when a module is; what an extra brings is imported where it is used."""
    brought_by = importlib.metadata.packages_distributions()
    needed = {re.split("[<>=; ]", line)[0].lower() for line in metadata.get_all("Requires-Dist") if "extra" not in line}
    for file in [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]:
        if not {"training", "latent_study"} & set(file.parts):  # needs the extra `train`
            for name in imported_at_the_top(file) - set(sys.stdlib_module_names) - set(PACKAGES):
                assert {one.lower().replace("_", "-") for one in brought_by[name]} & needed, f"{file} imports {name}"


def imported_at_the_top(file):
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def test_the_workflow_runs_targets_that_there_are(metadata):
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"make lint", "make test", "make docs", "make notebook", "make wheel"} == set(commands)
    assert {command.removeprefix("make ") for command in commands} <= set(targets)
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier")))
    assert jobs["test"]["strategy"]["matrix"]["python"] == claimed


@pytest.mark.slow
def test_an_installed_wheel_audits_in_an_empty_directory(wheel, tmp_path):
    """In an environment that holds the wheel and what it depends on, and nothing of this clone."""
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    venv.create(environment, with_pip=True)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_", "JAX_"))}
    subprocess.run([scripts / "python", "-m", "pip", "install", "--quiet", wheel], check=True, env=clean, cwd=empty)
    few = ["--attacks", "sima_l4", "--calibration-size", "60", "--test-size", "150", "--quiet", "--json"]
    done = subprocess.run([scripts / "dime-jax", "audit", *few], capture_output=True, text=True, env=clean, cwd=empty)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["origin"] == "shipped with dime_jax"
    assert (empty / "out" / "audit" / "report.html").is_file()
