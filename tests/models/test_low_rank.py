"""Adapters of trees against their definition, written out."""

import jax
import numpy as np
import pytest

from dime_jax import models
from dime_jax.models import low_rank

SPECS = [
    models.DdpmUnetSpec(
        image_channels=1,
        stem_channels=8,
        time_features=8,
        time_channels=16,
        level_channels=(8,),
        attention_levels=(0,),
        norm_groups=4,
    ),
    models.ClipTextSpec(vocabulary=10, max_tokens=4, width=8, num_layers=1, num_heads=2, mlp_width=16),
]


@pytest.fixture(params=SPECS, ids=lambda spec: spec.kind)
def variables(request):
    return jax.device_get(models.init(request.param, jax.random.key(0)))


def leaves(tree):
    return {"/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def some_adapter(tree, rank=2, seed=1):
    rng = np.random.default_rng(seed)
    fresh = low_rank.init(tree, rank, rng)
    return {path: one._replace(up=rng.normal(size=one.up.shape).astype(np.float32)) for path, one in fresh.items()}


def test_every_kernel_has_factors_and_nothing_else(variables):
    adapter = low_rank.init(variables, 3, np.random.default_rng(0))
    assert adapter.keys() == {path for path, leaf in leaves(variables).items() if path.endswith("kernel")}
    assert {np.ndim(leaf) for path, leaf in leaves(variables).items() if path not in adapter} <= {1, 2}
    for path, (down, up) in adapter.items():
        kernel = leaves(variables)[path]
        assert (down.shape, up.shape) == ((*kernel.shape[:-1], 3), (3, kernel.shape[-1]))
        assert down.std() == pytest.approx(np.prod(kernel.shape[:-1]) ** -0.5, rel=0.5)
    again = low_rank.init(variables, 3, np.random.default_rng(0))
    jax.tree.map(np.testing.assert_array_equal, adapter, again)


def test_a_fresh_adapter_changes_no_bit(variables):
    adapter = low_rank.init(variables, 3, np.random.default_rng(0))
    jax.tree.map(np.testing.assert_array_equal, low_rank.merge(variables, adapter, 5.0), variables)


@pytest.mark.parametrize("scale", [1.0, -0.3])
def test_a_merged_kernel_is_the_sum_over_the_rank(variables, scale):
    adapter = some_adapter(variables)
    merged, compiled = (leaves(merge(variables, adapter, scale)) for merge in (low_rank.merge, jax.jit(low_rank.merge)))
    for path, leaf in leaves(variables).items():
        if path not in adapter:
            np.testing.assert_array_equal(merged[path], leaf)
            continue
        expected = leaf.astype(np.float64)
        for r in range(2):
            down, up = adapter[path].down[..., r], adapter[path].up[r]
            expected = expected + scale * np.multiply.outer(down.astype(np.float64), up.astype(np.float64))
        np.testing.assert_allclose(merged[path], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(compiled[path], expected, rtol=1e-5, atol=1e-6)
        assert merged[path].dtype == np.float32


def test_a_part_of_the_kernels_is_enough(variables):
    adapter = some_adapter(variables)
    path = min(adapter)
    merged = leaves(low_rank.merge(variables, {path: adapter[path]}))
    assert [name for name, leaf in leaves(variables).items() if not np.array_equal(leaf, merged[name])] == [path]
