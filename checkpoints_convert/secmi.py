"""pytorch-ddpm checkpoints: what SecMI, PIA, SimA and dime-mia publish and train.

Their blocks are numbered through, resampling steps included; the time embedding is a stored table, which the EMA has
averaged along with the weights; GroupNorm's eps is PyTorch's default; the stride-2 convolutions pad both sides.
"""

from checkpoints_convert.checkpoint import Checkpoint, by_convention, make_spec, sample_size, stored_schedule
from checkpoints_convert.mapping import Dialect, Level, StateDict, infer_ddpm_spec
from checkpoints_convert.options import ConversionOptions
from checkpoints_convert.weights_file import Weights
from dime_jax.models import DdpmUnetSpec, ScheduleSpec

_CODE = "pytorch-ddpm"
TIME_TABLE = "time_embedding.timembedding.0.weight"


def _module_names(spec: DdpmUnetSpec) -> dict[str, str]:
    names = {
        "time_table": "time_embedding.timembedding.0",
        "time_dense_0": "time_embedding.timembedding.1",
        "time_dense_1": "time_embedding.timembedding.3",
        "conv_in": "head",
        "middle_block_0": "middleblocks.0",
        "middle_attention": "middleblocks.0.attn",
        "middle_block_1": "middleblocks.1",
        "norm_out": "tail.0",
        "conv_out": "tail.2",
    }
    levels = range(len(spec.level_channels))
    number = 0
    for level in levels:
        for block in range(spec.num_res_blocks):
            names[f"down_{level}_block_{block}"] = f"downblocks.{number}"
            names[f"down_{level}_attention_{block}"] = f"downblocks.{number}.attn"
            number += 1
        names[f"down_{level}_downsample"] = f"downblocks.{number}.main"
        number += 1
    number = 0
    for level in reversed(levels):
        for block in range(spec.num_res_blocks + 1):
            names[f"up_{level}_block_{block}"] = f"upblocks.{number}"
            names[f"up_{level}_attention_{block}"] = f"upblocks.{number}.attn"
            number += 1
        names[f"up_{level}_upsample"] = f"upblocks.{number}.main"
        number += 1
    return names


DIALECT = Dialect(
    name="secmi",
    prefixes=("time_embedding.timembedding.", "head.", "downblocks.", "middleblocks.", "upblocks.", "tail."),
    module_names=_module_names,
    part_names={
        "norm_1": "block1.0",
        "conv_1": "block1.2",
        "time_dense": "temb_proj.1",
        "norm_2": "block2.0",
        "conv_2": "block2.3",
        "shortcut": "shortcut",
        "norm": "group_norm",
        "query": "proj_q",
        "key": "proj_k",
        "value": "proj_v",
        "out": "proj",
    },
    attention_layout="conv1x1",
)


def open_weights(weights: Weights, options: ConversionOptions) -> Checkpoint:
    """The checkpoint of a file's weights."""
    architecture = infer_spec(weights.state)
    steps = architecture.time_table_steps or ScheduleSpec.num_steps
    schedule = stored_schedule(weights) or by_convention(ScheduleSpec(num_steps=steps), _CODE)
    prediction = by_convention("epsilon", _CODE)
    spec, facts = make_spec(options, architecture, sample_size(weights), schedule, prediction)
    return Checkpoint(weights.file, weights.state, DIALECT, weights.which, spec, weights.facts + facts)


def infer_spec(state: StateDict) -> DdpmUnetSpec:
    """The architecture, read off names and shapes (they determine all of it)."""
    parts = {tuple(name.split(".")[1:3]) for name in state if name.startswith("downblocks.")}
    levels = [Level([], False)]
    for number in sorted({int(part[0]) for part in parts if part[0].isdecimal()}):
        if (str(number), "main") in parts:
            levels.append(Level([], False))
        else:
            blocks, attention = levels[-1]
            levels[-1] = Level([*blocks, f"downblocks.{number}"], attention or (str(number), "attn") in parts)
    if TIME_TABLE not in state or state[TIME_TABLE].ndim != 2:
        raise ValueError(f"expected the time table {TIME_TABLE} of shape [steps, features]")
    return infer_ddpm_spec(
        state, DIALECT, levels, time_table_steps=state[TIME_TABLE].shape[0], norm_eps=1e-5, symmetric_downsample=True
    )
