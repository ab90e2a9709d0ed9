"""Name tables between a checkpoint's tensors and a network's variables, total in both directions.

A `Naming` has the names of the network's modules; `name_table` makes one `Entry` per variable out of that.
`to_variables` checks a state dict against the table (every tensor used exactly once, every variable filled, every shape
right, every number finite), reports all problems in one error, and converts; `to_state_dict` goes back.
"""

import dataclasses
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util

from dime_jax import models
from dime_jax._util.typing import PyTree
from dime_jax.models import DdpmUnetSpec

StateDict = Mapping[str, np.ndarray]
Shape = tuple[int, ...]


class Naming(NamedTuple):
    """What a checkpoint calls the modules of a network.

    Attributes:
      modules: names of top-level modules, and of the tensors that become variables outside any module.
      parts: names of modules inside them; "" is left out.
      layouts: how the matrices of some modules are stored (a key of `LAYOUTS`), where not as [out, in].
    """

    modules: Mapping[str, str]
    parts: Mapping[str, str]
    layouts: Mapping[str, str] = {}


class Layout(NamedTuple):
    """One way a weight is stored: our axes in terms of theirs, and how many axes of size 1 theirs has at the end."""

    axes: Shape | None
    ones: int = 0


LAYOUTS = {
    "same": Layout(None),
    "conv": Layout((2, 3, 1, 0)),  # [out, in, height, width] -> [height, width, in, out]
    "linear": Layout((1, 0)),  # [out, in] -> [in, out]
    "conv1d": Layout((1, 0), ones=1),  # a 1-wide convolution
    "conv1x1": Layout((1, 0), ones=2),
}

# A network's 1×1 convolutions, which are matrices here; and its attention's, in code that has convolutions there too.
SHORTCUT = {"shortcut": "conv1x1"}
CONVOLVED_ATTENTION = {**SHORTCUT, **dict.fromkeys(("query", "key", "value", "out"), "conv1x1")}

_MIDDLE = ("middle_block_0", "middle_attention", "middle_block_1")
_LEAF_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


class Entry(NamedTuple):
    """One tensor of a checkpoint and the variable it becomes.

    Attributes:
      tensor: its name in the checkpoint.
      tensor_shape: its shape there.
      path: of the variable in the network's tree.
      layout: how the tensor is stored.
    """

    tensor: str
    tensor_shape: Shape
    path: tuple[str, ...]
    layout: Layout


def name_table(spec: models.NetworkSpec, naming: Naming) -> list[Entry]:
    """Return one entry for each variable of the network of `spec`."""
    leaves = jax.tree_util.tree_leaves_with_path(models.param_shapes(spec))
    return [_entry(tuple(key.key for key in path), leaf.shape, naming) for path, leaf in leaves]


def _entry(path: tuple[str, ...], shape: Shape, naming: Naming) -> Entry:
    if len(path) == 2:
        return Entry(naming.modules[path[1]], shape, path, LAYOUTS["same"])
    names = [naming.modules[path[1]], *(naming.parts[name] for name in path[2:-1]), _LEAF_NAMES[path[-1]]]
    layout = LAYOUTS[_layout(path, len(shape), naming)]
    return Entry(".".join(filter(None, names)), tensor_shape(shape, layout), path, layout)


def _layout(path: tuple[str, ...], rank: int, naming: Naming) -> str:
    if path[-1] != "kernel":
        return "same"
    return "conv" if rank == 4 else naming.layouts.get(path[-2], "linear")


def tensor_shape(shape: Shape, layout: Layout) -> Shape:
    """Return the shape in the file of a variable of this shape."""
    if layout.axes is None:
        return shape
    return tuple(shape[layout.axes.index(axis)] for axis in range(len(shape))) + (1,) * layout.ones


def to_variables(
    state: StateDict, table: list[Entry], track: Callable[[list[Entry]], Iterable[Entry]] = lambda entries: entries
) -> PyTree:
    """Convert tensors to the network's variables in float32, a nested dict of NumPy arrays.

    Args:
      state: tensors by name.
      table: from `name_table`.
      track: wraps the loop over entries, for a progress bar.

    Raises:
      ValueError: naming every missing, extra, mis-shaped, non-numeric or non-finite tensor.
    """
    problems = _structure_problems(state, table)
    variables: dict[tuple[str, ...], np.ndarray] = {}
    for entry in track(table) if not problems else []:
        array = to_ours(state[entry.tensor], entry.layout)
        bad = array.size - np.count_nonzero(np.isfinite(array))
        if bad:
            problems.append(f"{entry.tensor}: {bad} of {array.size} values NaN or infinite")
        variables[entry.path] = array
    if problems:
        raise ValueError(f"{len(problems)} bad tensors: " + "; ".join(problems))
    return traverse_util.unflatten_dict(variables)


def _structure_problems(state: StateDict, table: list[Entry]) -> list[str]:
    expected = {entry.tensor: entry.tensor_shape for entry in table}
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in state]
    problems += [f"unexpected {name} {list(array.shape)}" for name, array in state.items() if name not in expected]
    for name in expected.keys() & state.keys():
        if state[name].shape != expected[name]:
            problems.append(f"{name} must have shape {list(expected[name])}, got {list(state[name].shape)}")
        elif not jax.dtypes.issubdtype(state[name].dtype, np.floating):
            problems.append(f"{name} must hold floating-point numbers, got {state[name].dtype}")
    return sorted(problems)


def to_ours(tensor: np.ndarray, layout: Layout) -> np.ndarray:
    """Copy a tensor to float32 in our layout. Pages of a mapped file that the copy read into memory are released."""
    if layout.axes is not None:
        tensor = tensor.reshape(tensor.shape[: tensor.ndim - layout.ones]).transpose(layout.axes)
    with np.errstate(over="ignore"):  # a float64 weight beyond float32 becomes infinite, and is reported as such
        array = np.array(tensor, dtype=np.float32, order="C")
    _release(tensor)
    return array


