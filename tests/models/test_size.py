"""The arithmetic of a network's size against the shapes of its variables."""

import jax
import pytest

from checkpoints_convert import guided
from dime_jax import models
from dime_jax.models import DdpmUnetSpec, GuidedUnetSpec

SMALL = {"stem_channels": 8, "time_features": 4, "time_channels": 12, "norm_groups": 4}


@pytest.mark.parametrize(
    "spec",
    [
        DdpmUnetSpec(),
        DdpmUnetSpec(**SMALL, level_channels=(8,), attention_levels=(), middle_attention=False, num_res_blocks=1),
        DdpmUnetSpec(**SMALL, level_channels=(8, 16, 8), attention_levels=(0, 2), up_attention_levels=(1,)),
        DdpmUnetSpec(**SMALL, level_channels=(16, 8), num_classes=5, time_table_steps=7, image_channels=1),
        DdpmUnetSpec(**SMALL, level_channels=(8, 8), learned_sigma=True, num_res_blocks=3),
        GuidedUnetSpec(**SMALL, level_channels=(8, 16), num_classes=3),
        GuidedUnetSpec(**SMALL, level_channels=(8, 16), resblock_updown=False, learned_sigma=True),
        GuidedUnetSpec(**SMALL, level_channels=(8, 16, 16), scale_shift_norm=False, attention_levels=(1, 2)),
        guided.presets()["64x64"].architecture,
    ],
)
def test_it_is_the_sum_of_all_shapes(spec):
    assert models.num_values(spec) == sum(leaf.size for leaf in jax.tree.leaves(models.param_shapes(spec)))
