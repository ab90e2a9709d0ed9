"""Where compiled programs are kept, and that whatever is wrong with the place is a warning."""

import pathlib
import subprocess
import sys

import pytest

from dime_jax._util import compilation_cache

PROGRAM = """
from dime_jax._util import compilation_cache
compilation_cache.use(print)
import jax
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
print(jax.jit(lambda x: x * 2 + 1)(3.0).item())
"""


def test_the_directory_is_the_users_own(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    found = compilation_cache.use(pytest.fail, environment)
    assert found.parent == tmp_path / "dime_jax"
    assert environment["JAX_COMPILATION_CACHE_DIR"] == str(found)
    assert compilation_cache.cpu_features() in found.name
    assert compilation_cache.use(pytest.fail, {"HOME": str(tmp_path)}).parent == tmp_path / ".cache" / "dime_jax"


def test_the_switch_and_jaxs_own_variable(tmp_path):
    assert compilation_cache.use(pytest.fail, {"DIME_JAX_CACHE": "off", "HOME": str(tmp_path)}) is None
    theirs = {"JAX_COMPILATION_CACHE_DIR": "theirs", "HOME": str(tmp_path)}
    assert compilation_cache.use(pytest.fail, theirs) is None
    assert theirs["JAX_COMPILATION_CACHE_DIR"] == "theirs"
    elsewhere = {"DIME_JAX_CACHE": str(tmp_path / "mine"), "HOME": str(tmp_path)}
    assert compilation_cache.use(pytest.fail, elsewhere).parent == tmp_path / "mine"
    assert not (tmp_path / ".cache").exists()


def test_a_place_that_cannot_be_written_to_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    said, environment = [], {"DIME_JAX_CACHE": str(tmp_path / "file")}
    assert compilation_cache.use(said.append, environment) is None
    assert "JAX_COMPILATION_CACHE_DIR" not in environment
    assert said[0].startswith("warning: compiled programs are not cached: cannot write to")


@pytest.mark.slow
def test_a_second_process_compiles_nothing_and_a_full_disk_is_no_error(tmp_path):
    cache = tmp_path / "cache"

    def run(directory):
        environment = {"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "DIME_JAX_CACHE": str(directory)}
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert run(cache) == "7.0\n"
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*-cache")}
    assert before
    assert run(cache) == "7.0\n"
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*-cache")} == before
    assert run("/dev/full/cache").endswith("7.0\n")


AUDIT = """
import sys
from dime_jax._util import compilation_cache
compilation_cache.use(print)
import jax.monitoring
from dime_jax import cli
missed = []
jax.monitoring.register_event_listener(lambda name, **_: missed.append(name) if name.endswith("cache_misses") else None)
attacks = ["--attacks", "sima_l4", "dime", "--profile", "light"]
assert cli.main(["audit", *attacks, "--quiet", "--output", sys.argv[1]]) == 0
print("missed", len(missed))
"""


@pytest.mark.slow
def test_an_audit_compiles_nothing_that_another_has_compiled_and_two_share_a_cache(tmp_path):
    environment = {"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "DIME_JAX_CACHE": str(tmp_path / "cache")}

    def start(name):
        command = [sys.executable, "-c", AUDIT, str(tmp_path / name)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def missed(process):
        out, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
        assert "warning: compiled" not in error
        return int(out.rpartition("missed ")[2])

    together = [start("first"), start("second")]
    assert all(missed(process) > 0 for process in together)
    assert missed(start("third")) == 0
    verdicts = [(tmp_path / name / "candidates.csv").read_text() for name in ("first", "second", "third")]
    assert verdicts[0] == verdicts[1] == verdicts[2]
