"""How the tests run: with what environment, in which order, and what they share."""

import gc
import importlib.metadata
import os
import pathlib
import shutil

import pytest

# Four CPU devices, so that sharded code is tested on every machine; and programs that are compiled quickly rather than
# well, since each runs a few times only. Must be set before JAX starts.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
    # A later jaxlib aborts at a flag that it does not know.
    + " --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10."),
)
# Workers, and the processes that tests start, compile each program once between them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def pytest_configure(config):
    """Import JAX and the shortcuts, except where tests are only handed out: that takes seconds."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests:
        config.pluginmanager.import_plugin("shortcuts")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """No test writes to the user's cache directory, and none finds there what an older converter left."""
    before = os.environ.get("DIME_JAX_CACHE")
    os.environ["DIME_JAX_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["DIME_JAX_CACHE"]
    else:
        os.environ["DIME_JAX_CACHE"] = before


def pytest_collection_modifyitems(items):
    """The longest tests first, so that none is left to a single worker at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("experiments", "training"))


def pytest_collection_finish():
    """What is imported by now stays: looking through it for garbage took a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


class Failing:
    """A function that raises at some of its calls, given by their numbers from 1, and counts them."""

    def __init__(self, fn, errors):
        self.fn, self.errors, self.calls = fn, errors, 0

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls in self.errors:
            raise self.errors[self.calls]
        return self.fn(*arguments)


@pytest.fixture
def failing():
    return Failing


@pytest.fixture
def folds(monkeypatch):
    """The rows (train, test) of every fold that a blind baseline goes through."""
    from dime_jax.evidence import blind

    seen = []

    class Splitter(blind.StratifiedGroupKFold):
        def split(self, *arguments):
            for fold in super().split(*arguments):
                seen.append(fold)
                yield fold

    monkeypatch.setattr(blind, "StratifiedGroupKFold", Splitter)
    return seen


@pytest.fixture(scope="session")
def latent_lora(tmp_path_factory):
    """A trained tiny Stable Diffusion in pipeline/, lora.safetensors, and their images: see experiments/latent_lora.py.

    The first half of lora_candidates/ are members of the LoRA; nobody saw the others and lora_heldout/.
    """
    from experiments import latent_lora

    folder = tmp_path_factory.mktemp("latent_lora")
    shutil.copytree(pathlib.Path(__file__).parent / "golden" / "latent_lora", folder, dirs_exist_ok=True)
    latent_lora.write_folders(folder)
    return folder


@pytest.fixture(scope="session")
def schedule():
    from dime_jax import linear_schedule

    return linear_schedule()
