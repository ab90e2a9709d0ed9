"""Options for XLA: used where jaxlib knows them, and no error where it does not."""

import jax
import pytest
from tiny_model import TWO, network, quiet, source

from dime_jax import scoring
from dime_jax.core import xla_options
from dime_jax.scoring import call_runner

UNKNOWN = {"xla_cpu_no_such_option": ""}


@pytest.fixture(autouse=True)
def _asked_anew():
    for cached in (xla_options.network_options, call_runner.network_program):
        cached.cache_clear()
    yield
    for cached in (xla_options.network_options, call_runner.network_program):
        cached.cache_clear()


def test_an_option_that_jaxlib_does_not_know_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(xla_options, "_ON_CPUS", UNKNOWN)
    assert xla_options.network_options() is None
    assert len(scoring.score(network(), source(3), TWO, tmp_path, options=quiet()).index) == 3


def test_there_are_none_for_other_devices(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert xla_options.network_options() is None


def test_queries_are_compiled_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(call_runner, "network_options", lambda: UNKNOWN)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_no_such_option"):
        scoring.score(network(), source(3), TWO, tmp_path, options=quiet())
