"""ermongroup/ddim checkpoints, and Ho's weights as pesser converted them: bare state dicts, or ddim's training list."""

from checkpoints_convert import mapping
from checkpoints_convert.checkpoint import Checkpoint, Dialect, ddpm_facts, file_checkpoint
from checkpoints_convert.mapping import Level, Naming, StateDict
from checkpoints_convert.options import ConversionOptions
from checkpoints_convert.weights_file import ChosenWeights
from dime_jax.models import DdpmUnetSpec
from dime_jax.models.checks import MAX_LEVELS, check_integer

_CODE = "ermongroup/ddim"
_PARTS = {
    **mapping.block_parts("norm1", "conv1", "temb_proj", "norm2", "conv2", "nin_shortcut"),
    **mapping.attention_parts("norm", "q", "k", "v", "proj_out"),
}


def naming(spec: DdpmUnetSpec) -> Naming:
    """Return the names of its modules."""
    time, middle = ("temb.dense.0", "temb.dense.1"), ("mid.block_1", "mid.attn_1", "mid.block_2")
    names = mapping.trunk_names(time, "conv_in", middle, ("norm_out", "conv_out"))
    for level in range(len(spec.level_channels)):
        names[f"down_{level}_downsample"] = f"down.{level}.downsample.conv"
        names[f"up_{level}_upsample"] = f"up.{level}.upsample.conv"
        for way in ("down", "up"):
            blocks = range(spec.num_res_blocks + 1)
            residual = [f"{way}.{level}.block.{block}" for block in blocks]
            names |= mapping.block_names(way, level, residual, [f"{way}.{level}.attn.{block}" for block in blocks])
    return Naming(names, _PARTS, mapping.CONVOLVED_ATTENTION)


def open_weights(weights: ChosenWeights, options: ConversionOptions) -> Checkpoint:
    """Return the checkpoint of a file's weights."""
    spec = infer_spec(weights.state)
    return file_checkpoint(weights, options, spec, naming(spec), ddpm_facts(weights, spec, _CODE))


def infer_spec(state: StateDict) -> DdpmUnetSpec:
    """Read the architecture off names and shapes (they determine all of it)."""
    parts = {tuple(name.split(".")[1:4]) for name in state if name.startswith("down.")}
    highest = max((int(part[0]) for part in parts if part[0].isdecimal()), default=0)
    check_integer(highest, 0, MAX_LEVELS - 1, "the number of a level")
    levels = []
    for level in range(highest + 1):
        blocks = sorted({f"down.{level}.block.{part[2]}" for part in parts if part[:-1] == (str(level), "block")})
        levels.append(Level(blocks, any(part[:2] == (str(level), "attn") for part in parts)))
    return mapping.infer_ddpm_spec(state, naming(DdpmUnetSpec()), levels, DdpmUnetSpec())


DIALECT = Dialect("ddim", ("temb.dense.", "conv_in.", "down.", "mid.", "up.", "norm_out.", "conv_out."), open_weights)
