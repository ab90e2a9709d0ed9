"""What tests do without, since it takes time and shows nothing there; and fixtures that give it back.

A plugin of its own, so that the process that only hands out tests need not import JAX (see conftest.py).
"""

import dataclasses
import os
import pathlib

import hypothesis
import jax
import pytest

from dime_jax.guards import model_check
from dime_jax.report import figures
from dime_jax.scoring import micro_batch
from dime_jax.training import loop

# Implicit rank and dtype promotion are errors.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples in every run, and no time limit on a busy machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# A test need not survive a power cut, and small audits would spend much of their time waiting for the disk.
os.fsync = lambda descriptor: None

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


def pytest_configure(config):
    """The slow tests, of verdicts above all, check models as users' are."""
    if config.option.markexpr == "slow":
        model_check.IMAGES = _CHECKED


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
