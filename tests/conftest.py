"""Strict numerics for every test: implicit rank and dtype promotion are errors."""

import dataclasses
import gc
import importlib.metadata
import os
import pathlib

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

import hypothesis
import jax
import pytest

import dime_jax as dj
from dime_jax import model_check
from dime_jax.report import figures
from dime_jax.scoring import micro_batch
from dime_jax.training import loop

# Tests have few images, and most of a full-size batch would be padding.
_FULL_SIZE, micro_batch._CPU_IMAGES = micro_batch._CPU_IMAGES, 2

# With more images, a check asks a network of random weights in every other way as well.
_CHECKED, model_check.IMAGES = model_check.IMAGES, 2

_MAKE_STEP, _STEPS = loop.make_step, {}


def _shared_step(spec, recipe, method, mesh):
    """One program for all trainings that differ in their seed and length alone: tests begin and continue many."""
    alike = spec, dataclasses.replace(recipe, steps=1, seed=0), method.name, mesh
    if alike not in _STEPS:
        _STEPS[alike] = _MAKE_STEP(spec, recipe, method, mesh)
    return _STEPS[alike]


loop.make_step = _shared_step

_SAVE_FIGURE = figures.save_figure


def _save_nothing(figure, directory, name):
    """Files in place of a figure: writing one takes a third of a second, which most tests of reports can do without."""
    paths = [pathlib.Path(directory) / f"{name}.{suffix}" for suffix in ("png", "svg")]
    paths[0].write_bytes(b"\x89PNG\r\n")
    paths[1].write_text('<svg viewBox="0 0 1 1"></svg>')
    return paths


figures.save_figure = _save_nothing

# The same examples in every run, and no time limit on a busy machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# A test need not survive a power cut, and small audits would spend much of their time waiting for the disk.
os.fsync = lambda descriptor: None


def pytest_configure(config):
    """The slow tests, of verdicts above all, check models as users' are."""
    if config.option.markexpr == "slow":
        model_check.IMAGES = _CHECKED


def pytest_collection_modifyitems(items):
    """The longest tests first, so that none is left to a single worker at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("experiments", "training"))


def pytest_collection_finish():
    """What is imported by now stays: looking through it for garbage took a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """A worker that has reported everything ends at once: JAX takes seconds to take its programs apart."""
    if hasattr(config, "workerinput"):
        os._exit(0)


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
def full_size_batches(monkeypatch):
    """The default micro-batch as users have it."""
    monkeypatch.setattr(micro_batch, "_CPU_IMAGES", _FULL_SIZE)


@pytest.fixture
def whole_model_check(monkeypatch):
    """Models are checked with as many images as users' are."""
    monkeypatch.setattr(model_check, "IMAGES", _CHECKED)


@pytest.fixture(scope="module")
def real_figures():
    """Figures are drawn and written as users get them, in all tests of the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save_figure", _SAVE_FIGURE)
        yield


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
def schedule():
    return dj.linear_schedule()
