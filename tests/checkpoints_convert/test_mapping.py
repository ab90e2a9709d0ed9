"""Name tables against the inventories of the original checkpoints, and round trips."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints_convert import ddim, diffusers_names, guided, mapping, secmi
from dime_jax import models
from dime_jax.models import DdpmUnetSpec, GuidedUnetSpec

DIALECTS = Path(__file__).parents[1] / "golden" / "dialects"


def inventory(name):
    """Tensors of the right names and shapes, without memory."""
    shapes = json.loads((DIALECTS / f"keys_{name}.json").read_text())
    return {key: np.broadcast_to(np.float32(0), shape) for key, shape in shapes.items()}


def table_shapes(naming, spec):
    return {entry.tensor: entry.tensor_shape for entry in mapping.name_table(spec, naming(spec))}


def old_names(spec):
    return diffusers_names.unet_naming(spec, old_attention=True)


def shapes_of(state):
    return {name: tensor.shape for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("name", "module", "fixed"),
    [
        ("A_pytorch_ddpm_secmi", secmi, {"time_table_steps": 1000, "norm_eps": 1e-5, "symmetric_downsample": True}),
        ("B_pesser_ddim", ddim, {}),
    ],
)
def test_cifar_architecture_is_read_off_names_and_shapes(name, module, fixed):
    state = inventory(name)
    assert module.infer_spec(state) == DdpmUnetSpec(**fixed)
    assert table_shapes(module.naming, DdpmUnetSpec(**fixed)) == shapes_of(state)


def test_diffusers_names():
    assert table_shapes(diffusers_names.unet_naming, DdpmUnetSpec()) == shapes_of(
        inventory("C_diffusers_ddpm_cifar10_32")
    )


def test_guided_256_is_recognised_even_with_a_few_bad_tensors():
    state = inventory("D_guided_diffusion_256_cond")
    assert table_shapes(guided.naming, guided.presets()["256x256"].architecture) == shapes_of(state)
    del state["out.2.bias"]
    state["label_emb.weight"] = np.zeros((1000, 3), np.float32)
    assert guided.recognise(state).name == "256x256"


@pytest.mark.parametrize(("name", "module"), [("A_pytorch_ddpm_secmi", secmi), ("B_pesser_ddim", ddim)])
def test_inference_survives_any_one_missing_tensor(name, module):
    """So that the error can name the tensor that is missing (the stored time table excepted: it has its own error)."""
    state = inventory(name)
    spec = module.infer_spec(state)
    for missing in state:
        rest = {key: tensor for key, tensor in state.items() if key != missing}
        if missing == secmi.TIME_TABLE:
            with pytest.raises(ValueError, match=missing):
                module.infer_spec(rest)
        elif not missing.endswith(("timembedding.1.weight", "temb.dense.0.weight")):
            assert module.infer_spec(rest) == spec, missing


@pytest.mark.parametrize(
    ("naming", "spec"),
    [
        (secmi.naming, DdpmUnetSpec(level_channels=(32, 64), stem_channels=32, num_res_blocks=1, time_table_steps=7)),
        (ddim.naming, DdpmUnetSpec(level_channels=(32, 64, 32), stem_channels=32, attention_levels=(0, 2))),
        (diffusers_names.unet_naming, DdpmUnetSpec(level_channels=(32, 64), stem_channels=32, num_classes=3)),
        (old_names, DdpmUnetSpec(level_channels=(32,), stem_channels=32, attention_levels=(0,))),
        (guided.naming, GuidedUnetSpec(level_channels=(32, 64), stem_channels=32, num_classes=3, num_heads=2)),
        (
            guided.naming,
            GuidedUnetSpec(level_channels=(32, 64), stem_channels=32, resblock_updown=False, scale_shift_norm=False),
        ),
    ],
)
def test_there_and_back_is_the_identity(naming, spec):
    rng = np.random.default_rng(0)
    shapes = models.param_shapes(spec)
    variables = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    table = mapping.name_table(spec, naming(spec))
    assert len({entry.tensor for entry in table}) == len(table) == len(jax.tree.leaves(shapes))
    state = mapping.to_state_dict(variables, table)
    jax.tree.map(np.testing.assert_array_equal, mapping.to_variables(state, table), variables)
    again = mapping.to_state_dict(mapping.to_variables(state, table), table)
    assert again.keys() == state.keys()
    for name in state:
        np.testing.assert_array_equal(again[name], state[name])
    if naming in (secmi.naming, ddim.naming):
        inferred = (secmi if naming is secmi.naming else ddim).infer_spec(state)
        assert mapping.name_table(inferred, naming(inferred)) == table


def test_layouts():
    kernel = np.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7).astype(np.float32)  # [out, in, height, width]
    entry = mapping.Entry("w", kernel.shape, ("params", "w"), mapping.LAYOUTS["conv"])
    assert mapping.to_variables({"w": kernel}, [entry])["params"]["w"][4, 6, 2, 1] == kernel[1, 2, 4, 6]
    linear = np.arange(6).reshape(2, 3, 1, 1).astype(np.float32)
    entry = mapping.Entry("w", linear.shape, ("params", "w"), mapping.LAYOUTS["conv1x1"])
    assert mapping.to_variables({"w": linear}, [entry])["params"]["w"][2, 1] == linear[1, 2, 0, 0]
