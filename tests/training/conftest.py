"""The tests of a module train the same small network again and again: it is compiled once."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compilations")
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 1.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield directory
    for name, value in before.items():
        jax.config.update(name, value)
