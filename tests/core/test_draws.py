import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dime_jax.core import draws

KEY = jax.random.key(0)


def test_draws_depend_on_seed_id_and_index_only():
    ids = draws.id_numbers([7, "cat.png", 2**31])
    batch = draws.rademacher(KEY, ids, 3, (8, 8, 1))
    for row in range(3):
        np.testing.assert_array_equal(batch[row], draws.rademacher(KEY, ids[row : row + 1], 3, (8, 8, 1))[0])
    np.testing.assert_array_equal(batch[::-1], draws.rademacher(KEY, ids[::-1], 3, (8, 8, 1)))
    assert not np.array_equal(batch, draws.rademacher(KEY, ids, 4, (8, 8, 1)))
    assert not np.array_equal(batch, draws.rademacher(jax.random.key(1), ids, 3, (8, 8, 1)))


def test_probes_are_signs_and_noise_is_gaussian():
    ids = jnp.arange(200, dtype=jnp.uint32)
    signs = np.asarray(draws.rademacher(KEY, ids, 0, (500,)))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert abs(signs.mean()) < 4 / np.sqrt(signs.size)
    noise = np.asarray(draws.gaussian(KEY, ids, 0, (500,)))
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert abs(noise.std() - 1) < 0.02
    assert abs(np.mean(np.sign(noise) * signs)) < 4 / np.sqrt(signs.size)  # separate streams


def test_one_compilation_for_all_ids_seeds_and_indices():
    draws._draw.clear_cache()
    for index in range(5):
        draws.rademacher(jax.random.key(index), jnp.arange(index, index + 4, dtype=jnp.uint32), index, (3,))
    assert draws._draw._cache_size() == 1


@pytest.mark.parametrize("ids", [[0, 2**32], [-1, 5]])
def test_numbers_that_do_not_fit_are_refused(ids):
    with pytest.raises(ValueError, match="ids must be from 0 to 2³² - 1, got"):
        draws.id_numbers(ids)