def _release(view: object) -> None:
    """Drop the pages of the memory-mapped file under a view, if there is one, from this process's memory."""
    while view is not None and not isinstance(view, mmap.mmap):
        view = view.obj if isinstance(view, memoryview) else getattr(view, "base", None)
    if view is not None and hasattr(mmap, "MADV_DONTNEED"):
        view.madvise(mmap.MADV_DONTNEED)


def to_state_dict(variables: PyTree, table: list[Entry]) -> dict[str, np.ndarray]:
    """Return the checkpoint's tensors by name: the inverse of `to_variables`."""
    state, arrays = {}, traverse_util.flatten_dict(variables)
    for entry in table:
        state[entry.tensor] = np.ascontiguousarray(to_theirs(np.asarray(arrays[entry.path]), entry.layout))
    return state


def to_theirs(array: np.ndarray, layout: Layout) -> np.ndarray:
    """Return a view of a variable in the file's layout."""
    if layout.axes is None:
        return array
    return array.transpose(np.argsort(layout.axes)).reshape(tensor_shape(array.shape, layout))


def trunk_names(
    time: tuple[str, str], conv_in: str, middle: tuple[str, str, str], out: tuple[str, str]
) -> dict[str, str]:
    """Return the checkpoint's names of what a U-Net has outside its levels.

    Args:
      time: the two layers of the time MLP.
      conv_in: the first convolution.
      middle: the residual block, the attention and the second residual block.
      out: the last norm and convolution.
    """
    steps = ("time_dense_0", "time_dense_1", "conv_in", *_MIDDLE, "norm_out", "conv_out")
    return dict(zip(steps, (*time, conv_in, *middle, *out), strict=True))


def block_parts(*names: str) -> dict[str, str]:
    """Return the checkpoint's names in a residual block: norm, convolution, time layer, norm, convolution, shortcut."""
    return dict(zip(("norm_1", "conv_1", "time_dense", "norm_2", "conv_2", "shortcut"), names, strict=True))


def attention_parts(*names: str) -> dict[str, str]:
    """Return the checkpoint's names in an attention block: norm, query, key, value, output."""
    return dict(zip(("norm", "query", "key", "value", "out"), names, strict=True))


def numbered(stem: str, place: int, count: int, start: int = 0) -> list[str]:
    """Name one level's modules where they are numbered through all levels, `count` per level.

    Args:
      stem: what stands before the number.
      place: how many levels come before.
      count: modules in each level.
      start: the first number of all.
    """
    first = start + place * count
    return [f"{stem}.{number}" for number in range(first, first + count)]


def block_names(way: str, level: int, blocks: Iterable[str], attentions: Iterable[str]) -> dict[str, str]:
    """Return the checkpoint's names of one level's residual blocks, and of the attention after each.

    A name for a block or an attention that the network does not have is never looked up.

    Args:
      way: "down" or "up".
      level: counted from the full resolution.
      blocks: names of the residual blocks, in the order of the network.
      attentions: as many names, one for the attention after each block.
    """
    names = {}
    for number, (block, attention) in enumerate(zip(blocks, attentions, strict=True)):
        names[f"{way}_{level}_block_{number}"] = block
        names[f"{way}_{level}_attention_{number}"] = attention
    return names


class Level(NamedTuple):
    """The residual blocks of one level on the way down, and whether the level has attention, as read off the names."""

    blocks: list[str]
    attention: bool


def infer_ddpm_spec(state: StateDict, naming: Naming, levels: list[Level], base: DdpmUnetSpec) -> DdpmUnetSpec:
    """Return the DDPM U-Net that has these levels and the widths of these tensors.

    Args:
      state: tensors by name.
      naming: what they are called; that of any DDPM U-Net.
      levels: from the full resolution down.
      base: a spec with what the dialect fixes.
    """
    names = naming.modules
    biases = [f"{naming.parts[part]}.bias" for part in ("conv_1", "time_dense", "norm_2", "conv_2")]
    parts = [*biases, f"{naming.parts['norm_2']}.weight"]
    return dataclasses.replace(
        base,
        image_channels=width_of(state, [(f"{names['conv_out']}.bias", 0), (f"{names['conv_in']}.weight", 1)]),
        stem_channels=width_of(state, [(f"{names['conv_in']}.bias", 0), (f"{names['conv_in']}.weight", 0)]),
        time_features=width_of(state, [(f"{names['time_dense_0']}.weight", 1)]),
        time_channels=width_of(state, [(f"{names['time_dense_0']}.bias", 0), (f"{names['time_dense_1']}.bias", 0)]),
        level_channels=tuple(
            width_of(state, [(f"{block}.{part}", 0) for block in level.blocks for part in parts]) for level in levels
        ),
        num_res_blocks=max(len(level.blocks) for level in levels),
        attention_levels=tuple(index for index, level in enumerate(levels) if level.attention),
    )


def width_of(state: StateDict, candidates: Sequence[tuple[str, int]]) -> int:
    """Return the most frequent size among (tensor, axis) pairs; absent tensors do not vote.

    Widths are read off several tensors at once, so that one missing or mis-shaped tensor does not mislead the guess of
    the architecture, and ends up as the one tensor that the error names.

    Args:
      state: tensors by name.
      candidates: names of tensors that have the width, each with the axis that it is on.
    """
    sizes = [state[name].shape[axis] for name, axis in candidates if name in state and state[name].ndim > axis]
    if not sizes:
        raise ValueError(f"cannot tell the architecture without {' or '.join(name for name, _ in candidates[:2])}")
    return max(sizes, key=sizes.count)
