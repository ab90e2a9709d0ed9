"""pytorch-ddpm checkpoints: what SecMI, PIA, SimA and dime-mia publish and train.

Their blocks are numbered through, resampling steps included; the time embedding is a stored table, which the EMA has
averaged along with the weights; GroupNorm's eps is PyTorch's default; the stride-2 convolutions pad both sides.
"""

from checkpoints_convert import mapping
from checkpoints_convert.checkpoint import Checkpoint, Dialect, ddpm_facts, file_checkpoint
from checkpoints_convert.mapping import Level, Naming, StateDict
from checkpoints_convert.options import ConversionOptions
from checkpoints_convert.weights_file import ChosenWeights
from dime_jax.models import DdpmUnetSpec

_CODE = "pytorch-ddpm"
TIME_TABLE = "time_embedding.timembedding.0.weight"
_PARTS = {
    **mapping.block_parts("block1.0", "block1.2", "temb_proj.1", "block2.0", "block2.3", "shortcut"),
    **mapping.attention_parts("group_norm", "proj_q", "proj_k", "proj_v", "proj"),
}
_PREFIXES = ("time_embedding.timembedding.", "head.", "downblocks.", "middleblocks.", "upblocks.", "tail.")


def naming(spec: DdpmUnetSpec) -> Naming:
    """Return the names of its modules."""
    time = ("time_embedding.timembedding.1", "time_embedding.timembedding.3")
    middle = ("middleblocks.0", "middleblocks.0.attn", "middleblocks.1")
    names = {"time_table": TIME_TABLE, **mapping.trunk_names(time, "head", middle, ("tail.0", "tail.2"))}
    levels = len(spec.level_channels)
    for level in range(levels):
        *down, downsample = mapping.numbered("downblocks", level, spec.num_res_blocks + 1)
        *up, upsample = mapping.numbered("upblocks", levels - 1 - level, spec.num_res_blocks + 2)
        names |= mapping.block_names("down", level, down, [f"{block}.attn" for block in down])
        names |= mapping.block_names("up", level, up, [f"{block}.attn" for block in up])
        names[f"down_{level}_downsample"] = f"{downsample}.main"
        names[f"up_{level}_upsample"] = f"{upsample}.main"
    return Naming(names, _PARTS, mapping.CONVOLVED_ATTENTION)


def open_weights(weights: ChosenWeights, options: ConversionOptions) -> Checkpoint:
    """Return the checkpoint of a file's weights."""
    spec = infer_spec(weights.state)
    return file_checkpoint(weights, options, spec, naming(spec), ddpm_facts(weights, spec, _CODE))


def infer_spec(state: StateDict) -> DdpmUnetSpec:
    """Read the architecture off names and shapes (they determine all of it)."""
    parts = {tuple(name.split(".")[1:3]) for name in state if name.startswith("downblocks.")}
    levels = [Level([], False)]
    for number in sorted({int(part[0]) for part in parts if part[0].isdecimal()}):
        if (str(number), "main") in parts:
            levels.append(Level([], False))
        else:
            blocks, attention = levels[-1]
            levels[-1] = Level([*blocks, f"downblocks.{number}"], attention or (str(number), "attn") in parts)
    if TIME_TABLE not in state or state[TIME_TABLE].ndim != 2:
        raise ValueError(f"the time table {TIME_TABLE} must be there, of shape [steps, features]")
    steps = state[TIME_TABLE].shape[0]
    base = DdpmUnetSpec(time_table_steps=steps, norm_eps=1e-5, symmetric_downsample=True)
    return mapping.infer_ddpm_spec(state, naming(base), levels, base)


DIALECT = Dialect("secmi", _PREFIXES, open_weights)
