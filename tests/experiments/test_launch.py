"""Starting an experiment: what is compiled is kept where the user keeps it."""

import jax
import pytest

from experiments import launch


@pytest.fixture
def _restored():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("_restored")
def test_programs_are_kept_in_the_users_directory(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    launch.keep_programs()
    assert jax.config.jax_compilation_cache_dir == before  # the variable is JAX's own, and set
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    monkeypatch.setenv("DIME_JAX_CACHE", str(tmp_path))
    launch.keep_programs()
    assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path))
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
