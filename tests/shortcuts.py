"""What no test needs, and shortcuts that tests ask for by name where they need the time.

A plugin of its own, so that the process that only hands out tests need not import JAX (see conftest.py).
"""

import os
import pathlib

import hypothesis
import jax
import pytest

from dime_jax.guards import model_check
from dime_jax.report import figures
from dime_jax.scoring import micro_batch

# Implicit rank and dtype promotion are errors.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples in every run, and no time limit on a busy machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# A test need not survive a power cut, and small audits would spend much of their time waiting for the disk.
os.fsync = lambda descriptor: None


@pytest.fixture(scope="module")
def small_batches():
    """A default micro-batch of an eighth: with few images, most of a full one would be padding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "_CPU_IMAGES", 2)
        yield


@pytest.fixture(scope="module")
def small_model_check():
    """A model check of two images, which tries no other way to ask; each would be another program to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_check, "IMAGES", 2)
        yield


def _save_nothing(figure, directory, name):
    paths = [pathlib.Path(directory) / f"{name}.{suffix}" for suffix in ("png", "svg")]
    paths[0].write_bytes(b"\x89PNG\r\n")
    paths[1].write_text('<svg viewBox="0 0 1 1"></svg>')
    return paths


@pytest.fixture(scope="module")
def no_figures():
    """Files in place of figures: drawing one takes a third of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save_figure", _save_nothing)
        yield
